"""Reads the footers of listed files, unifies their columns, and checks columns and filter against them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.columns.arrow import require_column
from torch_dataloader_utils.columns.transform import null_message
from torch_dataloader_utils.errors import ColumnError, UnreadableFileError, cut
from torch_dataloader_utils.formats.base import Deletes, Described, FileCase, Footer, Format, KnownFooters
from torch_dataloader_utils.formats.filters import all_of, filter_columns, rules_out
from torch_dataloader_utils.formats.opened_files import Opened, OpenedFiles, expression_digest
from torch_dataloader_utils.formats.row_packing import RowGroupPacking
from torch_dataloader_utils.formats.schema import (
    AllColumns,
    FileSchema,
    Projection,
    Unified,
    grew_out_of,
    projected,
)
from torch_dataloader_utils.planning.manifest import Manifest, RowGroup, root_prefix
from torch_dataloader_utils.reading.scan import ReadOptions
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.listing import Listing

NO_COLUMNS = pa.schema([])


@dataclass(frozen=True, slots=True)
class Request:
    """What to deliver of the files, and how they are read.

    Attributes:
        columns: The columns to deliver; None for all.
        filters: Which rows to deliver; None for all.
        refuses_nulls: Whether a column refuses nulls.
        storage_timeout: Bounds each operation of the storage, in seconds.
        memory_map: Whether local files are mapped into memory; None for those on a file system of this machine.
        row_id_column: The name of the row id column, which transforms of sources see; None without one.
        forks: Whether processes that read the files are forked from this one.
        new_packing: Returns what packs the columns that all sources of a mixture deliver; None where nothing does.
    """

    columns: Sequence[str] | None
    filters: pc.Expression | None
    refuses_nulls: Callable[[pa.Field], bool]
    storage_timeout: float
    memory_map: bool | None
    row_id_column: str | None = None
    forks: bool = False
    new_packing: Callable[[pa.Schema], RowGroupPacking] | None = None

    @contextmanager
    def opened_storage(
        self, urls: Sequence[str], options: Mapping[str, Any] | None
    ) -> Iterator[tuple[Storage, list[str]]]:
        """Yield the storage of some paths or URLs, and what it calls each, to open them: see `Storage.for_urls`."""
        storage, locations = Storage.for_urls(
            urls,
            options,
            timeout_sec=self.storage_timeout,
            memory_map=self.memory_map,
            client="obstore in other processes" if self.forks else "obstore",
        )
        try:
            yield storage, locations
        finally:
            storage.end_opening()


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


def open_files(
    storage: Storage,
    listing: Listing,
    file_format: Format,
    request: Request,
    *,
    annotations: Annotations,
    known: KnownFooters | None = None,
) -> OpenedFiles:
    """Read the footer of every file, once, or take those that are known, and check columns and filter against them.

    Raises:
        UnreadableFileError: If a file cannot be read or its footer is not valid; the message names the file.
        ColumnError: If a column is missing, its types cannot be unified, or the filter does not fit the columns.
    """
    columns, filters = request.columns, request.filters
    wanted = None if columns is None or annotations.schema is not None else frozenset(columns)

    def columns_to_count(schema: pa.Schema) -> list[str]:
        places = [place for place, name in enumerate(schema.names) if wanted is None or name in wanted]
        return [column.name for column in map(schema.field, places) if request.refuses_nulls(column)]

    described = file_format.describe(storage, listing, known, columns_to_count)
    deletes, footers = _without_deleted(described.footers, annotations, listing.root)
    manifest = Manifest(listing.root, tuple(footer.file for footer in footers), file_format.unknown_rows is None)
    all_columns = _all_columns(footers, manifest, annotations, file_format.types_option)
    whole = all_columns.unified if columns is None or filters is not None else all_columns.of(columns)
    filtering = NO_COLUMNS if filters is None else filter_columns(filters, whole.schema)
    delivered = whole.schema.names if columns is None else list(columns)
    needed = _needed(whole, delivered, filtering.names)
    projections, projected_by = _projections(all_columns, needed)
    files = OpenedFiles(
        storage=storage,
        format=file_format,
        manifest=manifest,
        schema=pa.schema([whole.schema.field(name) for name in delivered]),
        needed=needed,
        filter=filters,
        filter_columns=tuple(filtering.names),
        files={file.path: file for file in listing.files},
        footers={footer.file.path: footer.content for footer in footers if footer.content is not None},
        parsed=described.parsed,
        metadata_file=described.metadata_file,
        projections=projections,
        projected=projected_by,
        all_columns=all_columns,
        constants=annotations.constants,
        constant_columns=tuple(annotations.constant_schema.names),
        deletes=deletes,
        pin=annotations.pin,
    )
    if filters is not None:
        files = replace(files, selection=_selection(files, filtering, replace(described, footers=footers)))
    files = replace(files, announced_nulls=next(_announced_nulls(files, footers, request.refuses_nulls), None))
    file_format.verify(files)
    return files


def with_expression(files: OpenedFiles, expression: pc.Expression, options: ReadOptions) -> OpenedFiles:
    """Return the same files with the columns that an expression needs, and the expression.

    Raises:
        ColumnError: If a column does not exist or has no common type, or the expression does not fit the columns.
    """
    columns = files.all_columns
    assert columns is not None  # noqa: S101 - only copies in workers have none
    names = filter_columns(expression, columns.unified.schema).names
    require_no_column(options.row_id_column, names)
    needed = _needed(columns.unified, files.needed.names, names)
    projections, projected_by = _projections(columns, needed)
    expressions = {**files.expressions, expression_digest(expression): expression}
    return replace(files, needed=needed, projections=projections, projected=projected_by, expressions=expressions)


def with_column_alone(files: OpenedFiles, column: str) -> OpenedFiles:
    """Return the same files with one column, delivered or not.

    Raises:
        ColumnError: If it does not exist, or has no common type.
    """
    columns = files.all_columns
    assert columns is not None  # noqa: S101 - only copies in workers have none
    needed = _needed(columns.unified, [column], [])
    projections, projected_by = _projections(columns, needed)
    return replace(files, schema=needed, needed=needed, projections=projections, projected=projected_by)


def with_filters(files: OpenedFiles, excluding: Iterable[str]) -> OpenedFiles:
    """Return the same files with some expressions that exclude rows, given by digest, as a part of the filter."""
    expressions = [files.expressions[digest] for digest in excluding]
    if not expressions:
        return files
    kept = [~expression | expression.is_null() for expression in expressions]
    names = {name for expression in expressions for name in filter_columns(expression, files.needed).names}
    excluded = f"the exclusion of {cut(' and of '.join(map(str, expressions)))}"
    return replace(
        files,
        filter=all_of([files.filter, *kept]),
        filter_columns=tuple(sorted({*files.filter_columns, *names})),
        filter_name=excluded if files.filter is None else f"{files.filter_name} with {excluded}",
    )


def _needed(whole: Unified, delivered: Sequence[str], filtering: Sequence[str]) -> pa.Schema:
    """Return the columns to deliver and those of the filter, or raise if one is missing or has no common type."""
    for name in delivered:
        require_column(name, whole.schema, "")
    for name in [*delivered, *filtering]:
        if name in whole.problems:
            raise ColumnError(f"column {name!r} {whole.problems[name]}")
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
            raise UnreadableFileError(f"the table deletes row {positions[-1]} of {path}, which has {file.rows} rows")
        bounds = tuple(accumulate((group.rows for group in file.row_groups), initial=0))
        deletes[file.path] = deleted = Deletes(positions, bounds)
        groups = tuple(
            RowGroup(group.rows - len(deleted.within(number)), group.bytes)
            for number, group in enumerate(file.row_groups)
        )
        # The digest covers the deletes: a state must not load where other rows of the same file are deleted.
        digest = hashlib.blake2b(positions.tobytes(), key=file.digest.encode()[:64], digest_size=8).hexdigest()
        reduced = file._replace(digest=digest, row_groups=groups)
        left.append(footer._replace(file=reduced, nulls=()))  # the announced nulls may be in deleted rows
    return deletes, left


def _all_columns(
    footers: Sequence[Footer], manifest: Manifest, annotations: Annotations, types_option: str | None
) -> AllColumns:
    """Return the columns of all files. Files with equal schemas, which are one object, share one."""
    firsts: dict[int, Footer] = {}
    for footer in footers:
        firsts.setdefault(id(footer.schema), footer)
    files = [FileSchema(manifest.full_path(footer.file.path), footer.schema) for footer in firsts.values()]
    numbers = {key: number for number, key in enumerate(firsts)}
    by_path = {footer.file.path: numbers[id(footer.schema)] for footer in footers if numbers[id(footer.schema)]}
    table = annotations.schema
    constants, name_in_file = annotations.constant_schema, annotations.name_in_file
    return AllColumns(tuple(files), by_path, constants, table, name_in_file, types_option)


def _projections(columns: AllColumns, needed: pa.Schema) -> tuple[tuple[Projection, ...], dict[str, int]]:
    """Return the projections of files' columns to the needed ones, and the index of each file's projection, by path.

    Files with the first projection, which are most, are left out of the indices.
    """
    distinct: list[Projection] = []
    numbers: list[int] = []
    for file in columns.files:
        projection = _projected(file, needed, columns)
        if projection not in distinct:
            distinct.append(projection)
        numbers.append(distinct.index(projection))
    return tuple(distinct), {path: numbers[schema] for path, schema in columns.numbers.items() if numbers[schema]}


def _projected(file: FileSchema, needed: pa.Schema, columns: AllColumns) -> Projection:
    """Return how a file's columns become the needed ones, or raise an error that names the file."""
    path = file.path
    try:
        projection = projected(file.schema, needed, partial(columns.name_of, file.schema))
    except ColumnError as error:
        raise ColumnError(f"{path}: {error}") from None
    for column, source in zip(needed, projection.sources, strict=True):
        if columns.name_in_file is None or source is None:
            continue
        stored = projection.stored.field(source).type
        if not grew_out_of(column.type, stored):  # a table's column may only have been widened since
            msg = f"column {column.name!r} is {stored} in {path} but {column.type} in the table: choose `columns` "
            msg += "without it"
            raise ColumnError(msg)
    return projection


