"""`in_step` looks a batch ahead, and counts none that it does not yield."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
import torch.distributed as dist
from support import batches_of, open_loader, rows_of, write_dataset

from torch_dataloader_utils.distributed import in_step
from torch_dataloader_utils.distributed.gather import on_all_ranks

reduce = dist.all_reduce


@pytest.fixture
def _group() -> Iterator[None]:
    """An initialised process group of one."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


class FailsOnce:
    """A `collate_fn` that fails at the batch with a row, the first time."""

    def __init__(self, row: int) -> None:
        self.row: int | None = row

    def __call__(self, batch: Any) -> Any:
        if self.row in rows_of(batch):
            self.row = None
            raise ValueError("made up")
        return batch


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_dataset(tmp_path, ((70, 20), (33, 10)))
    return tmp_path


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("uneven", ["drop", "pad"])
@pytest.mark.parametrize("row", [0, 16, 40, 102])
def test_a_batch_that_cannot_be_fetched_takes_none_before_it_along(path, uneven, row):
    whole = batches_of(open_loader(path)[0])
    loader, _ = open_loader(path, collate_fn=FailsOnce(row))
    taken: list[list[int]] = []
    with pytest.raises(ValueError, match="made up"):
        taken.extend(map(rows_of, in_step(loader, uneven=uneven)))
    state = loader.state_dict()
    assert state["batches_delivered"] == len(taken)
    loader.load_state_dict(state)
    assert taken + batches_of(in_step(loader, uneven=uneven)) == whole


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("claim", [True, False])
def test_a_claim_of_all_ranks_is_one_sum_and_no_exchange_of_objects(monkeypatch, claim):
    sums = []
    monkeypatch.setattr(dist, "all_gather_object", None)
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **options: sums.append(args) or reduce(*args, **options))
    assert on_all_ranks(claim) == claim
    assert len(sums) == 1


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("filters", [None, pc.field("value") < 90], ids=["all rows", "filtered"])
def test_a_state_after_the_last_step_has_no_row_left(path, filters):
    loader, dataset = open_loader(path, filters=filters)
    steps = sum(1 for _ in in_step(loader))
    state = loader.state_dict()
    assert dataset.is_finished
    again, resumed = open_loader(path, filters=filters)
    again.load_state_dict(state)
    assert (batches_of(again), resumed.is_finished, state["batches_delivered"]) == ([], True, steps)
