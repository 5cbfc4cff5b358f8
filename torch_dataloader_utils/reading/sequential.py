"""The scan in file order: the row groups of a stream's slices, without the rows outside the slices."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import accumulate

import pyarrow as pa

from torch_dataloader_utils.columns.arrow import has_fixed_width, nbytes, stacked, width
from torch_dataloader_utils.columns.convert import ColumnSlice, convert, join
from torch_dataloader_utils.errors import ColumnError
from torch_dataloader_utils.reading.batching import Chunk
from torch_dataloader_utils.reading.memory_budget import MemoryLease
from torch_dataloader_utils.reading.requests import Requests, Step
from torch_dataloader_utils.reading.row_groups.file_row_group import FileRowGroup
from torch_dataloader_utils.reading.row_groups.together import Joiner
from torch_dataloader_utils.reading.scan import Scan

PART_SHARE = 4
"""A row group that is too large to be read whole is read in parts, each of which takes this part (a quarter) of the
budget."""

FIRST_ROWS = 1024
"""Rows of the first part where the size of a row is unknown. They tell it, and the other parts are larger."""

SCRATCH_SHARE = 4
"""Decoding takes, as long as it lasts, this part (a quarter) of a table's bytes in addition to the table."""


def budget_for_whole(decoded: int) -> int:
    """Return the least budget with which row groups of so many decoded bytes are read whole.

    It has room for one that is delivered and for one that is decoded meanwhile.
    """
    return 2 * decoded + decoded // SCRATCH_SHARE


