"""Nulls in Arrow arrays, at any depth of lists: counted, filled, and marked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = [
    "count_nulls",
    "each_chunk",
    "fill",
    "innermost",
    "is_list",
    "leaves_of_places",
    "mark",
    "mask_type",
    "nest",
    "where",
]


def is_list(kind: pa.DataType) -> bool:
    """Whether lists of such a column may differ in length."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def innermost(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values in lists of lists, or the type itself."""
    while is_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return kind


def each_chunk(column: pa.ChunkedArray, make: Callable[[pa.Array], pa.Array], kind: pa.DataType) -> pa.ChunkedArray:
    """Return what is made of each chunk."""
    return pa.chunked_array([make(chunk) for chunk in column.chunks], kind)


def leaves_of_places(values: pa.Array) -> tuple[pa.Array, npt.NDArray[np.bool_] | None]:
    """Return the values at all places of fixed-size lists, one after the other.

    Returns:
        The values, and for each whether the lists around it are valid; None if all are.
    """
    valid: npt.NDArray[np.bool_] | None = None
    while pa.types.is_fixed_size_list(values.type):
        size = values.type.list_size
        if values.null_count:
            own = values.is_valid().to_numpy(zero_copy_only=False)
            valid = own if valid is None else valid & own
        values = values.values.slice(values.offset * size, len(values) * size)
        valid = None if valid is None else np.repeat(valid, size)
    return values, valid


def nest(leaves: pa.Array, kind: pa.DataType, length: int) -> pa.Array:
    """Return values as so many fixed-size lists of a type; the other way round of `leaves_of_places`."""
    if not pa.types.is_fixed_size_list(kind):
        return leaves
    inner = nest(leaves, kind.value_type, length * kind.list_size)
    return pa.Array.from_buffers(kind, length, [None], children=[inner])


def where(known: pa.Array, values: pa.Array, value: pa.Scalar) -> pa.Array:
    """Return values where they are known, else another one."""
    if values.type != pa.float16():
        return pc.if_else(known, values, value)
    bits = pa.repeat(value, 1).view(pa.uint16())[0]  # older releases choose among no float16
    return pc.if_else(known, values.view(pa.uint16()), bits).view(pa.float16())


def count_nulls(values: pa.Array, *, leaves_may_be_null: bool) -> int:
    """Count the nulls that a tensor has no value for: lists, as they have no length, and values inside.

    Args:
        values: Numbers, times or bytes, or lists of them.
        leaves_may_be_null: Whether the innermost have a value for null, as floats have. Fixed-size lists then do too.
    """
    if is_list(values.type):
        inner = values.flatten() if len(values) else values.values.slice(0, 0)
        return int(values.null_count) + count_nulls(inner, leaves_may_be_null=leaves_may_be_null)
    own = 0 if leaves_may_be_null else int(values.null_count)
    if pa.types.is_fixed_size_list(values.type):
        size = values.type.list_size
        inner = values.values.slice(values.offset * size, len(values) * size)
        return own + count_nulls(inner, leaves_may_be_null=leaves_may_be_null)
    return own


def fill(values: pa.Array, value: pa.Scalar | None) -> pa.Array:
    """Return values without nulls: a null list becomes empty, all places of a null fixed-size list are filled.

    Args:
        values: Values, or lists of them.
        value: What stands for null; None leaves nulls that are no lists.
    """
    kind = values.type
    if is_list(kind):
        return _fill_lists(values, value)
    if value is None:
        return values
    leaves, valid = leaves_of_places(values)
    if is_list(leaves.type):
        filled = _fill_lists(leaves, value, valid)
    elif valid is None:
        filled = where(leaves.is_valid(), leaves, value)
    else:
        filled = where(pc.and_(pa.array(valid), leaves.is_valid()), leaves, value)
    filled = filled if filled.type == leaves.type else filled.cast(leaves.type)  # decimals may come wider
    return nest(filled, kind, len(values))


def _fill_lists(lists: pa.Array, value: pa.Scalar | None, valid: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """Return lists without nulls. Those that are not valid may hold values all the same, which are left out."""
    kind = lists.type
    width, make = (np.int32, pa.ListArray) if pa.types.is_list(kind) else (np.int64, pa.LargeListArray)
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    if valid is not None:
        lengths = np.where(valid, lengths, 0)
        lists = lists.filter(pa.array(valid))
    offsets = np.zeros(len(lengths) + 1, width)
    np.cumsum(lengths, out=offsets[1:])
    return make.from_arrays(pa.array(offsets), fill(lists.flatten(), value), type=kind)


def mark(values: pa.Array) -> pa.Array:
    """Return where nulls are: a boolean for each row, or for each place of fixed-size lists."""
    leaves, valid = leaves_of_places(values)
    marks = leaves.is_null()
    if valid is not None:
        marks = pc.or_(marks, pa.array(~valid))
    return nest(marks, mask_type(values.type), len(values))


def mask_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of what `mark` returns."""
    return pa.list_(mask_type(kind.value_type), kind.list_size) if pa.types.is_fixed_size_list(kind) else pa.bool_()
