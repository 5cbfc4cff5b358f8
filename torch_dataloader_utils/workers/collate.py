"""Copies of what a `collate_fn` returned: it may reuse the same memory for the next batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info

from torch_dataloader_utils.columns.ragged import PackedBytes, jagged_parts, split_values
from torch_dataloader_utils.workers.direct_queue import sendable


class FailedCollate:
    """What `collate_fn` raised, in place of a batch that may be thrown away."""

    def __init__(self, error: Exception) -> None:
        worker = get_worker_info()
        self._error: Exception | ExceptionWrapper = error
        if worker is not None:
            wrapped: Callable[..., ExceptionWrapper] = ExceptionWrapper
            exc_info = (type(error), error, error.__traceback__)
            self._error = sendable(wrapped(exc_info, where=f"in DataLoader worker process {worker.id}"))

    def reraise(self) -> NoReturn:
        """Raise it, once."""
        error = self._error
        del self._error  # the traceback has this frame: a cycle would keep the batch
        try:
            if isinstance(error, ExceptionWrapper):
                reraise: Callable[[], NoReturn] = error.reraise
                reraise()
            raise error
        finally:
            del error


def collated_or_failed(collate_fn: Callable[[Any], Any], batch: Any) -> Any:
    """Return what `collate_fn` makes of a batch, or what it raised."""
    try:
        return collate_fn(batch)
    except Exception as error:  # noqa: BLE001 - raised again if the batch is delivered
        return FailedCollate(error)


class UncopyableError(Exception):
    """A batch holds something that `copy_batch` does not know how to copy."""


def copy_batch(value: Any) -> Any:
    """Return a copy that shares no memory: of tensors and arrays in dictionaries, lists and tuples.

    There may be numbers and strings between them. If there is anything else, or something that holds itself, raise an
    UncopyableError. What is there several times is so in the copy, too.
    """
    try:
        return _copied(value, {})
    except RecursionError:
        raise UncopyableError from None


def _copied(value: Any, made: dict[int, Any]) -> Any:
    """Copy a value; `made` has the copies of the batch, by the identity of what was copied."""
    copy = made.get(id(value))
    if copy is not None:
        return copy
    # Exact types but for tensors: a subclass may hold more than its base does.
    if isinstance(value, torch.Tensor):
        copy = _copy_tensor(value)
    elif value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    elif type(value) is np.ndarray and not value.dtype.hasobject:
        copy = value.copy()
    elif type(value) is dict:
        copy = {key: _copied(inner, made) for key, inner in value.items()}
    elif type(value) in (list, tuple):
        copy = type(value)([_copied(inner, made) for inner in value])
    elif type(value) is PackedBytes:
        copy = PackedBytes._make([_copied(inner, made) for inner in value])
    else:
        raise UncopyableError
    made[id(value)] = copy
    return copy


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.requires_grad:
        return tensor.clone()
    parts = jagged_parts(tensor)
    if parts is None:
        raise UncopyableError
    values, offsets = parts
    return torch.nested.nested_tensor_from_jagged(values.clone(), offsets=offsets.clone())


class BatchBuffer:
    """Memory for several batches as one tensor a column, into which each batch is copied as it is collated.

    Then a message has as few tensors as there are columns, however many batches it holds. That works for dictionaries
    of tensors with one entry for each row, if all batches have the same columns, dtypes, shapes of a row and order of
    dimensions.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)  # rows of each batch
        self._views: list[tuple[torch.Tensor, ...]] = []  # for each batch its part of each column
        self.columns: dict[str, torch.Tensor] = {}
        self.count = 0

    @property
    def is_complete(self) -> bool:
        """Whether all batches were copied into the buffer."""
        return self.count == len(self._sizes)

    def append(self, batch: Any) -> dict[str, torch.Tensor] | None:
        """Copy the next batch into the buffer and return the copy, or None if the buffer cannot take it."""
        if type(batch) is not dict or len(set(map(id, batch.values()))) < len(batch):
            return None  # a tensor under two names must arrive as one tensor, which pickling ensures
        if not self.count and not self._allocate(batch):
            return None
        views, tensors = self._views[self.count], list(batch.values())
        if list(batch) != list(self.columns) or not _are_alike(tensors, views):
            return None
        torch._foreach_copy_(views, tensors)  # as torch's optimizers do: one call in place of many
        self.count += 1
        return dict(zip(self.columns, views, strict=True))

    def _allocate(self, first: dict[str, Any]) -> bool:
        """Allocate memory for batches like the first one, if there will be more of them."""
        if not first or len(self._sizes) == 1:
            return False
        rows = sum(self._sizes)
        for name, tensor in first.items():
            # One without an entry for each row could be a large one, and the memory more than there is.
            if not is_plain(tensor) or tensor.shape[:1] != (self._sizes[0],):
                return False
            order = order_of(tensor)
            if order is not None and order[0] != 0:
                return False  # one batch's rows do not follow those of another
            shape = (rows, *tensor.shape[1:])
            memory = torch.empty(math.prod(shape), dtype=tensor.dtype, device="cpu")
            self.columns[name] = in_order(memory, shape, order)
        columns = [split_values(column, self._sizes) for column in self.columns.values()]
        self._views = list(zip(*columns, strict=True))
        return True


def _are_alike(tensors: Sequence[Any], views: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are like those of a buffer, which are plain. This is asked for each tensor of each batch."""
    strided = torch.strided
    for tensor, view in zip(tensors, views, strict=True):
        if type(tensor) is not torch.Tensor or tensor.is_nested:  # which has no shape
            return False
        if tensor.dtype is not view.dtype or tensor.shape != view.shape:
            return False
        if tensor.layout is not strided or tensor.requires_grad or not tensor.is_cpu:
            return False
        if tensor.dim() > 1 and order_of(tensor) != order_of(view):
            return False
    return True


def order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions of a strided tensor from the outermost in memory to the innermost, as of `channels_last`.

    None stands for their usual order, and for a tensor that leaves gaps in memory or has an element in several places.
    The rows of a batch of one row have any stride, and are the outermost.
    """
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    first = 0 if tensor.shape[0] == 1 else None
    order = tuple(sorted(range(tensor.dim()), key=lambda number: (number != first, -strides[number])))
    return order if tensor.permute(order).is_contiguous() else None


def in_order(values: torch.Tensor, shape: tuple[int, ...], order: tuple[int, ...] | None) -> torch.Tensor:
    """Return a flat tensor as one of a shape, whose dimensions have an order in memory: see `order_of`."""
    if order is None:
        return values.view(shape)
    places = sorted(range(len(order)), key=order.__getitem__)
    return values.view([shape[number] for number in order]).permute(places)


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor in main memory that is described by its values, strides and dtype alone."""
    is_strided = type(value) is torch.Tensor and value.is_cpu and value.layout == torch.strided
    return is_strided and not (value.requires_grad or value.is_quantized or value.is_nested)
