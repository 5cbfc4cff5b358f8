"""Arrow values as Python's, batch by batch."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from torch_dataloader_utils.errors import ColumnError

__all__ = ["to_list"]


def to_list(name: str, column: pa.ChunkedArray) -> list[Any]:
    """Return a column as a list, or raise a ColumnError where Python has no such value."""
    kind = column.type
    try:
        return _without_nanoseconds(column).to_pylist()  # type: ignore[no-any-return]
    except (pa.ArrowException, ValueError, OverflowError) as error:  # such as nanoseconds in a datetime
        msg = f"column {name!r} of type {kind} holds a value that Python cannot: {error}; "
        msg += "use output_format='arrow', or leave the column out"
        raise ColumnError(msg) from None


def _without_nanoseconds(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return times in microseconds, as Python has them; an ArrowInvalid where that would lose something.

    pyarrow's own way out depends on whether pandas is installed.
    """
    kind = _in_microseconds(column.type)
    return column if kind == column.type else column.cast(kind)


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    """Return a type with microseconds in place of nanoseconds, at any depth."""
    if pa.types.is_nested(kind):
        return _nested_in_microseconds(kind)
    if getattr(kind, "unit", None) != "ns":
        return kind
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    return pa.duration("us") if pa.types.is_duration(kind) else pa.time64("us")


def _nested_in_microseconds(kind: pa.DataType) -> pa.DataType:
    fields = [kind.field(number) for number in range(kind.num_fields)]
    inner = [field.with_type(_in_microseconds(field.type)) for field in fields]
    if pa.types.is_struct(kind):
        return pa.struct(inner)
    if pa.types.is_map(kind):
        return pa.map_(_in_microseconds(kind.key_type), _in_microseconds(kind.item_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(inner[0], kind.list_size)
    make = {"list": pa.list_, "large_list": pa.large_list}.get(str(kind).partition("<")[0])
    return kind if make is None else make(inner[0])
