"""Arrow values as Python objects."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from torch_dataloader_utils.errors import ColumnError

__all__ = ["to_pylist"]


def to_pylist(name: str, column: pa.ChunkedArray) -> list[Any]:
    """Return a column as a list of Python objects.

    Raises:
        ColumnError: If Python's types cannot hold a value.
    """
    try:
        # Python's times have microseconds. pyarrow's own conversion of nanoseconds depends on whether pandas is
        # installed; this cast fails where it would lose digits.
        dtype = _in_microseconds(column.type)
        return (column if dtype == column.type else column.cast(dtype)).to_pylist()  # type: ignore[no-any-return]
    except (pa.ArrowException, ValueError, OverflowError) as error:
        msg = f"column {name!r} of type {column.type} holds a value that Python's types cannot hold: {error}; "
        msg += "use output_format='arrow', or leave the column out"
        raise ColumnError(msg) from None


def _in_microseconds(dtype: pa.DataType) -> pa.DataType:
    """Return a type with microseconds in place of nanoseconds, at any depth."""
    if pa.types.is_nested(dtype):
        return _nested_in_microseconds(dtype)
    if getattr(dtype, "unit", None) != "ns":
        return dtype
    if pa.types.is_timestamp(dtype):
        return pa.timestamp("us", dtype.tz)
    return pa.duration("us") if pa.types.is_duration(dtype) else pa.time64("us")


def _nested_in_microseconds(dtype: pa.DataType) -> pa.DataType:
    fields = [dtype.field(index) for index in range(dtype.num_fields)]
    inner = [field.with_type(_in_microseconds(field.type)) for field in fields]
    if pa.types.is_struct(dtype):
        return pa.struct(inner)
    if pa.types.is_map(dtype):
        return pa.map_(_in_microseconds(dtype.key_type), _in_microseconds(dtype.item_type))
    if pa.types.is_fixed_size_list(dtype):
        return pa.list_(inner[0], dtype.list_size)
    if pa.types.is_list(dtype):
        return pa.list_(inner[0])
    return pa.large_list(inner[0]) if pa.types.is_large_list(dtype) else dtype
