"""Collation of rows of lists: torch's own would make a tensor of each place in the lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["stack_lists"]


def stack_lists(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Make one tensor of each column of lists."""
    return {name: torch.from_numpy(np.array([row[name] for row in rows])) for name in rows[0]}
