"""Arrow values of one shape as NumPy arrays: numbers, booleans, times, and fixed-size lists of them."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torch_dataloader_utils.columns.arrow import fixed_shape, leaf_type
from torch_dataloader_utils.columns.nulls import flatten_fixed, where

_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}
"""Arrow's names of numbers that NumPy calls otherwise."""

NAT = np.iinfo(np.int64).min
"""The integer that NumPy reads as NaT (not a time)."""


@lru_cache(maxsize=1_000)
def numpy_dtype(dtype: pa.DataType, *, numpy_times: bool) -> np.dtype[Any]:
    """Return NumPy's dtype for a column's values, also inside lists.

    Times become datetime64 and timedelta64, or integers in the unit of their type if `numpy_times` is false.
    """
    dtype = leaf_type(dtype)
    if not pa.types.is_temporal(dtype):
        return np.dtype(_FLOATS.get(str(dtype), str(dtype)))  # to_pandas_dtype() needs pandas before pyarrow 18
    if not numpy_times or pa.types.is_time(dtype):  # NumPy has no time of day
        return np.dtype(np.int64)
    unit = "D" if pa.types.is_date32(dtype) else "ms" if pa.types.is_date64(dtype) else dtype.unit
    return np.dtype(f"timedelta64[{unit}]" if pa.types.is_duration(dtype) else f"datetime64[{unit}]")


def dense_array(values: pa.Array, *, numpy_times: bool) -> npt.NDArray[Any]:
    """Return values as a writable array that shares no memory with others; null becomes NaN or NaT."""
    if not values.type.num_fields and not pa.types.is_temporal(values.type):
        return _numbers(values)
    dtype, shape = leaf_type(values.type), [len(values), *fixed_shape(values.type)]
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
    if values.null_count and values.type in (pa.float32(), pa.float64()):  # older pyarrow fills no half floats
        values = values.fill_null(math.nan)
    if values.null_count == 0:
        if pa.types.is_boolean(values.type):
            return _booleans(values)
        return read_buffer(values.buffers()[1], numpy_dtype(values.type, numpy_times=False), len(values), values.offset)
    array: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return array if array.flags.writeable else array.copy()


def _booleans(values: pa.BooleanArray) -> npt.NDArray[np.bool_]:
    """Return booleans, which Arrow packs into bits, the first into the lowest one. NumPy unpacks many at once."""
    skipped, stop = values.offset % 8, values.offset + len(values)
    stored = read_buffer(
        values.buffers()[1], np.dtype(np.uint8), -(-stop // 8) - values.offset // 8, values.offset // 8
    )
    return np.unpackbits(stored, bitorder="little", count=skipped + len(values))[skipped:].view(np.bool_)


def read_buffer(buffer: pa.Buffer | None, dtype: np.dtype[Any], count: int, start: int) -> npt.NDArray[Any]:
    """Return values of a buffer as a writable array: a view if Arrow allows writing to the buffer, else a copy."""
    if buffer is None:  # Arrow may leave out the buffer of an empty array
        return np.empty(0, dtype)
    array = np.frombuffer(buffer, dtype, count=count, offset=start * dtype.itemsize)
    return array if buffer.is_mutable else array.copy()
