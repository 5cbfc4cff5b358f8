"""Files to a opened_files: what they say of themselves read and put together, columns and filter checked against it."""

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

__all__ = ["Annotations", "check_columns", "open_files"]


NO_COLUMNS = pa.schema([])


@dataclass(frozen=True)
class Annotations:
    """What is known of files beside what they say themselves: from their paths, or from the table that they are of.

    Attributes:
        schema: The dataset's columns, where a table says what they are; None where the files do.
        name_in_file: Gives, for a file's columns and a column of the table, the file's name of it, or None. Needed
            with `schema`.
        constant_schema: Columns that have one value for all of a file.
        constants: Their values in each file, by path.
        deleted: Places in a file of the rows that are deleted, int64, rising, by path.
        pin: What a table is pinned to: its ``snapshot_id`` or ``version``.
    """

    schema: pa.Schema | None = None
    name_in_file: Callable[[pa.Schema, str], str | None] | None = None
    constant_schema: pa.Schema = NO_COLUMNS
    constants: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    deleted: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    pin: Mapping[str, int] = field(default_factory=dict)

    def name_of(self, schema: pa.Schema, column: str) -> str | None:
        """Return a file's name of a column; None where it has none."""
        if self.name_in_file is not None:
            return self.name_in_file(schema, column)
        return column if column in schema.names else None


NOTHING = Annotations()


def open_files(
    storage: Storage,
    listing: Listing,
    file_format: Format,
    *,
    columns: Sequence[str] | None = None,
    filters: pc.Expression | None = None,
    refuses_nulls: Callable[[pa.Field], bool] = lambda _: False,
    known: KnownFooters | None = None,
    annotations: Annotations = NOTHING,
) -> OpenedFiles:
    """Read what every file says of itself, once, and check columns and filter against it.

    Args:
        storage: Where the files lie.
        listing: The files.
        file_format: Their format.
        columns: The columns to deliver; None for all.
        filters: Which rows to deliver; None for all.
        refuses_nulls: The columns that cannot be delivered with nulls.
        known: What another opened files read, so that nothing has to be; or None.
        annotations: What is known of the files beside that.

    Returns:
        The opened_files.

    Raises:
        UnreadableFileError: If a file does not say what it should; the message names it.
        ColumnError: If a column is missing, its types cannot be unified, or the filter does not fit the columns.
    """

    def counts_nulls(column: pa.Field) -> bool:
        is_wanted = columns is None or column.name in columns or annotations.schema is not None
        return is_wanted and refuses_nulls(column)

    described = file_format.describe(storage, listing, known, counts_nulls)
    deletes, footers = _without_deleted(described.footers, annotations, listing.root)
    manifest = Manifest(listing.root, tuple(footer.file for footer in footers), file_format.unknown_rows is None)
    whole = _whole_schema(manifest, footers, annotations)
    filtering = () if filters is None else filter_columns(filters, whole.schema)
    delivered = whole.schema.names if columns is None else list(columns)
    for name in delivered:
        require_column(name, whole.schema, "")
    for name in [*delivered, *filtering]:
        if name in whole.problems:
            msg = f"column {name!r} {whole.problems[name]}"
            raise ColumnError(msg)
    needed = pa.schema([whole.schema.field(name) for name in dict.fromkeys([*delivered, *filtering])])
    projections = _Projections(manifest, footers, needed, annotations)
    selection = None
    if filters is not None:
        cases = [projections.case(footer, filtering, annotations) for footer in footers]
        by_statistics = file_format.select(replace(described, footers=footers), filters, whole.schema, filtering, cases)

        def is_ruled_out(guarantee: pc.Expression) -> bool:
            return rules_out(filters, whole.schema, filtering, guarantee)

        selection = _without_ruled_out(by_statistics, footers, cases, is_ruled_out)
    taken = {name for name in filtering if filters is not None and takes_nulls(filters, whole.schema, filtering, name)}
    refused = {name for name in delivered if name not in taken and refuses_nulls(whole.schema.field(name))}
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
    opened_files = replace(opened_files, announced_nulls=tuple(_announced_nulls(opened_files, footers, refused)))
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


def _without_deleted(
    footers: Sequence[Footer], annotations: Annotations, root: str
) -> tuple[dict[str, Deletes], Sequence[Footer]]:
    """Return footers whose row groups have only the rows that are not deleted, and which are, by path."""
    if not annotations.deleted:
        return {}, footers
    deletes: dict[str, Deletes] = {}
    left = []
    for footer in footers:
        positions = annotations.deleted.get(footer.file.path)
        if positions is None or not len(positions):
            left.append(footer)
            continue
        file = footer.file
        if positions[0] < 0 or positions[-1] >= file.rows:
            path = f"{root_prefix(root)}{file.path}"
            msg = f"the table deletes row {positions[-1]} of {path}, which has {file.rows} rows"
            raise UnreadableFileError(msg)
        deletes[file.path] = own = Deletes(positions, tuple(group.rows for group in file.row_groups))
        groups = tuple(
            RowGroup(group.rows - len(own.within(number)), group.bytes) for number, group in enumerate(file.row_groups)
        )
        digest = hashlib.blake2b(positions.tobytes(), key=file.digest.encode()[:64], digest_size=8).hexdigest()
        left.append(
            replace(footer, file=DataFile(file.path, file.size, digest, groups, file.etag, file.modified), nulls=())
        )
    return deletes, left


