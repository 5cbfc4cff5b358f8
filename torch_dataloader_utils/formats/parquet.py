"""Parquet: footers to a manifest, row groups to Arrow tables.

The layout of a file's end (footer, its length as four little-endian bytes, the magic ``PAR1``) is that of the Apache
Parquet file format specification, https://parquet.apache.org/docs/file-format/.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import operator
import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from torch_dataloader_utils.errors import ColumnError, UnreadableFileError
from torch_dataloader_utils.model import DataFile, Manifest, RowGroup, Split
from torch_dataloader_utils.storage import Listing, Storage, StoredFile

__all__ = ["SUFFIXES", "NullCount", "ParquetReader", "ParquetSource", "RowGroupPlace", "open_parquet"]

SUFFIXES = (".parquet", ".parq", ".pq")
"""Endings of the names of Parquet files."""

MAGIC = b"PAR1"
TAIL_BYTES = 64 * 1024
"""How much of a file's end is read at first: most footers are smaller, and then one request is enough."""

FOOTER_THREADS = 16
OPEN_FILES = 16
"""How many files a reader keeps open."""


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
class NullCount:
    """Nulls that a footer announces."""

    column: str
    path: str
    row_group: int
    nulls: int


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
    """

    storage: Storage
    manifest: Manifest
    schema: pa.Schema
    filter: pc.Expression | None
    filter_columns: tuple[str, ...]
    selection: tuple[tuple[int, ...], ...] | None
    files: dict[str, StoredFile] = field(repr=False)
    footers: dict[str, bytes] = field(repr=False)

    @cached_property
    def filter_digest(self) -> str | None:
        """Digest of the serialised filter, 16 hexadecimal characters: its text leaves too much out."""
        if self.filter is None:
            return None
        serialised = self.filter.__reduce__()[1][0]
        return hashlib.blake2b(bytes(serialised), digest_size=8).hexdigest()

    def announced_nulls(self, columns: Sequence[str]) -> Iterator[NullCount]:
        """Yield the nulls that the footers announce in columns, where the filter does not take every null row."""
        columns = [name for name in columns if not self._takes_nulls(name)]
        for number, file in enumerate(self.manifest.files if columns else ()):
            metadata = parse_footer(self.footers[file.path])
            leaves = _leaves(metadata.schema.to_arrow_schema())
            groups = range(metadata.num_row_groups) if self.selection is None else self.selection[number]
            for group in groups:
                row_group = metadata.row_group(group)
                for column in columns:
                    statistics = row_group.column(leaves[column][0]).statistics
                    if statistics is not None and statistics.has_null_count and statistics.null_count:
                        yield NullCount(column, self.manifest.full_path(file.path), group, statistics.null_count)

    def _takes_nulls(self, column: str) -> bool:
        """Whether the filter takes every row in which a column is null."""
        if self.filter is None or column not in self.filter_columns:
            return False
        schema = _schema(parse_footer(self.footers[self.manifest.files[0].path]))
        return _rules_out(self.filter, schema, self.filter_columns, pc.field(column).is_null())


def open_parquet(
    storage: Storage,
    listing: Listing,
    *,
    columns: Sequence[str] | None = None,
    filters: pc.Expression | None = None,
) -> ParquetSource:
    """Read every file's footer, once, and check columns and filter against them.

    Args:
        storage: Where the files lie.
        listing: The files.
        columns: The columns to deliver; None for all.
        filters: Which rows to deliver; None for all.

    Returns:
        The source.

    Raises:
        UnreadableFileError: If a footer cannot be read; the message names the file.
        ColumnError: If a column is missing or has another type in one file than in another, or the filter does not
            fit the columns.
    """
    with ThreadPoolExecutor(FOOTER_THREADS, thread_name_prefix="footers") as threads:
        footers = list(threads.map(lambda file: read_footer(storage, file), listing.files))
    described = [_describe(storage, file, footer) for file, footer in zip(listing.files, footers, strict=True)]
    manifest = Manifest(listing.root, tuple(file for file, _ in described))
    schemas = [schema for _, schema in described]
    whole = schemas[0]
    filter_columns = () if filters is None else _filter_columns(filters, whole)
    delivered = whole.names if columns is None else list(columns)
    for name in delivered:
        _require_column(name, whole, "")
    needed = list(dict.fromkeys([*delivered, *filter_columns]))
    for file, schema in zip(manifest.files[1:], schemas[1:], strict=True):
        _require_same(manifest, file.path, schema, whole, needed, all_columns=columns is None)
    selection = None
    if filters is not None and not _may_keep_nan(filters, whole, filter_columns):
        selection = tuple(_selected(footer, filters, whole) for footer in footers)
    return ParquetSource(
        storage=storage,
        manifest=manifest,
        schema=pa.schema([pa.field(name, _delivered_type(whole.field(name).type)) for name in delivered]),
        filter=filters,
        filter_columns=filter_columns,
        selection=selection,
        files={file.path: file for file in listing.files},
        footers={file.path: footer for file, footer in zip(listing.files, footers, strict=True)},
    )


def read_footer(storage: Storage, file: StoredFile) -> bytes:
    """Return a file's footer with its length and magic: one request, or two where it is longer than the first took."""
    name = storage.display(file.location)
    if file.size < len(MAGIC) * 2 + 4:
        msg = f"{name} is not a Parquet file: it has only {file.size} bytes"
        raise UnreadableFileError(msg)
    tail = storage.read(file, max(0, file.size - TAIL_BYTES), file.size)
    if tail[-4:] != MAGIC:
        what = "an encrypted" if tail[-4:] == b"PARE" else "no complete"
        msg = f"{name} is {what} Parquet file: it ends in {tail[-4:]!r}, not in {MAGIC!r}"
        raise UnreadableFileError(msg)
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length + len(MAGIC) > file.size:
        msg = f"{name} is a damaged Parquet file: its footer would be {length} bytes of {file.size}"
        raise UnreadableFileError(msg)
    if length > len(tail):
        tail = storage.read(file, file.size - length, file.size - len(tail)) + tail
    return tail[-length:]


