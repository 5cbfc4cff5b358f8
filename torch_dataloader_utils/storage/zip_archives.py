"""Zip archives, of which some releases of Python read other bytes than they were asked for."""

from __future__ import annotations

import functools
import io
import zipfile
from typing import Any

from torch_dataloader_utils.errors import UnreadableFileError


def require_readable(fs: Any) -> None:
    """Raise an UnreadableFileError for an archive that this Python reads wrongly; do nothing with other filesystems."""
    if type(fs).__module__ != "fsspec.implementations.zip" or not mixes_up_files():
        return
    stored = next(
        (info for info in fs.zip.infolist() if info.compress_type == zipfile.ZIP_STORED and info.file_size), None
    )
    if stored is not None:
        msg = f"the archive has {stored.filename!r} without compression. Of several such files that are read at a time "
        msg += (
            "this release of Python returns wrong bytes (https://github.com/python/cpython/issues/127847): use a later "
        )
        raise UnreadableFileError(f"{msg}one, compress the files in the archive, or unpack it")


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
