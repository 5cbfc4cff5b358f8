"""What a `collate_fn` returned, copied before it is called again: it may fill the same memory for the next batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torch_dataloader_utils.columns.ragged import PackedBytes, jagged_parts

__all__ = ["BatchBuffer", "UncopyableError", "copy_batch"]


class UncopyableError(Exception):
    """Nobody knows how to copy this."""


def copy_batch(value: Any) -> Any:
    """Return a copy.

    Args:
        value: Tensors and arrays in dictionaries, lists and tuples, with numbers and texts between them.

    Raises:
        UncopyableError: If there is anything else in it.
    """
    if isinstance(value, torch.Tensor):
        return _copied(value)
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    if type(value) is dict:
        return {key: copy_batch(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copy_batch, value))
    if type(value) is PackedBytes:
        return PackedBytes._make(map(copy_batch, value))
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    raise UncopyableError


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.requires_grad:
        return tensor.clone()
    parts = jagged_parts(tensor)
    if parts is None:
        raise UncopyableError
    values, offsets = parts
    return torch.nested.nested_tensor_from_jagged(values.clone(), offsets=offsets.clone())


class BatchBuffer:
    """Batches put together as columns, each copied to its place as it comes.

    They are dictionaries of tensors of one kind, with an entry for each row. Others are not taken.

    Args:
        sizes: The rows of the batches to come.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        self._places: list[tuple[torch.Tensor, ...]] = []
        self.columns: dict[str, torch.Tensor] = {}
        self.count = 0

    @property
    def is_complete(self) -> bool:
        """Whether all batches were taken."""
        return self.count == len(self._sizes)

    def take(self, batch: Any) -> dict[str, torch.Tensor] | None:
        """Copy the next batch to its place and return it there; or return None if it is not like those before."""
        if type(batch) is not dict or len(set(map(id, batch.values()))) < len(batch):
            return None
        if not self.count and not self._prepare(batch):
            return None
        if batch.keys() != self.columns.keys():
            return None
        tensors = [batch[name] for name in self.columns]
        places = self._places[self.count]
        if not all(map(_fits, tensors, places)):
            return None
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
        self.count += 1
        return dict(zip(self.columns, places, strict=True))

    def _prepare(self, first: dict[str, Any]) -> bool:
        """Make room for batches like the first one."""
        if not first or len(self._sizes) == 1:
            return False
        rows = sum(self._sizes)
        for name, tensor in first.items():
            if type(tensor) is not torch.Tensor or not tensor.dim() or tensor.is_quantized or not _is_plain(tensor):
                return False
            self.columns[name] = torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype)
        places = [torch.unsafe_split_with_sizes(column, self._sizes) for column in self.columns.values()]
        self._places = list(zip(*places, strict=True))
        return True


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and not tensor.requires_grad and tensor.layout == torch.strided


def _fits(tensor: Any, place: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or tensor.dtype != place.dtype or tensor.shape != place.shape:
        return False
    return _is_plain(tensor)
