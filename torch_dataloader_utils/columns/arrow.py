"""Arrow tables and types: copies of slices, what a type holds, and columns found by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.errors import ColumnError, nearest

ROWS_OF_A_VALUE = 4
"""So many rows or more for each value of a dictionary, and the values take little beside what is made of each once."""

BYTES_FOR_A_ROW = 32
"""So many bytes of a dictionary for each row, or less, and values that no row has take little to make and to send."""


def children(dtype: pa.DataType) -> list[pa.Field]:
    """Return the fields of a nested type; none of another."""
    if isinstance(dtype, pa.BaseExtensionType):
        dtype = dtype.storage_type
    if pa.types.is_map(dtype):
        return [dtype.key_field, dtype.item_field]
    return [dtype.field(number) for number in range(dtype.num_fields)] if pa.types.is_nested(dtype) else []


def with_fields(dtype: pa.DataType, fields: Sequence[pa.Field]) -> pa.DataType:
    """Return a struct, map or list with these fields in the place of its `children`; another type as it is."""
    if pa.types.is_struct(dtype):
        return pa.struct(fields)
    if pa.types.is_map(dtype):
        return pa.map_(*fields, keys_sorted=dtype.keys_sorted)
    if pa.types.is_fixed_size_list(dtype):
        return pa.list_(fields[0], dtype.list_size)
    if pa.types.is_list(dtype):
        return pa.list_(fields[0])
    return pa.large_list(fields[0]) if pa.types.is_large_list(dtype) else dtype


def copied(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a copy that keeps no other rows in memory."""
    # concat_arrays copies even a single array; a slice would keep the whole buffers that it points into. Strings of all
    # chunks together may be too many for one array.
    return pa.chunked_array([pa.concat_arrays([chunk]) for chunk in column.chunks], column.type)


