"""Of shuffled shards, two are in memory: one that is delivered, and one that is decoded and permuted meanwhile."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs.processes import wait_until_none
from support import open_loader, rows_of, write_dataset

from torch_dataloader_utils.reading.batching import Batches
from torch_dataloader_utils.reading.memory_budget import MemoryBudget
from torch_dataloader_utils.reading.permuting import Permuter
from torch_dataloader_utils.reading.row_groups.reader import RowGroupReader
from torch_dataloader_utils.workers import producer

GROUPS = 12
ROWS = 60
"""Of a row group, and of a shard."""

BATCH = 5
LONG_SEC = 60
"""Longer than anything here takes, if it ends."""

OPTIONS: dict[str, Any] = {
    "shuffle": True,
    "shuffle_buffer_size": ROWS,
    "batch_size": BATCH,
    "columns": ["value", "score"],
    "read_ahead_bytes": 4_000,  # a shard takes a half of it, so that none is read together with others
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_dataset(tmp_path, ((GROUPS * ROWS, ROWS),))
    return tmp_path


@pytest.mark.parametrize("collate_fn", [None, dict])
def test_a_shard_is_decoded_while_the_one_before_it_is_permuted(path, monkeypatch, collate_fn):
    """In one process, the consumer holds the last batch that it got, and waits for the next: that keeps no shard."""
    events: list[tuple[str, int]] = []
    budgets: list[MemoryBudget] = []
    new_budget, request, read, permuted = (
        MemoryBudget.__init__,
        RowGroupReader.request,
        RowGroupReader.read,
        Permuter.permuted,
    )

    def noted_budget(budget: MemoryBudget, limit: int) -> None:
        new_budget(budget, limit)
        budgets.append(budget)

    def noted_request(reader: Any, group: Any, *others: Any, whole: bool) -> None:
        events.append(("requested", len([kind for kind, _ in events if kind == "requested"])))
        request(reader, group, *others, whole=whole)

    def read_once_delivered(reader: Any, group: Any) -> Any:
        """Return once all batches of the shard before are delivered, or the shard behind is requested already."""
        table = read(reader, group)
        [budget] = budgets
        number = len([kind for kind, _ in events if kind == "permuted"])

        def is_early() -> bool:
            return budget.leased > budget.limit // 2 and ("requested", number + 1) not in events

        assert not wait_until_none(is_early, LONG_SEC)
        return table

    def noted_permuted(permuter: Any, *arguments: Any) -> Any:
        table = permuted(permuter, *arguments)
        events.append(("permuted", len([kind for kind, _ in events if kind == "permuted"])))
        return table

    monkeypatch.setattr(MemoryBudget, "__init__", noted_budget)
    monkeypatch.setattr(RowGroupReader, "request", noted_request)
    monkeypatch.setattr(Permuter, "permuted", noted_permuted)
    loader, _ = open_loader(path, collate_fn=collate_fn, **OPTIONS)
    batches = iter(loader)
    rows = rows_of(next(batches))  # the first shard: two are requested then, and the second is not read before
    monkeypatch.setattr(RowGroupReader, "read", read_once_delivered)
    for batch in batches:
        rows += rows_of(batch)
    assert sorted(rows) == list(range(GROUPS * ROWS))
    late = [
        number
        for number in range(2, GROUPS - 1)  # the second may have been read before its `read` was replaced
        if events.index(("requested", number + 1)) > events.index(("permuted", number))
    ]
    assert not late


def test_what_was_delivered_is_dropped_before_the_next_is_permuted(path, monkeypatch):
    columns: list[weakref.ref[Any]] = []
    kept: list[int] = []
    delivered = threading.Semaphore(0)
    read_assignment, permuted = producer.read_assignment, Permuter.permuted

    def noted(*arguments: Any) -> Iterator[Any]:
        for content in read_assignment(*arguments):
            if isinstance(content, Batches):
                columns.append(weakref.ref(content.columns["score"]))
            yield content
            del content

    def permuted_once_dropped(permuter: Any, *arguments: Any) -> Any:
        number = len(columns) - 1
        if number >= 0:
            assert delivered.acquire(timeout=LONG_SEC)
            if wait_until_none(lambda: columns[number]() is not None, LONG_SEC):
                kept.append(number)
        return permuted(permuter, *arguments)

    monkeypatch.setattr(producer, "read_assignment", noted)
    monkeypatch.setattr(Permuter, "permuted", permuted_once_dropped)
    loader, _ = open_loader(path, **OPTIONS)
    rows: list[int] = []
    for batch in loader:
        rows += rows_of(batch)
        del batch
        if len(rows) % ROWS == 0:
            delivered.release()
    assert sorted(rows) == list(range(GROUPS * ROWS))
    assert (len(columns), kept) == (GROUPS, [])