class _Projections:
    """How the columns of all files become the needed ones; files of one schema share it."""

    def __init__(
        self, manifest: Manifest, footers: Sequence[Footer], needed: pa.Schema, annotations: Annotations
    ) -> None:
        self.distinct: list[Projection] = []
        self.numbers: dict[str, int] = {}
        by_schema: dict[int, int] = {}
        for footer in footers:
            schema = footer.schema
            if id(schema) not in by_schema:
                made = _projected(schema, needed, annotations, manifest.full_path(footer.file.path))
                if made not in self.distinct:
                    self.distinct.append(made)
                by_schema[id(schema)] = self.distinct.index(made)
            if by_schema[id(schema)]:
                self.numbers[footer.file.path] = by_schema[id(schema)]
        self._needed = needed

    def of(self, path: str) -> Projection:
        """Return a file's."""
        return self.distinct[self.numbers.get(path, 0)]

    def case(self, footer: Footer, filtering: Sequence[str], annotations: Annotations) -> FileCase:
        """Return what holds for all rows of a file, and whether its statistics are those of the filter's columns."""
        projection = self.of(footer.file.path)
        values = dict(
            zip(annotations.constant_schema.names, annotations.constants.get(footer.file.path, ()), strict=False)
        )
        guarantees = []
        comparable = True
        for name in filtering:
            kind = self._needed.field(name).type
            opened_files = projection.sources[self._needed.get_field_index(name)]
            if opened_files is None:
                comparable &= name not in footer.schema.names
                value = values.get(name)
                is_it = pc.field(name).is_null() if value is None else pc.field(name) == pa.scalar(value, kind)
                guarantees.append(is_it)
            else:
                comparable &= opened_files == name and footer.schema.field(opened_files).type == kind
        return FileCase(reduce(operator.and_, guarantees) if guarantees else None, comparable)


def _projected(schema: pa.Schema, needed: pa.Schema, annotations: Annotations, path: str) -> Projection:
    """Return how a file's columns become the needed ones, or raise an error that names the file."""
    try:
        made = projected(schema, needed, partial(annotations.name_of, schema))
    except ColumnError as error:
        msg = f"{path}: {error}"
        raise ColumnError(msg) from None
    if annotations.schema is not None:
        _require_promotable(made, needed, path)
    return made


def _require_promotable(projection: Projection, needed: pa.Schema, path: str) -> None:
    """Raise unless a file's types are those of the table, or such as it may have grown out of."""
    for column, opened_files in zip(needed, projection.sources, strict=True):
        own = None if opened_files is None else projection.stored.field(opened_files).type
        if own is not None and not grew_out_of(column.type, own):
            msg = (
                f"column {column.name!r} is {own} in {path} but {column.type} in the table: choose `columns` without it"
            )
            raise ColumnError(msg)


def _without_ruled_out(
    selection: Sequence[Sequence[int]] | None,
    footers: Sequence[Footer],
    cases: Sequence[FileCase],
    is_ruled_out: Callable[[pc.Expression], bool],
) -> tuple[tuple[int, ...], ...] | None:
    """Leave out files that are ruled out by what holds for all of their rows."""
    if selection is None and all(case.guarantee is None for case in cases):
        return None
    known: dict[str, bool] = {}
    chosen: list[tuple[int, ...]] = []
    for number, (footer, case) in enumerate(zip(footers, cases, strict=True)):
        is_out = False
        if case.guarantee is not None:
            text = str(case.guarantee)
            if text not in known:
                known[text] = is_ruled_out(case.guarantee)
            is_out = known[text]
        every = range(len(footer.file.row_groups)) if selection is None else selection[number]
        chosen.append(() if is_out else tuple(every))
    return tuple(chosen)


def _announced_nulls(
    opened_files: OpenedFiles, footers: Sequence[Footer], refused: set[str]
) -> Iterator[AnnouncedNulls]:
    """Yield nulls that footers announce in columns that cannot be delivered with them."""
    names = [dict(zip(one.sources, opened_files.needed.names, strict=True)) for one in opened_files.projections]
    lacking = [
        [
            name
            for name, stored in zip(opened_files.needed.names, one.sources, strict=True)
            if stored is None and name in refused
        ]
        for one in opened_files.projections
    ]
    for number, footer in enumerate(footers):
        file = footer.file
        projection = opened_files.projected.get(file.path, 0)
        if not footer.nulls and not lacking[projection]:
            continue
        path = opened_files.manifest.full_path(file.path)
        selected = range(len(file.row_groups)) if opened_files.selection is None else opened_files.selection[number]
        for found in footer.nulls:
            name = names[projection].get(found.column)
            if name in refused and found.row_group in selected:
                yield AnnouncedNulls(path, replace(found, column=name))
        values = opened_files.constants_of(file.path)
        group = next((one for one in selected if file.row_groups[one].rows), None)
        for name in lacking[projection]:
            if values.get(name) is None and group is not None:
                announced = NullCount(name, group, file.row_groups[group].rows)
                yield AnnouncedNulls(path, announced, None if name in values else _home(opened_files, footers, name))


def _home(opened_files: OpenedFiles, footers: Sequence[Footer], column: str) -> str | None:
    """Return a file that has a column."""
    place = opened_files.needed.get_field_index(column)
    paths = (footer.file.path for footer in footers)
    home = next((path for path in paths if opened_files.projection(path).sources[place] is not None), None)
    return None if home is None else opened_files.manifest.full_path(home)


def check_columns(opened_files: OpenedFiles, options: ReadOptions) -> None:
    """Raise now what would otherwise be raised in the middle of an epoch.

    Raises:
        ColumnError: If the row id column has the name of another, or a column cannot be delivered as asked: its
            footers announce nulls that have no value, or its type cannot be filtered or mixed.
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
        msg = f"rows of column {column.name!r} can be neither filtered nor mixed: {error}"
        raise ColumnError(msg) from None
