"""The way through a stream's pieces where rows are mixed: whole shards, or rounds of them, in their shuffled order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torch_dataloader_utils.convert import convert
from torch_dataloader_utils.cutting import Chunk
from torch_dataloader_utils.formats.rowgroups import ParquetReader, RowGroupPlace
from torch_dataloader_utils.model import Piece, Shard
from torch_dataloader_utils.planning import permutation, round_bounds
from torch_dataloader_utils.readahead import Room
from torch_dataloader_utils.walking import ReadOptions, Step, Walk

__all__ = ["MixedWalk"]


@dataclass(frozen=True, slots=True)
class _Round:
    """A part of a shard that is mixed at once; the whole of most shards.

    Attributes:
        number: Which it is.
        first: The shard's delivered rows before it.
        last: Whether the piece has none after it.
        size: The room that was taken for it.
    """

    number: int
    first: int
    last: bool
    size: int


class MixedWalk(Walk):
    """Yields shards, or rounds of those that are too large, their rows in their shuffled order.

    Args:
        reader: Reads row groups.
        pieces: What to read.
        options: How rows become batches.
        room: How much may be read that is not delivered yet.
        epoch: The epoch.
    """

    def __init__(
        self, reader: ParquetReader, pieces: Sequence[Piece], options: ReadOptions, room: Room, epoch: int
    ) -> None:
        super().__init__(reader, pieces, options, room)
        self._epoch = epoch
        self._threads = ThreadPoolExecutor(max(1, pa.cpu_count()), thread_name_prefix="mix")

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def chunks(self) -> Iterator[Chunk]:
        """Yield the rows of every piece; the last chunk of each says so, also when it holds no rows."""
        tables: dict[int, pa.Table] = {}
        size = 0
        for step in self.asked_for(self._steps()):
            if step.piece.shard.rounds > 1:
                yield from self._rounds(step)
                continue
            table = self.reader.read(step.path, step.place)
            self.count(step.path, step.place, again=step.piece.start > 0)
            tables[step.number] = self.checked(step.path, step.place, table)
            size += step.size
            del table
            if step.last:
                parts = [tables[number] for number in sorted(tables)]
                tables.clear()
                chunks = [self._mixed(step, _Round(0, 0, last=True, size=size), parts)]
                size = 0
                yield chunks.pop()  # not to keep what it holds

    def _steps(self) -> Iterator[Step]:
        """Yield all row groups of each piece's shard, file by file, so that each file is opened once."""
        for position, piece in enumerate(self.pieces):
            groups = self.row_groups(position)
            if piece.shard.rounds > 1:
                path, place = groups[0]
                yield Step(position, piece, path, place, 0, last=True, number=0, whole=False, size=0, asks=False)
                continue
            sizes = [self.reader.fetched_bytes(*group) + self.reader.decoded_bytes(*group) for group in groups]
            size = self._half_at_least(sum(sizes))
            in_file_order = sorted(range(len(groups)), key=lambda number: (groups[number][0], groups[number][1].number))
            for number in in_file_order:
                path, place = groups[number]
                last = number == in_file_order[-1]
                yield Step(position, piece, path, place, 0, last, number, whole=True, size=size)
                size = 0  # the first of them takes room for all

    def _mixed(self, step: Step, turn: _Round, parts: list[pa.Table]) -> Chunk:
        """Mix rows column by column, several at once, and let go of each as it is mixed.

        Args:
            step: Where they belong.
            turn: Which rows they are.
            parts: For each row group its rows. The list is emptied, for nothing else may keep them.
        """
        piece = step.piece
        whole = pa.concat_tables(parts)
        parts.clear()
        skip = max(0, piece.start - turn.first)
        indices = self._indices(piece.shard, turn.number, whole.num_rows).slice(skip, piece.stop - turn.first - skip)
        names, columns = whole.column_names, dict(enumerate(whole.columns))
        del whole
        taken = self._threads.map(lambda place: columns.pop(place).take(indices), range(len(names)))
        mixed = pa.table(list(taken), names=names)
        held = self._half_at_least(mixed.nbytes)
        self.room.give_back(turn.size - held)
        converted = convert(mixed, self.options.output_format)
        return Chunk(step.position, turn.first + skip, mixed.num_rows, turn.last, converted, held)

    def _indices(self, shard: Shard, number: int, rows: int) -> pa.Array:
        """Return the order as Arrow takes it fastest: in few bytes."""
        order = self._order(shard, number, rows)
        return pa.array(order.astype(np.uint32) if rows < 1 << 32 else order)

    def _order(self, shard: Shard, number: int, rows: int) -> npt.NDArray[np.intp]:
        """Return the order of the rows that are there: that of all of them, without those of absent splits."""
        seed = self.options.mixing_seed
        assert seed is not None  # noqa: S101 - rows are mixed
        if not shard.absent:
            return permutation(rows, seed=seed, epoch=self._epoch, shard=shard, number=number)
        lengths = [stop - start for start, stop in round_bounds(shard, number)]
        present = np.ones(sum(lengths), dtype=bool)
        for place, (start, stop) in enumerate(pairwise(accumulate(lengths, initial=0))):
            present[start:stop] = place not in shard.absent
        order = permutation(len(present), seed=seed, epoch=self._epoch, shard=shard, number=number)
        return (np.cumsum(present) - 1)[order[present[order]]]

    def _half_at_least(self, size: int) -> int:
        """Return the room for a shard of mixed rows: so much that there are never more than two."""
        return max(size, self.room.limit // 2)

    # Rounds ----------------------------------------------------------------------------------------------------------

    def _rounds(self, step: Step) -> Iterator[Chunk]:
        """Yield the rounds of a shard: the next part of each of its row groups, mixed with those of the others."""
        piece, shard = step.piece, step.piece.shard
        groups = self.row_groups(step.position)
        begin, first = (0, 0) if self.reader.filters else _begin(piece)
        cursors = []
        try:
            for number, (path, place) in enumerate(groups):
                self.count(path, place, again=piece.start > 0)
                cursors.append(self.reader.cursor(path, place, place.rows // shard.rounds + 1))
                cursors[-1].skip(_bounds(shard, begin)[number][0])
            sizes = [self._round_bytes(shard, number, groups) for number in range(shard.rounds)]
            asked = begin
            for number in range(begin, shard.rounds):
                while asked < shard.rounds and asked <= number + 1:
                    if not self.room.take(sizes[asked], wait=asked == number):
                        break
                    for cursor, (start, stop) in zip(cursors, _bounds(shard, asked), strict=True):
                        cursor.ask(stop - start)
                    asked += 1
                parts = [
                    self.checked(path, place, cursor.take())
                    for cursor, (path, place) in zip(cursors, groups, strict=True)
                ]
                rows = sum(part.num_rows for part in parts)
                last = number == shard.rounds - 1 or (first + rows >= piece.stop and not self.reader.filters)
                chunks = [self._mixed(step, _Round(number, first, last, sizes[number]), parts)]
                yield chunks.pop()
                first += rows
                if last:
                    self.room.give_back(sum(sizes[number + 1 : asked]))
                    return
        finally:
            for cursor in cursors:
                cursor.close()

    def _round_bytes(self, shard: Shard, number: int, groups: Sequence[tuple[str, RowGroupPlace]]) -> int:
        """Return the room that a round takes."""
        sizes = [
            self.reader.decoded_bytes(path, place) * (stop - start) // place.rows
            for (path, place), (start, stop) in zip(groups, _bounds(shard, number), strict=True)
        ]
        return self._half_at_least(sum(sizes))


def _bounds(shard: Shard, number: int) -> list[tuple[int, int]]:
    """Return which rows of each split that is present are mixed in a round."""
    return [one for place, one in enumerate(round_bounds(shard, number)) if place not in shard.absent]


def _begin(piece: Piece) -> tuple[int, int]:
    """Return the round that holds a piece's first row, and the shard's delivered rows before it."""
    first = 0
    for number in range(piece.shard.rounds):
        rows = sum(stop - start for start, stop in _bounds(piece.shard, number))
        if first + rows > piece.start:
            return number, first
        first += rows
    return piece.shard.rounds - 1, first
