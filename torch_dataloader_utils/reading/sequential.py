"""The row groups of a stream's slices in file order, without the rows outside the slices."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from torch_dataloader_utils.columns.convert import convert
from torch_dataloader_utils.reading.batching import Chunk
from torch_dataloader_utils.reading.row_groups import RowGroupPlace
from torch_dataloader_utils.reading.scan import Scan, Step

__all__ = ["SequentialScan"]


LARGEST_SHARE = 2
"""A row group that takes more than this part of the budget is read in slices, so that the next is read ahead."""


FIRST_ROWS = 1024
"""Rows of a slice as long as nobody knows how large they are."""


SCRATCH_SHARE = 4
"""Decoding takes this part (a quarter) of a table's bytes beside the table, as long as it lasts."""


class SequentialScan(Scan):
    """Yields row groups as they follow one another, without the rows outside the slices."""

    def chunks(self) -> Iterator[Chunk]:
        """Yield the rows of every slice; the last chunk of each says so, also when it holds no rows."""
        first = 0  # delivered rows of the shard before the table
        for step in self.asked_for(self._steps()):
            if step.number == 0 or self.reader.knows_rows:
                first = step.first
            for table, last in self._tables(step):
                skip = min(table.num_rows, max(0, step.shard_slice.start - first))
                rows = max(0, min(table.num_rows, step.shard_slice.stop - first) - skip)
                columns = convert(table.slice(skip, rows), self.options.transform)
                held = self.reader.held_bytes(table)
                yield Chunk(step.position, first + skip, rows, step.last and last, columns, held)
                first += table.num_rows
                del table, columns

    def _steps(self) -> Iterator[Step]:
        """Yield the row groups of each shard_slice.

        Unfiltered, those that hold the slice's rows; filtered, from the shard's beginning, for only reading tells how
        many rows the filter leaves.
        """
        for position, shard_slice in enumerate(self.slices):
            groups = self.row_groups(position)
            first = 0
            for number, (path, place) in enumerate(groups):
                after = first + place.rows
                if not self.reader.knows_rows or after > shard_slice.start:
                    last = number == len(groups) - 1 or (after >= shard_slice.stop and self.reader.knows_rows)
                    decoding = self._decoding_bytes(path, place)
                    fits = decoding <= self.budget.limit // LARGEST_SHARE
                    whole = fits and self.reader.knows_sizes(path)
                    size = self.reader.fetched_bytes(path, place) + decoding if whole else 0
                    yield Step(position, shard_slice, path, place, first, last, number, whole, size)
                    if last:
                        break
                first = after

    def _decoding_bytes(self, path: str, place: RowGroupPlace) -> int:
        decoded = self.reader.decoded_bytes(path, place)
        return decoded + decoded // SCRATCH_SHARE

    def _tables(self, step: Step) -> Iterator[tuple[pa.Table, bool]]:
        """Read a row group as one table, or as several where it is large; say of each whether it is the last."""
        path, place = step.path, step.place
        self.count(path, place, again=step.first < step.shard_slice.start)
        if step.whole:
            table = self.delivered(path, place, self.reader.read(path, place))
            self.budget.give_back(step.size - self.reader.held_bytes(table))
            yield table, True
            return
        share = max(1, self.budget.limit // (2 * LARGEST_SHARE))
        rows = max(1, self.reader.expected_rows(path, place) * share // self.reader.decoded_bytes(path, place))
        if not self.reader.knows_sizes(path):
            rows = min(rows, FIRST_ROWS)
        left = place.rows
        if step.last and self.reader.knows_rows:
            left = min(left, step.shard_slice.stop - step.first)
        self.budget.take(share)
        for read, count in self.reader.read_in_pieces(path, place, rows):
            left -= count
            table = self.delivered(path, place, read)
            del read
            self.budget.give_back(share - self.reader.held_bytes(table))
            yield table, left <= 0
            del table
            if left <= 0:
                break
            self.budget.take(share)
