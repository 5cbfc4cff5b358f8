"""Row groups to Arrow tables: local ones out of mapped files, others out of ranges fetched ahead of need."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.formats.footers import leaves_of, parse_footer
from torch_dataloader_utils.formats.parquet import ParquetSource, delivered_type
from torch_dataloader_utils.formats.sparse import SparseFile, coalesced
from torch_dataloader_utils.model import DataFile, Split
from torch_dataloader_utils.storage import LocalFile, RemoteFile

__all__ = ["ParquetReader", "RowGroupPlace"]

OPEN_FILES = 16
"""How many files a reader keeps open, and how many footers parsed: those may take many megabytes each."""

FETCHES = 32
"""How many ranges are fetched from a storage at once: its answers take long, and the network has room for many."""

LARGEST_GAP = 64 * 1024
"""Bytes between two column chunks that are fetched along rather than left out at the price of another request."""


@dataclass(frozen=True, slots=True)
class RowGroupPlace:
    """A row group and where its rows lie.

    Attributes:
        number: Number of the row group in its file.
        first_row: The file's rows before it.
        rows: Its rows.
    """

    number: int
    first_row: int
    rows: int


class ParquetReader:
    """Reads row groups; keeps the files it read last open. One to a stream.

    Args:
        source: The data files.
        row_id_column: Name of an int64 column to add, each row's place among all rows of the manifest; or None.
    """

    def __init__(self, source: ParquetSource, row_id_column: str | None = None) -> None:
        self._source = source
        self._row_id_column = row_id_column
        self._columns = list(dict.fromkeys([*source.schema.names, *source.filter_columns]))
        self._schema = source.schema
        if row_id_column is not None:
            self._schema = source.schema.append(pa.field(row_id_column, pa.int64()))
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()
        self._layout = lru_cache(OPEN_FILES)(self._parse_layout)
        self._places: dict[str, tuple[RowGroupPlace, ...]] = {}
        self._first_rows = source.manifest.first_rows
        self._files = {file.path: file for file in source.manifest.files}
        self._asked: dict[tuple[str, int], list[tuple[int, Future[bytes]]]] = {}
        self._remotes: OrderedDict[str, Future[RemoteFile]] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None
        self._decoder = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._decoded: dict[tuple[str, int], Future[pa.Table]] = {}
        self._swell = 1.0

    @property
    def filters(self) -> bool:
        """Whether a filter leaves rows out."""
        return self._source.filter is not None

    @property
    def most_asked(self) -> int:
        """How many row groups to ask for ahead: one to decode while another is worked on, or many to fetch."""
        return 2 if self._source.storage.is_local else FETCHES

    def row_groups(self, split: Split) -> list[RowGroupPlace]:
        """Return the row groups that make up a split, in order."""
        if split.path not in self._places:
            self._places[split.path] = tuple(_places(self._files[split.path]))
        places = self._places[split.path]
        start = bisect_left(places, split.row_offset, key=lambda place: place.first_row)
        stop = bisect_left(places, split.row_offset + split.row_length, key=lambda place: place.first_row)
        return [place for place in places[start:stop] if place.rows]

    def full_path(self, path: str) -> str:
        """Return a file's path for people."""
        return self._source.manifest.full_path(path)

    # How large it is -----------------------------------------------------------------------------------------------

    def stored_bytes(self, path: str, place: RowGroupPlace) -> int:
        """Return the compressed bytes that reading a row group takes from storage."""
        return sum(chunk.total_compressed_size for chunk in self._layout(path).chunks(place.number))

    def fetched_bytes(self, path: str, place: RowGroupPlace) -> int:
        """Return the bytes that are in memory before a row group is decoded."""
        return 0 if self._source.storage.is_local else self.stored_bytes(path, place)

    def decoded_bytes(self, path: str, place: RowGroupPlace) -> int:
        """Return how large a row group will be in memory: exactly for numbers, by what others came to for the rest."""
        width = sum(_width(column.type) for column in self._schema)
        sizes = [chunk.total_uncompressed_size for chunk in self._layout(path).variable_chunks(place.number)]
        return max(1, int(place.rows * width + sum(sizes) * self._swell))

    # Reading -------------------------------------------------------------------------------------------------------

    def ask_for(self, path: str, place: RowGroupPlace, *, whole: bool) -> None:
        """Begin to fetch a row group that is to be read soon, and to decode it unless it is to be read in pieces."""
        if not self._source.storage.is_local:
            self._ask_storage(path, place)
        if whole:
            decoded = self._decoder.submit(self._source.storage.attempt, partial(self._decoded_whole, path, place))
            self._decoded[path, place.number] = decoded

    def _ask_storage(self, path: str, place: RowGroupPlace) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch")
        opened = self._remote(path)
        ranges = coalesced(self._layout(path).ranges(place.number), LARGEST_GAP)
        asked = [(start, self._threads.submit(self._fetch, opened, start, stop)) for start, stop in ranges]
        self._asked[path, place.number] = asked

    def read(self, path: str, place: RowGroupPlace) -> pa.Table:
        """Return the rows that the filter leaves of a row group that was asked for, in file order.

        Args:
            path: The file, relative to the root.
            place: The row group.

        Returns:
            The columns of the source's schema, and the row ids last where asked for.

        Raises:
            FileNotFoundError: If the file is gone.
            UnreadableFileError: If it changed, is damaged, or cannot be read.
        """
        with self._errors(path, place):
            table = self._decoded.pop((path, place.number)).result()
            self._require_all(path, place, table.num_rows)
            return self._finished(table, self._first_rows[path] + place.first_row)

    def read_in_pieces(self, path: str, place: RowGroupPlace, rows: int) -> Iterator[tuple[pa.Table, int]]:
        """Yield a row group in pieces. It was asked for, but not as a whole.

        Args:
            path: The file, relative to the root.
            place: The row group.
            rows: Rows of a piece, at most.

        Yields:
            The rows of a piece that the filter leaves, and how many it had before.

        Raises:
            FileNotFoundError: If the file is gone.
            UnreadableFileError: If it changed, is damaged, or cannot be read.
        """
        with self._errors(path, place):
            first = self._first_rows[path] + place.first_row
            done = 0
            for table in self._decoded_pieces(path, place, rows):
                yield self._finished(table, first + done), table.num_rows
                done += table.num_rows
            self._require_all(path, place, done)

    def close(self) -> None:
        """Close the files that are open; what is being fetched and decoded is waited for."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self._decoder.shutdown(cancel_futures=True)
        while self._open:
            self._open.popitem()[1].close()

    def _errors(self, path: str, place: RowGroupPlace) -> AbstractContextManager[None]:
        return self._source.storage.errors_at(f"row group {place.number} of {self.full_path(path)}")

    def _require_all(self, path: str, place: RowGroupPlace, rows: int) -> None:
        if rows != place.rows:
            msg = f"row group {place.number} of {self.full_path(path)} has {rows} rows, not {place.rows}"
            raise UnreadableFileError(msg)

    # In the thread that decodes, which alone has to do with files ---------------------------------------------------

    def _decoded_pieces(self, path: str, place: RowGroupPlace, rows: int) -> Iterator[pa.Table]:
        tables: Iterator[pa.Table] | None = None
        done = 0

        def next_table() -> pa.Table | None:
            nonlocal tables
            tables = tables or self._decoded_from(path, place, rows, done)
            try:
                return next(tables, None)
            except BaseException:
                tables = None  # another attempt begins with what has not been yielded
                raise

        while (table := self._decoder.submit(self._source.storage.attempt, next_table).result()) is not None:
            done += table.num_rows
            yield table

    def _decoded_from(self, path: str, place: RowGroupPlace, rows: int, first: int) -> Iterator[pa.Table]:
        with self._at_hand(path, place) as opened:
            for batch in opened.parquet.iter_batches(rows, row_groups=[place.number], columns=self._columns):
                opened.require_unchanged()
                if batch.num_rows > first:
                    yield pa.Table.from_batches([batch.slice(first)])
                first = max(0, first - batch.num_rows)

    def _decoded_whole(self, path: str, place: RowGroupPlace) -> pa.Table:
        with self._at_hand(path, place) as opened:
            table = opened.parquet.read_row_group(place.number, columns=self._columns)
            opened.require_unchanged()
        self._learn(path, place, table)
        return table

    @contextmanager
    def _at_hand(self, path: str, place: RowGroupPlace) -> Iterator[_OpenFile]:
        """Have a file open with a row group's bytes in it; after an error the next attempt opens it anew."""
        try:
            opened = self._opened(path)
            opened.require_unchanged()
            extent = self._layout(path).extent(place.number)
            if opened.local is not None:
                opened.local.will_need(*extent)
            if not self._source.storage.is_local and (path, place.number) not in self._asked:  # another attempt
                self._ask_storage(path, place)
            for start, fetched in self._asked.pop((path, place.number), ()):
                opened.add(start, fetched.result())
            yield opened
            opened.forget(extent)
        except BaseException:
            self._open.pop(path, None)
            self._remotes.pop(path, None)
            raise

    def _finished(self, table: pa.Table, first: int) -> pa.Table:
        rows = table.num_rows
        table = _without_views(table)
        if self._row_id_column is not None:
            table = table.append_column(self._row_id_column, _row_ids(first, rows))
        if self._source.filter is not None:
            table = table.filter(_mask(table, self._source.filter))
        return pa.table([table[name] for name in self._schema.names], schema=self._schema)

    def _learn(self, path: str, place: RowGroupPlace, table: pa.Table) -> None:
        """Learn how much larger columns of no fixed width become than their footer says."""
        said = sum(chunk.total_uncompressed_size for chunk in self._layout(path).variable_chunks(place.number))
        if said:
            names = [column.name for column in table.schema if not _width(column.type)]
            self._swell = max(1.0, table.select(names).nbytes / said)

    # Files ---------------------------------------------------------------------------------------------------------

    def _opened(self, path: str) -> _OpenFile:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        while len(self._open) >= OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        metadata = self._layout(path).metadata
        if self._source.storage.is_local:
            local = self._source.storage.open_local(self._source.files[path])
            self._check_footer(path, local)
            self._open[path] = _OpenFile(pq.ParquetFile(local.file, metadata=metadata, pre_buffer=False), local=local)
        else:
            sparse = SparseFile(self._files[path].size)
            parquet = pq.ParquetFile(pa.PythonFile(sparse, mode="r"), metadata=metadata, pre_buffer=False)
            self._open[path] = _OpenFile(parquet, sparse=sparse)
        return self._open[path]

    def _check_footer(self, path: str, local: LocalFile) -> None:
        footer = self._source.footers[path]
        local.file.seek(local.size - len(footer))
        if local.file.read(len(footer)) != footer:
            msg = f"{self.full_path(path)} was written anew since it was listed"
            raise UnreadableFileError(msg)

    def _remote(self, path: str) -> Future[RemoteFile]:
        """Open a file of a storage that is not local; its ranges are fetched as soon as it is open."""
        assert self._threads is not None  # noqa: S101 - whoever asks has made them
        opened = self._remotes.pop(path, None)
        if opened is None:
            opened = self._threads.submit(self._source.storage.open_remote, self._source.files[path])
        self._remotes[path] = opened
        if len(self._remotes) > OPEN_FILES:
            self._remotes.popitem(last=False)
        return opened

    def _fetch(self, opened: Future[RemoteFile], start: int, stop: int) -> bytes:
        file = opened.result()
        return self._source.storage.attempt(partial(file.read, start, stop))

    def _parse_layout(self, path: str) -> _Layout:
        return _Layout(parse_footer(self._source.footers[path]), self._columns)


