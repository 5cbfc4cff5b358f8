"""A worker's way through its pieces: row groups to filtered, permuted rows, cut into batches with their receipts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa

from torch_dataloader_utils.convert import Columns, Cut, convert, copy_rows, find_nulls, join, null_message
from torch_dataloader_utils.errors import ColumnError
from torch_dataloader_utils.formats.parquet import ParquetReader, ParquetSource, RowGroupPlace
from torch_dataloader_utils.model import Assignment, Piece, Receipt, Shard
from torch_dataloader_utils.planning import permutation

__all__ = ["Batch", "ReadOptions", "StreamEnd", "check_columns", "read_stream"]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How rows become batches.

    Attributes:
        batch_size: Rows in a batch; only a stream's last batch has fewer.
        drop_last: Whether a stream's short last batch is left out.
        output_format: What a batch is made of.
        row_id_column: Name of the added row id column, or None.
        mixing_seed: Seed of the permutation inside shards, or None where rows keep their order.
    """

    batch_size: int
    drop_last: bool
    output_format: str
    row_id_column: str | None
    mixing_seed: int | None


@dataclass(slots=True)
class BytesRead:
    """Compressed bytes taken from storage since the last batch.

    Attributes:
        total: All of them.
        again: Those of row groups that hold rows which were delivered before a resume.
    """

    total: int = 0
    again: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch and the receipt that travels with it."""

    data: Any
    receipt: Receipt
    bytes_read: BytesRead


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """A stream's last word: a receipt without a batch."""

    receipt: Receipt
    bytes_read: BytesRead


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Converted rows of one piece.

    Attributes:
        position: Index of the piece in the stream's pieces.
        first: The shard's delivered rows before the first of these.
        rows: Number of rows.
        ends: Whether the piece has no rows after these.
    """

    position: int
    first: int
    rows: int
    ends: bool
    columns: Columns


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


def read_stream(source: ParquetSource, assignment: Assignment, options: ReadOptions) -> Iterator[Batch | StreamEnd]:
    """Read the pieces of one stream and yield its batches, then its end.

    Args:
        source: The data files.
        assignment: What to read.
        options: How rows become batches.

    Yields:
        Every batch with its receipt; last the end, with the receipt that says that all pieces are done.

    Raises:
        UnreadableFileError: If a file cannot be read.
        ColumnError: If an integer or boolean column holds nulls; the message names the file and the row group.
    """
    reader = ParquetReader(source)
    try:
        walk = _Walk(reader, assignment, options, filtered=source.filter is not None)
        yield from _cut(walk, assignment, options)
    finally:
        reader.close()


class _Walk:
    """Reads the pieces of a stream in order, as chunks."""

    def __init__(self, reader: ParquetReader, assignment: Assignment, options: ReadOptions, *, filtered: bool) -> None:
        self._reader = reader
        self._assignment = assignment
        self._options = options
        self._filtered = filtered
        self._bytes_read = BytesRead()

    def chunks(self) -> Iterator[_Chunk]:
        """Yield the rows of every piece; the last chunk of each says so, also when it holds no rows."""
        if self._options.mixing_seed is not None:
            read = self._mixed_chunks
        elif self._filtered:
            read = self._filtered_chunks
        else:
            read = self._plain_chunks
        return chain.from_iterable(read(number, piece) for number, piece in enumerate(self._assignment.pieces))

    def take_bytes_read(self) -> BytesRead:
        """Return what was read since the last call."""
        taken, self._bytes_read = self._bytes_read, BytesRead()
        return taken

    def _plain_chunks(self, position: int, piece: Piece) -> Iterator[_Chunk]:
        """Begin at the row group that holds the piece's first row: those before it are not read."""
        first = 0
        for path, place in self._row_groups(piece.shard):
            stop = first + place.rows
            if stop > piece.start:
                skip = max(0, piece.start - first)
                table = self._read(path, place, again=skip > 0).slice(skip)
                columns = convert(table, self._options.output_format)
                yield _Chunk(position, first + skip, place.rows - skip, stop == piece.shard.rows, columns)
            first = stop

    def _filtered_chunks(self, position: int, piece: Piece) -> Iterator[_Chunk]:
        """Begin at the shard's beginning: only reading tells how many rows the filter leaves."""
        first = 0
        groups = self._row_groups(piece.shard)
        for number, (path, place) in enumerate(groups):
            table = self._read(path, place, again=first < piece.start)
            skip = min(table.num_rows, max(0, piece.start - first))
            columns = convert(table.slice(skip), self._options.output_format)
            yield _Chunk(position, first + skip, table.num_rows - skip, number == len(groups) - 1, columns)
            first += table.num_rows

    def _mixed_chunks(self, position: int, piece: Piece) -> Iterator[_Chunk]:
        """Read the whole shard, put its rows into their shuffled order, and pass over those delivered."""
        columns, rows = self._mixed(piece)
        yield _Chunk(position, piece.start, rows, ends=True, columns=columns)

    def _mixed(self, piece: Piece) -> tuple[Columns, int]:
        """Return what is left of a shard in its shuffled order; column by column, so that it is in memory once."""
        seed = self._options.mixing_seed
        assert seed is not None  # noqa: S101 - the caller chose this way because there is a seed
        whole = self._read_shard(piece)
        order = permutation(whole.num_rows, seed=seed, epoch=self._assignment.epoch, shard=piece.shard)
        order = pa.array(order[piece.start :])
        names, columns = whole.column_names, whole.columns
        del whole
        taken = [columns.pop(0).take(order) for _ in names]
        return convert(pa.table(taken, names=names), self._options.output_format), len(order)

    def _read_shard(self, piece: Piece) -> pa.Table:
        """Read a shard's row groups file by file, so that each file is opened once, and return them in its order."""
        groups = self._row_groups(piece.shard)
        in_file_order = sorted(range(len(groups)), key=lambda number: (groups[number][0], groups[number][1].number))
        tables = {number: self._read(*groups[number], again=piece.start > 0) for number in in_file_order}
        return pa.concat_tables(tables[number] for number in range(len(groups)))

    def _row_groups(self, shard: Shard) -> list[tuple[str, RowGroupPlace]]:
        return [(split.path, place) for split in shard.splits for place in self._reader.row_groups(split)]

    def _read(self, path: str, place: RowGroupPlace, *, again: bool) -> pa.Table:
        table = self._reader.read(path, place, self._options.row_id_column)
        size = self._reader.stored_bytes(path, place)
        self._bytes_read.total += size
        self._bytes_read.again += size if again else 0
        nulls = find_nulls(table, self._options.output_format)
        if nulls is not None:
            column, count = nulls
            msg = f"{null_message(column, count)} (row group {place.number} of {self._reader.full_path(path)})"
            raise ColumnError(msg)
        return table


