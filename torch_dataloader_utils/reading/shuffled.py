"""The way through a stream's slices where rows are mixed: whole shards, or rounds of them, in their shuffled order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.columns.convert import convert
from torch_dataloader_utils.planning.plan import Shard, ShardSlice
from torch_dataloader_utils.planning.shuffle import permutation, round_bounds
from torch_dataloader_utils.reading.batching import Chunk
from torch_dataloader_utils.reading.read_ahead import MemoryBudget
from torch_dataloader_utils.reading.row_groups import RowGroupPlace, RowGroupReader
from torch_dataloader_utils.reading.scan import ReadOptions, Scan, Step

__all__ = ["ShuffledScan"]


ABSENT = (1 << 32) - 1
"""Stands for a row that is not there, and is above the number of any row of a table in memory."""


BLOCK_SHARE = 8
"""Rounds are mixed together, each for itself, up to this part (an eighth) of the budget: each time has its costs."""


COLUMNS_OF_A_THREAD = 8
"""For so many columns one is permuted at a time: what is on its way stays a small part of the shard."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Rounds of a shard that are read together; most shards have only one.

    Attributes:
        rounds: Their numbers.
        first: The shard's delivered rows before them.
        last: Whether the slice has none after them.
        size: The budget that was taken for them.
        indices: Their order, drawn while they are read; None where only reading tells how many rows there are.
    """

    rounds: range
    first: int
    last: bool
    size: int
    indices: Future[pa.Array] | None


class ShuffledScan(Scan):
    """Yields shards, or rounds of those that are too large, their rows in their shuffled order.

    Args:
        reader: Reads row groups.
        slices: What to read.
        options: How rows become batches.
        budget: How much may be read that is not delivered yet.
        epoch: The epoch.
    """

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
        at_once = max(1, min(pa.cpu_count(), reader.columns // COLUMNS_OF_A_THREAD))
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="mix")

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def chunks(self) -> Iterator[Chunk]:
        """Yield the rows of every slice; the last chunk of each says so, also when it holds no rows."""
        tables: dict[int, pa.Table] = {}
        size = 0
        for step in self.asked_for(self._steps()):
            if step.shard_slice.shard.rounds > 1:
                yield from self._rounds(step)
                continue
            if not tables:
                indices = self._draw(step.shard_slice.shard, range(1))
            table = self.reader.read(step.path, step.place)
            self.count(step.path, step.place, again=step.shard_slice.start > 0)
            tables[step.number] = self.delivered(step.path, step.place, table)
            size += step.size
            del table
            if step.last:
                parts = [tables[number] for number in sorted(tables)]
                tables.clear()
                chunks = [self._mixed(step, _Block(range(1), 0, last=True, size=size, indices=indices), parts)]
                size = 0
                yield chunks.pop()  # not to keep what it holds

    def _steps(self) -> Iterator[Step]:
        """Yield all row groups of each slice's shard, file by file, so that each file is opened once."""
        for position, shard_slice in enumerate(self.slices):
            groups = self.row_groups(position)
            if shard_slice.shard.rounds > 1:
                path, place = groups[0]
                yield Step(position, shard_slice, path, place, 0, last=True, number=0, whole=False, size=0, asks=False)
                continue
            sizes = [self.reader.fetched_bytes(*group) + self.reader.decoded_bytes(*group) for group in groups]
            size = self._half_at_least(sum(sizes))
            in_file_order = sorted(range(len(groups)), key=lambda number: (groups[number][0], groups[number][1].number))
            for number in in_file_order:
                path, place = groups[number]
                last = number == in_file_order[-1]
                yield Step(position, shard_slice, path, place, 0, last, number, whole=True, size=size)
                size = 0  # the first of them takes budget for all

    def _mixed(self, step: Step, block: _Block, parts: list[pa.Table]) -> Chunk:
        """Mix rows column by column, several at once, and let go of each as it is mixed.

        Args:
            step: Where they belong.
            block: Which rows they are.
            parts: For each row group its rows. The list is emptied, for nothing else may keep them.
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
        names, columns = whole.column_names, dict(enumerate(whole.columns))
        del whole

        def take(place: int) -> pa.ChunkedArray:
            return pc.take(columns.pop(place), indices, boundscheck=False)  # each of them is a row's number

        mixed = pa.table(list(self._threads.map(take, range(len(names)))), names=names)
        held = self._half_at_least(mixed.nbytes)
        self.budget.give_back(block.size - held)
        converted = convert(mixed, self.options.transform)
        return Chunk(step.position, block.first + skip, mixed.num_rows, block.last, converted, held)

    def _draw(self, shard: Shard, rounds: range) -> Future[pa.Array] | None:
        """Begin to draw the order of rounds, where it is known how many rows they have."""
        return None if not self.reader.knows_rows else self._threads.submit(self._indices, shard, rounds)

    def _indices(self, shard: Shard, rounds: range) -> pa.Array:
        """Return which rows of the tables that are read for rounds follow one another."""
        if shard.rounds == 1 and not shard.missing:
            return _packed(self._permutation(shard, 0, shard.rows))
        begins, ends = round_bounds(shard, rounds[0]), round_bounds(shard, rounds[-1])
        offsets: list[int | None] = []  # of each split's rows in the tables, put together, from the row group's first
        rows = 0
        for place, ((begin, _), (_, end)) in enumerate(zip(begins, ends, strict=True)):
            missing = place in shard.missing
            offsets.append(None if missing else rows - begin)
            rows += 0 if missing else end - begin
        orders = []
        for number in rounds:
            parts = [
                np.full(stop - start, ABSENT) if offset is None else np.arange(start + offset, stop + offset)
                for (start, stop), offset in zip(round_bounds(shard, number), offsets, strict=True)
            ]
            places = np.concatenate(parts)
            order = places[self._permutation(shard, number, len(places))]
            orders.append(order[order != ABSENT] if shard.missing else order)
        return _packed(np.concatenate(orders))

    def _permutation(self, shard: Shard, number: int, rows: int) -> npt.NDArray[np.intp]:
        seed = self.options.row_shuffle_seed
        assert seed is not None  # noqa: S101 - rows are mixed
        return permutation(rows, seed=seed, epoch=self._epoch, shard=shard, number=number)

    def _half_at_least(self, size: int) -> int:
        """Return the budget for a shard of mixed rows: so much that there are never more than two."""
        return max(size, self.budget.limit // 2)

    # Rounds ----------------------------------------------------------------------------------------------------------

    def _rounds(self, step: Step) -> Iterator[Chunk]:
        """Yield the rounds of a shard: the next part of each of its row groups, mixed with those of the others."""
        shard_slice, shard = step.shard_slice, step.shard_slice.shard
        groups = self.row_groups(step.position)
        begin, first = (0, 0) if not self.reader.knows_rows else _begin(shard_slice)
        blocks = list(self._blocks(shard, begin, groups))
        cursors = []
        try:
            for number, (path, place) in enumerate(groups):
                self.count(path, place, again=shard_slice.start > 0)
                rows = max(_part(shard, rounds)[number] for rounds, _ in blocks)
                cursors.append(self.reader.cursor(path, place, rows))
                cursors[-1].skip(_bounds(shard, begin)[number][0])
            asked = 0
            for number, (rounds, size) in enumerate(blocks):
                while asked < len(blocks) and asked <= number + 1:
                    if not self.budget.take(blocks[asked][1], wait=asked == number):
                        break
                    for cursor, rows in zip(cursors, _part(shard, blocks[asked][0]), strict=True):
                        cursor.ask(rows)
                    asked += 1
                indices = self._draw(shard, rounds)
                parts = [
                    self.delivered(path, place, cursor.take())
                    for cursor, (path, place) in zip(cursors, groups, strict=True)
                ]
                rows = sum(part.num_rows for part in parts)
                last = number == len(blocks) - 1 or (first + rows >= shard_slice.stop and self.reader.knows_rows)
                chunks = [self._mixed(step, _Block(rounds, first, last, size, indices), parts)]
                yield chunks.pop()
                first += rows
                if last:
                    self.budget.give_back(sum(size for _, size in blocks[number + 1 : asked]))
                    return
        finally:
            for cursor in cursors:
                cursor.close()

    def _blocks(
        self, shard: Shard, begin: int, groups: Sequence[tuple[str, RowGroupPlace]]
    ) -> Iterator[tuple[range, int]]:
        """Yield the rounds to read together, from one on, and the budget that they take."""
        row_bytes = sum(self.reader.decoded_bytes(*group) for group in groups) // shard.rows + 1
        largest = sum(-(-place.rows // shard.rounds) for _, place in groups) * row_bytes
        together = 1 if not self.reader.knows_rows else max(1, self.budget.limit // (BLOCK_SHARE * largest))
        for number in range(begin, shard.rounds, together):
            rounds = range(number, min(number + together, shard.rounds))
            yield rounds, self._half_at_least(len(rounds) * largest)


def _packed(order: npt.NDArray[np.intp]) -> pa.Array:
    """Return indices as Arrow takes them fastest: in few bytes."""
    return pa.array(order.astype(np.uint32) if len(order) < ABSENT else order)


def _bounds(shard: Shard, number: int) -> list[tuple[int, int]]:
    """Return which rows of each split that is present are mixed in a round."""
    return [one for place, one in enumerate(round_bounds(shard, number)) if place not in shard.missing]


def _part(shard: Shard, rounds: range) -> list[int]:
    """Return how many rows of each split that is present some rounds have together."""
    begins, ends = _bounds(shard, rounds[0]), _bounds(shard, rounds[-1])
    return [stop - start for (start, _), (_, stop) in zip(begins, ends, strict=True)]


def _begin(shard_slice: ShardSlice) -> tuple[int, int]:
    """Return the round that holds a slice's first row, and the shard's delivered rows before it."""
    first = 0
    for number in range(shard_slice.shard.rounds):
        rows = sum(_part(shard_slice.shard, range(number, number + 1)))
        if first + rows > shard_slice.start:
            return number, first
        first += rows
    return shard_slice.shard.rounds - 1, first
