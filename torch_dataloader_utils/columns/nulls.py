"""Nulls in Arrow arrays, at any depth of lists: counted, filled and marked."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.columns.arrow import is_list


def flatten_fixed(values: pa.Array) -> tuple[pa.Array, npt.NDArray[np.bool_] | None]:
    """Return the values of fixed-size lists at any depth, one after the other.

    Returns:
        The values, and for each whether all lists around it are valid; None if no list is null.
    """
    valid: npt.NDArray[np.bool_] | None = None
    while pa.types.is_fixed_size_list(values.type):
        size = values.type.list_size
        if values.null_count:
            not_null = values.is_valid().to_numpy(zero_copy_only=False)
            valid = not_null if valid is None else valid & not_null
        # Not `flatten`, which leaves out the values of null lists: the result would no longer have one shape.
        values = values.values.slice(values.offset * size, len(values) * size)
        valid = None if valid is None else np.repeat(valid, size)
    return values, valid


def nest_fixed(leaves: pa.Array, dtype: pa.DataType, length: int) -> pa.Array:
    """Return values as this many fixed-size lists of a type: the inverse of `flatten_fixed`."""
    if not pa.types.is_fixed_size_list(dtype):
        return leaves
    inner = nest_fixed(leaves, dtype.value_type, length * dtype.list_size)
    # `from_arrays` divides by the list size to learn the length, which lists of size 0 do not allow.
    return pa.Array.from_buffers(dtype, length, [None], children=[inner])


def make_lists(dtype: pa.DataType, lengths: npt.NDArray[Any], values: pa.Array, **options: Any) -> pa.Array:
    """Return values as consecutive lists of a type, either list or large list; options are for `from_arrays`."""
    width, make = (np.int32, pa.ListArray) if pa.types.is_list(dtype) else (np.int64, pa.LargeListArray)
    offsets = np.zeros(len(lengths) + 1, width)
    np.cumsum(lengths, out=offsets[1:])
    return make.from_arrays(pa.array(offsets), values, type=dtype, **options)


def where(condition: pa.Array, values: pa.Array, other: pa.Scalar) -> pa.Array:
    """Return values where the condition is true, and the other value elsewhere."""
    if values.type != pa.float16():
        return pc.if_else(condition, values, other)
    bits = pa.repeat(other, 1).view(pa.uint16())[0]  # older pyarrow has no if_else for float16
    return pc.if_else(condition, values.view(pa.uint16()), bits).view(pa.float16())


def count_nulls(values: pa.Array, *, leaves_may_be_null: bool) -> int:
    """Count the nulls that a tensor has no value for: null lists, which have no length, and null values inside.

    If `leaves_may_be_null`, it has NaN for null values, and so for null fixed-size lists, too.
    """
    if is_list(values.type):
        inner = values.flatten() if len(values) else values.values.slice(0, 0)  # `flatten` crashes without offsets
        return int(values.null_count) + count_nulls(inner, leaves_may_be_null=leaves_may_be_null)
    nulls = 0 if leaves_may_be_null else int(values.null_count)
    if pa.types.is_fixed_size_list(values.type):
        size = values.type.list_size
        inner = values.values.slice(values.offset * size, len(values) * size)
        return nulls + count_nulls(inner, leaves_may_be_null=leaves_may_be_null)
    return nulls


def fill_nulls(values: pa.Array, filling: pa.Scalar | None) -> pa.Array:
    """Return values without nulls: a null list becomes empty, a null fixed-size list is filled in all its places.

    Without a filling, null lists become empty and other nulls stay.
    """
    if is_list(values.type):
        return _fill_lists(values, filling)
    if filling is None:
        return values
    leaves, valid = flatten_fixed(values)
    if is_list(leaves.type):
        filled = _fill_lists(leaves, filling, valid)
    elif valid is None and pa.types.is_primitive(leaves.type) and leaves.type not in (pa.bool_(), pa.float16()):
        filled = leaves.fill_null(filling)  # half of the time of `if_else`; more of booleans and half floats
    else:
        not_null = leaves.is_valid()
        filled = where(not_null if valid is None else pc.and_(pa.array(valid), not_null), leaves, filling)
    filled = filled if filled.type == leaves.type else filled.cast(leaves.type)  # if_else may widen decimals
    return nest_fixed(filled, values.type, len(values))


def _fill_lists(lists: pa.Array, filling: pa.Scalar | None, valid: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    if valid is not None:
        # A list inside a null fixed-size list need not be null itself: leave its values out, too.
        lengths = np.where(valid, lengths, 0)
        lists = lists.filter(pa.array(valid))
    return make_lists(lists.type, lengths, fill_nulls(lists.flatten(), filling))


def null_mask(values: pa.Array) -> pa.Array:
    """Return where nulls are: one boolean for each row, or for each value of fixed-size lists."""
    leaves, valid = flatten_fixed(values)
    mask = leaves.is_null()
    if valid is not None:
        mask = pc.or_(mask, pa.array(~valid))
    return nest_fixed(mask, mask_type(values.type), len(values))


def mask_type(dtype: pa.DataType) -> pa.DataType:
    """Return the type of `null_mask` for values of a type."""
    return pa.list_(mask_type(dtype.value_type), dtype.list_size) if pa.types.is_fixed_size_list(dtype) else pa.bool_()
