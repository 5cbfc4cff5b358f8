"""`in_step` looks a batch ahead, and counts none that it does not yield."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.compute as pc
import pytest
import torch.distributed as dist
from support import batches_of, open_loader, rows_of, write_dataset

from torch_dataloader_utils.distributed import in_step, steps
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


class AnotherRank:
    """Stands for a second rank in the ranks' sums: it has so many batches, and none to repeat before it has had one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
        self.has = iter([True] * batches)
        self.received: list[list[Any]] = []  # of all_gather
        self.has_had = False
        monkeypatch.setattr(steps, "Sum", self.sum)
        monkeypatch.setattr(steps, "all_gather", lambda own, _: self.received.append(own) or [own])

    def sum(self, own: list[bool], _group: Any) -> Any:
        has = next(self.has, False)
        self.has_had = self.has_had or has
        total = own[0] + has, own[1] + (not self.has_had)
        return SimpleNamespace(wait=lambda: total)


def own_bytes(batch: dict[str, Any]) -> bool:
    """Whether the memory of each tensor has no more bytes than the tensor."""
    return all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in batch.values())


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("collate_fn", [None, OrderedDict], ids=["a dictionary", "what only deepcopy copies"])
def test_a_batch_that_is_repeated_is_copied_without_the_batches_beside_it(path, monkeypatch, collate_fn):
    options = {"batch_size": 10, "num_workers": 1, "columns": ["value"], "collate_fn": collate_fn}
    whole = batches_of(open_loader(path, **options)[0])
    AnotherRank(monkeypatch, len(whole) + 3)
    seen = list(in_step(open_loader(path, **options)[0], uneven="pad"))
    assert list(map(rows_of, seen)) == [*whole, *[whole[-1]] * 3]
    assert not all(map(own_bytes, seen[: len(whole)]))
    repeated = seen[len(whole) :]
    assert len({batch["row"].data_ptr() for batch in seen[-4:]}) == 4
    if collate_fn is None:
        assert all(map(own_bytes, repeated))


@pytest.mark.usefixtures("_group")
def test_a_rank_that_never_had_a_batch_gets_one_without_the_batches_beside_it(path, monkeypatch):
    options = {"batch_size": 10, "num_workers": 1, "columns": ["value"]}
    whole = batches_of(open_loader(path, **options)[0])
    other = AnotherRank(monkeypatch, 0)
    assert list(map(rows_of, in_step(open_loader(path, **options)[0], uneven="pad"))) == whole
    sent = [batch for own in other.received for batch in own]
    assert list(map(rows_of, sent)) == whole
    assert all(map(own_bytes, sent))
