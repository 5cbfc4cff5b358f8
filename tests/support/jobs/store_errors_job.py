"""In two ranks: calls of a store that are wrong on one rank. Each rank gets the error, and the next save succeeds.

Its argument, JSON: ``url`` of the store.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs.groups import leave_group

from torch_dataloader_utils import CheckpointStore, CheckpointStoreError, RankMismatchError


class Part:
    """A part whose state has a value that may fail: as it is taken, or as it is written."""

    def __init__(self, value: Callable[[], Any]) -> None:
        self._value = value

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {"value": self._value()}

    def load_state_dict(self, state: Any) -> None:
        """Do nothing: it is never loaded."""


class Unwritable:
    """A value that can be copied, and not be written."""

    def __deepcopy__(self, _: Any) -> Unwritable:
        return self

    def __reduce__(self) -> Any:
        raise ValueError("it cannot be written")


def main() -> None:
    """Call it."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = CheckpointStore(json.loads(sys.argv[1])["url"])
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    with pytest.raises(RankMismatchError, match="rank 1 with step=1"):
        store.save(rank, model=model)
    with pytest.raises(TypeError, match="'low'"):
        store.save(1, model=model, metrics={"loss": 1.0 if rank == 0 else "low"})
    with pytest.raises(ZeroDivisionError):
        store.save(1, model=model, other=Part(lambda: 1 // (1 - rank)))
    bad = {"other": Part(Unwritable)} if rank == 1 else {"other": Part(dict)}
    with pytest.raises(CheckpointStoreError, match="rank 1: ValueError: it cannot be written"):
        store.save(1, **bad)
    store.save(1, **bad, async_=True)
    with pytest.raises(CheckpointStoreError, match="rank 1: ValueError: it cannot be written"):
        store.wait()
    assert store.latest() is None
    assert store.save(2, model=model).step == 2
    dist.barrier()
    assert store.restore(model=model) == store.latest()
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 7"):
        store.restore(model=model, step=7)
    leave_group()


if __name__ == "__main__":
    main()