def stacked(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of all tables as one table."""
    if len(tables) == 1:
        return tables[0]
    if tables[0].num_columns:
        first = tables[0].schema
        if all(table.schema.equals(first) for table in tables):
            return pa.concat_tables(tables)
        columns = [joined(columns) for columns in zip(*(table.columns for table in tables), strict=True)]
        return pa.table(columns, schema=encoded_schema(first, columns))
    # pyarrow's concat_tables loses the number of rows of tables without columns.
    return pa.table({"": pa.nulls(sum(map(len, tables)))}).select([])


def joined(columns: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
    """Return the rows of all columns as one. Where only some of them are encoded in dictionaries, none is then."""
    if any(column.type != columns[0].type for column in columns):
        columns = list(map(without_dictionary, columns))
    return pa.chunked_array([chunk for column in columns for chunk in column.chunks], columns[0].type)


def encoded_schema(schema: pa.Schema, columns: Sequence[pa.ChunkedArray]) -> pa.Schema:
    """Return a schema with the types of those columns that are encoded in dictionaries, or are not."""
    types = [column.type for column in columns]
    if types == schema.types:
        return schema
    return pa.schema([field.with_type(dtype) for field, dtype in zip(schema, types, strict=True)], schema.metadata)


def is_encoded_bytes(dtype: pa.DataType) -> bool:
    """Whether values are strings or binary in dictionaries."""
    return bool(pa.types.is_dictionary(dtype) and is_bytes(dtype.value_type))


def has_few_values(column: pa.ChunkedArray) -> bool:
    """Whether a column is encoded in dictionaries of strings or binary that have few values for its rows.

    Dictionaries of a part of the rows may have large values that none of these has.
    """
    if not is_encoded_bytes(column.type):
        return False
    dictionaries = [chunk.dictionary for chunk in column.chunks]
    if not 0 < ROWS_OF_A_VALUE * sum(map(len, dictionaries)) <= len(column):
        return False
    # Of whole buffers first: to look at parts of them, Arrow lets go of Python's lock.
    if sum(each.get_total_buffer_size() for each in dictionaries) <= BYTES_FOR_A_ROW * len(column):
        return True
    size = sum(map(nbytes, dictionaries))
    return size <= BYTES_FOR_A_ROW * len(column) or size <= sum(map(_looked_up_bytes, column.chunks))


def _looked_up_bytes(chunk: pa.DictionaryArray) -> int:
    """Return the bytes of all rows' strings or binary together."""
    return pc.sum(pc.binary_length(chunk.dictionary).take(chunk.indices)).as_py() or 0


def without_rows(schema: pa.Schema) -> pa.Table:
    """Return a table of these columns without rows, also of those of which pyarrow's `empty_table` cannot make one.

    These are tensors with a permutation, and structs that hold values of extension types, such as UUIDs (seen in 26.0).
    """
    return pa.table([pa.nulls(0, column.type) for column in schema], schema=schema)


def sliced(table: pa.Table, start: int, stop: int | None = None) -> pa.Table:
    """Return the rows of a table from one to another, or to its end."""
    rows = max(0, min(len(table), len(table) if stop is None else stop) - start)
    if table.num_columns:
        return table.slice(start, rows)
    # pyarrow's slice of a table without columns keeps the number of rows (seen in 26.0).
    return pa.table({"": pa.nulls(rows)}).select([])


def takeable(table: pa.Table) -> pa.Table:
    """Return the same rows in a form on which `take` and `filter` are correct.

    For slices of fixed-size lists inside fixed-size lists pyarrow's `take` and `filter` ignore a part of the offset and
    silently return wrong values (seen in 17.0 and in 26.0). A copy has no offset.
    """
    for index in nested_fixed_lists(table.schema):
        column = table.column(index)
        if any(chunk.offset for chunk in column.chunks):
            table = table.set_column(index, table.schema.field(index), copied(column))
    return table


def nested_fixed_lists(schema: pa.Schema) -> list[int]:
    """Return the indices of columns for which `takeable` may have to do something."""
    return [index for index, dtype in enumerate(schema.types) if _nests_fixed_lists(dtype)]


def _nests_fixed_lists(dtype: pa.DataType) -> bool:
    """Whether there are fixed-size lists inside fixed-size lists, at any depth."""
    if pa.types.is_fixed_size_list(dtype) and pa.types.is_fixed_size_list(dtype.value_type):
        return True
    return any(_nests_fixed_lists(dtype.field(index).type) for index in range(dtype.num_fields))


def without_dictionary(values: Any) -> Any:
    """Return the values of a dictionary-encoded array or column; views, which Arrow cannot look up, stay encoded."""
    dtype = values.type
    if not pa.types.is_dictionary(dtype) or is_view(dtype.value_type):
        return values
    return values.cast(dtype.value_type)


def any_type(dtype: pa.DataType, is_of: Callable[[pa.DataType], bool]) -> bool:
    """Whether a type, or one within it at any depth, the values of dictionaries included, is of a kind."""
    if is_of(dtype):
        return True
    if pa.types.is_dictionary(dtype):
        return any_type(dtype.value_type, is_of)
    if isinstance(dtype, pa.BaseExtensionType):
        return any_type(dtype.storage_type, is_of)
    return any(any_type(dtype.field(index).type, is_of) for index in range(dtype.num_fields))


def is_view(dtype: pa.DataType) -> bool:
    """Whether values are views of strings or binary, on which pyarrow has neither `take` nor `filter`."""
    return bool(pa.types.is_string_view(dtype) or pa.types.is_binary_view(dtype))


def is_list(dtype: pa.DataType) -> bool:
    """Whether rows of this type are lists that may differ in length."""
    return bool(pa.types.is_list(dtype) or pa.types.is_large_list(dtype))


def leaf_type(dtype: pa.DataType) -> pa.DataType:
    """Return the type of the values inside all lists, or the type itself if it is not a list."""
    while is_list(dtype) or pa.types.is_fixed_size_list(dtype):
        dtype = dtype.value_type
    return dtype


def offsets_of(array: pa.Array) -> npt.NDArray[np.signedinteger[Any]]:
    """Return where each row of lists, strings or binary begins in their values, and where the last one ends."""
    dtype, stored = array.type, array.buffers()[1]
    is_large = pa.types.is_large_list(dtype) or pa.types.is_large_string(dtype) or pa.types.is_large_binary(dtype)
    offset = np.dtype(np.int64 if is_large else np.int32)
    if stored is None or not len(array):  # an empty array may have no offsets to read
        return np.zeros(len(array) + 1, offset)
    return np.frombuffer(stored, offset, len(array) + 1, array.offset * offset.itemsize)


def is_bytes(dtype: pa.DataType) -> bool:
    """Whether values are strings or binary."""
    is_string = pa.types.is_string(dtype) or pa.types.is_large_string(dtype)
    is_binary = pa.types.is_binary(dtype) or pa.types.is_large_binary(dtype) or pa.types.is_fixed_size_binary(dtype)
    return bool(is_string or is_binary)


def fixed_shape(dtype: pa.DataType) -> list[int]:
    """Return the sizes of fixed-size lists inside one another, from the outermost to the innermost."""
    shape = []
    while pa.types.is_fixed_size_list(dtype):
        shape.append(dtype.list_size)
        dtype = dtype.value_type
    return shape


def width(dtype: pa.DataType) -> float:
    """Return the bytes that one value takes in memory, or 0 if that varies between values."""
    if pa.types.is_boolean(dtype):
        return 1  # a bit in Arrow, but a byte once it is decoded, and in tensors and arrays
    if pa.types.is_fixed_size_list(dtype):
        size: int = dtype.list_size
        return size * width(dtype.value_type)
    if pa.types.is_nested(dtype) or isinstance(dtype, pa.BaseExtensionType):
        return 0
    try:
        return float(dtype.bit_width) / 8
    except ValueError:  # strings, binary and other types without a fixed width
        return 0


def nbytes(values: pa.Table | pa.RecordBatch | pa.ChunkedArray | pa.Array) -> int:
    """Return the bytes that rows of a table, batch or column take: pyarrow before 24 does not tell those of views."""
    try:
        return int(values.nbytes)
    except pa.ArrowTypeError:
        if isinstance(values, (pa.Table, pa.RecordBatch)):
            return sum(map(nbytes, values.columns))
    try:
        plain = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}[values.type]
        return int(values.cast(plain).nbytes)
    except (KeyError, pa.ArrowNotImplementedError):  # views in other types; casts are new in 18
        return int(values.get_total_buffer_size())  # of a slice that of all rows


