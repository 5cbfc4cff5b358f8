"""The sources of a mixture: described, opened, and their columns put into one schema."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.columns.transform import null_message
from torch_dataloader_utils.dataset.discovery import Request
from torch_dataloader_utils.dataset.file_set import FileSet
from torch_dataloader_utils.dataset.kept_rows import with_kept_rows
from torch_dataloader_utils.dataset.manifest_file import parse_kept_rows
from torch_dataloader_utils.dataset.transforms import with_transform
from torch_dataloader_utils.errors import ColumnError, TransformError
from torch_dataloader_utils.formats.opened_files import OpenedFiles, files_of
from torch_dataloader_utils.formats.row_packing import RowGroupPacking
from torch_dataloader_utils.formats.row_transform import Transform
from torch_dataloader_utils.formats.schema import FileSchema, Projection, unified
from torch_dataloader_utils.formats.text.footer import Cutting


@dataclass(frozen=True, slots=True)
class SourceDescription:
    """Which rows a source of a mixture has. Nothing is accessed before the mixture is made.

    Attributes:
        text: What the user gave, for messages: the path, or the table's name.
        file_set: Returns the files, given how finely text is cut.
        columns: The columns to deliver, in this order; None for all.
        filters: Which rows to deliver; None for all.
        count_rows: Whether rows that only reading tells are counted when the source is opened.
        unknown_rows: Why the number of rows is unknown, if they are not counted; None where it is known.
        manifest: The result of `dump_manifest` that the files are taken from, or None.
        transform: What makes other rows of the rows, and what the user calls it; None for nothing.
    """

    text: str
    file_set: Callable[[Cutting], FileSet] = field(repr=False)
    columns: list[str] | None
    filters: pc.Expression | None
    count_rows: bool
    unknown_rows: str | None
    manifest: bytes | None = field(default=None, repr=False)
    transform: tuple[Transform, str | None] | None = field(default=None, repr=False)


def require_sources(sources: object) -> dict[str, SourceDescription]:
    """Return the sources by name, in their order.

    Raises:
        TypeError: If it is no mapping from names to sources.
        ValueError: If there is none, or the rows of one are not known.
    """
    if not isinstance(sources, Mapping):
        raise TypeError(f"sources is {type(sources).__name__}, expected a mapping from names to Source")
    if not sources:
        raise ValueError("sources is empty: name at least one")
    for name, source in sources.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"sources has the name {name!r}, expected a string that is not empty")
        if "/" in name:
            raise ValueError(f"sources has the name {name!r}: a slash divides it from the paths of its files")
        if not isinstance(source, SourceDescription):
            raise TypeError(f"source {name!r} is {type(source).__name__}, expected a Source")
        if source.unknown_rows is not None:
            msg = f"source {name!r} ({source.text}): {source.unknown_rows}, and a mixture has to know that; "
            raise ValueError(f"{msg}make the Source with count_rows=True, which counts them once")
    return dict(sources)


def require_rows(name: str, weight: Fraction, rows: int) -> None:
    """Raise a ValueError if a source has a weight, and no row to deliver."""
    if weight and not rows:
        msg = f"source {name!r} has the weight {float(weight):g} of 1, and its files, or its filter or transform, "
        raise ValueError(f"{msg}leave no row: give it the weight 0, or leave it out")


def open_sources(
    sources: Mapping[str, SourceDescription], request: Request, cutting: Cutting, source_column: str | None
) -> dict[str, OpenedFiles]:
    """Open every source once, and give all of them the same columns.

    Raises:
        ColumnError: If a source's columns do not fit, or those of several sources cannot be unified; the message names
            the sources and the column.
    """
    opened = {name: _opened(name, source, request, cutting) for name, source in sources.items()}
    schema = _common_schema(opened, request.row_id_column)
    if source_column is not None:
        homes = [
            name
            for name, files in opened.items()
            if source_column in (*files.delivered_schema.names, *files.needed.names)
        ]
        if homes:
            msg = f"source_column={source_column!r} is the name of a column of source {homes[0]!r}: choose another"
            raise ColumnError(msg)
        if request.new_packing is None:
            schema = schema.append(pa.field(source_column, pa.int64()))
    if request.new_packing is not None:
        packing = request.new_packing(schema)
        if source_column in packing.packing.outputs:
            raise ColumnError(f"source_column={source_column!r} is the name of an output of Packing: choose another")
        return {
            name: _packed(
                name,
                sources[name],
                _with_made_schema(name, files, schema, None, {})
                if files.makes_rows
                else _with_schema(name, files, schema, opened, request.refuses_nulls),
                packing.with_constants({} if source_column is None else {source_column: number}),
            )
            for number, (name, files) in enumerate(opened.items())
        }
    return {
        name: _with_made_schema(
            name, files, schema, request.row_id_column, {} if source_column is None else {source_column: number}
        )
        if files.makes_rows
        else _numbered(_with_schema(name, files, schema, opened, request.refuses_nulls), source_column, number)
        for number, (name, files) in enumerate(opened.items())
    }


def _opened(name: str, source: SourceDescription, request: Request, cutting: Cutting) -> OpenedFiles:
    """Open a source, or raise an error that names it."""
    try:
        own = replace(request, columns=source.columns, filters=source.filters)
        if source.transform is not None:  # it may fill nulls
            own = replace(own, refuses_nulls=_refuses_none)
        files = files_of(source.file_set(cutting).open(own), "a source")
        if source.transform is not None:
            files = with_transform(files, *source.transform, request.row_id_column)
    except (ValueError, FileNotFoundError) as error:
        raise _of_source(name, error) from error.__cause__
    if request.new_packing is not None or (files.filter is None and not files.makes_rows):
        return files
    return _counted(name, source, files, request.row_id_column)


def _packed(name: str, source: SourceDescription, files: OpenedFiles, packing: RowGroupPacking) -> OpenedFiles:
    """Return a source whose documents are packed, with the number of its sequences."""
    return _counted(name, source, replace(files, packing=packing), None)


def _counted(name: str, source: SourceDescription, files: OpenedFiles, row_id_column: str | None) -> OpenedFiles:
    """Return a source with what is delivered of each row group counted, or raise an error that names the source."""
    known = None if source.manifest is None else parse_kept_rows(source.manifest)
    try:
        return with_kept_rows(files, known, row_id_column)
    except (ColumnError, TransformError) as error:
        raise _of_source(name, error) from error.__cause__


def _of_source(name: str, error: ValueError | FileNotFoundError) -> ValueError | FileNotFoundError:
    """Return an error of a source with a message that names it."""
    kinds: tuple[type[ValueError | FileNotFoundError], ...]
    kinds = ColumnError, TransformError, ValueError, FileNotFoundError
    return next(kind for kind in kinds if isinstance(error, kind))(f"source {name!r}: {error}")


def _refuses_none(column: pa.Field) -> bool:  # noqa: ARG001 - nulls of no column are refused
    return False


def _common_schema(opened: Mapping[str, OpenedFiles], row_id_column: str | None) -> pa.Schema:
    """Return the columns of all sources: the first one's, then those that only others have."""
    whole = unified(
        FileSchema(f"source {name!r}", _without_row_ids(name, files, row_id_column)) for name, files in opened.items()
    )
    for column, problem in whole.problems.items():
        raise ColumnError(f"column {column!r} {problem}")
    return whole.schema


