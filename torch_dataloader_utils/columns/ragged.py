"""Rows of different lengths, as all their values one after the other and the places where rows begin.

Lists of numbers are kept so until they are handed over as nested tensors, as lists of arrays or padded; strings and
binary where they are wanted as packed bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from torch_dataloader_utils.columns.dense import concatenated, dense_array, read_buffer
from torch_dataloader_utils.columns.nulls import innermost
from torch_dataloader_utils.columns.options import Padded
from torch_dataloader_utils.columns.transform import Form, fitting

__all__ = ["PackedBytes", "Ragged", "RaggedBatches", "concatenate", "is_plain_jagged", "jagged_parts", "ragged"]


Values: TypeAlias = torch.Tensor | npt.NDArray[Any]


Offsets: TypeAlias = npt.NDArray[np.int64]


class PackedBytes(NamedTuple):
    """Strings or binary as bytes: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``.

    Attributes:
        values: The bytes of all rows, uint8: a tensor or an array.
        offsets: Where rows begin, and last where the last one ends: int64 of shape ``(rows + 1,)``.
    """

    values: Any
    offsets: Any


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths, on their way.

    Attributes:
        values: The values of all rows.
        offsets: Where rows begin and the last one ends. The first need not be 0: `values` begins there.
        form: What they become in a batch.
        padding: What follows shorter rows where they are padded; one value.
    """

    values: Values
    offsets: Offsets
    form: Form
    padding: npt.NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return int(self.values.nbytes + self.offsets.nbytes)

    def slice(self, start: int, stop: int) -> Ragged:
        """Return some of the rows, without a copy."""
        offsets = self.offsets[start : stop + 1]
        first, last = int(offsets[0] - self.offsets[0]), int(offsets[-1] - self.offsets[0])
        return replace(self, values=self.values[first:last], offsets=offsets)

    def copy(self) -> Ragged:
        """Return the same in memory of its own."""
        values = self.values.clone() if isinstance(self.values, torch.Tensor) else self.values.copy()
        return replace(self, values=values, offsets=self.offsets.copy())

    def pin_memory(self) -> Ragged:
        """Return the same with the values in pinned memory: torch calls this."""
        return replace(self, values=self.values.pin_memory()) if isinstance(self.values, torch.Tensor) else self

    def batches(self, sizes: Sequence[int]) -> Iterator[Any]:
        """Yield batches of some rows, as they are handed over."""
        if not isinstance(self.form, Padded):
            yield from self.apart(sizes)
            return
        stops = list(accumulate(sizes))
        for size, stop in zip(sizes, stops, strict=True):
            yield self.slice(stop - size, stop).padded(self.form.length)

    def apart(self, sizes: Sequence[int]) -> RaggedBatches:
        """Return batches of some rows, ready to be cut apart and nothing more: each with offsets of its own."""
        stops = list(accumulate(sizes))
        parts = [self.offsets[stop - size : stop + 1] for size, stop in zip(sizes, stops, strict=True)]
        offsets = np.concatenate([part - part[0] for part in parts])
        lengths = tuple(int(part[-1] - part[0]) for part in parts)
        whole = torch.from_numpy(offsets) if isinstance(self.values, torch.Tensor) else offsets
        return RaggedBatches(self.values, whole, lengths, tuple(sizes), self.form)

    def padded(self, length: int | None) -> Values:
        """Return the rows as one tensor or array, each as long as the longest."""
        lengths = np.diff(self.offsets)
        width = int(lengths.max(initial=0)) if length is None else length
        shape = (len(self), width, *self.values.shape[1:])
        padded: Values
        if isinstance(self.values, torch.Tensor):
            padded = torch.empty(shape, dtype=self.values.dtype, pin_memory=self.values.is_pinned())
            array, values = padded.numpy(), self.values.numpy()
        else:
            padded, values = np.empty(shape, self.values.dtype), self.values
            array = padded
        array[...] = self.padding
        array[np.arange(width) < lengths[:, None]] = values
        return padded


