"""The way through a stream's pieces: row groups asked for ahead of need, as far as there is room, and read in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from torch_dataloader_utils.columns.convert import convert
from torch_dataloader_utils.columns.delivery import Delivery
from torch_dataloader_utils.cutting import BytesRead, Chunk
from torch_dataloader_utils.errors import ColumnError
from torch_dataloader_utils.formats.rowgroups import RowGroupPlace, RowGroupReader
from torch_dataloader_utils.model import Piece
from torch_dataloader_utils.readahead import Room

__all__ = ["OrderedWalk", "ReadOptions", "Step", "Walk"]

LARGEST_SHARE = 2
"""A row group that takes more than this part (a half) of the room is read in pieces, so that the next is read ahead."""

FIRST_ROWS = 1024
"""Rows of a piece as long as nobody knows how large they are."""

SCRATCH_SHARE = 4
"""Decoding takes this part (a quarter) of a table's bytes beside the table, as long as it lasts."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How rows become batches.

    Attributes:
        batch_size: Rows in a batch; only a stream's last batch has fewer.
        drop_last: Whether a stream's short last batch is left out.
        delivery: What is delivered of the columns that are read.
        row_id_column: Name of the added row id column, or None.
        mixing_seed: Seed of the permutation inside shards, or None where rows keep their order.
        read_ahead_bytes: Decoded bytes that a stream holds at most; a shard of mixed rows may have more.
    """

    batch_size: int
    drop_last: bool
    delivery: Delivery
    row_id_column: str | None
    mixing_seed: int | None
    read_ahead_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """A row group in its turn; or all of a shard's, where they are read side by side.

    Attributes:
        position: Index of its piece in the stream's pieces.
        piece: The piece.
        path: Its file.
        place: The row group.
        first: The shard's delivered rows before it, where no filter takes any.
        last: Whether the piece has none after it.
        number: Its place among the row groups that the piece's shard has.
        whole: Whether it is read as one table.
        size: Bytes to take room for before it is asked for; parts of it take theirs as they are read.
        asks: Whether it is to be asked for.
    """

    position: int
    piece: Piece
    path: str
    place: RowGroupPlace
    first: int
    last: bool
    number: int
    whole: bool
    size: int
    asks: bool = True


class Walk(ABC):
    """Reads the pieces of a stream in order, as chunks.

    Args:
        reader: Reads row groups.
        pieces: What to read.
        options: How rows become batches.
        room: How much may be read that is not delivered yet.
    """

    def __init__(self, reader: RowGroupReader, pieces: Sequence[Piece], options: ReadOptions, room: Room) -> None:
        self.reader = reader
        self.pieces = pieces
        self.options = options
        self.room = room
        self._bytes_read = BytesRead()

    @abstractmethod
    def chunks(self) -> Iterator[Chunk]:
        """Yield the rows of every piece; the last chunk of each says so, also when it holds no rows."""

    def close(self) -> None:  # noqa: B027 - most need nothing
        """Let go of what was needed beside the reader."""

    def take_bytes_read(self) -> BytesRead:
        """Return what was read since the last call."""
        taken, self._bytes_read = self._bytes_read, BytesRead()
        return taken

    def row_groups(self, position: int) -> list[tuple[str, RowGroupPlace]]:
        """Return the row groups of a piece's shard that can be read; let the reader prepare for them and the next."""
        for piece in self.pieces[position : position + 2]:
            self.reader.expect(piece.shard.present)
        piece = self.pieces[position]
        return [(split.path, place) for split in piece.shard.present for place in self.reader.row_groups(split)]

    def asked_for(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Yield row groups once they are asked for, and ask ahead for as many as there is room for."""
        upcoming = iter(steps)
        waiting = next(upcoming, None)
        asked: deque[Step] = deque()
        while asked or waiting is not None:
            while waiting is not None and self._may_ask(waiting, asked):
                if not self.room.take(waiting.size, wait=not asked):
                    break
                if waiting.asks:
                    self.reader.ask_for(waiting.path, waiting.place, whole=waiting.whole)
                asked.append(waiting)
                waiting = next(upcoming, None)
            yield asked.popleft()

    def _may_ask(self, step: Step, asked: Collection[Step]) -> bool:
        """Whether a row group may be asked for behind others, without the room that the parts of a large one need."""
        if all(other.whole for other in asked):
            return len(asked) < self.reader.most_asked
        return not step.whole and len(asked) < 2  # noqa: PLR2004 - the one that is read, and the next

    def count(self, path: str, place: RowGroupPlace, *, again: bool) -> None:
        """Count the bytes of a row group that is read, and whether they are read again after a resume."""
        size = self.reader.stored_bytes(path, place)
        self._bytes_read.total += size
        self._bytes_read.again += size if again else 0

    def delivered(self, path: str, place: RowGroupPlace, table: pa.Table) -> pa.Table:
        """Return rows of a row group as they are delivered, or raise if they hold what cannot be."""
        try:
            return self.options.delivery.deliver(table)
        except ColumnError as error:
            msg = f"{error} (row group {place.number} of {self.reader.full_path(path)})"
            raise ColumnError(msg) from None


class OrderedWalk(Walk):
    """Yields row groups as they follow one another, without the rows outside the pieces."""

    def chunks(self) -> Iterator[Chunk]:
        """Yield the rows of every piece; the last chunk of each says so, also when it holds no rows."""
        first = 0  # delivered rows of the shard before the table
        for step in self.asked_for(self._steps()):
            if step.number == 0 or self.reader.knows_rows:
                first = step.first
            for table, last in self._tables(step):
                skip = min(table.num_rows, max(0, step.piece.start - first))
                rows = max(0, min(table.num_rows, step.piece.stop - first) - skip)
                columns = convert(table.slice(skip, rows), self.options.delivery)
                held = self.reader.held_bytes(table)
                yield Chunk(step.position, first + skip, rows, step.last and last, columns, held)
                first += table.num_rows
                del table, columns

    def _steps(self) -> Iterator[Step]:
        """Yield the row groups of each piece.

        Unfiltered, those that hold the piece's rows; filtered, from the shard's beginning, for only reading tells how
        many rows the filter leaves.
        """
        for position, piece in enumerate(self.pieces):
            groups = self.row_groups(position)
            first = 0
            for number, (path, place) in enumerate(groups):
                after = first + place.rows
                if not self.reader.knows_rows or after > piece.start:
                    last = number == len(groups) - 1 or (after >= piece.stop and self.reader.knows_rows)
                    decoding = self._decoding_bytes(path, place)
                    fits = decoding <= self.room.limit // LARGEST_SHARE
                    whole = fits and self.reader.knows_sizes(path)
                    size = self.reader.fetched_bytes(path, place) + decoding if whole else 0
                    yield Step(position, piece, path, place, first, last, number, whole, size)
                    if last:
                        break
                first = after

    def _decoding_bytes(self, path: str, place: RowGroupPlace) -> int:
        decoded = self.reader.decoded_bytes(path, place)
        return decoded + decoded // SCRATCH_SHARE

    def _tables(self, step: Step) -> Iterator[tuple[pa.Table, bool]]:
        """Read a row group as one table, or as several where it is large; say of each whether it is the last."""
        path, place = step.path, step.place
        self.count(path, place, again=step.first < step.piece.start)
        if step.whole:
            table = self.delivered(path, place, self.reader.read(path, place))
            self.room.give_back(step.size - self.reader.held_bytes(table))
            yield table, True
            return
        share = max(1, self.room.limit // (2 * LARGEST_SHARE))
        rows = max(1, self.reader.expected_rows(path, place) * share // self.reader.decoded_bytes(path, place))
        if not self.reader.knows_sizes(path):
            rows = min(rows, FIRST_ROWS)
        left = place.rows
        if step.last and self.reader.knows_rows:
            left = min(left, step.piece.stop - step.first)
        self.room.take(share)
        for read, count in self.reader.read_in_pieces(path, place, rows):
            left -= count
            table = self.delivered(path, place, read)
            del read
            self.room.give_back(share - self.reader.held_bytes(table))
            yield table, left <= 0
            del table
            if left <= 0:
                break
            self.room.take(share)
