"""Every lease that reading an epoch takes is released, however the epoch is read."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pyarrow.dataset as pads
import pytest
from ranged import ranged
from support import all_rows_of, open_loader, rows_of, write_dataset

from torch_dataloader_utils.reading.memory_budget import MemoryBudget
from torch_dataloader_utils.reading.sequential import SequentialScan
from torch_dataloader_utils.reading.shuffled import ShuffledScan

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    directory: Path = tmp_path_factory.mktemp("leases")
    write_dataset(directory, ((1500, 500), (400, 100)))
    return directory


@pytest.fixture
def budgets(monkeypatch) -> list[MemoryBudget]:
    """Every budget that is made."""
    made: list[MemoryBudget] = []
    make = MemoryBudget.__init__

    def record(budget: MemoryBudget, limit: int) -> None:
        make(budget, limit)
        made.append(budget)

    monkeypatch.setattr(MemoryBudget, "__init__", record)
    return made


VIRTUAL = {"virtual_ranks": 1, "virtual_workers": 2, "uneven_ranks": "drop"}

WAYS: dict[str, dict[str, Any]] = {
    "in file order": {},
    "without the short last batch": {"drop_last": True, "batch_size": 300},
    "batches of several row groups": {"batch_size": 1700},
    "filtered": {"filters": pads.field("value") > 1234},
    "filtered to nothing in most row groups": {"filters": pads.field("value") == 3},
    "rows shuffled": {"shuffle": True, "shuffle_buffer_size": 1000},
    "rows shuffled in rounds": {"shuffle": True, "shuffle_buffer_size": 50},
    "rows shuffled and filtered": {"shuffle": True, "shuffle_buffer_size": 1000, "filters": pads.field("value") > 1234},
    "virtual topology": VIRTUAL,
    "virtual topology with rows shuffled": {**VIRTUAL, "shuffle": True, "shuffle_buffer_size": 200},
}


CHOSEN = {
    *((way, 9_000, "local") for way in WAYS),
    *((way, 9_000, "remote") for way in ("in file order", "filtered", "rows shuffled in rounds", "virtual topology")),
    ("in file order", 1, "local"),
    ("rows shuffled", 1, "remote"),
}
"""The ways tried in `make test`; a budget of one byte reads a few rows at a time, which is slow."""

CELLS = [
    pytest.param(way, limit, opened, marks=[] if (way, limit, opened) in CHOSEN else pytest.mark.soak)
    for way, limit, opened in itertools.product(WAYS, (1, 9_000), ("local", "remote"))
]


@pytest.mark.parametrize(("way", "limit", "opened"), CELLS)
def test_every_lease_of_an_epoch_is_released(path, budgets, way, limit, opened):
    loader, _ = open_loader(ranged(path) if opened == "remote" else path, read_ahead_bytes=limit, **WAYS[way])
    first, second = all_rows_of(loader), all_rows_of(loader)
    assert first == second
    assert first
    assert len(budgets) == 2 * (3 if "virtual" in way else 1)
    assert [budget.leased for budget in budgets] == [0] * len(budgets)


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        ({"split_rows": 100}, (SequentialScan, "_chunks_of_several")),
        ({"shuffle": True, "shuffle_buffer_size": 50, "shuffle_interleave": 2}, (ShuffledScan, "_chunks_of")),
    ],
    ids=["row groups of several shards as one", "a shard in rounds as a whole"],
)
def test_every_lease_of_what_is_read_together_is_released(path, budgets, options, reads, monkeypatch):
    scan, name = reads
    read, calls = getattr(scan, name), []
    monkeypatch.setattr(scan, name, lambda *given: calls.append(given) or read(*given))
    loader, _ = open_loader(path, columns=["value", "score"], read_ahead_bytes=100_000, **options)
    assert sorted(all_rows_of(loader)) == list(range(1900))
    assert calls
    assert [budget.leased for budget in budgets] == [0]


@pytest.mark.parametrize(
    "way", ["filtered", "rows shuffled", "rows shuffled in rounds", "batches of several row groups"]
)
def test_every_lease_of_a_resumed_epoch_is_released(path, budgets, way):
    loader, dataset = open_loader(path, read_ahead_bytes=9_000, **WAYS[way])
    batches = iter(loader)
    delivered = rows_of(next(batches)) + rows_of(next(batches))
    state = dataset.state_dict()
    expected = all_rows_of(batches)
    budgets.clear()
    resumed, dataset = open_loader(path, read_ahead_bytes=9_000, **WAYS[way])
    dataset.load_state_dict(state)
    assert all_rows_of(resumed) == expected
    assert not set(delivered).intersection(expected)
    assert [budget.leased for budget in budgets] == [0]
