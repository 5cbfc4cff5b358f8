"""Reads the footers of listed files, unifies their columns, and checks columns and filter against them."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.columns.arrow import require_column
from torch_dataloader_utils.columns.transform import null_message
from torch_dataloader_utils.errors import ColumnError, UnreadableFileError
from torch_dataloader_utils.formats.base import (
    AnnouncedNulls,
    Deletes,
    Described,
    FileCase,
    Footer,
    Format,
    KnownFooters,
    NullCount,
    OpenedFiles,
)
from torch_dataloader_utils.formats.filters import filter_columns, rules_out, takes_nulls
from torch_dataloader_utils.formats.schema import FileSchema, Projection, Unified, grew_out_of, projected, unified
from torch_dataloader_utils.planning.manifest import DataFile, Manifest, RowGroup, root_prefix
from torch_dataloader_utils.reading.scan import ReadOptions
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.listing import Listing

__all__ = ["Annotations", "Request", "check_columns", "open_files"]

NO_COLUMNS = pa.schema([])


@dataclass(frozen=True, slots=True)
class Request:
    """What to deliver of the files.

    Attributes:
        columns: The columns to deliver; None for all.
        filters: Which rows to deliver; None for all.
        refuses_nulls: Whether a column cannot be delivered with nulls.
    """

    columns: Sequence[str] | None
    filters: pc.Expression | None
    refuses_nulls: Callable[[pa.Field], bool]


@dataclass(frozen=True)
class Annotations:
    """What the files themselves do not hold: it comes from their paths, or from the metadata of their table.

    Attributes:
        schema: The dataset's columns, where a table defines them; None where the files do.
        name_in_file: Returns, for a file's columns and a column of the table, the file's name of it, or None. Needed
            with `schema`.
        constant_schema: Columns that have one value in all rows of a file.
        constants: Their values in each file, by path.
        deleted: Numbers of the deleted rows of files, int64, ascending, by path.
        pin: The ``snapshot_id`` or ``version`` that a table is pinned to.
    """

    schema: pa.Schema | None = None
    name_in_file: Callable[[pa.Schema, str], str | None] | None = None
    constant_schema: pa.Schema = NO_COLUMNS
    constants: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    deleted: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    pin: Mapping[str, int] = field(default_factory=dict)

    def name_of(self, schema: pa.Schema, column: str) -> str | None:
        """Return a file's name of a column; None if the file does not have the column."""
        if self.name_in_file is not None:
            return self.name_in_file(schema, column)
        return column if column in schema.names else None

    def constants_of(self, path: str) -> dict[str, Any]:
        """Return the columns that have one value in all rows of a file, with their values."""
        return dict(zip(self.constant_schema.names, self.constants.get(path, ()), strict=False))


def open_files(
    storage: Storage,
    listing: Listing,
    file_format: Format,
    request: Request,
    *,
    annotations: Annotations,
    known: KnownFooters | None = None,
) -> OpenedFiles:
    """Read the footer of every file, once, and check columns and filter against them.

    Args:
        storage: The files' storage.
        listing: The files.
        file_format: Their format.
        request: What to deliver of them.
        annotations: What the files themselves do not hold.
        known: Footers that were read before, so that none has to be read; or None.

    Raises:
        UnreadableFileError: If a file cannot be read or its footer is not valid; the message names the file.
        ColumnError: If a column is missing, its types cannot be unified, or the filter does not fit the columns.
    """
    columns, filters = request.columns, request.filters

    def counts_nulls(column: pa.Field) -> bool:
        is_wanted = columns is None or column.name in columns or annotations.schema is not None
        return is_wanted and request.refuses_nulls(column)

    described = file_format.describe(storage, listing, known, counts_nulls)
    deletes, footers = _without_deleted(described.footers, annotations, listing.root)
    manifest = Manifest(listing.root, tuple(footer.file for footer in footers), file_format.unknown_rows is None)
    whole = _whole_schema(manifest, footers, annotations)
    filtering = () if filters is None else filter_columns(filters, whole.schema)
    delivered = whole.schema.names if columns is None else list(columns)
    needed = _needed(whole, delivered, filtering)
    projections = _Projections(manifest, footers, needed, annotations)
    selection = None
    if filters is not None:
        cases = projections.cases(footers, filtering, annotations)
        described = replace(described, footers=footers)
        selection = _Pruning(filters, whole.schema, filtering).selection(file_format, described, cases)
    opened_files = OpenedFiles(
        storage=storage,
        format=file_format,
        manifest=manifest,
        schema=pa.schema([whole.schema.field(name) for name in delivered]),
        needed=needed,
        filter=filters,
        filter_columns=filtering,
        selection=selection,
        announced_nulls=(),
        files={file.path: file for file in listing.files},
        footers={footer.file.path: footer.content for footer in footers if footer.content is not None},
        metadata_file=described.metadata_file,
        projections=tuple(projections.distinct),
        projected=projections.numbers,
        constants=annotations.constants,
        constant_columns=tuple(annotations.constant_schema.names),
        deletes=deletes,
        pin=annotations.pin,
    )
    announced_nulls = tuple(_announced_nulls(opened_files, footers, request.refuses_nulls))
    opened_files = replace(opened_files, announced_nulls=announced_nulls)
    file_format.verify(opened_files)
    return opened_files