class _Layout:
    """A file's footer, parsed, and which of its column chunks are needed."""

    def __init__(self, metadata: pq.FileMetaData, columns: list[str]) -> None:
        schema = metadata.schema.to_arrow_schema()
        leaves = leaves_of(schema)
        self.metadata = metadata
        self._leaves = [leaf for name in columns for leaf in leaves[name]]
        self._variable = [leaf for name in columns if not _width(schema.field(name).type) for leaf in leaves[name]]

    def chunks(self, number: int) -> list[pq.ColumnChunkMetaData]:
        """Return the chunks of the needed columns in a row group."""
        group = self.metadata.row_group(number)
        return [group.column(leaf) for leaf in self._leaves]

    def variable_chunks(self, number: int) -> list[pq.ColumnChunkMetaData]:
        """Return those of columns that have no fixed width."""
        group = self.metadata.row_group(number)
        return [group.column(leaf) for leaf in self._variable]

    def extent(self, number: int) -> tuple[int, int]:
        """Return from where to where they lie, all together; columns need not be any."""
        ranges = self.ranges(number)
        return min((start for start, _ in ranges), default=0), max((stop for _, stop in ranges), default=0)

    def ranges(self, number: int) -> list[tuple[int, int]]:
        """Return where in the file the needed chunks lie."""
        return [_range(chunk) for chunk in self.chunks(number)]