@dataclass(frozen=True, slots=True)
class RaggedBatches:
    """Batches of rows of different lengths, to be cut apart by views alone.

    Attributes:
        values: The values of all batches.
        offsets: For each batch where its rows begin and the last one ends, each from 0, one batch after the other.
        lengths: Values of each batch.
        sizes: Rows of each batch.
        form: What they become.
    """

    values: Values
    offsets: Values
    lengths: tuple[int, ...]
    sizes: tuple[int, ...]
    form: Form

    def pin_memory(self) -> RaggedBatches:
        """Return the same in pinned memory: torch calls this."""
        if not isinstance(self.values, torch.Tensor) or not isinstance(self.offsets, torch.Tensor):
            return self
        return replace(self, values=self.values.pin_memory(), offsets=self.offsets.pin_memory())

    def __iter__(self) -> Iterator[Any]:
        """Yield each batch as it is handed over."""
        values, offsets = _cut(self.values, self.lengths), _cut(self.offsets, [size + 1 for size in self.sizes])
        for own, ends in zip(values, offsets, strict=True):
            if self.form == "packed":
                yield PackedBytes(own, ends)
            elif isinstance(own, torch.Tensor) and isinstance(ends, torch.Tensor):
                yield torch.nested.nested_tensor_from_jagged(own, offsets=ends)
            else:
                bounds = ends.tolist()
                yield [own[start:stop] for start, stop in pairwise(bounds)]


def _cut(values: Values, sizes: Sequence[int]) -> Sequence[Values]:
    if isinstance(values, torch.Tensor):
        # Not views in autograd's eyes: what a training loop computes in place on one batch is not the others' business.
        return torch.unsafe_split_with_sizes(values, list(sizes))
    stops = list(accumulate(sizes))
    return [values[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]


def ragged(column: pa.ChunkedArray, form: Form, *, tensors: bool) -> Ragged:
    """Return lists, strings or binary as their values, without a copy where the layout allows.

    Args:
        column: The rows, without nulls that have no value.
        form: What they become in a batch.
        tensors: Whether that is made of tensors, not of arrays.
    """
    parts = [
        _bytes_of(chunk) if form == "packed" else _values_of(chunk, times=not tensors) for chunk in _chunks(column)
    ]
    values = concatenated([values for values, _ in parts])
    padding = None
    if isinstance(form, Padded):
        kind = innermost(column.type)
        scalar = fitting(form.value, kind, "padding")
        padding = dense_array(pa.repeat(scalar, 1), times=not tensors)
    return Ragged(torch.from_numpy(values) if tensors else values, _joined([ends for _, ends in parts]), form, padding)


def is_plain_jagged(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a nested one of which values and offsets are all there is to it."""
    if not tensor.is_nested or tensor.layout != torch.jagged or tensor.requires_grad or not tensor.is_cpu:
        return False
    return getattr(tensor, "_ragged_idx", 1) == 1 and tensor.lengths() is None  # type: ignore[attr-defined]


def jagged_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and the offsets of such a tensor."""
    return tensor.values(), tensor.offsets()  # type: ignore[attr-defined]


def concatenate(parts: Sequence[Ragged]) -> Ragged:
    """Return rows one after the other, in memory of their own where they are several."""
    if len(parts) == 1:
        return parts[0]
    values = [part.values for part in parts]
    together: Any = torch.cat(values) if isinstance(values[0], torch.Tensor) else np.concatenate(values)  # type: ignore[arg-type]
    return replace(parts[0], values=together, offsets=_joined([part.offsets for part in parts]))


def _joined(parts: Sequence[Offsets]) -> Offsets:
    """Return the offsets of rows put one after the other."""
    if len(parts) == 1:
        return parts[0]
    offsets = [np.zeros(1, np.int64)]
    for part in parts:
        offsets.append(part[1:] - part[0] + offsets[-1][-1])
    return np.concatenate(offsets)


def _chunks(column: pa.ChunkedArray) -> list[pa.Array]:
    return column.chunks or [pa.array([], column.type)]


def _values_of(lists: pa.Array, *, times: bool) -> tuple[npt.NDArray[Any], Offsets]:
    if not len(lists):
        kind = lists.type.value_type
        return dense_array(pa.array([], kind), times=times), np.zeros(1, np.int64)
    offsets = lists.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    return dense_array(lists.values.slice(offsets[0], offsets[-1] - offsets[0]), times=times), offsets


def _bytes_of(values: pa.Array) -> tuple[npt.NDArray[np.uint8], Offsets]:
    if pa.types.is_fixed_size_binary(values.type):
        width = values.type.byte_width
        offsets = np.arange(len(values) + 1, dtype=np.int64) * width
        return read_buffer(values.buffers()[1], np.dtype(np.uint8), len(values) * width, values.offset * width), offsets
    is_large = pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)
    if not len(values):
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    dtype = np.dtype(np.int64 if is_large else np.int32)
    _, ends, content = values.buffers()
    offsets = np.frombuffer(ends, dtype, len(values) + 1, values.offset * dtype.itemsize).astype(np.int64)
    return read_buffer(content, np.dtype(np.uint8), int(offsets[-1] - offsets[0]), int(offsets[0])), offsets
