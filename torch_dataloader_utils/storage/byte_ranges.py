"""Ranges of a file's bytes: which to fetch together, and a file that has only the fetched ones."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TypeAlias

import pyarrow as pa

Pieces: TypeAlias = list[bytes | memoryview | pa.Buffer]
"""The bytes of a range as they came: in pieces, which were not copied into one."""


def size_of(pieces: Pieces) -> int:
    """Return how many bytes pieces have."""
    return sum(map(len, pieces))


def without_ends(pieces: Pieces, start: int, stop: int) -> Pieces:
    """Return the bytes from the start to the stop, counted from the first of the pieces, which are not copied."""
    found: Pieces = []
    for piece in pieces:
        if max(0, start) < min(len(piece), stop):
            found.append(memoryview(piece)[max(0, start) : stop])
        start, stop = start - len(piece), stop - len(piece)
    return found


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
        self._ranges: list[tuple[int, int, Pieces]] = []

    def add(self, start: int, pieces: Pieces) -> None:
        """Add a range."""
        self._ranges.append((start, size_of(pieces), pieces))

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
        """Read without copying, unless the bytes are in several pieces: pyarrow asks for this by name."""
        return pa.py_buffer(self._view(size))

    def read(self, size: int = -1) -> bytes:
        """Read bytes."""
        return bytes(self._view(size))

    def _view(self, size: int) -> memoryview:
        begin = self._position
        end = self._size if size < 0 else min(self._size, begin + size)
        for start, size_of_range, pieces in self._ranges:
            if start <= begin and end <= start + size_of_range:
                self._position = end
                wanted = without_ends(pieces, begin - start, end - start)
                return memoryview(wanted[0] if len(wanted) == 1 else b"".join(wanted))
        raise OSError(f"bytes {begin} to {end} were not fetched")
