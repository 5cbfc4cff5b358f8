"""A stored file as a Python file object, of which only what is asked for is read."""

from __future__ import annotations

import io
import os
from functools import partial
from typing import TYPE_CHECKING

from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.stored_file import StoredFile, etag_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

BLOCK = 1 << 16
"""Bytes that are read together at least: the directory of an archive is read in small pieces."""


def stored_file(storage: Storage, location: str) -> StoredFile:
    """Return a file as its storage describes it now.

    Raises:
        FileNotFoundError: If there is no such file.
        UnreadableFileError: If the storage does not say.
    """
    with storage.errors(location):
        info = storage.call("info", location)
    return StoredFile(location, location, info["size"], etag_of(info), None)


def open_stored(storage: Storage, file: StoredFile) -> io.BufferedReader:
    """Open a file for reading; each read is one of its storage, with its retries.

    Raises:
        UnreadableFileError: If it cannot be opened; reads raise it, too.
    """
    return io.BufferedReader(_RangeReader(storage, file), BLOCK)


class _RangeReader(io.RawIOBase):
    def __init__(self, storage: Storage, file: StoredFile) -> None:
        self._storage, self._file = storage, file
        self._opened = storage.open_ranged(file)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Buffer) -> int:
        memory = memoryview(buffer).cast("B")
        stop = min(self._file.size, self._position + len(memory))
        if stop <= self._position:
            return 0
        with self._storage.errors(self._file.location):
            name = partial(self._storage.display, self._file.location)
            content = self._storage.fetch(self._opened, self._position, stop, name)
        count = stop - self._position
        memory[:count] = memoryview(content).cast("B")[:count]
        self._position = stop
        return count
