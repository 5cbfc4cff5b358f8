"""What the page cache has of the files in a directory. Linux only."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["bytes_in_memory", "forget"]


def bytes_in_memory(directory: str) -> int:
    """Return the bytes of the files in a directory that are in memory, in whole pages."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = 0
    for path in _files(directory):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            found = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
            address = ctypes.c_char.from_buffer(mapped)
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(address)), ctypes.c_size_t(len(mapped)), found)
            del address  # the map cannot be closed while something points into it
            if failed:
                raise OSError(ctypes.get_errno(), "mincore")
            pages += sum(page & 1 for page in found)
    return pages * mmap.PAGESIZE


def forget(directory: str) -> None:
    """Take the files in a directory out of memory."""
    for path in _files(directory):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is not written yet stays in memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _files(directory: str) -> Iterator[Path]:
    return (path for path in Path(directory).rglob("*") if path.is_file() and path.stat().st_size)