def _range(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:  # some writers set it to 0 where there is none
        start = min(start, chunk.dictionary_page_offset)
    return start, start + chunk.total_compressed_size


@dataclass(frozen=True, slots=True)
class _OpenFile:
    """A file that is open for reading row groups: a local one, or what was fetched of another."""

    parquet: pq.ParquetFile
    local: LocalFile | None = None
    sparse: SparseFile | None = None

    def require_unchanged(self) -> None:
        if self.local is not None:
            self.local.require_unchanged()

    def add(self, start: int, content: bytes) -> None:
        if self.sparse is not None:
            self.sparse.add(start, content)

    def forget(self, extent: tuple[int, int]) -> None:
        if self.local is not None:
            self.local.forget(*extent)
        if self.sparse is not None:
            self.sparse.clear()

    def close(self) -> None:
        self.parquet.close(force=True)


def _width(kind: pa.DataType) -> float:
    """Return the bytes that a value of a type takes in memory; 0 where that differs from value to value."""
    if pa.types.is_fixed_size_list(kind):
        size: int = kind.list_size
        return size * _width(kind.value_type)
    if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
        return 0
    try:
        return float(kind.bit_width) / 8
    except ValueError:
        return 0


def _places(file: DataFile) -> Iterator[RowGroupPlace]:
    first = 0
    for number, group in enumerate(file.row_groups):
        yield RowGroupPlace(number, first, group.rows)
        first += group.rows


def _without_views(table: pa.Table) -> pa.Table:
    kinds = list(map(delivered_type, table.schema.types))
    if kinds == table.schema.types:
        return table
    return table.cast(pa.schema([column.with_type(kind) for column, kind in zip(table.schema, kinds, strict=True)]))


def _mask(table: pa.Table, filters: pc.Expression) -> pa.ChunkedArray:
    """Evaluate a filter row by row; a scan without threads keeps the order."""
    return pads.dataset(table).scanner(columns={"keep": filters}, use_threads=False).to_table()["keep"]


def _row_ids(first: int, rows: int) -> pa.Array:
    return pa.array(np.arange(first, first + rows, dtype=np.int64))
