"""A storage that is not local to the library: files of this machine, read by ranges, each of which can be watched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

PREFIX = "ranged://"


def _unwatched(path: str, start: int, end: int) -> None:
    pass


class RangedFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file of which every range is fetched by a call of its own."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        RangedFileSystem.on_fetch(self.path, start, end)
        with Path(self.path).open("rb") as file:
            file.seek(start)
            return file.read(end - start)


class RangedFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Local files under another name.

    Attributes:
        on_fetch: Called with the path, start and stop of each range before it is read, in the thread that fetches.
    """

    protocol = "ranged"
    cachable = False
    on_fetch: Callable[[str, int, int], None] = staticmethod(_unwatched)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path).removeprefix(PREFIX).rstrip("/")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        return list(LocalFileSystem().ls(self._strip_protocol(path), detail=detail))

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return dict(LocalFileSystem().info(self._strip_protocol(path)))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> RangedFile:
        return RangedFile(self, path, mode, **{"cache_type": "none", **options})


fsspec.register_implementation("ranged", RangedFileSystem, clobber=True)


def ranged(path: Path) -> str:
    """Return the URL of a local file or directory in this storage."""
    return f"{PREFIX}{path}"
