"""What a forked process inherits of the filesystems: it must not close them."""

from __future__ import annotations

from typing import Any

from fsspec.spec import AbstractFileSystem

_HELD: list[list[Any]] = []
"""In a forked process: the filesystems of the process that it was forked from."""


def hold_filesystems() -> None:
    """Refer to all filesystems, so that a process that is forked now never closes them.

    The event loop of this process waits for its connections by an epoll object, which both processes share. s3fs closes
    the connections of a filesystem that nobody refers to. That takes them out of the shared object: the answer to the
    next request of this process was seen only when the client's timeout was over.
    """
    classes: list[Any] = [AbstractFileSystem]
    found: list[Any] = []
    for cls in classes:  # grows with what is found
        classes += cls.__subclasses__()
        found += getattr(cls, "_cache", {}).values()  # where fsspec keeps all that it has made, but not after a fork
    _HELD.append(found)


def release_filesystems() -> None:
    """Refer to them no longer, in the process that has forked another."""
    _HELD.pop()
