"""One schema for files whose columns differ, and how each file's columns become that schema's.

Types are unified as ``pyarrow.unify_schemas`` does with permissive promotion
(https://arrow.apache.org/docs/python/generated/pyarrow.unify_schemas.html): a column that a file lacks is null there,
integers become wider integers or floats. A cast that would change a value is an error of its row group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from torch_dataloader_utils.columns.arrow import children, encoded_schema, with_fields
from torch_dataloader_utils.errors import ColumnError, UnreadableFileError

MOST_DIGITS = {pa.decimal128: 38, pa.decimal256: 76}
"""The digits that a decimal may have
(https://arrow.apache.org/docs/cpp/api/datatype.html, ``Decimal128Type`` and ``Decimal256Type``)."""


@dataclass(frozen=True, slots=True)
class FileSchema:
    """A file, as messages name it, and its columns."""

    path: str
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class Projection:
    """How the columns of files of one schema become those that are needed.

    Attributes:
        stored: The files' columns to read, with their types.
        sources: For each needed column the files' name of it; None where they have none.
    """

    stored: pa.Schema
    sources: tuple[str | None, ...]

    def of(self, sources: tuple[str | None, ...]) -> Projection:
        """Return the projection to other needed columns, which some of the same stored columns become."""
        stored = dict.fromkeys(source for source in sources if source is not None)
        return Projection(pa.schema([self.stored.field(source) for source in stored]), sources)

    def apply(self, table: pa.Table, needed: pa.Schema, constants: Mapping[str, Any]) -> pa.Table:
        """Return the needed columns, in the dataset's types, of a table of the stored ones.

        `constants` are the values of columns that have one for the whole file. A column that was read as a dictionary
        stays one.

        Raises:
            UnreadableFileError: If a column was read in another type than the file was listed with.
            ColumnError: If a value does not fit the dataset's type.
        """
        is_needed = self.sources == tuple(needed.names) and self.stored.equals(needed)
        if is_needed and self.sources and table.schema.equals(self.stored):
            if table.schema.equals(needed, check_metadata=True):
                return table
            return pa.Table.from_arrays(table.columns, schema=needed)  # most tables, in a part of the time
        for column, expected in zip(table.schema, self.stored, strict=True):
            if not _is_read_as(column.type, expected.type):  # else it would be cast
                msg = f"column {expected.name!r} is {column.type}, and was {expected.type} when the file was listed"
                raise UnreadableFileError(msg)
        columns = [
            _repeated(constants.get(field.name), field, len(table))
            if source is None
            else _cast(table[source], self.stored.field(source).type, field)
            for field, source in zip(needed, self.sources, strict=True)
        ]
        return pa.table(columns, schema=encoded_schema(needed, columns)) if columns else table.select([])


def _repeated(value: Any, field: pa.Field, rows: int) -> pa.Array:
    return pa.nulls(rows, field.type) if value is None else pa.repeat(pa.scalar(value, field.type), rows)


def _is_read_as(dtype: pa.DataType, stored: pa.DataType) -> bool:
    """Whether values are of the type that the file has, or in a dictionary of such."""
    return bool(dtype == stored or (pa.types.is_dictionary(dtype) and dtype.value_type == stored))


def _cast(column: pa.ChunkedArray, stored: pa.DataType, field: pa.Field) -> pa.ChunkedArray:
    if column.type == field.type or (stored == field.type and _is_read_as(column.type, stored)):
        return column
    try:
        return column.cast(field.type)
    except pa.ArrowException as error:
        msg = f"column {field.name!r} is {column.type} here and {field.type} in the dataset: {error}; write the files "
        msg += "with one type, or choose `columns` without it"
        raise ColumnError(msg) from None


@dataclass(frozen=True, slots=True)
class Unified:
    """One schema for all files.

    Attributes:
        schema: The first file's columns, in its order, then those that only others have; all nullable.
        problems: Columns that cannot be delivered, and what is wrong with each.
    """

    schema: pa.Schema
    problems: Mapping[str, str]


@dataclass(frozen=True)
class AllColumns:
    """The columns of all files, delivered or not: an expression may need them later.

    Attributes:
        files: A file of each distinct schema.
        numbers: The index of a file's schema among those of `files`, by relative path; 0 where it is left out.
        constants: Columns that have one value in all rows of a file.
        table: The columns as a table defines them; None where the files do.
        name_in_file: For a table: returns, for a file's columns and a column of the table, the file's name of it, or
            None. Else None.
        types_option: What in ``format_options`` gives types that the files do not tell.
    """

    files: tuple[FileSchema, ...]
    numbers: Mapping[str, int]
    constants: pa.Schema
    table: pa.Schema | None = None
    name_in_file: Callable[[pa.Schema, str], str | None] | None = None
    types_option: str | None = None

    @cached_property
    def unified(self) -> Unified:
        """One schema for all files."""
        return self._unified(None)

    def of(self, wanted: Collection[str]) -> Unified:
        """Return one schema for some columns and the constants, in any order; for all if a column does not exist.

        To unify a thousand columns takes longer than to read two of them.
        """
        wanted = frozenset(wanted)
        found = self._unified(wanted)
        return found if wanted.issubset(found.schema.names) else self.unified

    def _unified(self, wanted: Collection[str] | None) -> Unified:
        if self.table is not None:
            return Unified(self.table, {})
        whole = unified(self.files, wanted, self.types_option)
        problems = dict(whole.problems)
        from_paths = []
        for column in self.constants:
            if column.name not in whole.schema.names:
                from_paths.append(column)
                continue
            home = next(file.path for file in self.files if column.name in file.schema.names)
            problems[column.name] = f"is both in the paths of files and in {home}: open the dataset without "
            problems[column.name] += (
                "`partitioning`, write the files without it, or choose `columns` and `filters` without it"
            )
        return Unified(pa.schema([*whole.schema, *from_paths]), problems)

    def name_of(self, schema: pa.Schema, column: str) -> str | None:
        """Return a file's name of a column; None if the file does not have the column."""
        if self.name_in_file is not None:
            return self.name_in_file(schema, column)
        return column if schema.get_all_field_indices(column) else None


def unified(
    files: Iterable[FileSchema], wanted: Collection[str] | None = None, types_option: str | None = None
) -> Unified:
    """Return one schema for all files, or for the wanted columns alone.

    Equal schemas should be one object: each object is examined once.
    """
    types: dict[str, pa.DataType] = {}
    homes: dict[str, str] = {}
    problems: dict[str, str] = {}
    seen: dict[int, pa.Schema] = {}  # held, so that no other schema gets the same id
    for file in files:
        if id(file.schema) in seen:
            continue
        seen[id(file.schema)] = file.schema
        names = file.schema.names
        for name, count in Counter(names).items():
            if count > 1 and (wanted is None or name in wanted):
                problems[name] = f"stands {count} times in the schema of {file.path}, so it cannot be delivered by name"
        if wanted is None:
            columns = list(zip(names, file.schema.types, strict=True))
        else:
            columns = [(name, file.schema.field(place).type) for place, name in enumerate(names) if name in wanted]
        for name, stored in columns:
            home, dtype = homes.setdefault(name, file.path), delivered_type(stored)
            known = types.setdefault(name, dtype)
            if known is dtype or known == dtype:
                continue
            common = _common(known, dtype)
            if common is None:
                problem = f"is {dtype} in {file.path} but {known} in {home}, which have no common type: "
                if types_option is not None:
                    problem += f"give its type by format_options={{{types_option!r}: ...}}, "
                problem += "write the files with one type, or choose `columns` without it"
                problems.setdefault(name, problem)
            else:
                types[name] = common
    return Unified(pa.schema(list(types.items())), problems)


def _common(known: pa.DataType, dtype: pa.DataType) -> pa.DataType | None:
    """Return a type that both can be cast to; None also where pyarrow would change values silently."""
    if _would_change_values(known, dtype):
        return None
    try:
        common = pa.unify_schemas([pa.schema([("", known)]), pa.schema([("", dtype)])], promote_options="permissive")
    except (pa.ArrowException, TypeError):
        return None
    return _with_all_digits(common.types[0], known, dtype)


def _with_all_digits(common: pa.DataType, *dtypes: pa.DataType) -> pa.DataType | None:
    """Return a common type in which decimals, at any depth, have a digit for each of an integer's; None if none can.

    pyarrow's own has one too few for its own cast (seen in 17.0 and in 26.0).
    """
    if pa.types.is_nested(common):
        fields = children(common)
        found = [_with_all_digits(one.type, *_parts(dtypes, place, one.name)) for place, one in enumerate(fields)]
        if any(dtype is None for dtype in found):
            return None
        return with_fields(common, [one.with_type(dtype) for one, dtype in zip(fields, found, strict=True)])
    integers = [dtype for dtype in dtypes if pa.types.is_integer(dtype)]
    if not integers or not pa.types.is_decimal(common):
        return common
    largest = [2 ** (dtype.bit_width - pa.types.is_signed_integer(dtype)) - 1 for dtype in integers]
    precision = max(common.precision, *(len(str(number)) + common.scale for number in largest))
    if precision > MOST_DIGITS[pa.decimal256]:
        return None
    is_long = pa.types.is_decimal256(common) or precision > MOST_DIGITS[pa.decimal128]
    return (pa.decimal256 if is_long else pa.decimal128)(precision, common.scale)


def _parts(dtypes: Iterable[pa.DataType], place: int, name: str) -> list[pa.DataType]:
    """Return the types of a field of nested types: of that name in structs, at that place in others."""
    fields = [
        next((field for field in children(dtype) if field.name == name), None)
        if pa.types.is_struct(dtype)
        else next(iter(children(dtype)[place:]), None)
        for dtype in dtypes
    ]
    return [field.type for field in fields if field is not None]


def _would_change_values(dtype: pa.DataType, other: pa.DataType) -> bool:
    """Whether pyarrow would change values silently to a common type, at any depth."""
    dtypes = (dtype, other)
    if all(map(pa.types.is_dictionary, dtypes)):
        return _would_change_values(dtype.value_type, other.value_type)
    if any(map(pa.types.is_decimal, dtypes)) and any(map(pa.types.is_floating, dtypes)):
        return True
    if any(map(_is_text, dtypes)) and any(map(_is_binary, dtypes)):
        return True
    if all(map(pa.types.is_struct, dtypes)):
        others = {field.name: field.type for field in other}
        parts = [(field.type, others[field.name]) for field in dtype if field.name in others]
    else:  # the values of lists, or the keys and items of maps
        parts = [(one.type, another.type) for one, another in zip(children(dtype), children(other), strict=False)]
    return any(_would_change_values(*part) for part in parts)


def _is_text(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_string(dtype) or pa.types.is_large_string(dtype))


def _is_binary(dtype: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_binary(dtype) or types.is_large_binary(dtype) or types.is_fixed_size_binary(dtype))


LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
"""What a table's lists may be in its files."""


def grew_out_of(dtype: pa.DataType, stored: pa.DataType) -> bool:
    """Whether a table's column of type `dtype` may be of type `stored` in files older than a change of the table.

    A value that does not fit is still an error of its row group.
    """
    if isinstance(stored, pa.BaseExtensionType):
        stored = stored.storage_type
    if pa.types.is_dictionary(stored):
        stored = stored.value_type
    stored = SMALL.get(stored.id, stored)
    if dtype == stored or pa.types.is_null(stored):
        return True
    if pa.types.is_nested(dtype):
        return _parts_grew_out_of(dtype, stored)
    if pa.types.is_decimal(dtype):
        return bool(pa.types.is_decimal(stored) and dtype.scale == stored.scale and dtype.precision >= stored.precision)
    if pa.types.is_timestamp(dtype):
        return pa.types.is_timestamp(stored) and (dtype.tz is not None or stored.tz is None)  # INT96 has no time zone
    if not all(pa.types.is_integer(one) or pa.types.is_floating(one) for one in (dtype, stored)):
        return False
    common = _common(dtype, stored)
    return common is not None and bool(common == dtype)


def _parts_grew_out_of(dtype: pa.DataType, stored: pa.DataType) -> bool:
    """Whether the same is true of each part of nested types."""
    if pa.types.is_struct(dtype) and pa.types.is_struct(stored):
        now = {field.name: field.type for field in dtype}  # fields that were added are null
        parts = [(now.get(field.name), field.type) for field in stored]
    elif pa.types.is_map(dtype) and pa.types.is_map(stored):
        parts = [(dtype.key_type, stored.key_type), (dtype.item_type, stored.item_type)]
    elif pa.types.is_list(dtype) and any(is_kind(stored) for is_kind in LISTS):
        parts = [(dtype.value_type, stored.value_type)]
    else:
        return False
    return all(part is not None and grew_out_of(part, before) for part, before in parts)


def projected(schema: pa.Schema, needed: pa.Schema, name_of: Callable[[str], str | None]) -> Projection:
    """Return how files of a schema become the needed columns.

    `name_of` returns the name that a needed column has in these files; None where they do not have it.
    """
    sources = tuple(name_of(field.name) for field in needed)
    stored = dict.fromkeys(source for source in sources if source is not None)
    return Projection(pa.schema([schema.field(source) for source in stored]), sources)


VIEWS = {pa.string_view().id: pa.string(), pa.binary_view().id: pa.binary()}
SMALL = VIEWS | {pa.large_string().id: pa.string(), pa.large_binary().id: pa.binary()}
"""Types by the number of their kind: to write a type's name takes longer, and a file may have thousands of columns."""


def delivered_type(dtype: pa.DataType) -> pa.DataType:
    """Return the type that a column is delivered in: the file's, except for views, which pyarrow cannot filter."""
    return VIEWS.get(dtype.id, dtype)


def table_column_type(dtype: pa.DataType) -> pa.DataType:
    """Return the type that a table's column is delivered in: no extensions, all nullable, nothing large."""
    if isinstance(dtype, pa.BaseExtensionType):
        dtype = dtype.storage_type
    inner = [(field.name, table_column_type(field.type)) for field in children(dtype)]
    if pa.types.is_map(dtype):
        return pa.map_(*(part for _, part in inner))
    if pa.types.is_struct(dtype):
        return pa.struct(inner)
    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype):
        return pa.list_(pa.field(*inner[0]))
    return SMALL.get(dtype.id, dtype)