def _selection(files: OpenedFiles, filtering: pa.Schema, described: Described) -> tuple[tuple[int, ...], ...] | None:
    """Return the row groups of each file that may hold a row that the filter keeps; None for all.

    Statistics rule out row groups; what holds for all rows of a file rules out the file.
    """
    cases = [_case(files, footer) for footer in described.footers]
    groups = files.format.select(described, files.filter, filtering, cases)
    if groups is None and all(case.guarantee is None for case in cases):
        return None
    if groups is None:
        groups = [range(len(footer.file.row_groups)) for footer in described.footers]
    guarantees = {str(case.guarantee): case.guarantee for case in cases}  # many files share a partition
    ruled_out = {
        shown: guarantee is not None and rules_out(files.filter, filtering, guarantee)
        for shown, guarantee in guarantees.items()
    }
    return tuple(
        () if ruled_out[str(case.guarantee)] else tuple(numbers) for numbers, case in zip(groups, cases, strict=True)
    )


def _case(files: OpenedFiles, footer: Footer) -> FileCase:
    """Return what holds for all rows of a file, and whether its statistics are of the filter's columns."""
    sources, values = files.projection(footer.file.path).sources, files.constants_of(footer.file.path)
    guarantees = []
    comparable = True
    for name in files.filter_columns:
        dtype, source = files.needed.field(name).type, sources[files.needed.get_field_index(name)]
        if source is None:
            comparable &= name not in footer.schema.names
            value, column = values.get(name), pc.field(name)
            guarantees.append(column.is_null() if value is None else column == pa.scalar(value, dtype))
        else:
            comparable &= source == name and footer.schema.field(source).type == dtype
    return FileCase(all_of(guarantees), comparable)