def parse_footer(footer: bytes) -> pq.FileMetaData:
    """Parse a footer: a file of nothing but magic and footer has the same metadata."""
    return pq.read_metadata(pa.BufferReader(MAGIC + footer))


class ParquetReader:
    """Reads row groups; keeps the files it read last open. One to a worker."""

    def __init__(self, source: ParquetSource) -> None:
        self._source = source
        self._columns = list(dict.fromkeys([*source.schema.names, *source.filter_columns]))
        self._open: OrderedDict[str, pq.ParquetFile] = OrderedDict()
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
        with storage.errors(f"row group {place.number} of {self.full_path(path)}"):
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
        metadata = self._file(path).metadata
        leaves = _leaves(metadata.schema.to_arrow_schema())
        group = metadata.row_group(place.number)
        return sum(group.column(leaf).total_compressed_size for name in self._columns for leaf in leaves[name])

    def close(self) -> None:
        """Close the files that are open."""
        while self._open:
            self._open.popitem()[1].close(force=True)

    def _read_row_group(self, path: str, place: RowGroupPlace) -> pa.Table:
        try:
            table = self._file(path).read_row_group(place.number, columns=self._columns)
        except BaseException:
            self._open.pop(path, None)  # another attempt opens the file anew
            raise
        if table.num_rows != place.rows:
            msg = f"row group {place.number} of {self.full_path(path)} has {table.num_rows} rows, not {place.rows}"
            raise UnreadableFileError(msg)
        return table

    def _file(self, path: str) -> pq.ParquetFile:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        source = self._source
        opened = source.storage.open(source.files[path])
        if source.storage.is_local:
            self._check_footer(path, opened)
        while len(self._open) >= OPEN_FILES:
            self._open.popitem(last=False)[1].close(force=True)
        metadata = parse_footer(source.footers[path])
        self._open[path] = pq.ParquetFile(opened, metadata=metadata, pre_buffer=not source.storage.is_local)
        return self._open[path]

    def _check_footer(self, path: str, opened: pa.NativeFile) -> None:
        footer = self._source.footers[path]
        opened.seek(opened.size() - len(footer))
        if opened.read() != footer:
            msg = f"{self.full_path(path)} was written anew since it was listed"
            raise UnreadableFileError(msg)


def _describe(storage: Storage, file: StoredFile, footer: bytes) -> tuple[DataFile, pa.Schema]:
    try:
        metadata = parse_footer(footer)
        schema = _schema(metadata)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        row_groups = tuple(RowGroup(group.num_rows, group.total_byte_size) for group in groups)
        if any(group.rows < 0 for group in row_groups) or sum(group.rows for group in row_groups) != metadata.num_rows:
            msg = f"its row groups do not add up to {metadata.num_rows} rows"
            raise pa.ArrowInvalid(msg)
    except (pa.ArrowException, OSError, ValueError) as error:
        msg = f"cannot read the footer of {storage.display(file.location)}: {error}"
        raise UnreadableFileError(msg) from None
    digest = hashlib.blake2b(footer, digest_size=8).hexdigest()
    return DataFile(file.path, file.size, digest, row_groups, file.etag, file.modified), schema


def _schema(metadata: pq.FileMetaData) -> pa.Schema:
    return metadata.schema.to_arrow_schema().remove_metadata()


def _places(file: DataFile) -> Iterator[RowGroupPlace]:
    first = 0
    for number, group in enumerate(file.row_groups):
        yield RowGroupPlace(number, first, group.rows)
        first += group.rows


