"""Takes and filters rows of tables, of which lists of numbers are copied as bytes.

To take rows of a list column, Arrow makes an index of all their values, and takes each value by it. A list of numbers
is a range of bytes, as binary is, of which Arrow copies each row at once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.columns.arrow import is_list, offsets_of

FEWEST_VALUES = 4
"""Lists that have fewer values on average are left to Arrow: to make binary of them takes as long as what it saves."""

LEAST_VALUES = 1 << 15
"""So are those that have fewer values together: to make binary of a column has costs that do not depend on its size."""

MOST_VALUES = np.iinfo(np.int32).max
"""How many values the lists of an array may have together, unless its offsets are those of large lists."""


def take_rows(
    table: pa.Table, indices: pa.Array, memory_pool: pa.MemoryPool | None = None, *, boundscheck: bool = True
) -> pa.Table:
    """Return the rows of a `takeable` table that have these numbers, in their order.

    No number is given twice: there could be more values then than the offsets of lists can count. Without `boundscheck`
    each number has to be one of a row.
    """
    return _selected(table, lambda rows: pc.take(rows, indices, boundscheck=boundscheck, memory_pool=memory_pool))


def filter_rows(table: pa.Table, mask: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Return the rows of a `takeable` table for which a mask is true, and neither false nor null."""
    return _selected(table, lambda rows: rows.filter(mask))


def _selected(table: pa.Table, select: Callable[[pa.Table], pa.Table]) -> pa.Table:
    """Return selected rows. Columns of lists of numbers are binary meanwhile."""
    types = table.schema.types
    as_bytes = [is_list(dtype) and _has_plain_values(table.column(number)) for number, dtype in enumerate(types)]
    if not any(as_bytes):
        return select(table)
    columns = [_binary(column) if chosen else column for column, chosen in zip(table.columns, as_bytes, strict=True)]
    rows = select(pa.table(columns, names=[""] * len(columns)))
    columns = [
        _lists(column, dtype) if chosen else column
        for column, dtype, chosen in zip(rows.columns, types, as_bytes, strict=True)
    ]
    return pa.table(columns, schema=table.schema)


def _has_plain_values(column: pa.ChunkedArray) -> bool:
    """Whether lists hold numbers or times of whole bytes, not too few or too many, of which none is null."""
    dtype = column.type
    if not pa.types.is_primitive(dtype.value_type) or dtype.value_type.bit_width % 8:
        return False
    values = sum(int(offsets[-1]) - int(offsets[0]) for offsets in map(offsets_of, column.chunks))
    if values < max(FEWEST_VALUES * len(column), LEAST_VALUES):
        return False
    if not pa.types.is_large_list(dtype) and values > MOST_VALUES:
        return False
    return not any(chunk.values.null_count for chunk in column.chunks)


def _binary(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return lists of numbers as binary that shares their values."""
    width = column.type.value_type.bit_width // 8
    chunks = []
    for chunk in column.chunks:
        offsets, values = offsets_of(chunk), chunk.values
        stored = values.buffers()[1]
        shared = pa.py_buffer(b"") if stored is None else stored.slice(values.offset * width, len(values) * width)
        buffers = [_validity(chunk), pa.py_buffer(offsets.astype(np.int64) * width), shared]
        chunks.append(pa.Array.from_buffers(pa.large_binary(), len(chunk), buffers, chunk.null_count))
    return pa.chunked_array(chunks, pa.large_binary())


def _lists(column: pa.ChunkedArray, dtype: pa.DataType) -> pa.ChunkedArray:
    """Return binary as the lists of this type that it stands for."""
    width = dtype.value_type.bit_width // 8
    chunks = []
    for chunk in column.chunks:
        offsets = offsets_of(chunk) // width
        values = pa.Array.from_buffers(dtype.value_type, int(offsets[-1]), [None, chunk.buffers()[2]], 0)
        in_lists = pa.py_buffer(offsets if pa.types.is_large_list(dtype) else offsets.astype(np.int32))
        buffers = [_validity(chunk), in_lists]
        chunks.append(pa.Array.from_buffers(dtype, len(chunk), buffers, chunk.null_count, children=[values]))
    return pa.chunked_array(chunks, dtype)


def _validity(array: pa.Array) -> pa.Buffer | None:
    """Return the bits that say of which rows there is a value, beginning with the first row; None if of all."""
    if not array.null_count:
        return None
    return pa.concat_arrays([array.is_valid()]).buffers()[1]  # a copy, which begins with a whole byte
