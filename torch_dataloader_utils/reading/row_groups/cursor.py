"""A row group that is read part by part while others are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait

import pyarrow as pa

from torch_dataloader_utils.reading.row_groups.decoder import Decoded, Decoder
from torch_dataloader_utils.reading.row_groups.file_row_group import FileRowGroup


class Cursor:
    """A row group that is read part by part, about so many rows each, from a file opened for it alone.

    Args:
        decoder: Has the file open.
        group: The row group.
        rows: About how many rows a part has.
        first: The rows, without deleted ones, that are left out at the beginning.
        stored_rows: Returns how many rows of the file the first rows are.
        finished: Returns the rows to deliver of a part: gets the stored rows before it, the part, and its stored rows.
    """

    def __init__(
        self,
        decoder: Decoder,
        group: FileRowGroup,
        rows: int,
        first: int,
        *,
        stored_rows: Callable[[int], int],
        finished: Callable[[int, Future[Decoded], int], pa.Table],
    ) -> None:
        self._decoder = decoder
        self._stored_rows = stored_rows
        self._finished = finished
        self._last = 0  # rows, without deleted ones, that were left out or requested
        self._first = self._advance(first)  # stored rows that were left out or taken
        self._parts = decoder.parts(group.path, group.number, rows, self._first)
        self._requested: deque[tuple[Future[Decoded], int]] = deque()

    def request(self, rows: int) -> None:
        """Begin to decode the next rows."""
        stored = self._advance(rows)
        self._requested.append((self._parts.next(stored), stored))

    def take(self) -> pa.Table:
        """Return the rows that the filter keeps of the first part that was requested and not taken."""
        part, stored = self._requested.popleft()
        table = self._finished(self._first, part, stored)
        self._first += stored
        return table

    def _advance(self, rows: int) -> int:
        """Move on by some rows, and return how many stored rows these are."""
        before = self._stored_rows(self._last)
        self._last += rows
        return self._stored_rows(self._last) - before

    def close(self) -> None:
        """Decode nothing more; wait for what is being decoded."""
        wait([part for part, _ in self._requested if not part.cancel()])
        self._parts.close()
        self._decoder.close()