def _leaves(schema: pa.Schema) -> dict[str, tuple[int, ...]]:
    """Return each column's leaf columns, by number: Parquet stores the leaves of nested types apart."""
    leaves: dict[str, tuple[int, ...]] = {}
    first = 0
    for column in schema:
        count = _leaf_count(column.type)
        leaves[column.name] = tuple(range(first, first + count))
        first += count
    return leaves


def _leaf_count(kind: pa.DataType) -> int:
    if isinstance(kind, pa.BaseExtensionType):
        return _leaf_count(kind.storage_type)
    if pa.types.is_dictionary(kind) or not pa.types.is_nested(kind):
        return 1
    return sum(_leaf_count(kind.field(number).type) for number in range(kind.num_fields))


def _require_column(name: str, schema: pa.Schema, where: str) -> None:
    count = schema.names.count(name)
    if count == 1:
        return
    if count > 1:
        msg = f"column {name!r}{where} stands {count} times in the file's schema, so it cannot be delivered by name"
        raise ColumnError(msg)
    nearest = difflib.get_close_matches(name, schema.names, n=1, cutoff=0.0)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    msg = f"there is no column {name!r}{where}{hint} (columns: {', '.join(schema.names[:50])})"
    raise ColumnError(msg)


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


def _filter_columns(filters: pc.Expression, schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns that a filter needs: those without which pyarrow cannot bind it."""
    if re.search(r"\bFieldPath\(\d+\)", str(filters)):
        msg = f"the filter {filters!s:.200} names a column by its place, which differs between files: use its name"
        raise ColumnError(msg)
    try:
        kind = _bound_type(filters, schema)
    except (pa.ArrowException, TypeError) as error:
        raise _filter_error(filters, schema, error) from None
    if not pa.types.is_boolean(kind):
        msg = f"the filter {filters!s:.200} gives {kind}, not true or false: compare it with something"
        raise ColumnError(msg)
    names = tuple(name for number, name in enumerate(schema.names) if not _binds(filters, schema.remove(number)))
    all_null = reduce(operator.and_, (pc.field(name).is_null() for name in names), pc.scalar(value=True))
    try:
        _rules_out(filters, schema, names, all_null)
    except pa.ArrowInvalid as error:  # one that needs more than its own row, such as a sum
        raise _filter_error(filters, schema, error) from None
    return names


def _filter_error(filters: pc.Expression, schema: pa.Schema, error: Exception) -> ColumnError:
    text = str(error).splitlines()[0]
    shown = f"{filters!s:.200}"
    marker = "FieldRef.Name("
    if "No match" in text and marker in text:
        name = text.split(marker, 1)[1].split(")", 1)[0]
        try:
            _require_column(name, schema, f" for the filter {shown}")
        except ColumnError as missing:
            return missing
    return ColumnError(f"the filter {shown} does not fit the columns: {text}")


def _binds(filters: pc.Expression, schema: pa.Schema) -> bool:
    try:
        _bound_type(filters, schema)
    except pa.ArrowException:
        return False
    return True


def _bound_type(filters: pc.Expression, schema: pa.Schema) -> pa.DataType:
    dataset = pads.dataset(schema.empty_table())
    return dataset.scanner(columns={"keep": filters}).projected_schema.field("keep").type


def _may_keep_nan(filters: pc.Expression, schema: pa.Schema, columns: Sequence[str]) -> bool:
    """Whether a filter may keep rows that hold NaN, which statistics leave out: then they rule out no row group."""
    for name in columns:
        kind = schema.field(name).type
        if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
            return True
        if pa.types.is_floating(kind):
            is_nan = pc.field(name) == pa.scalar(float("nan"), kind)
            if not _rules_out(filters, schema, columns, is_nan):
                return True
    return False


def _rules_out(filters: pc.Expression, schema: pa.Schema, columns: Sequence[str], guarantee: pc.Expression) -> bool:
    """Whether no row of which the guarantee holds passes a filter, by pyarrow's own reasoning."""
    sink = pa.BufferOutputStream()
    row = pa.table({name: pa.nulls(1, schema.field(name).type) for name in columns})
    pq.write_table(row, sink, write_statistics=False)
    written = bytes(sink.getvalue())
    footer = written[-int.from_bytes(written[-8:-4], "little") - 8 :]
    return not _fragment(footer, guarantee).subset(filters).row_groups


def _selected(footer: bytes, filters: pc.Expression, schema: pa.Schema) -> tuple[int, ...]:
    """Return the row groups whose statistics do not rule out a row that the filter keeps."""
    fragment = _fragment(footer)
    with contextlib.suppress(pa.ArrowNotImplementedError):  # types that pyarrow cannot compare with statistics
        fragment = fragment.subset(filters, schema=schema)
    return tuple(group.id for group in fragment.row_groups)


def _fragment(footer: bytes, guarantee: pc.Expression | None = None) -> Any:
    return pads.ParquetFileFormat().make_fragment(pa.BufferReader(MAGIC + footer), partition_expression=guarantee)


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