def _whole_schema(manifest: Manifest, footers: Sequence[Footer], annotations: Annotations) -> Unified:
    """Return all columns of the dataset."""
    if annotations.schema is not None:
        return Unified(annotations.schema, {})
    files = [FileSchema(manifest.full_path(footer.file.path), footer.schema) for footer in footers]
    whole = unified(files)
    problems = dict(whole.problems)
    from_paths = []
    for column in annotations.constant_schema:
        if column.name not in whole.schema.names:
            from_paths.append(column)
            continue
        home = next(file.path for file in files if column.name in file.schema.names)
        problems[column.name] = f"is both in the paths of files and in {home}: open the dataset without "
        problems[column.name] += "`partitioning`, write the files without it, or choose `columns` without it"
    return Unified(pa.schema([*whole.schema, *from_paths]), problems)


def _needed(whole: Unified, delivered: Sequence[str], filtering: Sequence[str]) -> pa.Schema:
    """Return the columns to deliver and those of the filter, or raise if one is missing or has no common type."""
    for name in delivered:
        require_column(name, whole.schema, "")
    for name in [*delivered, *filtering]:
        if name in whole.problems:
            msg = f"column {name!r} {whole.problems[name]}"
            raise ColumnError(msg)
    return pa.schema([whole.schema.field(name) for name in dict.fromkeys([*delivered, *filtering])])


def _without_deleted(
    footers: Sequence[Footer], annotations: Annotations, root: str
) -> tuple[dict[str, Deletes], Sequence[Footer]]:
    """Return the deleted rows, by path, and footers whose row groups count only the other rows."""
    if not annotations.deleted:
        return {}, footers
    deletes: dict[str, Deletes] = {}
    left = []
    for footer in footers:
        file, positions = footer.file, annotations.deleted.get(footer.file.path)
        if positions is None or not len(positions):
            left.append(footer)
            continue
        if positions[0] < 0 or positions[-1] >= file.rows:
            path = f"{root_prefix(root)}{file.path}"
            msg = f"the table deletes row {positions[-1]} of {path}, which has {file.rows} rows"
            raise UnreadableFileError(msg)
        deletes[file.path] = deleted = Deletes(positions, tuple(group.rows for group in file.row_groups))
        groups = tuple(
            RowGroup(group.rows - len(deleted.within(number)), group.bytes)
            for number, group in enumerate(file.row_groups)
        )
        # The digest covers the deletes: a state must not load where other rows of the same file are deleted.
        digest = hashlib.blake2b(positions.tobytes(), key=file.digest.encode()[:64], digest_size=8).hexdigest()
        reduced = DataFile(file.path, file.size, digest, groups, file.etag, file.modified)
        left.append(replace(footer, file=reduced, nulls=()))  # the announced nulls may be in deleted rows
    return deletes, left


class _Projections:
    """How the columns of each file become the needed ones. Files with equal schemas share a projection."""

    def __init__(
        self, manifest: Manifest, footers: Sequence[Footer], needed: pa.Schema, annotations: Annotations
    ) -> None:
        self.distinct: list[Projection] = []
        self.numbers: dict[str, int] = {}
        by_schema: dict[int, int] = {}
        for footer in footers:
            schema = footer.schema
            if id(schema) not in by_schema:
                projection = _projected(schema, needed, annotations, manifest.full_path(footer.file.path))
                if projection not in self.distinct:
                    self.distinct.append(projection)
                by_schema[id(schema)] = self.distinct.index(projection)
            if by_schema[id(schema)]:
                self.numbers[footer.file.path] = by_schema[id(schema)]
        self._needed = needed

    def cases(self, footers: Sequence[Footer], filtering: Sequence[str], annotations: Annotations) -> list[FileCase]:
        """Return what holds for all rows of each file, and whether its statistics are of the filter's columns."""
        return [self._case(footer, filtering, annotations.constants_of(footer.file.path)) for footer in footers]

    def _case(self, footer: Footer, filtering: Sequence[str], values: Mapping[str, Any]) -> FileCase:
        projection = self.distinct[self.numbers.get(footer.file.path, 0)]
        guarantees = []
        comparable = True
        for name in filtering:
            dtype = self._needed.field(name).type
            source = projection.sources[self._needed.get_field_index(name)]
            if source is None:
                comparable &= name not in footer.schema.names
                value = values.get(name)
                column = pc.field(name)
                guarantees.append(column.is_null() if value is None else column == pa.scalar(value, dtype))
            else:
                comparable &= source == name and footer.schema.field(source).type == dtype
        return FileCase(reduce(operator.and_, guarantees) if guarantees else None, comparable)