def _announced_nulls(
    files: OpenedFiles, footers: Sequence[Footer], refuses_nulls: Callable[[pa.Field], bool]
) -> Iterator[str]:
    """Yield messages about the nulls that footers announce in columns that cannot be delivered with them.

    Columns of which the filter removes every null are left out.
    """
    filtering = pa.schema([files.needed.field(name) for name in files.filter_columns])
    removed = {name for name in filtering.names if rules_out(files.filter, filtering, pc.field(name).is_null())}
    refused = {column.name for column in files.schema if column.name not in removed and refuses_nulls(column)}
    needed = files.needed.names
    names = [dict(zip(projection.sources, needed, strict=True)) for projection in files.projections]
    missing = [
        [name for name, source in zip(needed, projection.sources, strict=True) if source is None and name in refused]
        for projection in files.projections
    ]
    for number, footer in enumerate(footers):
        file = footer.file
        projection = files.projected.get(file.path, 0)
        if not footer.nulls and not missing[projection]:
            continue
        path = files.manifest.full_path(file.path)
        selected = range(len(file.row_groups)) if files.selection is None else files.selection[number]
        for found in footer.nulls:
            name = names[projection].get(found.column, "")
            if name in refused and found.row_group in selected:
                yield f"{null_message(name, found.nulls)} (row group {found.row_group} of {path})"
        values = files.constants_of(file.path)
        first = next((group for group in selected if file.row_groups[group].rows), None)
        for name in missing[projection]:
            if values.get(name) is None and first is not None:
                message = f"{null_message(name, file.row_groups[first].rows)} (row group {first} of {path})"
                home = None if name in values else _home(files, footers, name)
                if home is not None:
                    message = f"column {name!r} is in {home} but not in {path}, where it is null: {message}"
                yield message