def row_bytes(column: pa.ChunkedArray) -> float:
    """Return the bytes that a row takes in a column that has some, on average.

    In a column of dictionaries a value counts for no more than one row: a few rows come with all values, too.
    """
    if not pa.types.is_dictionary(column.type):
        return nbytes(column) / len(column)
    dictionaries = [chunk.dictionary for chunk in column.chunks]
    values, size = sum(map(len, dictionaries)), sum(map(nbytes, dictionaries))
    return (nbytes(column) - size) / len(column) + size / max(values, len(column))


def has_fixed_width(dtype: pa.DataType) -> bool:
    """Whether the number of rows tells how much memory a column of this type takes."""
    return not (pa.types.is_nested(dtype) or pa.types.is_dictionary(dtype)) and width(dtype) > 0


def require_column(name: str, schema: pa.Schema, where: str) -> None:
    """Raise a ColumnError, with the most similar name, unless the schema has exactly one column of this name."""
    count = len(schema.get_all_field_indices(name))  # by a hash table, unlike `schema.names`
    if count == 1:
        return
    if count > 1:
        msg = f"column {name!r}{where} appears {count} times in the file's schema, so it cannot be delivered by name"
        raise ColumnError(msg)
    hint = nearest(name, schema.names, cutoff=0.0) if schema.names else ""
    raise ColumnError(f"there is no column {name!r}{where}{hint} (columns: {', '.join(schema.names[:50])})")