class SequentialScan(Scan):
    """Yields row groups in file order, without the rows outside the slices."""

    _row_bytes: float | None = None  # of what is delivered, once a table is there; 0 if not all columns have a width

    def chunks(self) -> Generator[Chunk, None, None]:
        """Yield the rows of every slice. The last chunk of each slice says so, even if it holds no rows."""
        first = 0  # delivered rows of the shard before the table
        for step, lease in Requests(self._steps(), self.reader, self.budget):
            if step.following:
                yield from self._chunks_of_several(step, lease)
                continue
            if step.number == 0 or self.reader.knows_rows:
                first = step.first
            for table, is_last, paid in self._tables(step, lease):
                if step.last and is_last:
                    self.require_rows(step.shard_slice, first + table.num_rows)
                skip = min(table.num_rows, max(0, step.shard_slice.start - first))
                rows = max(0, min(table.num_rows, step.shard_slice.stop - first) - skip)
                columns = convert(table.slice(skip, rows), self.options.transform)
                yield Chunk(step.position, first + skip, rows, step.last and is_last, columns, paid)
                first += table.num_rows
                del table, columns  # they must be gone before the next one is read

    def _chunks_of_several(self, step: Step, lease: MemoryLease) -> Iterator[Chunk]:
        """Yield the rows of a step that has those of several slices: a chunk for each slice, of each table."""
        of_others = [each.rows for each in step.following]
        rows = [self.reader.rows_left(step.group) - sum(of_others), *of_others]  # of each slice
        stops = list(accumulate(rows))  # of each slice, counted in the rows of the step
        done = 0  # rows of the step before the table
        for table, _, paid in self._tables(step, lease):
            columns, after = convert(table, self.options.transform), done + table.num_rows
            del table
            last = bisect_left(stops, after)  # the slice that has the table's last row
            for number in range(bisect_right(stops, done), last + 1):
                begin, stop = stops[number] - rows[number], min(after, stops[number])
                start = max(begin, done)
                own = join([ColumnSlice(columns, start - done, stop - done)])
                if number == last:
                    columns = {}  # not kept here while the chunk is used
                before = start - begin + (0 if number else step.first)  # rows of its shard
                ends, lease_of_last = stop == stops[number], paid if number == last else None
                yield Chunk(step.position + number, before, stop - start, ends, own, lease_of_last)
                del own
            done = after

    def _steps(self) -> Iterator[Step]:
        """Yield the row groups of each slice's shard that hold rows of the slice.

        With a filter, only reading tells how many rows a row group has left. So a filtered shard is read from its
        beginning, to find the slice's first row.
        """
        counted, joiner = self.reader.knows_rows, Joiner(self.reader, self.budget.limit)
        most = 1  # row groups that are read as one
        following = 0  # the position of the first slice that no step has yet
        for position, shard_slice in enumerate(self.slices):
            if position < following:
                continue
            following = position + 1
            left = deque(self.row_groups(position))
            first = number = 0
            while left:
                group = left.popleft()
                after = first + self.reader.rows_left(group)
                if not counted or after > shard_slice.start:
                    behind: tuple[FileRowGroup, ...] = ()
                    if first >= shard_slice.start:
                        wanted = shard_slice.stop - first if counted else None
                        group, behind = joiner.joined(group, left, most, wanted)
                        after = first + sum(map(self.reader.rows_left, (group, *behind)))
                        if not left and first < after <= shard_slice.stop and not behind:
                            group, following = self._joined_with_slices(joiner, group, following, most)
                    count = group.count + sum(each.count for each in behind)
                    most = max(most, 2 * count)
                    last = not left or (after >= shard_slice.stop and counted)
                    decoded = sum(map(self.reader.sizes.decoded_bytes, (group, *behind)))
                    fits = budget_for_whole(decoded) <= self.budget.limit and self.reader.sizes.are_known(group)
                    whole = fits or count > 1  # several are never read in parts
                    decoding = decoded + decoded // SCRATCH_SHARE
                    size = self.reader.sizes.fetched_bytes(group) + decoding if whole else 0
                    others = tuple(self.slices[position + 1 : following])
                    step = Step(position, shard_slice, group, first, last, number, whole, size, following=others)
                    yield replace(step, behind=behind) if behind else step
                    if last:
                        break
                first = after
                number += group.count

    def _joined_with_slices(
        self, joiner: Joiner, group: FileRowGroup, following: int, most: int
    ) -> tuple[FileRowGroup, int]:
        """Return a row group, which ends its slice, and those of whole slices that are read as one with it.

        `following` is the position of the slice behind it. With the row group is returned that of the first slice that
        is not read with it. Where few of many columns are read, a shard may be a single row group with few bytes.
        """
        reader = self.reader
        while reader.knows_rows and reader.joins(group.path) and following < len(self.slices):
            shard_slice = self.slices[following]
            if not shard_slice.is_whole or group.count + len(shard_slice.shard.splits) > most:
                break
            left = deque(self.row_groups(following))
            if not left or not all(map(reader.rows_left, left)):  # nothing is read of what is left out
                break
            whole = joiner.joined_of_file(group, left, most)
            if left:  # not all of the slice's row groups
                break
            group, following = whole, following + 1
        return group, following

    def _tables(self, step: Step, lease: MemoryLease) -> Iterator[tuple[pa.Table, bool, MemoryLease]]:
        """Yield a step's row groups in tables: each, whether it is the last, and its lease.

        Row groups that are read whole have one lease, of which each table gets its part. Several that are read as one
        are read one by one after an error, so that the rows before it are delivered, and it names its row group.
        """
        group = step.group
        if not step.whole:
            self.count(group, again=step.first < step.shard_slice.start)
            yield from self._parts(step, lease)
            return
        table_of_all = self._joined_table(step)
        if table_of_all is not None:
            lease.resize(self._held_bytes(table_of_all))
            yield table_of_all, True, lease
            return
        groups = [each for several in step.groups for each in self.reader.single(several)]
        for each in groups:
            self.count(each, again=step.first < step.shard_slice.start)
            done = 0
            for read, ends in self.reader.read_as_decoded(each):
                table = self.delivered(each, read, done)
                del read
                done += table.num_rows
                held = self._held_bytes(table)
                is_last = ends and each is groups[-1]
                paid = lease if is_last else lease.split(held)
                paid.resize(held)
                yield table, is_last, paid
                del table

    def _held_bytes(self, table: pa.Table) -> int:
        """Return how large a table of rows that are delivered will be once it is converted.

        All of them have the same columns. Where each has a fixed width, Arrow is not asked: it lets go of Python's lock
        to look at its buffers, and to get that back takes longer where a training loop runs.
        """
        if self._row_bytes is None:
            types = table.schema.types
            self._row_bytes = sum(map(width, types)) if all(map(has_fixed_width, types)) else 0.0
        if self._row_bytes:
            return int(len(table) * self._row_bytes)
        booleans = sum(pa.types.is_boolean(column.type) for column in table.schema)
        return int(nbytes(table) + len(table) * booleans)

    def _joined_table(self, step: Step) -> pa.Table | None:
        """Return several row groups that were requested as one. After an error, request each, and return None."""
        group, groups = step.group, step.groups
        if len(groups) == group.count == 1:
            return None
        try:
            read = stacked(self.reader.read_together(groups)) if step.behind else self.reader.read(group)
            table = self.delivered(group, read, 0)
        except (ColumnError, OSError):  # raised again for the row group that it comes from, when that is read
            for each in [single for several in groups for single in self.reader.single(several)]:
                self.reader.request(each, whole=True)
            return None
        for several in groups:
            self.count(several, again=False)  # a slice's first rows come before them, if at all
        return table

    def _parts(self, step: Step, lease: MemoryLease) -> Iterator[tuple[pa.Table, bool, MemoryLease]]:
        """Yield a row group in parts, each of which takes a lease before it is decoded."""
        group = step.group
        share = max(1, self.budget.limit // PART_SHARE)

        def rows_of_part() -> int:
            rows = max(1, self.reader.sizes.expected_rows(group) * share // self.reader.sizes.decoded_bytes(group))
            return rows if self.reader.sizes.are_known(group) else min(rows, FIRST_ROWS)

        counted = self.reader.knows_rows
        left = self.reader.rows_left(group) if counted else group.rows
        if step.last and counted:
            left = min(left, step.shard_slice.stop - step.first)
        lease.merge(self.budget.take(share))
        done = 0
        for read, count in self.reader.read_in_parts(group, rows_of_part):
            left -= read.num_rows if counted else count
            table = self.delivered(group, read, done)
            done += table.num_rows
            del read
            lease.resize(self._held_bytes(table))
            yield table, left <= 0, lease
            del table
            if left <= 0:
                return
            lease = self.budget.take(share)