def _without_row_ids(name: str, files: OpenedFiles, row_id_column: str | None) -> pa.Schema:
    """Return the columns that a source delivers, without the row ids, which its transform has to return."""
    columns = files.delivered_schema
    if row_id_column is None or files.transform is None:
        return columns
    number = columns.get_field_index(row_id_column)
    if number < 0 or columns.field(number).type != pa.int64():
        msg = f"source {name!r}: row_id_column={row_id_column!r} is delivered of every source, and the transform does "
        raise ColumnError(f"{msg}not return it as int64: let it return the column that it is called with")
    return columns.remove(number)


def _with_made_schema(
    name: str, files: OpenedFiles, schema: pa.Schema, row_id_column: str | None, constants: Mapping[str, int]
) -> OpenedFiles:
    """Return a source with a transform that delivers the columns of all sources, some of them with one value."""
    assert files.transform is not None  # noqa: S101 - the caller asks
    transform = replace(files.transform, common=schema, constants=constants, row_id_column=row_id_column)
    return replace(files, transform=transform, source=name)


def _with_schema(
    name: str,
    files: OpenedFiles,
    schema: pa.Schema,
    opened: Mapping[str, OpenedFiles],
    refuses_nulls: Callable[[pa.Field], bool],
) -> OpenedFiles:
    """Return a source that delivers the columns of all sources. Those that it lacks are null."""
    own = files.schema.names
    for filtering in files.filter_columns:
        if filtering not in own and filtering in schema.names:
            home = next(other for other in opened if filtering in opened[other].delivered_schema.names)
            msg = (
                f"source {name!r} filters by column {filtering!r} and does not deliver it, which source {home!r} does: "
            )
            raise ColumnError(f"{msg}name it in the columns of {name!r} too, or in those of neither")
    nulls = files.announced_nulls
    rows = files.manifest.rows
    for column in schema:
        if column.name not in own and rows and refuses_nulls(column) and nulls is None:
            homes = [other for other in opened if column.name in opened[other].delivered_schema.names]
            if homes:
                nulls = (
                    f"column {column.name!r} is in source {homes[0]!r} but not in source {name!r}, where it is null: "
                )
                nulls += null_message(column.name, rows)
    needed = pa.schema([*schema, *(files.needed.field(name) for name in files.filter_columns if name not in own)])
    places = {column: files.needed.get_field_index(column) for column in needed.names if column in files.needed.names}
    projections = tuple(map(partial(_rearranged, places=places, columns=needed.names), files.projections))
    return replace(files, schema=schema, needed=needed, projections=projections, announced_nulls=nulls, source=name)


def _rearranged(projection: Projection, places: Mapping[str, int], columns: Collection[str]) -> Projection:
    """Return how the same files become other columns: some of those of a projection, and columns that they lack."""
    sources = tuple(projection.sources[places[name]] if name in places else None for name in columns)
    return projection.of(sources)


def _numbered(files: OpenedFiles, column: str | None, number: int) -> OpenedFiles:
    """Return a source with its place among the sources as a column."""
    if column is None:
        return files
    columns = files.constant_columns
    before = {path: (*values, *(None for _ in columns[len(values) :])) for path, values in files.constants.items()}
    constants = {file.path: (*before.get(file.path, (None,) * len(columns)), number) for file in files.manifest.files}
    return replace(files, constants=constants, constant_columns=(*columns, column))
