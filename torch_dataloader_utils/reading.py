"""A worker's way through its pieces: row groups to filtered, permuted rows, cut into batches with their receipts."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from torch_dataloader_utils.convert import convert, find_nulls, join, null_message
from torch_dataloader_utils.cutting import Batches, BytesRead, Chunk, Cutter, StreamEnd
from torch_dataloader_utils.errors import ColumnError
from torch_dataloader_utils.formats.parquet import ParquetSource
from torch_dataloader_utils.formats.rowgroups import ParquetReader, RowGroupPlace
from torch_dataloader_utils.model import Assignment, Piece, Receipt
from torch_dataloader_utils.planning import permutation
from torch_dataloader_utils.readahead import Room

__all__ = ["ReadOptions", "check_columns", "read_stream"]

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
        output_format: What a batch is made of.
        row_id_column: Name of the added row id column, or None.
        mixing_seed: Seed of the permutation inside shards, or None where rows keep their order.
        read_ahead_bytes: Decoded bytes that a stream holds at most; a shard of mixed rows may have more.
    """

    batch_size: int
    drop_last: bool
    output_format: str
    row_id_column: str | None
    mixing_seed: int | None
    read_ahead_bytes: int


@dataclass(frozen=True, slots=True)
class _Step:
    """A row group in its turn.

    Attributes:
        position: Index of its piece in the stream's pieces.
        piece: The piece.
        path: Its file.
        place: The row group.
        first: The shard's rows before it.
        last: Whether the piece has none after it.
        number: Its place among the shard's row groups.
        whole: Whether it is read as one table.
        size: Bytes to take room for before it is asked for; pieces take theirs as they are read.
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


def check_columns(source: ParquetSource, options: ReadOptions) -> None:
    """Raise now what would otherwise be raised in the middle of an epoch.

    Raises:
        ColumnError: If the row id column has the name of another, or a column cannot be delivered as asked: its
            footers announce nulls that have no value, or its type cannot be filtered or mixed.
    """
    if options.row_id_column in (*source.schema.names, *source.filter_columns):
        msg = f"row_id_column={options.row_id_column!r} is the name of a column of the files: choose another"
        raise ColumnError(msg)
    for announced in source.announced_nulls:
        found = announced.found
        msg = f"{null_message(found.column, found.nulls)} (row group {found.row_group} of {announced.path})"
        raise ColumnError(msg)
    if source.filter is not None or options.mixing_seed is not None:
        for column in source.schema:
            _require_selectable(column)


def _require_selectable(column: pa.Field) -> None:
    try:
        row = pa.chunked_array([pa.nulls(1, column.type)])
        row.take(pa.array([0]))
        row.filter(pa.array([True]))
    except pa.ArrowException as error:
        msg = f"rows of column {column.name!r} can be neither filtered nor mixed: {error}"
        raise ColumnError(msg) from None


def read_stream(
    source: ParquetSource, assignment: Assignment, options: ReadOptions, room: Room
) -> Iterator[Batches | StreamEnd]:
    """Read the pieces of one stream and yield its batches, then its end.

    Args:
        source: The data files.
        assignment: What to read.
        options: How rows become batches.
        room: How much may be read that is not delivered yet. Whoever delivers gives back what batches held.

    Yields:
        Every batch with its receipt, many together; last the end, with the receipt that says that all pieces are done.

    Raises:
        UnreadableFileError: If a file cannot be read.
        ColumnError: If an integer or boolean column holds nulls; the message names the file and the row group.
    """
    reader = ParquetReader(source, options.row_id_column)
    try:
        walk = _Walk(reader, assignment, options, room)
        yield from _cut(walk, assignment, options, room)
    finally:
        reader.close()


class _Walk:
    """Reads the pieces of a stream in order, as chunks."""

    def __init__(self, reader: ParquetReader, assignment: Assignment, options: ReadOptions, room: Room) -> None:
        self._reader = reader
        self._assignment = assignment
        self._options = options
        self._room = room
        self._bytes_read = BytesRead()

    def chunks(self) -> Iterator[Chunk]:
        """Yield the rows of every piece; the last chunk of each says so, also when it holds no rows."""
        if self._options.mixing_seed is not None:
            return self._mixed_chunks()
        return self._chunks_in_order()

    def take_bytes_read(self) -> BytesRead:
        """Return what was read since the last call."""
        taken, self._bytes_read = self._bytes_read, BytesRead()
        return taken

    def _chunks_in_order(self) -> Iterator[Chunk]:
        """Yield row groups as they follow one another, without the rows that were delivered before a resume."""
        first = 0  # delivered rows of the shard before the table
        for step in self._asked_for(self._steps_in_order()):
            if step.number == 0 or not self._reader.filters:
                first = step.first
            for table, last in self._tables(step):
                skip = min(table.num_rows, max(0, step.piece.start - first))
                rows = table.num_rows - skip
                columns = convert(table.slice(skip), self._options.output_format)
                held = self._reader.held_bytes(table)
                yield Chunk(step.position, first + skip, rows, step.last and last, columns, held)
                first += table.num_rows
                del table, columns

    def _mixed_chunks(self) -> Iterator[Chunk]:
        """Yield whole shards, their rows in their shuffled order, without those delivered before a resume."""
        tables: dict[int, pa.Table] = {}
        taken = 0
        for step in self._asked_for(self._mixed_steps()):
            tables[step.number] = self._whole(step)
            taken += step.size
            if step.last:
                whole = [pa.concat_tables(tables[number] for number in range(len(tables)))]
                tables.clear()
                chunks = [self._mixed(step, whole, taken)]
                taken = 0
                yield chunks.pop()  # not to keep what it holds

    def _mixed(self, step: _Step, whole: list[pa.Table], taken: int) -> Chunk:
        """Permute a shard's rows column by column, so that it is in memory once; take it out of the list it is in."""
        table = whole.pop()
        seed = self._options.mixing_seed
        assert seed is not None  # noqa: S101 - the caller chose this way because there is a seed
        order = permutation(table.num_rows, seed=seed, epoch=self._assignment.epoch, shard=step.piece.shard)
        order = pa.array(order[step.piece.start :])
        names, columns = table.column_names, table.columns
        del table
        mixed = pa.table([columns.pop(0).take(order) for _ in names], names=names)
        held = self._half_at_least(mixed.nbytes)
        self._room.give_back(taken - held)
        converted = convert(mixed, self._options.output_format)
        return Chunk(step.position, step.piece.start, len(order), ends=True, columns=converted, held=held)

    def _half_at_least(self, size: int) -> int:
        """Return the room for a shard of mixed rows: so much that there are never more than two."""
        return max(size, self._room.limit // 2)

    # What to read --------------------------------------------------------------------------------------------------

    def _steps_in_order(self) -> Iterator[_Step]:
        """Yield the row groups of each piece.

        Unfiltered, from the one that holds the piece's first row; filtered, from the shard's beginning, for only
        reading tells how many rows the filter leaves.
        """
        for position, piece in enumerate(self._assignment.pieces):
            groups = self._row_groups(position)
            first = 0
            for number, (path, place) in enumerate(groups):
                if self._reader.filters or first + place.rows > piece.start:
                    last = number == len(groups) - 1
                    decoding = self._decoding_bytes(path, place)
                    fits = decoding <= self._room.limit // LARGEST_SHARE
                    whole = fits and self._reader.knows_sizes(path)
                    size = self._reader.fetched_bytes(path, place) + decoding if whole else 0
                    yield _Step(position, piece, path, place, first, last, number, whole, size)
                first += place.rows

    def _mixed_steps(self) -> Iterator[_Step]:
        """Yield all row groups of each piece's shard, file by file, so that each file is opened once."""
        for position, piece in enumerate(self._assignment.pieces):
            groups = self._row_groups(position)
            sizes = [self._reader.fetched_bytes(*group) + self._reader.decoded_bytes(*group) for group in groups]
            size = self._half_at_least(sum(sizes))
            in_file_order = sorted(range(len(groups)), key=lambda number: (groups[number][0], groups[number][1].number))
            for number in in_file_order:
                path, place = groups[number]
                last = number == in_file_order[-1]
                yield _Step(position, piece, path, place, 0, last, number, whole=True, size=size)
                size = 0  # the first of them takes room for all

    def _row_groups(self, position: int) -> list[tuple[str, RowGroupPlace]]:
        """Return the row groups of a piece's shard, and let the reader prepare for them and the next ones."""
        pieces = self._assignment.pieces
        for piece in pieces[position : position + 2]:
            self._reader.expect(piece.shard.splits)
        piece = pieces[position]
        return [(split.path, place) for split in piece.shard.splits for place in self._reader.row_groups(split)]

    def _decoding_bytes(self, path: str, place: RowGroupPlace) -> int:
        decoded = self._reader.decoded_bytes(path, place)
        return decoded + decoded // SCRATCH_SHARE

    # Reading it ----------------------------------------------------------------------------------------------------

    def _asked_for(self, steps: Iterable[_Step]) -> Iterator[_Step]:
        """Yield row groups once they are asked for, and ask ahead for as many as there is room for."""
        upcoming = iter(steps)
        waiting = next(upcoming, None)
        asked: deque[_Step] = deque()
        while asked or waiting is not None:
            while waiting is not None and self._may_ask(waiting, asked):
                if not self._room.take(waiting.size, wait=not asked):
                    break
                self._reader.ask_for(waiting.path, waiting.place, whole=waiting.whole)
                asked.append(waiting)
                waiting = next(upcoming, None)
            yield asked.popleft()

    def _may_ask(self, step: _Step, asked: Collection[_Step]) -> bool:
        """Whether a row group may be asked for behind others, without the room that the pieces of a large one need."""
        if all(other.whole for other in asked):
            return len(asked) < self._reader.most_asked
        return not step.whole and len(asked) < 2  # noqa: PLR2004 - the one that is read, and the next

    def _whole(self, step: _Step) -> pa.Table:
        """Read a row group as one table."""
        table = self._reader.read(step.path, step.place)
        self._count(step, again=step.piece.start > 0)
        return self._checked(step, table)

    def _tables(self, step: _Step) -> Iterator[tuple[pa.Table, bool]]:
        """Read a row group as one table, or as several where it is large; say of each whether it is the last."""
        self._count(step, again=step.first < step.piece.start)
        if step.whole:
            table = self._checked(step, self._reader.read(step.path, step.place))
            self._room.give_back(step.size - self._reader.held_bytes(table))
            yield table, True
            return
        share = max(1, self._room.limit // (2 * LARGEST_SHARE))
        rows = max(1, step.place.rows * share // self._reader.decoded_bytes(step.path, step.place))
        if not self._reader.knows_sizes(step.path):
            rows = min(rows, FIRST_ROWS)
        left = step.place.rows
        self._room.take(share)
        for table, count in self._reader.read_in_pieces(step.path, step.place, rows):
            left -= count
            self._room.give_back(share - self._reader.held_bytes(table))
            yield self._checked(step, table), left == 0
            del table
            if left:
                self._room.take(share)

    def _count(self, step: _Step, *, again: bool) -> None:
        size = self._reader.stored_bytes(step.path, step.place)
        self._bytes_read.total += size
        self._bytes_read.again += size if again else 0

    def _checked(self, step: _Step, table: pa.Table) -> pa.Table:
        nulls = find_nulls(table, self._options.output_format)
        if nulls is not None:
            column, count = nulls
            where = f"row group {step.place.number} of {self._reader.full_path(step.path)}"
            msg = f"{null_message(column, count)} ({where})"
            raise ColumnError(msg)
        return table


def _cut(walk: _Walk, assignment: Assignment, options: ReadOptions, room: Room) -> Iterator[Batches | StreamEnd]:
    """Cut chunks into batches that span row groups, shards and files."""
    cutter = Cutter(assignment.stream, options.batch_size)
    held = 0
    for chunk in walk.chunks():
        cutter.add(chunk)
        held += chunk.held
        del chunk  # it must be gone before the next one is read
        for cut in cutter.full_batches():
            is_last = cutter.rows < options.batch_size
            yield Batches(join(cut.cuts), cut.receipts, walk.take_bytes_read(), held if is_last else 0)
            held = 0 if is_last else held
        room.keep(held)  # no batch is full yet: what it needs beyond the room has to be read all the same
    if cutter.rows and not options.drop_last:
        cut = cutter.take(cutter.rows)
        yield Batches(join(cut.cuts), cut.receipts, walk.take_bytes_read(), held)
    else:
        room.give_back(held)
    end = Receipt(assignment.stream, len(assignment.pieces), 0, rows=0, rows_dropped=cutter.rows)
    yield StreamEnd(end, walk.take_bytes_read())
