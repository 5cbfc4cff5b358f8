"""Arrow values of one shape as NumPy arrays: numbers, booleans, times, and fixed-size lists of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torch_dataloader_utils.columns.arrow import leaf_type
from torch_dataloader_utils.columns.nulls import flatten_fixed, where

__all__ = ["dense_array", "numpy_dtype", "read_buffer"]


_NUMPY_TYPES = {
    pa.bool_(): np.bool_,
    pa.int8(): np.int8,
    pa.int16(): np.int16,
    pa.int32(): np.int32,
    pa.int64(): np.int64,
    pa.uint8(): np.uint8,
    pa.uint16(): np.uint16,
    pa.uint32(): np.uint32,
    pa.uint64(): np.uint64,
    pa.float16(): np.float16,
    pa.float32(): np.float32,
    pa.float64(): np.float64,
}
"""NumPy's types for Arrow's. The memory layout is the same, except for booleans, which Arrow packs into bits."""

NAT = np.iinfo(np.int64).min
"""The integer that NumPy reads as NaT (not a time)."""


def numpy_dtype(dtype: pa.DataType, *, numpy_times: bool) -> np.dtype[Any]:
    """Return NumPy's dtype for the values of a column.

    Args:
        dtype: Type of the column: values, or lists of them.
        numpy_times: Whether times become datetime64 and timedelta64; else integers in the unit of their type.
    """
    dtype = leaf_type(dtype)
    if not pa.types.is_temporal(dtype):
        return np.dtype(_NUMPY_TYPES[dtype])
    if not numpy_times or pa.types.is_time(dtype):  # NumPy has no time of day
        return np.dtype(np.int64)
    unit = "D" if pa.types.is_date32(dtype) else "ms" if pa.types.is_date64(dtype) else dtype.unit
    return np.dtype(f"timedelta64[{unit}]" if pa.types.is_duration(dtype) else f"datetime64[{unit}]")


def dense_array(values: pa.Array, *, numpy_times: bool) -> npt.NDArray[Any]:
    """Return values as a writable array that shares no memory with others; null becomes NaN or NaT."""
    shape = [len(values)]
    dtype = values.type
    while pa.types.is_fixed_size_list(dtype):
        shape.append(dtype.list_size)
        dtype = dtype.value_type
    leaves, valid = flatten_fixed(values)
    if valid is not None:
        leaves = where(pa.array(valid), leaves, pa.scalar(None, dtype))
    array = _times(leaves) if pa.types.is_temporal(dtype) else _numbers(leaves)
    return array.view(numpy_dtype(dtype, numpy_times=numpy_times)).reshape(shape)


def _times(values: pa.Array) -> npt.NDArray[np.int64]:
    integers = values.view(pa.int32() if values.type.bit_width == 32 else pa.int64())  # noqa: PLR2004 - or 64
    if values.null_count:
        integers = integers.cast(pa.int64()).fill_null(NAT)
    return _numbers(integers).astype(np.int64, copy=False)


def _numbers(values: pa.Array) -> npt.NDArray[Any]:
    """Return the values of a numeric array; nulls of floats become NaN."""
    if values.null_count == 0 and not pa.types.is_boolean(values.type):
        return read_buffer(values.buffers()[1], np.dtype(_NUMPY_TYPES[values.type]), len(values), values.offset)
    array: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return array if array.flags.writeable else array.copy()


def read_buffer(buffer: pa.Buffer | None, dtype: np.dtype[Any], count: int, start: int) -> npt.NDArray[Any]:
    """Return values of a buffer as a writable array: a view if Arrow allows writing to the buffer, else a copy."""
    if buffer is None:  # Arrow may leave out the buffer of an empty array
        return np.empty(0, dtype)
    array = np.frombuffer(buffer, dtype, count=count, offset=start * dtype.itemsize)
    return array if buffer.is_mutable else array.copy()
