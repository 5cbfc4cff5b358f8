"""Takes and filters rows of tables, of which lists of numbers are copied as bytes.

Of a list column Arrow makes an index of all values in the selected rows, and takes each value by it. A list of numbers
is a range of bytes, as binary is, of which Arrow copies each row at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.columns.arrow import is_list

FEWEST_VALUES = 4
"""Lists that have fewer values on average are left to Arrow: to make binary of them takes as long as what it saves."""

MOST_VALUES = np.iinfo(np.int32).max
"""How many values the lists of an array may have together, unless its offsets are those of large lists."""


def take_rows(table: pa.Table, indices: pa.Array, memory_pool: pa.MemoryPool | None = None) -> pa.Table:
    """Return rows of a `takeable` table by their numbers, of which none is too large, or there twice."""
    return _selected(table, lambda rows: pc.take(rows, indices, boundscheck=False, memory_pool=memory_pool))


def filter_rows(table: pa.Table, mask: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Return the rows of a `takeable` table for which a mask is true, and neither false nor null."""
    return _selected(table, lambda rows: rows.filter(mask))


def _selected(table: pa.Table, select: Callable[[pa.Table], pa.Table]) -> pa.Table:
    """Return selected rows. Columns of lists of numbers are binary meanwhile."""
    as_lists = {}
    rows = table
    for number, dtype in enumerate(table.schema.types):
        if is_list(dtype) and _has_plain_values(table.column(number)):
            as_lists[number] = table.schema.field(number)
            rows = rows.set_column(number, "", _binary(table.column(number)))
    rows = select(rows)
    for number, field in as_lists.items():
        rows = rows.set_column(number, field, _lists(rows.column(number), field.type))
    return rows


def _has_plain_values(column: pa.ChunkedArray) -> bool:
    """Whether lists hold numbers or times of whole bytes, not too few or too many, of which none is null."""
    dtype = column.type
    if not pa.types.is_primitive(dtype.value_type) or dtype.value_type.bit_width % 8:
        return False
    if any(chunk.values.null_count for chunk in column.chunks):
        return False
    values = sum(int(offsets[-1]) - int(offsets[0]) for offsets in map(_offsets, column.chunks))
    return FEWEST_VALUES * len(column) <= values and (pa.types.is_large_list(dtype) or values <= MOST_VALUES)


def _binary(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return lists of numbers as binary that shares their values."""
    width = column.type.value_type.bit_width // 8
    chunks = []
    for chunk in column.chunks:
        offsets, values = _offsets(chunk), chunk.values
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
        offsets = _offsets(chunk) // width
        values = pa.Array.from_buffers(dtype.value_type, int(offsets[-1]), [None, chunk.buffers()[2]], 0)
        in_lists = pa.py_buffer(offsets if pa.types.is_large_list(dtype) else offsets.astype(np.int32))
        buffers = [_validity(chunk), in_lists]
        chunks.append(pa.Array.from_buffers(dtype, len(chunk), buffers, chunk.null_count, children=[values]))
    return pa.chunked_array(chunks, dtype)


def _offsets(array: pa.Array) -> npt.NDArray[np.signedinteger[Any]]:
    """Return where each row of lists or large binary begins, and where the last one ends."""
    dtype = np.dtype(np.int32 if pa.types.is_list(array.type) else np.int64)
    stored = array.buffers()[1]
    if stored is None or not len(array):
        return np.zeros(len(array) + 1, dtype)
    return np.frombuffer(stored, dtype, len(array) + 1, array.offset * dtype.itemsize)


def _validity(array: pa.Array) -> pa.Buffer | None:
    """Return the bits that say of which rows there is a value, beginning with the first row; None if of all."""
    if not array.null_count:
        return None
    return pa.array(array.is_valid().to_numpy(zero_copy_only=False)).buffers()[1]
