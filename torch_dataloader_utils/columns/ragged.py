"""Rows of different lengths, kept as the values of all rows plus the offsets at which rows begin.

Lists of numbers have this layout until they are delivered as jagged nested tensors, as lists of arrays or padded.
Strings and binary have it if the user wants them as packed bytes.
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

from torch_dataloader_utils.columns.arrow import leaf_type, offsets_of
from torch_dataloader_utils.columns.column_plan import Form, to_scalar
from torch_dataloader_utils.columns.dense import dense_array, read_buffer
from torch_dataloader_utils.columns.inference import normal_mode
from torch_dataloader_utils.columns.options import Padded

MOST_COPIED_AT_ONCE = 1 << 14
"""So many values are copied without releasing Python's lock: to get it back takes longer where a training loop runs."""

Values: TypeAlias = torch.Tensor | npt.NDArray[Any]
Offsets: TypeAlias = npt.NDArray[np.int64]


class PackedBytes(NamedTuple):
    """Strings or binary as bytes: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``.

    Attributes:
        values: The bytes of all rows, uint8: a tensor or an array.
        offsets: Where each row begins, and where the last one ends: int64 of shape ``(rows + 1,)``.
    """

    values: Any
    offsets: Any


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths, not yet split into batches.

    Attributes:
        offsets: Where each row begins, and where the last one ends. The first need not be 0: the values begin there.
        padding: The value that shorter rows are filled up with where they are padded, as an array of one value.
        is_pinned: Whether tensors are in pinned memory, and padded rows are to be. Known without asking torch, which
            would ask the device, and fail in a forked worker.
    """

    values: Values
    offsets: Offsets
    form: Form
    padding: npt.NDArray[Any] | None = None
    is_pinned: bool = False

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return int(self.values.nbytes + self.offsets.nbytes)

    def slice(self, start: int, stop: int) -> Ragged:
        """Return some of the rows, without a copy."""
        offsets = self.offsets[start : stop + 1]  # left as they are: subtracting the first would be a copy
        first, last = int(offsets[0] - self.offsets[0]), int(offsets[-1] - self.offsets[0])
        return replace(self, values=self.values[first:last], offsets=offsets)

    def keep(self, flags: npt.NDArray[np.bool_]) -> Ragged:
        """Return a copy of the rows whose flag is True."""
        lengths = np.diff(self.offsets)
        kept = np.repeat(flags, lengths)
        values = self.values[torch.from_numpy(kept) if isinstance(self.values, torch.Tensor) else kept]
        return replace(self, values=values, offsets=np.cumsum([0, *lengths[flags]]))

    def batches(self, sizes: Sequence[int]) -> Iterator[Any]:
        """Yield the rows as batches of these sizes, in the form that is delivered."""
        if not isinstance(self.form, Padded):
            yield from self.split(sizes)
            return
        for size, stop in zip(sizes, accumulate(sizes), strict=True):
            yield self.slice(stop - size, stop).padded(self.form.length)

    def split(self, sizes: Sequence[int]) -> RaggedBatches:
        """Return batches of these sizes, each with offsets from 0, of which delivered batches are mere views."""
        parts = [self.offsets[stop - size : stop + 1] for size, stop in zip(sizes, accumulate(sizes), strict=True)]
        offsets = np.concatenate([part - part[0] for part in parts])
        lengths = tuple(int(part[-1] - part[0]) for part in parts)
        all_offsets = torch.from_numpy(offsets) if isinstance(self.values, torch.Tensor) else offsets
        return RaggedBatches(self.values, all_offsets, lengths, tuple(sizes), self.form)

    def padded(self, length: int | None) -> Values:
        """Return the rows as one tensor or array, in which each is as long as the longest, or as a given length."""
        lengths = np.diff(self.offsets)
        width = int(lengths.max(initial=0)) if length is None else length
        shape = (len(self), width, *self.values.shape[1:])
        padded: Values
        if isinstance(self.values, torch.Tensor):
            padded = torch.empty(shape, dtype=self.values.dtype, device="cpu", pin_memory=self.is_pinned)
        else:
            padded = np.empty(shape, self.values.dtype)
        array = np.asarray(padded)
        array[...] = self.padding
        # A boolean mask selects the places row by row, which is the order of the values.
        array[np.arange(width) < lengths[:, None]] = np.asarray(self.values)
        return padded


@dataclass(frozen=True, slots=True)
class RaggedBatches:
    """Batches of rows of different lengths, whose memory is ready: delivering one makes views and copies nothing.

    Attributes:
        offsets: For each batch where its rows begin and the last one ends, from 0; one batch after the other.
        lengths: Number of values of each batch.
        sizes: Number of rows of each batch.
    """

    values: Values
    offsets: Values
    lengths: tuple[int, ...]
    sizes: tuple[int, ...]
    form: Form

    def __iter__(self) -> Iterator[Any]:
        """Yield each batch in the form that is delivered."""
        all_offsets = split_values(self.offsets, [size + 1 for size in self.sizes])
        for values, offsets in zip(split_values(self.values, self.lengths), all_offsets, strict=True):
            if self.form == "packed":
                yield PackedBytes(values, offsets)
            elif isinstance(values, torch.Tensor) and isinstance(offsets, torch.Tensor):
                with normal_mode():
                    jagged = torch.nested.nested_tensor_from_jagged(values, offsets=offsets)
                yield jagged
            else:
                yield [values[start:stop] for start, stop in pairwise(offsets.tolist())]


def split_values(values: Values, sizes: Sequence[int]) -> Sequence[Values]:
    """Split a tensor or an array into consecutive parts of these sizes, without a copy."""
    if isinstance(values, torch.Tensor):
        # To autograd the parts of a safe split are views of one tensor: an in-place operation on one batch would make
        # it refuse to compute gradients through another.
        return torch.unsafe_split_with_sizes(values, list(sizes))
    return [values[stop - size : stop] for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def concat(parts: Sequence[Any]) -> Any:
    """Return a copy of tensors, arrays, or rows of different lengths, one part after the other."""
    if isinstance(parts[0], Ragged):
        values, offsets = concat([part.values for part in parts]), _concat_offsets([part.offsets for part in parts])
        return replace(parts[0], values=values, offsets=offsets)
    # Torch copies with all of its threads, which then wait for more work at full speed: numpy's copy takes less.
    if isinstance(parts[0], torch.Tensor):
        return torch.from_numpy(concat([part.numpy() for part in parts]))
    first = parts[0]
    is_buffer = first.dtype.kind not in "mM"  # to Python, arrays of times are none
    if not is_buffer or not 0 < sum(part.size for part in parts) <= MOST_COPIED_AT_ONCE:
        return np.concatenate(parts)
    copy = np.frombuffer(bytearray().join([np.ascontiguousarray(part).data for part in parts]), first.dtype)
    return copy if first.ndim == 1 else copy.reshape(-1, *first.shape[1:])


def _concat_offsets(parts: Sequence[Offsets]) -> Offsets:
    begins = accumulate((part[-1] - part[0] for part in parts), initial=np.int64(0))
    moved = [part[1:] - part[0] + begin for part, begin in zip(parts, begins, strict=False)]
    return np.concatenate([np.zeros(1, np.int64), *moved])


def ragged(column: pa.ChunkedArray, form: Form, *, tensors: bool) -> Ragged:
    """Return lists, strings or binary as values and offsets, without a copy where the layout allows it.

    Nulls must be filled before, except values that are NaN or NaT for null. `tensors` says whether batches are made of
    tensors, or else of arrays.
    """
    chunks = column.chunks or [pa.array([], column.type)]
    parts = [_bytes(chunk) if form == "packed" else _list_values(chunk, numpy_times=not tensors) for chunk in chunks]
    values, offsets = parts[0]
    if len(parts) > 1:
        values, offsets = np.concatenate([part for part, _ in parts]), _concat_offsets([part for _, part in parts])
    padding = None
    if isinstance(form, Padded):
        scalar = to_scalar(form.value, leaf_type(column.type), "padding")
        padding = dense_array(pa.repeat(scalar, 1), numpy_times=not tensors)
    return Ragged(torch.from_numpy(values) if tensors else values, offsets, form, padding)


def jagged_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the values and the offsets of a nested tensor, or None if these do not describe it completely."""
    if not tensor.is_nested or tensor.layout != torch.jagged or tensor.requires_grad or not tensor.is_cpu:
        return None
    # With lengths, rows need not fill the space between offsets; a transposed one is jagged in another dimension.
    if getattr(tensor, "_ragged_idx", 1) != 1 or tensor.lengths() is not None:  # type: ignore[attr-defined]
        return None
    return tensor.values(), tensor.offsets()  # type: ignore[attr-defined]


def _list_values(lists: pa.Array, *, numpy_times: bool) -> tuple[npt.NDArray[Any], Offsets]:
    if not len(lists):  # an empty array may have no offsets to read
        return dense_array(pa.array([], lists.type.value_type), numpy_times=numpy_times), np.zeros(1, np.int64)
    offsets = offsets_of(lists).astype(np.int64)
    values = lists.values.slice(offsets[0], offsets[-1] - offsets[0])
    return dense_array(values, numpy_times=numpy_times), offsets


def _bytes(values: pa.Array) -> tuple[npt.NDArray[np.uint8], Offsets]:
    byte, buffers = np.dtype(np.uint8), values.buffers()
    if pa.types.is_fixed_size_binary(values.type):
        width = values.type.byte_width
        offsets = np.arange(len(values) + 1, dtype=np.int64) * width
        return read_buffer(buffers[1], byte, len(values) * width, values.offset * width), offsets
    if not len(values):
        return np.empty(0, byte), np.zeros(1, np.int64)
    offsets = offsets_of(values).astype(np.int64)
    return read_buffer(buffers[2], byte, int(offsets[-1] - offsets[0]), int(offsets[0])), offsets