def _projected(schema: pa.Schema, needed: pa.Schema, annotations: Annotations, path: str) -> Projection:
    """Return how a file's columns become the needed ones, or raise an error that names the file."""
    try:
        projection = projected(schema, needed, partial(annotations.name_of, schema))
    except ColumnError as error:
        msg = f"{path}: {error}"
        raise ColumnError(msg) from None
    for column, source in zip(needed, projection.sources, strict=True):
        if annotations.schema is None or source is None:
            continue
        stored = projection.stored.field(source).type
        if not grew_out_of(column.type, stored):  # a table's column may only have been widened since
            msg = f"column {column.name!r} is {stored} in {path} but {column.type} in the table: choose `columns` "
            msg += "without it"
            raise ColumnError(msg)
    return projection


@dataclass(frozen=True, slots=True)
class _Pruning:
    """Rules out row groups by statistics and files by what holds for all of their rows.

    Attributes:
        filters: The filter.
        schema: The dataset's columns.
        columns: Those that the filter needs.
    """

    filters: pc.Expression
    schema: pa.Schema
    columns: Sequence[str]

    def selection(
        self, file_format: Format, described: Described, cases: Sequence[FileCase]
    ) -> tuple[tuple[int, ...], ...] | None:
        """Return the row groups of each file that may hold a row that the filter keeps; None for all."""
        by_statistics = file_format.select(described, self.filters, self.schema, self.columns, cases)
        if by_statistics is None and all(case.guarantee is None for case in cases):
            return None
        ruled_out: dict[str, bool] = {str(None): False}
        for case in cases:
            if str(case.guarantee) not in ruled_out:  # many files share a partition
                ruled_out[str(case.guarantee)] = rules_out(self.filters, self.schema, self.columns, case.guarantee)
        groups = by_statistics
        if groups is None:
            groups = [range(len(footer.file.row_groups)) for footer in described.footers]
        return tuple(
            () if ruled_out[str(case.guarantee)] else tuple(numbers)
            for numbers, case in zip(groups, cases, strict=True)
        )


def _announced_nulls(
    opened_files: OpenedFiles, footers: Sequence[Footer], refuses_nulls: Callable[[pa.Field], bool]
) -> Iterator[AnnouncedNulls]:
    """Yield the nulls that footers announce in columns that cannot be delivered with them.

    Columns of which the filter removes every null are left out.
    """
    filters, filtering = opened_files.filter, opened_files.filter_columns
    removed = {name for name in filtering if takes_nulls(filters, opened_files.needed, filtering, name)}
    refused = {column.name for column in opened_files.schema if column.name not in removed and refuses_nulls(column)}
    needed = opened_files.needed.names
    names = [dict(zip(projection.sources, needed, strict=True)) for projection in opened_files.projections]
    missing = [
        [name for name, source in zip(needed, projection.sources, strict=True) if source is None and name in refused]
        for projection in opened_files.projections
    ]
    for number, footer in enumerate(footers):
        file = footer.file
        projection = opened_files.projected.get(file.path, 0)
        if not footer.nulls and not missing[projection]:
            continue
        path = opened_files.manifest.full_path(file.path)
        selected = range(len(file.row_groups)) if opened_files.selection is None else opened_files.selection[number]
        for found in footer.nulls:
            name = names[projection].get(found.column, "")
            if name in refused and found.row_group in selected:
                yield AnnouncedNulls(path, replace(found, column=name))
        values = opened_files.constants_of(file.path)
        first = next((group for group in selected if file.row_groups[group].rows), None)
        for name in missing[projection]:
            if values.get(name) is None and first is not None:
                announced = NullCount(name, first, file.row_groups[first].rows)
                yield AnnouncedNulls(path, announced, None if name in values else _home(opened_files, footers, name))


def _home(opened_files: OpenedFiles, footers: Sequence[Footer], column: str) -> str | None:
    """Return a file that has a column."""
    index = opened_files.needed.get_field_index(column)
    paths = (footer.file.path for footer in footers)
    home = next((path for path in paths if opened_files.projection(path).sources[index] is not None), None)
    return None if home is None else opened_files.manifest.full_path(home)


def check_columns(opened_files: OpenedFiles, options: ReadOptions) -> None:
    """Raise now what would otherwise be raised in the middle of an epoch.

    Raises:
        ColumnError: If the row id column has the name of another column; if a column has nulls, by the footers, and
            cannot be delivered with them; or if rows of its type cannot be filtered or shuffled.
    """
    if options.row_id_column in (*opened_files.schema.names, *opened_files.filter_columns):
        msg = f"row_id_column={options.row_id_column!r} is the name of a column of the files: choose another"
        raise ColumnError(msg)
    for announced in opened_files.announced_nulls:
        found = announced.found
        msg = f"{null_message(found.column, found.nulls)} (row group {found.row_group} of {announced.path})"
        if announced.home is not None:
            msg = f"column {found.column!r} is in {announced.home} but not in {announced.path}, where it is null: {msg}"
        raise ColumnError(msg)
    if opened_files.filter is not None or options.row_shuffle_seed is not None:
        for column in opened_files.schema:
            _require_selectable(column)


def _require_selectable(column: pa.Field) -> None:
    try:
        row = pa.chunked_array([pa.nulls(1, column.type)])
        row.take(pa.array([0]))
        row.filter(pa.array([True]))
    except pa.ArrowException as error:
        msg = f"rows of column {column.name!r} can be neither filtered nor shuffled: {error}"
        raise ColumnError(msg) from None
