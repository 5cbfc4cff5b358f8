"""Arrow values of one shape as NumPy arrays: numbers, booleans, times, and fixed-size lists of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torch_dataloader_utils.columns.nulls import innermost, leaves_of_places, where

__all__ = ["concatenated", "dense_array", "dense_dtype", "read_buffer"]


_DTYPES = {
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
"""Arrow's numeric types and NumPy's of the same layout (booleans apart: Arrow packs them into bits)."""


NAT = np.iinfo(np.int64).min
"""What NumPy takes for a time that is none."""


def dense_dtype(kind: pa.DataType, *, times: bool) -> np.dtype[Any]:
    """Return the dtype of values.

    Args:
        kind: Their type.
        times: Whether times are NumPy's; else they are integers in the unit of their type.
    """
    kind = innermost(kind)
    if not pa.types.is_temporal(kind):
        return np.dtype(_DTYPES[kind])
    unit = "D" if pa.types.is_date32(kind) else "ms" if pa.types.is_date64(kind) else kind.unit
    if not times or pa.types.is_time(kind):
        return np.dtype(np.int64)
    return np.dtype(f"timedelta64[{unit}]" if pa.types.is_duration(kind) else f"datetime64[{unit}]")


def dense_array(values: pa.Array, *, times: bool) -> npt.NDArray[Any]:
    """Return values as a writable array that nothing else reads or writes; in it null is NaN or NaT."""
    shape = [len(values)]
    kind = values.type
    while pa.types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    leaves, valid = leaves_of_places(values)
    if valid is not None:
        leaves = where(pa.array(valid), leaves, pa.scalar(None, kind))
    array = _times(leaves) if pa.types.is_temporal(kind) else _numbers(leaves)
    return array.view(dense_dtype(kind, times=times)).reshape(shape)


def _times(values: pa.Array) -> npt.NDArray[np.int64]:
    integers = values.view(pa.int32() if values.type.bit_width == 32 else pa.int64())  # noqa: PLR2004 - it has no other
    if values.null_count:
        integers = integers.cast(pa.int64()).fill_null(NAT)
    return _numbers(integers).astype(np.int64, copy=False)


def _numbers(values: pa.Array) -> npt.NDArray[Any]:
    """Return the values of a numeric array; nulls of floats become NaN."""
    if values.null_count == 0 and not pa.types.is_boolean(values.type):
        return read_buffer(values.buffers()[1], np.dtype(_DTYPES[values.type]), len(values), values.offset)
    array: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return array if array.flags.writeable else array.copy()


def read_buffer(buffer: pa.Buffer | None, dtype: np.dtype[Any], count: int, start: int) -> npt.NDArray[Any]:
    """Return values of a buffer, as a view where they may be written to."""
    if buffer is None:
        return np.empty(0, dtype)
    array = np.frombuffer(buffer, dtype, count=count, offset=start * dtype.itemsize)
    return array if buffer.is_mutable else array.copy()


def concatenated(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return arrays as one, without a copy where it is one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
