"""Parts of columns are joined by one thread."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_dataloader_utils.columns.ragged import Ragged, concat


class Called(TorchDispatchMode):
    """Notes what torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN204
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", ["dense", "jagged"])
def test_torch_does_not_copy_with_all_of_its_threads(form):
    """Torch's threads wait for more work at full speed: they took half of the processor time of an epoch."""
    values = [torch.arange(start, start + 50_000) for start in (0, 50_000)]
    parts = values if form == "dense" else [Ragged(part, np.array([0, 10, 50_000]), "jagged") for part in values]
    with Called() as called:
        joined = concat(parts)
    assert "cat.default" not in called.names
    assert torch.equal(joined if form == "dense" else joined.values, torch.arange(100_000))
