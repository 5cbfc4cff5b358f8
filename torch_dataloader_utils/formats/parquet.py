"""Parquet: files to a source with its manifest, row groups to Arrow tables."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from torch_dataloader_utils.errors import ColumnError, UnreadableFileError
from torch_dataloader_utils.formats.footers import Footer, NullCount, leaves_of, parse_footer, read_footer
from torch_dataloader_utils.formats.pruning import filter_columns, require_column, select_row_groups, takes_nulls
from torch_dataloader_utils.listing import Listing
from torch_dataloader_utils.model import DataFile, Manifest, Split
from torch_dataloader_utils.storage import LocalFile, Storage, StoredFile

__all__ = ["SUFFIXES", "AnnouncedNulls", "ParquetReader", "ParquetSource", "RowGroupPlace", "open_parquet"]

SUFFIXES = (".parquet", ".parq", ".pq")
"""Endings of the names of Parquet files."""

FOOTER_THREADS = 16
OPEN_FILES = 16
"""How many files a reader keeps open, and how many footers parsed: those may take many megabytes each."""


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


@dataclass(frozen=True, slots=True)
class AnnouncedNulls:
    """Nulls that a footer announces, in a column that cannot be delivered with them, and where."""

    path: str
    found: NullCount


@dataclass(frozen=True)
class ParquetSource:
    """A dataset's Parquet files, their footers read and checked.

    Attributes:
        storage: Where the files lie.
        manifest: The files by content.
        schema: The columns to deliver, in order, with their types; all nullable, as files may differ in that alone.
        filter: Which rows to deliver, or None for all.
        filter_columns: The columns that the filter needs.
        selection: For each file the row groups that may hold such rows, by their statistics; None if that is all.
        announced_nulls: Where the footers announce nulls that cannot be delivered, and the filter does not take.
    """

    storage: Storage
    manifest: Manifest
    schema: pa.Schema
    filter: pc.Expression | None
    filter_columns: tuple[str, ...]
    selection: tuple[tuple[int, ...], ...] | None
    announced_nulls: tuple[AnnouncedNulls, ...]
    files: dict[str, StoredFile] = field(repr=False)
    footers: dict[str, bytes] = field(repr=False)

    @cached_property
    def filter_digest(self) -> str | None:
        """Digest of the serialised filter, 16 hexadecimal characters: its text leaves too much out."""
        if self.filter is None:
            return None
        serialised = self.filter.__reduce__()[1][0]
        return hashlib.blake2b(bytes(serialised), digest_size=8).hexdigest()


def open_parquet(
    storage: Storage,
    listing: Listing,
    *,
    columns: Sequence[str] | None = None,
    filters: pc.Expression | None = None,
    refuses_nulls: Callable[[pa.DataType], bool] = lambda _: False,
) -> ParquetSource:
    """Read every file's footer, once, and check columns and filter against them.

    Args:
        storage: Where the files lie.
        listing: The files.
        columns: The columns to deliver; None for all.
        filters: Which rows to deliver; None for all.
        refuses_nulls: The types that cannot be delivered with nulls.

    Returns:
        The source.

    Raises:
        UnreadableFileError: If a footer cannot be read; the message names the file.
        ColumnError: If a column is missing or has another type in one file than in another, or the filter does not
            fit the columns.
    """

    def counts_nulls(column: pa.Field) -> bool:
        return (columns is None or column.name in columns) and refuses_nulls(column.type)

    with ThreadPoolExecutor(FOOTER_THREADS, thread_name_prefix="footers") as threads:
        footers = list(threads.map(partial(read_footer, storage, counts_nulls=counts_nulls), listing.files))
    manifest = Manifest(listing.root, tuple(footer.file for footer in footers))
    whole = footers[0].schema
    filtering = () if filters is None else filter_columns(filters, whole)
    delivered = whole.names if columns is None else list(columns)
    for name in delivered:
        require_column(name, whole, "")
    needed = list(dict.fromkeys([*delivered, *filtering]))
    for footer in footers[1:]:
        _require_same(manifest, footer.file.path, footer.schema, whole, needed, all_columns=columns is None)
    contents = [footer.content for footer in footers]
    selection = None if filters is None else select_row_groups(contents, filters, whole, filtering)
    taken = {name for name in filtering if filters is not None and takes_nulls(filters, whole, filtering, name)}
    return ParquetSource(
        storage=storage,
        manifest=manifest,
        schema=pa.schema([pa.field(name, _delivered_type(whole.field(name).type)) for name in delivered]),
        filter=filters,
        filter_columns=filtering,
        selection=selection,
        announced_nulls=tuple(_announced_nulls(manifest, footers, selection, set(delivered) - taken)),
        files={file.path: file for file in listing.files},
        footers={footer.file.path: footer.content for footer in footers},
    )


def _announced_nulls(
    manifest: Manifest, footers: Sequence[Footer], selection: Sequence[Sequence[int]] | None, columns: set[str]
) -> Iterator[AnnouncedNulls]:
    for number, footer in enumerate(footers):
        for found in footer.nulls:
            if found.column in columns and (selection is None or found.row_group in selection[number]):
                yield AnnouncedNulls(manifest.full_path(footer.file.path), found)


class ParquetReader:
    """Reads row groups; keeps the files it read last open. One to a worker."""

    def __init__(self, source: ParquetSource) -> None:
        self._source = source
        self._columns = list(dict.fromkeys([*source.schema.names, *source.filter_columns]))
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()
        self._metadata = lru_cache(OPEN_FILES)(lambda path: parse_footer(source.footers[path]))
        self._places: dict[str, tuple[RowGroupPlace, ...]] = {}
        self._first_rows = source.manifest.first_rows
        self._files = {file.path: file for file in source.manifest.files}

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

    def read(self, path: str, place: RowGroupPlace, row_id_column: str | None = None) -> pa.Table:
        """Return a row group's rows that the filter leaves, in file order.

        Args:
            path: The file, relative to the root.
            place: The row group.
            row_id_column: Name of an int64 column to add: each row's place among all rows of the manifest.

        Returns:
            The columns of the source's schema, and the row ids last where asked for.

        Raises:
            FileNotFoundError: If the file is gone.
            UnreadableFileError: If it changed, is damaged, or cannot be read.
        """
        storage = self._source.storage
        with storage.errors_at(f"row group {place.number} of {self.full_path(path)}"):
            table = _without_views(storage.attempt(lambda: self._read_row_group(path, place)))
            if row_id_column is not None:
                first = self._first_rows[path] + place.first_row
                table = table.append_column(row_id_column, _row_ids(first, place.rows))
            if self._source.filter is not None:
                table = table.filter(_mask(table, self._source.filter))
        schema = self._source.schema
        if row_id_column is not None:
            schema = schema.append(pa.field(row_id_column, pa.int64()))
        return pa.table([table[name] for name in schema.names], schema=schema)

    def stored_bytes(self, path: str, place: RowGroupPlace) -> int:
        """Return the compressed bytes that reading a row group takes from storage."""
        metadata = self._metadata(path)
        leaves = leaves_of(metadata.schema.to_arrow_schema())
        group = metadata.row_group(place.number)
        return sum(group.column(leaf).total_compressed_size for name in self._columns for leaf in leaves[name])

    def close(self) -> None:
        """Close the files that are open."""
        while self._open:
            self._open.popitem()[1].parquet.close(force=True)

    def _read_row_group(self, path: str, place: RowGroupPlace) -> pa.Table:
        try:
            opened = self._file(path)
            table = opened.parquet.read_row_group(place.number, columns=self._columns)
            if opened.local is not None:
                opened.local.require_unchanged()
        except BaseException:
            self._open.pop(path, None)  # another attempt opens the file anew
            raise
        if table.num_rows != place.rows:
            msg = f"row group {place.number} of {self.full_path(path)} has {table.num_rows} rows, not {place.rows}"
            raise UnreadableFileError(msg)
        return table

    def _file(self, path: str) -> _OpenFile:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        opened = self._source.storage.open(self._source.files[path])
        local = opened if isinstance(opened, LocalFile) else None
        if local is not None:
            self._check_footer(path, local)
        while len(self._open) >= OPEN_FILES:
            self._open.popitem(last=False)[1].parquet.close(force=True)
        handle = opened if local is None else local.file
        parquet = pq.ParquetFile(handle, metadata=self._metadata(path), pre_buffer=local is None)
        self._open[path] = _OpenFile(parquet, local)
        return self._open[path]

    def _check_footer(self, path: str, local: LocalFile) -> None:
        footer = self._source.footers[path]
        local.file.seek(local.size - len(footer))
        if local.file.read(len(footer)) != footer:
            msg = f"{self.full_path(path)} was written anew since it was listed"
            raise UnreadableFileError(msg)


@dataclass(frozen=True, slots=True)
class _OpenFile:
    """A file that is open for reading row groups; `local` watches it where it is local."""

    parquet: pq.ParquetFile
    local: LocalFile | None


def _places(file: DataFile) -> Iterator[RowGroupPlace]:
    first = 0
    for number, group in enumerate(file.row_groups):
        yield RowGroupPlace(number, first, group.rows)
        first += group.rows


def _require_same(
    manifest: Manifest, path: str, schema: pa.Schema, whole: pa.Schema, needed: Sequence[str], *, all_columns: bool
) -> None:
    """Raise unless a file has the needed columns with the first file's types."""
    if schema.equals(whole):
        return
    here, first = manifest.full_path(path), manifest.full_path(manifest.files[0].path)
    surplus = [name for name in schema.names if name not in whole.names] if all_columns else []
    for name in [*needed, *surplus]:
        one, other = schema.get_all_field_indices(name), whole.get_all_field_indices(name)
        if len(one) != 1 or len(other) != 1:
            holding, lacking = (here, first) if one else (first, here)
            msg = f"column {name!r} is in {holding} but not in {lacking}: choose `columns` that all files have"
            raise ColumnError(msg)
        if schema.field(one[0]).type != whole.field(other[0]).type:
            kinds = f"{schema.field(one[0]).type} in {here} but {whole.field(other[0]).type} in {first}"
            msg = f"column {name!r} is {kinds}: write the files with one type, or choose `columns` without it"
            raise ColumnError(msg)


def _delivered_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that a column is delivered in: its own, but for views, which pyarrow cannot filter."""
    views = {"string_view": pa.string(), "binary_view": pa.binary()}
    return views.get(str(kind), kind)


def _without_views(table: pa.Table) -> pa.Table:
    kinds = list(map(_delivered_type, table.schema.types))
    if kinds == table.schema.types:
        return table
    return table.cast(pa.schema([column.with_type(kind) for column, kind in zip(table.schema, kinds, strict=True)]))


def _mask(table: pa.Table, filters: pc.Expression) -> pa.ChunkedArray:
    """Evaluate a filter row by row; a scan without threads keeps the order."""
    return pads.dataset(table).scanner(columns={"keep": filters}, use_threads=False).to_table()["keep"]


def _row_ids(first: int, rows: int) -> pa.Array:
    return pa.array(np.arange(first, first + rows, dtype=np.int64))