def _cut(walk: _Walk, assignment: Assignment, options: ReadOptions) -> Iterator[Batch | StreamEnd]:
    """Cut chunks into batches that span row groups, shards and files."""
    held = _Held(assignment.stream, options.output_format)
    for chunk in walk.chunks():
        held.add(chunk)
        while held.rows >= options.batch_size:
            yield Batch(*held.take(options.batch_size), walk.take_bytes_read())
        if options.mixing_seed is not None:
            held.compact()
        del chunk  # a shard of mixed rows is large: it must be gone before the next one is read
    if held.rows and not options.drop_last:
        yield Batch(*held.take(held.rows), walk.take_bytes_read())
    end = Receipt(assignment.stream, len(assignment.pieces), 0, rows=0, rows_dropped=held.rows)
    yield StreamEnd(end, walk.take_bytes_read())


class _Held:
    """Chunks that are read and not yet delivered."""

    def __init__(self, stream: int, output_format: str) -> None:
        self._stream = stream
        self._output_format = output_format
        self._chunks: deque[_Chunk] = deque()
        self._taken = 0
        self.rows = 0

    def add(self, chunk: _Chunk) -> None:
        if chunk.rows:
            self._chunks.append(chunk)
            self.rows += chunk.rows

    def compact(self) -> None:
        """Copy the last chunk's few rows that are left, so that they do not keep all of it in memory."""
        if self._chunks:
            start = self._taken if len(self._chunks) == 1 else 0
            chunk = self._chunks.pop()
            columns = copy_rows(Cut(chunk.columns, start, chunk.rows))
            self._taken -= start
            self._chunks.append(_Chunk(chunk.position, chunk.first + start, chunk.rows - start, chunk.ends, columns))

    def take(self, count: int) -> tuple[Any, Receipt]:
        """Make a batch of the next rows, no more than are held, and say how far the stream has come with them."""
        cuts = []
        wanted = count
        while wanted:
            chunk, start = self._chunks[0], self._taken
            stop = min(chunk.rows, start + wanted)
            cuts.append(Cut(chunk.columns, start, stop))
            wanted -= stop - start
            self._taken = stop
            if stop == chunk.rows:
                self._chunks.popleft()
                self._taken = 0
        self.rows -= count
        data = join(cuts, self._output_format)
        if chunk.ends and stop == chunk.rows:
            return data, Receipt(self._stream, chunk.position + 1, 0, rows=count)
        return data, Receipt(self._stream, chunk.position, chunk.first + stop, rows=count)
