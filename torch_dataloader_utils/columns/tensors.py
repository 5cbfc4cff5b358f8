"""The tensors that columns consist of, copied elsewhere: into pinned memory, or to a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pyarrow as pa
import torch

from torch_dataloader_utils.columns.convert import Columns
from torch_dataloader_utils.columns.ragged import Ragged


def map_tensors(columns: Columns, change: Callable[[torch.Tensor], torch.Tensor]) -> Columns:
    """Return columns with other tensors.

    Args:
        columns: Converted columns, or what `with_offsets` or `sendable` made of them. What is a list stays.
        change: Called with each tensor.
    """
    if isinstance(columns, pa.Table):
        return columns
    return {name: _with_tensors(values, change) for name, values in columns.items()}


def pinned(columns: Columns) -> Columns:
    """Return columns with their tensors in pinned memory, from which a device copies while the process goes on."""
    if isinstance(columns, pa.Table):
        return columns
    copied = map_tensors(columns, _pinned)
    return {
        name: replace(values, is_pinned=True) if isinstance(values, Ragged) else values
        for name, values in copied.items()
    }


def _with_tensors(values: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(values, torch.Tensor):
        return change(values)
    if not is_dataclass(values) or isinstance(values, type):
        return values
    found = {field.name: getattr(values, field.name) for field in fields(values)}
    changed: dict[str, Any] = {name: change(own) for name, own in found.items() if isinstance(own, torch.Tensor)}
    return replace(values, **changed) if changed else values


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory.

    torch's own way, ``pin_memory``, copies with a thread for each core. These wait for more work at full speed, and
    take that time from those who decode.
    """
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    copy.view(-1).view(torch.uint8).numpy()[:] = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return copy
