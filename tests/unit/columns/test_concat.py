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


@pytest.mark.parametrize("kind", ["tensors", "arrays"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.float16, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=["scalars", "vectors", "matrices"])
def test_a_few_rows_are_copied_without_torch(monkeypatch, dtype, shape, kind):
    """Torch, and NumPy's copies, release Python's lock, for which this thread waits as long as a training loop runs."""
    whole = torch.arange(40 * int(np.prod(shape))).reshape(40, *shape).to(dtype)
    for tensors in ([whole[3:9]], [whole[:4], whole[20:33], whole[5:5]], [whole[::3], whole[1:2]]):
        expected = torch.cat(tensors)
        parts = tensors if kind == "tensors" else [part.numpy() for part in tensors]
        with Called() as called, monkeypatch.context() as context:
            context.setattr(np, "concatenate", None)
            copy = concat(parts)
        assert not {"cat.default", "clone.default"} & set(called.names)
        assert type(copy) is type(parts[0])
        copy = torch.as_tensor(copy)
        assert copy.dtype is dtype
        assert torch.equal(copy, expected)
        copy.zero_()  # it is writable, and shares no memory
        assert torch.equal(torch.cat(tensors), expected)
    assert torch.equal(concat([whole[:0], whole[:0]]), whole[:0])


@pytest.mark.parametrize("dtype", ["datetime64[us]", "timedelta64[ns]"])
@pytest.mark.parametrize("shape", [(), (3,)], ids=["scalars", "vectors"])
def test_times_are_copied_though_they_are_no_buffers(dtype, shape):
    whole = np.arange(40 * int(np.prod(shape))).reshape(40, *shape).astype(dtype)
    for parts in ([whole[3:9]], [whole[:4], whole[20:33], whole[5:5]], [whole[::3], whole[1:2]]):
        copy = concat(parts)
        assert copy.dtype == dtype
        assert np.array_equal(copy, np.concatenate(parts))
        assert not any(np.shares_memory(copy, part) for part in parts)
