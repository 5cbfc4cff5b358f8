"""Values that Arrow stores in another way, as themselves: those of dictionaries, runs, views and extensions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.columns.nulls import nest

__all__ = ["is_bytes_view", "plain", "plain_type"]


def is_bytes_view(kind: pa.DataType) -> bool:
    """Whether it is a type of views of strings or binary, which pyarrow can neither take nor filter."""
    return bool(pa.types.is_string_view(kind) or pa.types.is_binary_view(kind))


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of what `plain` returns."""
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if is_bytes_view(kind):
        return pa.string() if pa.types.is_string_view(kind) else pa.binary()
    if pa.types.is_list_view(kind):
        return pa.list_(kind.value_field)
    if pa.types.is_large_list_view(kind):
        return pa.large_list(kind.value_field)
    if isinstance(kind, pa.FixedShapeTensorType):
        return _lists_of(kind.value_type, _logical(kind, kind.shape))
    return pa.bool_() if _is_bool8(kind) else kind


def plain(values: pa.Array) -> pa.Array:
    """Return values as themselves: dictionaries and runs decoded, list views as lists, tensors as nested lists."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        return plain(values.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return plain(pc.run_end_decode(values))
    if is_bytes_view(kind):
        return values.cast(plain_type(kind))
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return _lists(values)
    if isinstance(kind, pa.FixedShapeTensorType):
        return _tensors(values.storage, kind)
    return pc.not_equal(values.storage, pa.scalar(0, pa.int8())) if _is_bool8(kind) else values


def _is_bool8(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.bool8"


def _lists(views: pa.Array) -> pa.Array:
    """Return list views as lists. pyarrow's own cast gives invalid lists where there are nulls."""
    kind = plain_type(views.type)
    width, make = (np.int32, pa.ListArray) if pa.types.is_list(kind) else (np.int64, pa.LargeListArray)
    lengths = pc.list_value_length(views).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(views) + 1, width)
    np.cumsum(lengths, out=offsets[1:])
    missing = views.is_null() if views.null_count else None
    return make.from_arrays(pa.array(offsets), views.flatten(), type=kind, mask=missing)


def _tensors(stored: pa.FixedSizeListArray, kind: pa.FixedShapeTensorType) -> pa.Array:
    """Return tensors as lists of lists, in the order of their logical dimensions; a null tensor is a null list."""
    shape = _logical(kind, kind.shape)
    size = math.prod(shape)
    leaves = stored.values.slice(stored.offset * size, len(stored) * size)
    if shape and kind.permutation is not None:
        places = np.arange(size).reshape(kind.shape).transpose(kind.permutation).ravel()
        rows = np.arange(len(stored))[:, None] * size
        leaves = leaves.take(pa.array((rows + places).ravel()))
    lists = plain_type(kind)
    if not stored.null_count:
        return nest(leaves, lists, len(stored))
    return pa.FixedSizeListArray.from_arrays(
        nest(leaves, lists.value_type, len(stored) * shape[0]), type=lists, mask=stored.is_null()
    )


def _logical(kind: pa.FixedShapeTensorType, shape: Sequence[int]) -> list[int]:
    return list(shape) if kind.permutation is None else [shape[place] for place in kind.permutation]


def _lists_of(kind: pa.DataType, shape: Sequence[int]) -> pa.DataType:
    for size in reversed(shape):
        kind = pa.list_(kind, size)
    return kind
