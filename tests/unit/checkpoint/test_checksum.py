"""A state that was damaged, or comes from elsewhere: a documented error at once, in few words."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import all_rows_of, edited, open_loader, write_dataset

from torch_dataloader_utils import CheckpointMismatchError, LostRowsWarning, RankMismatchError
from torch_dataloader_utils.distributed import own_state

MOST_CHARACTERS = 4096
FILES = ((60, 20), (45, 15), (80, 20))
OPTIONS = {"batch_size": 7, "shuffle": True, "shuffle_buffer_size": 30}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("data")
    write_dataset(directory, FILES)
    return directory


@pytest.fixture(scope="module")
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

HOSTILE: dict[str, Callable[[], dict[str, Any]]] = {
    "ranks without end": lambda: {"num_ranks": 10**12, "rank": 1},
    "a deep list": lambda: {"in_progress": DEEP},
    "deep files": lambda: {"files": DEEP},
    "a deep value": lambda: {"epoch": DEEP},
    "a long string": lambda: {"_num_workers": "7" * 100_000_000},
    "a long filter": lambda: {"plan": {"filter": "7" * 10_000_000}},
    "a long root": lambda: {"plan": {"root": "/" + "7" * 10_000_000}},
    "a long number": lambda: {"epoch": -(10**5000)},
    "a long number of ranks": lambda: {"num_ranks": 10**400, "rank": 10**399},
    "bytes": lambda: {"files": b"x" * 10_000_000},
    "many completed shards": lambda: {"completed_shards": [{"splits": []}] * 100_000},
}
"""Made by the test alone: what a module keeps makes every fork of a worker process slower, in all other tests."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_state_is_refused_at_once_in_few_words(data, state, name, strict):
    changes = HOSTILE[name]()
    if "plan" in changes:
        changes["plan"] = state["plan"] | changes["plan"]
    hostile = edited(state, **changes)
    with pytest.raises(ValueError, match=r"state|checkpoint") as raised:
        load(data, hostile, strict=strict)
    assert len(str(raised.value)) < MOST_CHARACTERS


LONG = "x" * 10_000_000
MANY = 80_000
HUGE = 2 * 10**10
"""Rows that would take 160 GB as row numbers."""


def split(state: dict[str, Any], path: str, rows: int, start: int = 0) -> dict[str, Any]:
    return {"path": f"{state['plan']['root']}/{path}", "row_offset": start, "row_length": rows}


def shard(*splits: dict[str, Any], rows_delivered: int = 1, **others: Any) -> dict[str, Any]:
    return {"splits": list(splits), "rows_delivered": rows_delivered, **others}


def with_a_file_that_is_gone(state: dict[str, Any], rows: int, **others: Any) -> dict[str, Any]:
    """Return a state in which a file with so many rows, which is gone, shares a shard with one that is there."""
    plan = state["plan"] | {"rows": state["plan"]["rows"] + rows, "fingerprint": "0" * 32}
    files = [*state["files"], ["zz.parquet", 9, "0", None, None, rows]]
    both = shard(split(state, "part-000.parquet", 20), split(state, "zz.parquet", rows), **others)
    return edited(state, plan=plan, files=files, completed_shards=[], in_progress=[both])


ODD_SHARDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a long path twice": lambda state: [shard(split(state, LONG, 20))] * 2,
    "many absent splits": lambda state: [
        shard(*(split(state, "a", 1, row) for row in range(MANY)), rows_delivered=0, absent=list(range(MANY - 1)))
    ],
    "repeated again and again": lambda state: [
        shard(split(state, "part-000.parquet", 10**6), repeats=True, windows=[[2 * row, 2 * row + 1]])
        for row in range(MANY // 2)
    ],
    "the same row numbers": lambda state: [shard(rows=[0, state["plan"]["rows"]] * MANY, repeats=True)],
    "more rounds than rows": lambda state: [shard(split(state, "part-000.parquet", 20), rounds=10**10)],
}


LONG_TO_PARSE = "repeated again and again"
"""Refused by the parser, which does not know whether a load is strict."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "strict"),
    [
        pytest.param(name, strict, marks=pytest.mark.soak if strict and name == LONG_TO_PARSE else [])
        for name in ODD_SHARDS
        for strict in (True, False)
    ],
)
def test_hostile_shards_are_refused_at_once_in_few_words(data, state, name, strict):
    hostile = edited(state, completed_shards=[], in_progress=ODD_SHARDS[name](state))
    with pytest.raises(ValueError, match=r"state|checkpoint") as raised:
        load(data, hostile, strict=strict)
    assert len(str(raised.value)) < MOST_CHARACTERS


@pytest.mark.parametrize("rounds", [1, 10**10])
def test_a_hostile_state_of_a_file_that_is_gone_is_refused_without_counting_its_rows(data, state, rounds):
    rows = HUGE if rounds == 1 else 100
    hostile = with_a_file_that_is_gone(state, rows, rounds=rounds)
    with pytest.raises(ValueError, match="not a state of this package"):
        load(data, hostile, strict=False, on_changed_files="continue")


def test_a_file_that_is_gone_may_have_had_any_number_of_rows(data, state):
    loader, _ = open_loader(data, batch_size=7)
    plain = loader.state_dict()
    with pytest.warns(LostRowsWarning, match="zz"):
        loader.load_state_dict(with_a_file_that_is_gone(plain, HUGE), strict=False, on_changed_files="continue")
    assert len(all_rows_of(loader)) == sum(rows for rows, _ in FILES) - 1


def test_a_state_of_which_everything_differs_is_refused_in_few_words(data, state):
    strings = dict.fromkeys(("format", "format_options", "split_strategy", "filter", "filter_binding"), LONG)
    files = [[f"{LONG}{number}", 1, "", None, None, 1] for number in range(9)]
    shards = [shard(split(state, f"{LONG}{number}", 10)) for number in range(9)]
    plan = state["plan"] | strings | {"fingerprint": LONG, "split_bytes": 10**99, "snapshot_id": 10**99}
    with pytest.raises(CheckpointMismatchError) as raised:
        load(data, edited(state, plan=plan, files=files, completed_shards=[], in_progress=shards))
    assert len(str(raised.value)) < MOST_CHARACTERS


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning")
def test_ranks_that_planned_different_epochs_are_refused_when_their_states_meet(data):
    states = [
        open_loader(data, num_ranks=2, rank=rank, **OPTIONS, split_rows=20 + rank)[0].state_dict() for rank in range(2)
    ]
    with pytest.raises(RankMismatchError, match=r"ranks \[1\] were saved under other plans than rank 0"):
        load(data, states, strict=False)
    with pytest.raises(RankMismatchError, match=r"ranks \[0\], ranks \[1\]\. .* split_rows=20 and 21"):
        own_state(states, rank=0)
    assert own_state([state | {"plan_digest": None} for state in states], rank=1)["rank"] == 1
