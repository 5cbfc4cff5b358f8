"""A file of a remote storage, of which several threads read ranges."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from torch_dataloader_utils.storage.attempts import within
from torch_dataloader_utils.storage.range_stream import ReceivedRange
from torch_dataloader_utils.storage.stored_file import StoredFile, etag_of


@dataclass(frozen=True)  # without slots: they leave no room for a weak reference
class RemoteFile:
    """A file of a remote storage, for several threads to read ranges of.

    Attributes:
        file: What the storage lists of it.
        read: Reads a range: gets the seconds after which it is to give up, and the start and the stop.
        begin: Requests a range to be received in parts: gets the same, and the bytes of a part. None where ranges are
            read at once.
    """

    file: StoredFile
    read: Callable[[float, int, int], bytes | pa.Buffer] = field(repr=False)
    begin: Callable[[float, int, int, int], ReceivedRange] | None = field(repr=False, default=None)

    @classmethod
    def of(cls, file: StoredFile, opened: Any, *, by_ranges: bool) -> RemoteFile:
        """Return a file that fsspec has opened. It is closed when nothing refers to it.

        `by_ranges` is whether it can fetch several ranges at once; else a read waits for the one before it.
        """
        one_at_a_time = threading.Lock()

        def from_position(start: int, stop: int) -> bytes:
            with one_at_a_time:
                opened.seek(start)
                return bytes(opened.read(stop - start))

        def read(seconds: float, start: int, stop: int) -> bytes:
            fetch = opened._fetch_range if by_ranges else from_position  # noqa: SLF001 - without fsspec's caches
            return bytes(within(seconds, fetch, start, stop))

        remote = cls(file, read)
        weakref.finalize(remote, opened.close).atexit = False
        return remote


def size_and_etag(opened: Any) -> tuple[int, str | None]:
    """Return the size and etag of an open file. The size of a file in an archive shows only at its end."""
    size = getattr(opened, "size", None)
    if not isinstance(size, int):
        size = opened.seek(0, os.SEEK_END)
        opened.seek(0)
    return size, etag_of(getattr(opened, "details", None) or {})
