"""Zip archives, of which some releases of Python read other bytes than they were asked for."""

from __future__ import annotations

import functools
import io
import zipfile
from collections.abc import Callable, Iterable
from typing import Any

from torch_dataloader_utils.errors import UnreadableFileError


def require_readable(fs: Any, locations: Iterable[str], display: Callable[[str], str]) -> None:
    """Raise an UnreadableFileError if some files are in an archive from which this Python reads them wrongly.

    Args:
        fs: fsspec's filesystem. Nothing is done with another one than that of zip archives.
        locations: What it calls the files.
        display: Returns the name of a file for messages.
    """
    if type(fs).__module__ != "fsspec.implementations.zip" or not mixes_up_files():
        return
    stored = next((each for each in locations if fs.info(each).get("compress_type") == zipfile.ZIP_STORED), None)
    if stored is not None:
        msg = f"{display(stored)} is in the archive without compression. Of such files this release of Python returns "
        msg += "wrong bytes where others are read at the same time (https://github.com/python/cpython/issues/127847): "
        raise UnreadableFileError(f"{msg}use a later one, compress the files in the archive, or unpack it")


@functools.cache
def mixes_up_files() -> bool:
    """Whether this Python reads from another place of an archive than was sought, if two files in it are open."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as written:
        written.writestr("a", b"12")
        written.writestr("b", b"34")
    with zipfile.ZipFile(archive) as read, read.open("a") as first, read.open("b") as second:
        first.read(1)
        second.seek(1)
        return second.read(1) != b"4"
