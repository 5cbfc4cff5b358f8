"""The scan with row-level shuffle: whole shards, or rounds of them, with their rows in shuffled order."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.columns.convert import convert
from torch_dataloader_utils.planning.plan import Shard, ShardSlice
from torch_dataloader_utils.planning.shuffle import left_bounds, permutation, round_bounds
from torch_dataloader_utils.reading.arrow_threads import allocate_first
from torch_dataloader_utils.reading.batching import Chunk
from torch_dataloader_utils.reading.memory_budget import MemoryBudget, MemoryLease
from torch_dataloader_utils.reading.row_groups import Cursor, FileRowGroup, RowGroupReader
from torch_dataloader_utils.reading.scan import ReadOptions, Scan, Step

T = TypeVar("T")

MISSING = (1 << 32) - 1
"""Stands for a row of a missing split. It is above the number of any row of a table in memory."""

BLOCK_SHARE = 8
"""Rounds are read together, but permuted each for itself, up to this part (an eighth) of the budget: reading a round
has costs that do not depend on its size."""

COLUMNS_OF_A_THREAD = 8
"""A thread for each so many columns, the reading one included, permutes one column at a time, so that the copies which
are being made stay a small part of the shard."""


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


class ShuffledScan(Scan):
    """Yields shards, or rounds of those that are too large, with their rows in shuffled order."""

    def __init__(
        self,
        reader: RowGroupReader,
        slices: Sequence[ShardSlice],
        options: ReadOptions,
        budget: MemoryBudget,
        epoch: int,
    ) -> None:
        super().__init__(reader, slices, options, budget)
        self._epoch = epoch
        self._helpers = max(1, min(pa.cpu_count(), reader.columns // COLUMNS_OF_A_THREAD)) - 1
        threads = max(1, self._helpers)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="shuffle", initializer=allocate_first)

    def close(self) -> None:
        """End the threads, and close the reader."""
        self._threads.shutdown()
        super().close()

    def chunks(self) -> Generator[Chunk, None, None]:
        """Yield the rows of every slice. The last chunk of each slice says so, even if it holds no rows."""
        tables: dict[int, pa.Table] = {}
        for step, lease in self.requested(self._steps()):
            shard = step.shard_slice.shard
            if shard.rounds > 1:
                lease.release()  # an empty one: the rounds take their own
                yield from self._rounds(step)
                continue
            if not tables:
                shard_lease = lease
                indices = self._draw(shard, range(1))
            else:
                shard_lease.merge(lease)
            tables[step.number] = self.delivered(step.group, self.reader.read(step.group), 0)
            self.count(step.group, again=step.shard_slice.start > 0)
            if step.last:
                parts = [tables[number] for number in sorted(tables)]
                tables.clear()
                self.require_rows(step.shard_slice, sum(part.num_rows for part in parts))
                block = _Block(range(1), 0, last=True, lease=shard_lease, indices=indices)
                yield self._shuffled(step, block, parts)

    def _steps(self) -> Iterator[Step]:
        """Yield all row groups of each slice's shard, file by file, so that each file is opened once."""
        for position, part in enumerate(self.slices):
            groups = self.row_groups(position)
            if part.shard.rounds > 1:
                yield Step(position, part, groups[0], 0, last=True, number=0, whole=False, size=0, requested=False)
                continue
            sizes = [self.reader.fetched_bytes(group) + self.reader.decoded_bytes(group) for group in groups]
            size = self._half_at_least(sum(sizes))
            in_file_order = sorted(range(len(groups)), key=lambda number: (groups[number].path, groups[number].number))
            for number in in_file_order:
                last = number == in_file_order[-1]
                yield Step(position, part, groups[number], 0, last, number, whole=True, size=size)
                size = 0  # the first of them takes the lease for all

    def _shuffled(self, step: Step, block: _Block, parts: list[pa.Table]) -> Chunk:
        """Permute rows column by column, several columns at once, and free each column once it is permuted.

        The parts are the rows of each row group. Their list is emptied, for nothing else may keep them in memory.
        """
        shard_slice = step.shard_slice
        whole = pa.concat_tables(parts)
        parts.clear()
        skip = max(0, shard_slice.start - block.first)
        if block.indices is None:
            (number,) = block.rounds
            drawn = _packed(self._permutation(shard_slice.shard, number, whole.num_rows))
        else:
            drawn = block.indices.result()
        indices = drawn.slice(skip, shard_slice.stop - block.first - skip)
        names, columns = whole.column_names, deque(enumerate(whole.columns))
        del whole
        permuted: dict[int, pa.ChunkedArray] = {}

        def permute() -> None:
            while column := _first(columns):
                permuted[column[0]] = pc.take(column[1], indices, boundscheck=False)  # each index is a row's number
                del column

        helping = [self._threads.submit(permute) for _ in range(self._helpers)]
        permute()
        for helper in helping:
            helper.result()
        table = pa.table([permuted[number] for number in range(len(names))], names=names)
        block.lease.resize(self._half_at_least(table.nbytes))
        converted = convert(table, self.options.transform)
        return Chunk(step.position, block.first + skip, table.num_rows, block.last, converted, block.lease)

    def _draw(self, shard: Shard, rounds: range) -> Future[pa.Array] | None:
        """Begin to draw the order of rounds, where it is known how many rows they have."""
        return None if not self.reader.knows_rows else self._threads.submit(self._indices, shard, rounds)

    def _indices(self, shard: Shard, rounds: range) -> pa.Array:
        """Return the order of the rows of rounds, as indices into the tables that are read for them."""
        if shard.rounds == 1 and not shard.missing:
            return _packed(self._permutation(shard, 0, shard.rows_read))
        begins, ends = left_bounds(shard, rounds[0]), left_bounds(shard, rounds[-1])
        offsets: list[int | None] = []  # from a row's number in its row group to its index in the tables, by split
        rows = 0
        for split, ((begin, _), (_, end)) in enumerate(zip(begins, ends, strict=True)):
            missing = split in shard.missing
            offsets.append(None if missing else rows - begin)
            rows += 0 if missing else end - begin
        orders = []
        for number in rounds:
            parts = [
                np.full(stop - start, MISSING) if offset is None else np.arange(start + offset, stop + offset)
                for (start, stop), offset in zip(left_bounds(shard, number), offsets, strict=True)
            ]
            indices = np.concatenate(parts)
            order = indices[self._permutation(shard, number, len(indices))]
            orders.append(order[order != MISSING] if shard.missing else order)
        return _packed(np.concatenate(orders))

    def _permutation(self, shard: Shard, number: int, rows: int) -> npt.NDArray[np.intp]:
        seed = self.options.row_shuffle_seed
        assert seed is not None  # noqa: S101 - this scan is used for row-level shuffle alone
        return permutation(rows, seed=seed, epoch=self._epoch, shard=shard, number=number)

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
        row_bytes = sum(self.reader.decoded_bytes(group) for group in groups) // shard.rows_read + 1
        largest = sum(-(-group.rows // shard.rounds) for group in groups) * row_bytes
        together = 1 if not self.reader.knows_rows else max(1, self.budget.limit // (BLOCK_SHARE * largest))
        for number in range(begin, shard.rounds, together):
            rounds = range(number, min(number + together, shard.rounds))
            yield rounds, self._half_at_least(len(rounds) * largest)


def _first(columns: deque[T]) -> T | None:
    """Take the first of some columns, which other threads take as well; None if none is left."""
    try:
        return columns.popleft()
    except IndexError:
        return None


def _packed(order: npt.NDArray[np.intp]) -> pa.Array:
    """Return indices as Arrow takes them fastest: in few bytes."""
    return pa.array(order.astype(np.uint32) if len(order) < MISSING else order)


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
