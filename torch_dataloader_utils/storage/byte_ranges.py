"""Ranges of a file's bytes: which to fetch together, and a file that has only the fetched ones."""

from __future__ import annotations

import io
import weakref
from collections.abc import Iterable
from typing import Any

import pyarrow as pa


def coalesced(ranges: Iterable[tuple[int, int]], largest_gap: int) -> list[tuple[int, int]]:
    """Merge ranges with no more bytes between them than the largest gap. Pure (no I/O).

    Returns:
        Disjoint ranges that cover them all, ascending.
    """
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start - merged[-1][1] <= largest_gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


class SparseFile(io.RawIOBase):
    """A file, of `size` bytes, of which only some ranges are in memory. Reading others is an error."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._position = 0
        self._ranges: list[tuple[int, memoryview]] = []
        self._added: list[weakref.ref[Any]] = []

    def add(self, start: int, content: bytes | pa.Buffer) -> None:
        """Add a range."""
        buffer = pa.py_buffer(content)  # bytes have no weak references
        self._ranges.append((start, memoryview(buffer)))
        self._added = [weakref.ref(buffer), *(added for added in self._added if added() is not None)]

    def held_by_arrow(self) -> list[weakref.ref[Any]]:
        """Return the objects that Arrow's threads may still refer to once it is closed."""
        return [weakref.ref(self), *self._added]

    def clear(self) -> None:
        """Forget all ranges."""
        self._ranges.clear()

    def readable(self) -> bool:
        """Return True."""
        return True

    def size(self) -> int:
        """Return the whole file's size."""
        return self._size

    def tell(self) -> int:
        """Return where the next read begins."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set where the next read begins."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read_buffer(self, size: int = -1) -> pa.Buffer:
        """Read without copying: pyarrow asks for this by name."""
        return pa.py_buffer(self._view(size))

    def read(self, size: int = -1) -> bytes:
        """Read bytes."""
        return bytes(self._view(size))

    def _view(self, size: int) -> memoryview:
        begin = self._position
        end = self._size if size < 0 else min(self._size, begin + size)
        for start, content in self._ranges:
            if start <= begin and end <= start + len(content):
                self._position = end
                return content[begin - start : end - start]
        raise OSError(f"bytes {begin} to {end} were not fetched")