def _home(files: OpenedFiles, footers: Sequence[Footer], column: str) -> str | None:
    """Return a file that has a column."""
    index = files.needed.get_field_index(column)
    paths = (footer.file.path for footer in footers)
    home = next((path for path in paths if files.projection(path).sources[index] is not None), None)
    return None if home is None else files.manifest.full_path(home)


def check_columns(opened_files: Opened, options: ReadOptions) -> None:
    """Raise now what would otherwise be raised in the middle of an epoch.

    Raises:
        ColumnError: If the row id column has the name of another column; if a column has nulls, by the footers, and
            cannot be delivered with them; or if rows of its type cannot be filtered or shuffled.
    """
    require_no_column(options.row_id_column, (*opened_files.schema.names, *opened_files.filter_columns))
    if opened_files.announced_nulls is not None:
        raise ColumnError(opened_files.announced_nulls)
    if opened_files.filter is not None:
        require_selectable(opened_files.schema)
    if options.row_shuffle_seed is not None:
        require_selectable(opened_files.delivered_schema)


def require_no_column(row_id_column: str | None, names: Collection[str]) -> None:
    """Raise a ColumnError if the row id column has the name of another column."""
    if row_id_column in names:
        msg = f"row_id_column={row_id_column!r} is the name of a column of the files: choose another"
        raise ColumnError(msg)


def require_selectable(schema: pa.Schema) -> None:
    """Raise a ColumnError if rows of a column cannot be left out or shuffled."""
    for column in schema:
        _require_selectable(column)


def _require_selectable(column: pa.Field) -> None:
    try:
        row = pa.chunked_array([pa.nulls(1, column.type)])
        row.take(pa.array([0]))
        row.filter(pa.array([True]))
    except pa.ArrowException as error:
        raise ColumnError(f"rows of column {column.name!r} can be neither filtered nor shuffled: {error}") from None
