"""`in_step` looks a batch ahead, and counts none that it does not yield."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from support import batches_of, open_loader, rows_of, write_dataset
from torch.utils._pytree import tree_leaves

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
        self.received: list[list[Any]] = []  # of all_gather, the batches
        self.has_had = False
        monkeypatch.setattr(steps, "Sum", self.sum)
        monkeypatch.setattr(steps, "all_gather", self.gathered)

    def gathered(self, own: Any, _group: Any) -> list[Any]:
        if isinstance(own, list):
            self.received.append(own)
        return [own]

    def sum(self, own: list[bool], _group: Any) -> Any:
        has = next(self.has, False)
        self.has_had = self.has_had or has
        total = own[0] + has, own[1] + (not self.has_had)
        return SimpleNamespace(wait=lambda: total)


def own_bytes(batch: Any) -> bool:
    """Whether no tensor of a batch has memory of other rows."""
    tensors = [part for tensor in tree_leaves(batch) for part in (parts_of(tensor) if tensor.is_nested else [tensor])]
    return all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.values(), tensor.offsets()]


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    rows = range(103)
    columns = {"value": rows, "lists": [[row] * (row % 3) for row in rows], "name": [f"row {row}" for row in rows]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=50)
    return tmp_path


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate_fn", [None, OrderedDict])
def test_a_batch_that_is_repeated_is_copied_without_the_batches_beside_it(lists, monkeypatch, workers, collate_fn):
    options = {"batch_size": 10, "num_workers": workers, "column_formats": {"name": "packed"}, "collate_fn": collate_fn}
    whole = batches_of(open_loader(lists, **options)[0])
    AnotherRank(monkeypatch, len(whole) + 3)
    seen = list(in_step(open_loader(lists, **options)[0], uneven="pad"))
    assert list(map(rows_of, seen)) == [*whole, *[whole[-1]] * 3]
    assert not all(map(own_bytes, seen[: len(whole)]))
    last, *repeated = seen[len(whole) - 1 :]
    assert len({batch["row"].data_ptr() for batch in (last, *repeated)}) == 4
    for batch in repeated:
        assert own_bytes(batch)
        assert type(batch) is type(last)
        assert [row.tolist() for row in batch["lists"].unbind()] == [row.tolist() for row in last["lists"].unbind()]
        assert all(map(torch.equal, batch["name"], last["name"]))


def test_a_copy_has_what_the_batch_has():
    """What is one tensor stays one, wherever it is; what is expanded stays so; a table has its own rows alone."""
    many = torch.arange(10_000)
    few, ones = many[5:15], torch.ones(1).expand(1_000)
    table = pa.table({"x": range(10_000), "text": ["a"] * 10_000}).slice(5, 10)
    within = SimpleNamespace(tensor=few)
    ((copied,),) = [steps._copied([{"a": few, "b": [few], "within": within, "ones": ones, "table": table, "n": 3}])]
    assert copied["a"] is copied["b"][0] is copied["within"].tensor is not few
    assert copied["a"].tolist() == few.tolist()
    assert copied["a"].untyped_storage().nbytes() == few.nbytes
    assert copied["ones"].untyped_storage().nbytes() == 4
    assert copied["table"].equals(table)
    assert len(pickle.dumps(copied["table"])) < 2_000 < len(pickle.dumps(table))
    assert copied["n"] == 3


@pytest.mark.usefixtures("_group")
def test_a_rank_that_never_had_a_batch_gets_one_without_the_batches_beside_it(path, monkeypatch):
    options = {"batch_size": 10, "num_workers": 1, "columns": ["value"]}
    whole = batches_of(open_loader(path, **options)[0])
    other = AnotherRank(monkeypatch, 0)
    assert list(map(rows_of, in_step(open_loader(path, **options)[0], uneven="pad"))) == whole
    sent = [batch for own in other.received for batch in own]
    assert list(map(rows_of, sent)) == whole
    assert all(map(own_bytes, sent))
