"""Arrow columns as Python lists, by the faster of Arrow's own conversions that give the same objects.

`to_pylist` makes strings, numbers, lists and structs about as fast as Python can. Of times, decimals and values of
dictionaries it makes a scalar of Arrow each first, and calls that; a conversion to NumPy makes their objects in C++.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import numpy as np
import pyarrow as pa

from torch_dataloader_utils.errors import ColumnError


def python_list(name: str, column: pa.ChunkedArray) -> list[Any]:
    """Return a column as a list of Python objects: those that `to_pylist` makes, with None for nulls.

    Raises:
        ColumnError: If Python's types cannot hold a value.
    """
    try:
        # Python's times have microseconds. pyarrow's own conversion of nanoseconds depends on whether pandas is
        # installed; this cast fails where it would lose digits.
        dtype = _in_microseconds(column.type)
        return _objects(column if dtype == column.type else column.cast(dtype))
    except (pa.ArrowException, ValueError, OverflowError) as error:
        msg = f"column {name!r} of type {column.type} holds a value that Python's types cannot hold: {error}; "
        msg += "use output_format='arrow', or leave the column out"
        raise ColumnError(msg) from None


def _objects(column: pa.ChunkedArray) -> list[Any]:
    dtype = column.type
    if pa.types.is_dictionary(dtype):
        return _objects(column.cast(dtype.value_type))
    if pa.types.is_decimal(dtype) or pa.types.is_time(dtype):
        return column.to_numpy().tolist()  # type: ignore[no-any-return]
    if pa.types.is_timestamp(dtype) and dtype.tz is not None:
        return _in_zone(column)
    if pa.types.is_timestamp(dtype) or pa.types.is_date32(dtype) or pa.types.is_duration(dtype):
        return _times(column)
    return column.to_pylist()  # type: ignore[no-any-return]


def _times(column: pa.ChunkedArray) -> list[Any]:
    """Return a column of times without a time zone, of dates or of durations as a list.

    NumPy makes integers of those that Python's types cannot hold. Arrow's conversion raises an error for them.
    """
    values = column.to_numpy()
    ends = (np.fmin.reduce(values), np.fmax.reduce(values)) if len(values) else ()  # of those that are not null
    if any(isinstance(end.item(), int) for end in ends):
        return column.to_pylist()  # type: ignore[no-any-return]
    return values.tolist()  # type: ignore[no-any-return]


def _in_zone(column: pa.ChunkedArray) -> list[datetime | None]:
    """Return a column of times in a time zone, which Arrow stores in UTC, as a list."""
    zone = pa.scalar(0, column.type).as_py().tzinfo
    in_utc = _times(column.cast(pa.timestamp(column.type.unit)))
    return [time and time.replace(tzinfo=timezone.utc).astimezone(zone) for time in in_utc]


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
