"""The scan with row-level shuffle: whole shards, or rounds of them, with their rows in shuffled order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from torch_dataloader_utils.columns.arrow import nbytes
from torch_dataloader_utils.columns.convert import ColumnSlice, convert, join, size_of
from torch_dataloader_utils.planning.plan import Shard, ShardSlice
from torch_dataloader_utils.planning.shuffle import left_bounds, round_bounds
from torch_dataloader_utils.reading.batching import Chunk
from torch_dataloader_utils.reading.memory_budget import MemoryBudget, MemoryLease
from torch_dataloader_utils.reading.permuting import Permuter
from torch_dataloader_utils.reading.requests import Requests, Step
from torch_dataloader_utils.reading.row_groups.cursor import Cursor
from torch_dataloader_utils.reading.row_groups.file_row_group import FileRowGroup
from torch_dataloader_utils.reading.row_groups.reader import RowGroupReader
from torch_dataloader_utils.reading.row_groups.together import decoded_together
from torch_dataloader_utils.reading.row_orders import RowOrders
from torch_dataloader_utils.reading.scan import ReadOptions, Scan

WHOLE_SHARE = 4
"""A shard that is shuffled in rounds is read as a whole if it takes no more than this part (a quarter) of the budget:
row groups are decoded faster so, and without a page of each of their columns in memory. A quarter, since a shard of one
column is there four times while it is permuted: twice as it was read, permuted, and the one before it, which is
delivered, or after it, which is decoded. A larger one of many columns is read as a whole, too: see `NARROW_SHARE`."""

NARROW_SHARE = 8
"""A shard of numbers whose widest column is no more than this part (an eighth) of it is read as a whole if the budget
has room for it and for the copies of each column that is being permuted. If they take more than half of the budget, the
next shard is read once this one is delivered. With few columns, or lists, that was not faster and took more memory; of
lists Arrow then made an index of all values."""

ORDER_BYTES = 8
"""What the order of the rows takes of a row while it is drawn."""

BLOCK_SHARE = 8
"""Rounds are read together, but permuted each for itself, up to this part (an eighth) of the budget: reading a round
has costs that do not depend on its size."""

TOGETHER_BYTES = 4 << 20
"""Small shards are read together, but permuted each for itself, up to so many bytes: each table and each column of it
has costs that do not depend on its size."""

MOST_DRAWN_AT_ONCE = 1 << 15
"""The order of so many rows is drawn by the thread that permutes them, and of more by another one meanwhile: to hand
over a small task takes longer than the task."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Rounds of a shard that are read together; most shards have only one round.

    Attributes:
        rounds: Their numbers.
        first: The shard's delivered rows before them.
        last: Whether the slice has none after them.
        lease: Their memory.
        indices: Their row order, drawn while they are read; None where only reading tells how many rows there are.
    """

    rounds: range
    first: int
    last: bool
    lease: MemoryLease
    indices: Future[pa.Array] | None


@dataclass(frozen=True, slots=True)
class _Read:
    """The rows of a small shard that are read, until those of others are read that are permuted together with it.

    Attributes:
        position: Index of its slice in the stream's slices.
        shard_slice: The slice.
        indices: Its row order, drawn while it is decoded; None where it is drawn later, since it has few rows or since
            only reading tells how many.
        tables: The rows of each row group, by its number in the shard.
    """

    position: int
    shard_slice: ShardSlice
    indices: Future[pa.Array] | None
    tables: dict[int, pa.Table]

    @property
    def rows(self) -> int:
        """The rows that are read."""
        return sum(table.num_rows for table in self.tables.values())


class ShuffledScan(Scan):
    """Yields shards, or rounds of those that are too large, with their rows in shuffled order.

    `num_streams` counts those that are read side by side, this one included: they share the memory.
    """

    def __init__(
        self,
        reader: RowGroupReader,
        slices: Sequence[ShardSlice],
        options: ReadOptions,
        budget: MemoryBudget,
        epoch: int,
        *,
        num_streams: int,
    ) -> None:
        super().__init__(reader, slices, options, budget)
        assert options.row_shuffle_seed is not None  # noqa: S101 - this scan is used for row-level shuffle alone
        self._orders = RowOrders(options.row_shuffle_seed, epoch)
        self._permuter = Permuter(reader.columns, budget.limit)
        self._drawing: dict[int, Future[pa.Array]] = {}  # row orders of the shards that are requested, by position
        self._prepared = -1  # the last of them
        self._most_together = TOGETHER_BYTES // num_streams

    def close(self) -> None:
        """End the threads, and close the reader."""
        self._permuter.close()
        super().close()

    def chunks(self) -> Generator[Chunk, None, None]:
        """Yield the rows of every slice. The last chunk of each slice says so, even if it holds no rows."""
        together: list[_Read] = []
        requests = Requests(self._steps(), self.reader, self.budget, self._prepare_for)
        for step, lease in requests:
            if not step.whole:
                lease.release()  # an empty one: the rounds take their own
                yield from self._rounds(step)
                continue
            if lease.size:  # of the first shard that is read together with others
                shared_lease = lease
            else:
                lease.release()
            if not together or together[-1].position != step.position:
                together.append(_Read(step.position, step.shard_slice, self._drawing.pop(step.position, None), {}))
            read = together[-1]
            read.tables.update(zip(step.numbers, self._tables_of(step), strict=True))
            for group in step.groups:
                self.count(group, again=step.shard_slice.start > 0)
            if step.last:
                self.require_rows(step.shard_slice, read.rows)
                if not step.continues:
                    yield from self._chunks_of(together, shared_lease, requests.more)

    def _tables_of(self, step: Step) -> Iterator[pa.Table]:
        """Yield the rows of each row group of a step."""
        tables: Iterator[pa.Table] = map(self.reader.read, step.groups)
        if step.behind:
            try:
                tables = iter(self.reader.read_together(step.groups))
            except OSError:  # raised again for the row group that it comes from
                for group in step.groups:
                    self.reader.request(group, whole=True)
        for group, table in zip(step.groups, tables, strict=True):
            yield self.delivered(group, table, 0)

    def _prepare_for(self, step: Step) -> None:
        """Begin to draw the row order of a large shard once its first row group is requested."""
        shard = step.shard_slice.shard
        if step.position != self._prepared and shard.rows_read > MOST_DRAWN_AT_ONCE:
            drawing = self._draw(shard, range(shard.rounds))
            if drawing is not None:
                self._drawing[step.position] = drawing
        self._prepared = step.position

    def _steps(self) -> Iterator[Step]:
        """Yield all row groups of each slice's shard, file by file, so that each file is opened once."""
        position = 0
        while position < len(self.slices):
            groups = self.row_groups(position)
            part = self.slices[position]
            size = self._whole_size(part.shard, groups)
            if size is None:
                yield Step(position, part, groups[0], 0, last=True, number=0, whole=False, size=0, requested=False)
                position += 1
                continue
            together = [groups]
            while groups and (following := position + len(together)) < len(self.slices):
                groups = self.row_groups(following)
                if not groups or size + self._size(groups) > min(self._most_together, self.budget.limit // WHOLE_SHARE):
                    break
                if self._whole_size(self.slices[following].shard, groups) is None:
                    break
                if not all(map(self.reader.sizes.are_usual, (*together[-1], *groups))):
                    break
                together.append(groups)
                size += self._size(groups)
            lease = self._half_at_least(size)
            for number, groups in enumerate(together):
                continues = number < len(together) - 1
                yield from self._steps_of(position + number, groups, lease, continues=continues)
                lease = 0
            position += len(together)

    def _steps_of(
        self, position: int, groups: Sequence[FileRowGroup], lease: int, *, continues: bool
    ) -> Iterator[Step]:
        """Yield the row groups of a shard, file by file. The first of them takes the lease."""
        part = self.slices[position]
        in_file_order = sorted(range(len(groups)), key=lambda number: (groups[number].path, groups[number].number))
        for numbers in decoded_together(in_file_order, groups, self.reader, self._size(groups)):
            group, *behind = (groups[number] for number in numbers)
            last = numbers[-1] == in_file_order[-1]
            step = Step(position, part, group, 0, last, numbers[0], whole=True, size=lease, continues=continues)
            yield replace(step, behind=tuple(behind), numbers=tuple(numbers))
            lease = 0

    def _whole_size(self, shard: Shard, groups: Sequence[FileRowGroup]) -> int | None:
        """Return the bytes to lease for a shard that is read as a whole, in the order of all of its rounds.

        None if it is read round by round.
        """
        size = self._size(groups)
        if shard.rounds == 1:
            return size
        if not (self.reader.knows_rows and all(map(self.reader.sizes.are_known, groups))):
            return None
        if size + ORDER_BYTES * shard.rows_read <= self.budget.limit // WHOLE_SHARE:
            return size
        widths = self.reader.sizes.widths
        widest = max(widths or [], default=0.0)
        if widths is None or NARROW_SHARE * widest > sum(widths):
            return None
        copied = self._permuter.copied_bytes(widest * shard.rows_read)
        whole = int(size + ORDER_BYTES * shard.rows_read + copied)
        return whole if whole <= self.budget.limit else None

    def _size(self, groups: Sequence[FileRowGroup]) -> int:
        return sum(self.reader.sizes.fetched_bytes(group) + self.reader.sizes.decoded_bytes(group) for group in groups)

    def _chunks_of(
        self, together: list[_Read], lease: MemoryLease, request_more: Callable[[], object]
    ) -> Iterator[Chunk]:
        """Yield the rows of shards that were read together, a chunk for each. The last has the lease of all.

        The list is emptied. What is delivered meanwhile releases memory, in which more is requested.
        """
        orders: list[pa.Array] = []
        parts: list[pa.Table] = []
        rows = 0
        for read in together:
            drawn = self._drawn(read.indices, read.shard_slice.shard, 0, read.rows)
            order = drawn.slice(read.shard_slice.start, read.shard_slice.stop - read.shard_slice.start)
            orders.append(pa.array(order.to_numpy() + np.uint32(rows)) if rows else order)
            rows += read.rows
            parts += [read.tables[number] for number in sorted(read.tables)]
            read.tables.clear()
        positions = [(read.position, read.shard_slice.start) for read in together]
        together.clear()
        table = self._permuter.permuted(parts, pa.concat_arrays(orders) if len(orders) > 1 else orders[0], request_more)
        columns = convert(table, self.options.transform)
        del table
        lease.resize(self._half_at_least(size_of(columns)))
        begin = 0
        for (position, first), order in zip(positions, orders, strict=True):
            end = begin + len(order)
            is_last = len(orders) == 1 or order is orders[-1]
            own = columns if len(orders) == 1 else join([ColumnSlice(columns, begin, end)])
            if is_last:
                columns = {}  # not kept here while the chunk is used
            yield Chunk(position, first, len(order), True, own, lease if is_last else None)  # noqa: FBT003
            begin = end

    def _shuffled(self, step: Step, block: _Block, parts: list[pa.Table]) -> Chunk:
        """Return the rows of rounds, of which the parts are those of each row group. Their list is emptied."""
        shard_slice = step.shard_slice
        skip = max(0, shard_slice.start - block.first)
        drawn = self._drawn(block.indices, shard_slice.shard, block.rounds[0], sum(part.num_rows for part in parts))
        table = self._permuter.permuted(parts, drawn.slice(skip, shard_slice.stop - block.first - skip))
        block.lease.resize(self._half_at_least(nbytes(table)))
        converted = convert(table, self.options.transform)
        return Chunk(step.position, block.first + skip, table.num_rows, block.last, converted, block.lease)

    def _drawn(self, indices: Future[pa.Array] | None, shard: Shard, number: int, rows: int) -> pa.Array:
        """Return the order of rows that were read, which is drawn now if it was not while they were read."""
        if indices is not None:
            return indices.result()
        if self.reader.knows_rows:  # all of a shard's, since the order of single rounds was drawn while they were read
            return self._orders.of_rounds(shard, range(shard.rounds))
        return self._orders.of_read(shard, number, rows)

    def _draw(self, shard: Shard, rounds: range) -> Future[pa.Array] | None:
        """Begin to draw the order of rounds, where it is known how many rows they have."""
        return None if not self.reader.knows_rows else self._permuter.submit(self._orders.of_rounds, shard, rounds)

    def _half_at_least(self, size: int) -> int:
        """Return the bytes to lease for a shard: at least half of the budget, so that there are never more than two."""
        return max(size, self.budget.limit // 2)

    # Rounds ----------------------------------------------------------------------------------------------------------

    def _rounds(self, step: Step) -> Iterator[Chunk]:
        """Yield the rounds of a shard: the next part of each of its row groups, shuffled together."""
        shard_slice, shard = step.shard_slice, step.shard_slice.shard
        groups = self.row_groups(step.position)
        begin, first = (0, 0) if not self.reader.knows_rows else _begin(shard_slice)
        blocks = list(self._blocks(shard, begin, groups))
        cursors: list[Cursor] = []
        ahead: list[MemoryLease] = []
        try:
            for number, group in enumerate(groups):
                self.count(group, again=shard_slice.start > 0)
                rows = max(_part(shard, rounds)[number] for rounds, _ in blocks)
                cursors.append(self.reader.cursor(group, rows, _bounds(shard, begin)[number][0]))
            for number, (rounds, _) in enumerate(blocks):
                self._request_blocks(shard, cursors, blocks[number : number + 2], ahead)
                indices = self._draw(shard, rounds)
                parts = [self.delivered(group, cursor.take()) for cursor, group in zip(cursors, groups, strict=True)]
                rows = sum(part.num_rows for part in parts)
                last = number == len(blocks) - 1 or first + rows >= shard_slice.stop
                if last:
                    self.require_rows(shard_slice, first + rows)
                yield self._shuffled(step, _Block(rounds, first, last, ahead.pop(0), indices), parts)
                first += rows
                if last:
                    break
        finally:
            for cursor in cursors:
                cursor.close()
            for lease in ahead:
                lease.release()

    def _request_blocks(
        self, shard: Shard, cursors: list[Cursor], blocks: list[tuple[range, int]], ahead: list[MemoryLease]
    ) -> None:
        """Request the next block, and the one behind it if the budget allows.

        The blocks are the rounds and the size of each of the two; `ahead` has the leases of those that are requested.
        """
        for rounds, size in blocks[len(ahead) :]:
            lease = self.budget.try_take(size) if ahead else self.budget.take(size)
            if lease is None:
                return
            ahead.append(lease)
            for cursor, rows in zip(cursors, _part(shard, rounds), strict=True):
                cursor.request(rows)

    def _blocks(self, shard: Shard, begin: int, groups: Sequence[FileRowGroup]) -> Iterator[tuple[range, int]]:
        """Yield the rounds to read together, from one round on, and the bytes to lease for them."""
        row_bytes = sum(self.reader.sizes.decoded_bytes(group) for group in groups) // shard.rows_read + 1
        largest = sum(-(-group.rows // shard.rounds) for group in groups) * row_bytes
        together = 1 if not self.reader.knows_rows else max(1, self.budget.limit // (BLOCK_SHARE * largest))
        for number in range(begin, shard.rounds, together):
            rounds = range(number, min(number + together, shard.rounds))
            yield rounds, self._half_at_least(len(rounds) * largest)


def _bounds(shard: Shard, number: int) -> list[tuple[int, int]]:
    """Return which rows of each split that is present are in a round."""
    return [bounds for split, bounds in enumerate(round_bounds(shard, number)) if split not in shard.missing]


def _part(shard: Shard, rounds: range) -> list[int]:
    """Return how many rows of each split that is present some rounds have together."""
    begins, ends = _bounds(shard, rounds[0]), _bounds(shard, rounds[-1])
    return [stop - start for (start, _), (_, stop) in zip(begins, ends, strict=True)]


def _begin(shard_slice: ShardSlice) -> tuple[int, int]:
    """Return the round that holds a slice's first row, and the shard's delivered rows before it."""
    first = 0
    for number in range(shard_slice.shard.rounds):
        shard = shard_slice.shard
        bounds = left_bounds(shard, number)
        rows = sum(stop - start for split, (start, stop) in enumerate(bounds) if split not in shard.missing)
        if first + rows > shard_slice.start:
            return number, first
        first += rows
    return shard_slice.shard.rounds - 1, first
