"""A state that was damaged, or comes from elsewhere: a documented error at once, in few words."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import edited, open_loader, write_dataset

from torch_dataloader_utils import RankMismatchError
from torch_dataloader_utils.distributed import own_state

MOST_CHARACTERS = 4096
FILES = ((60, 20), (45, 15), (80, 20))
OPTIONS = {"batch_size": 7, "shuffle": True, "shuffle_buffer_size": 30}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("data")
    write_dataset(directory, FILES)
    return directory


@pytest.fixture
def state(data: Path) -> dict[str, Any]:
    loader, _ = open_loader(data, **OPTIONS)
    for number, _ in enumerate(loader):
        if number == 9:
            break
    found = json.loads(json.dumps(loader.state_dict()))
    assert found["in_progress"]
    return dict(found)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to each value of a state that holds no others."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))
    if not isinstance(value, (dict, list)):
        yield path


def damaged(value: Any) -> list[Any]:
    """Return values that a few flipped bits could make of one."""
    if isinstance(value, bool) or value is None:
        return [not value, 1]
    if isinstance(value, int):
        return [value + 1, value ^ 4, -value - 1]
    if isinstance(value, float):
        return [value + 0.5]
    return [value[:-1], value + "x"]


def load(data: Path, state: Any, **how: Any) -> None:
    open_loader(data, **OPTIONS)[0].load_state_dict(state, **how)


def test_each_value_that_is_damaged_is_refused(data, state):
    loader, _ = open_loader(data, **OPTIONS)
    before = loader.state_dict()
    tried = 0
    for path in places(state):
        for wrong in damaged(value_at(state, path)):
            broken = copy.deepcopy(state)
            value_at(broken, path[:-1])[path[-1]] = wrong
            with pytest.raises(ValueError, match=r"not a state of this package|reads version 1"):
                loader.load_state_dict(broken)
            tried += 1
    assert tried > 100
    assert loader.state_dict() == before


def value_at(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        state = state[key]
    return state


def test_keys_that_others_add_and_the_order_of_keys_do_not_matter(data, state):
    load(data, {"_of_a_framework": 1, **dict(reversed(state.items()))})


def test_a_state_without_a_checksum_is_loaded(data, state):
    load(data, edited(state))


DEEP: list[Any] = []
for _ in range(5000):
    DEEP = [DEEP]

HOSTILE: dict[str, dict[str, Any]] = {
    "ranks without end": {"num_ranks": 10**12, "rank": 1},
    "a deep list": {"in_progress": DEEP},
    "deep files": {"files": DEEP},
    "a deep value": {"epoch": DEEP},
    "a long string": {"_num_workers": "7" * 100_000_000},
    "a long filter": {"plan": {"filter": "7" * 10_000_000}},
    "a long root": {"plan": {"root": "/" + "7" * 10_000_000}},
    "a long number": {"epoch": -(10**5000)},
    "a long number of ranks": {"num_ranks": 10**400, "rank": 10**399},
    "bytes": {"files": b"x" * 10_000_000},
    "many completed shards": {"completed_shards": [{"splits": []}] * 100_000},
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_state_is_refused_at_once_in_few_words(data, state, name, strict):
    changes = copy.copy(HOSTILE[name])
    if "plan" in changes:
        changes["plan"] = state["plan"] | changes["plan"]
    hostile = edited(state, **changes)
    with pytest.raises(ValueError, match=r"state|checkpoint") as raised:
        load(data, hostile, strict=strict)
    assert len(str(raised.value)) < MOST_CHARACTERS


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning")
def test_ranks_that_planned_different_epochs_are_refused_when_their_states_meet(data):
    states = [
        open_loader(data, num_ranks=2, rank=rank, **OPTIONS, split_rows=20 + rank)[0].state_dict() for rank in range(2)
    ]
    with pytest.raises(RankMismatchError, match=r"ranks \[1\] were saved under other plans than rank 0"):
        load(data, states, strict=False)
    with pytest.raises(RankMismatchError, match=r"planned different epochs: ranks \[0\] have .*; ranks \[1\] have"):
        own_state(states, rank=0)
    assert own_state([state | {"plan_digest": None} for state in states], rank=1)["rank"] == 1
