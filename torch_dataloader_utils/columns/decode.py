"""Arrow's encodings undone: dictionaries, runs, views and extension types become the plain types behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.columns.arrow import is_view
from torch_dataloader_utils.columns.nulls import make_lists, nest_fixed


def decoded_type(dtype: pa.DataType) -> pa.DataType:
    """Return the type of what `decode` returns."""
    if pa.types.is_dictionary(dtype) or pa.types.is_run_end_encoded(dtype):
        return decoded_type(dtype.value_type)
    if is_view(dtype):
        return pa.string() if pa.types.is_string_view(dtype) else pa.binary()
    if pa.types.is_list_view(dtype):
        return pa.list_(dtype.value_field)
    if pa.types.is_large_list_view(dtype):
        return pa.large_list(dtype.value_field)
    if isinstance(dtype, pa.FixedShapeTensorType):
        lists = dtype.value_type
        for size in reversed(_logical_shape(dtype)):
            lists = pa.list_(lists, size)
        return lists
    return pa.bool_() if _is_bool8(dtype) else dtype


def decode(values: pa.Array) -> pa.Array:
    """Return dictionaries and runs as their values, views as strings or lists, and tensors as nested lists."""
    dtype = values.type
    if pa.types.is_dictionary(dtype):
        return decode(values.dictionary_decode())
    if pa.types.is_run_end_encoded(dtype):
        return decode(pc.run_end_decode(values))
    if is_view(dtype):
        return values.cast(decoded_type(dtype))
    if pa.types.is_list_view(dtype) or pa.types.is_large_list_view(dtype):
        # pyarrow's own cast to lists gives invalid arrays where there are nulls.
        lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
        nulls = values.is_null() if values.null_count else None
        return make_lists(decoded_type(dtype), lengths, values.flatten(), mask=nulls)
    if isinstance(dtype, pa.FixedShapeTensorType):
        return _decode_tensors(values.storage, dtype)
    return pc.not_equal(values.storage, pa.scalar(0, pa.int8())) if _is_bool8(dtype) else values


def _is_bool8(dtype: pa.DataType) -> bool:
    # By name: older pyarrow has no class for it.
    return isinstance(dtype, pa.BaseExtensionType) and dtype.extension_name == "arrow.bool8"


def _decode_tensors(storage: pa.FixedSizeListArray, dtype: pa.FixedShapeTensorType) -> pa.Array:
    """Return tensors as lists of lists in the order of their logical dimensions; a null tensor is a null list."""
    shape = _logical_shape(dtype)
    size = math.prod(shape)
    leaves = storage.values.slice(storage.offset * size, len(storage) * size)
    if shape and dtype.permutation is not None:
        # Values are stored by physical dimensions; the permutation says which of them each logical dimension is.
        order = np.arange(size).reshape(dtype.shape).transpose(dtype.permutation).ravel()
        starts = np.arange(len(storage))[:, None] * size
        leaves = leaves.take(pa.array((starts + order).ravel()))
    lists = decoded_type(dtype)
    if not storage.null_count:
        return nest_fixed(leaves, lists, len(storage))
    inner = nest_fixed(leaves, lists.value_type, len(storage) * shape[0])
    return pa.FixedSizeListArray.from_arrays(inner, type=lists, mask=storage.is_null())


def _logical_shape(dtype: pa.FixedShapeTensorType) -> Sequence[int]:
    shape: list[int] = dtype.shape
    return shape if dtype.permutation is None else [shape[index] for index in dtype.permutation]
