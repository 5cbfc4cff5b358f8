"""Batches as most contenders deliver them: columns by name, or the values of a single column."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["kind_of", "rows_of", "sum_of"]


def rows_of(batch: Any) -> int:
    """Return the number of rows: the length of any column."""
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch)


def sum_of(batch: Any, column: str) -> int:
    """Add up a column of tensors, arrays or lists, or of an Arrow batch."""
    if hasattr(batch, "column"):
        values = batch.column(column)
    elif isinstance(batch, dict):
        values = batch[column]
    else:
        values = batch
    return int(np.asarray(values).sum(dtype=np.int64))


def kind_of(batch: Any) -> str:
    """Describe the type of a batch's first column."""
    values = next(iter(batch.values())) if isinstance(batch, dict) else batch
    if isinstance(values, list):
        return f"list of {type(values[0]).__name__}"
    if not hasattr(values, "dtype"):
        return type(values).__name__
    return f"{type(values).__name__} of {values.dtype}, shape {tuple(values.shape)}"
