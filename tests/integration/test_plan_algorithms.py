"""A newer planning algorithm: states that were saved before it are continued by the algorithm that they name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import all_rows_of, batches_of, edited, open_loader, write_dataset

from torch_dataloader_utils import CheckpointMismatchError
from torch_dataloader_utils.planning.plan import Plan
from torch_dataloader_utils.planning.planner import PLAN_ALGORITHMS, make_plan

OPTIONS = {"shuffle": True, "split_rows": 30}
NEWER = 3


def last_first(*args: Any, **options: Any) -> Plan:
    """Another algorithm: the shards of the second one, in the opposite order."""
    plan = make_plan(*args, **options)
    return replace(plan, slices=plan.slices[::-1])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "data")
    return tmp_path / "data"


def saved(data: Path, batches: int) -> tuple[list[list[int]], dict[str, Any]]:
    loader, _ = open_loader(data, **OPTIONS)
    delivered = [[int(row) for row in batch["row"]] for _, batch in zip(range(batches), loader, strict=False)]
    return delivered, json.loads(json.dumps(loader.state_dict()))


def test_the_second_algorithm_is_kept():
    assert PLAN_ALGORITHMS[2] is make_plan


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_is_continued_by_the_algorithm_that_it_names_and_the_next_epoch_by_the_newest(
    data, monkeypatch, num_workers
):
    loader, _ = open_loader(data, **OPTIONS, num_workers=num_workers)
    whole = batches_of(loader)
    begun = iter(loader)
    first = [[int(row) for row in next(begun)["row"]] for _ in range(5)]
    state = loader.state_dict()
    assert state["plan_algorithm"] == 2

    monkeypatch.setitem(PLAN_ALGORITHMS, NEWER, last_first)
    loader, dataset = open_loader(data, **OPTIONS, num_workers=num_workers)
    assert loader.state_dict()["plan_algorithm"] == NEWER
    assert batches_of(loader) != whole
    loader.load_state_dict(state)
    assert loader.state_dict()["plan_algorithm"] == 2
    rest = iter(loader)
    second = [[int(row) for row in next(rest)["row"]] for _ in range(3)]
    again = loader.state_dict()
    loader.load_state_dict(again)
    assert first + second + batches_of(loader) == whole
    dataset.set_epoch(1)
    assert loader.state_dict()["plan_algorithm"] == NEWER
    assert sorted(all_rows_of(loader)) == list(range(443))


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning")
def test_an_elastic_load_plans_the_rest_by_the_algorithm_that_the_states_name(data, monkeypatch):
    first, state = saved(data, 5)
    monkeypatch.setitem(PLAN_ALGORITHMS, NEWER, last_first)
    rest = []
    for rank in range(2):
        loader, _ = open_loader(data, **OPTIONS, num_ranks=2, rank=rank)
        loader.load_state_dict(state, strict=False)
        assert loader.state_dict()["plan_algorithm"] == 2
        rest += all_rows_of(loader)
    assert sorted(sum(first, rest)) == list(range(443))


@pytest.mark.parametrize("strict", [True, False])
def test_an_unknown_algorithm_is_refused_by_its_number(data, strict):
    _, state = saved(data, 5)
    loader, _ = open_loader(data, **OPTIONS)
    with pytest.raises(CheckpointMismatchError, match="plan_algorithm changed: checkpoint=99, current=2"):
        loader.load_state_dict(edited(state, plan_algorithm=99), strict=strict)
