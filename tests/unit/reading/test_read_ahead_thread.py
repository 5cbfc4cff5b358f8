"""A generator that runs ahead of its consumer, as far as its memory budget allows."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

from jobs.processes import wait_until_none

from torch_dataloader_utils.reading import read_ahead
from torch_dataloader_utils.reading.memory_budget import MemoryBudget, MemoryLease
from torch_dataloader_utils.reading.read_ahead import ReadAhead
from torch_dataloader_utils.storage.attempts import within


def test_a_generator_runs_ahead_as_far_as_its_budget_allows_and_is_closed_at_the_end():
    made: list[int] = []
    leases: list[MemoryLease] = []
    ended = threading.Event()

    def read(budget: MemoryBudget) -> Iterator[int]:
        try:
            for number in itertools.count():
                leases.append(budget.take(3))
                made.append(number)
                yield number
        finally:
            ended.set()

    ahead = ReadAhead(read, 10)
    wait_until_none(lambda: len(made) < 3)
    time.sleep(0.2)
    assert made == [0, 1, 2]
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    ahead.retire(leases[0])
    time.sleep(0.2)
    assert made == [0, 1, 2]
    assert next(ahead) == 3  # the retired lease is released for it
    ahead.close()
    assert ended.is_set()
    assert not any(thread.name.startswith("read_ahead") for thread in threading.enumerate())


def test_a_thread_that_the_reading_thread_waits_for_may_drop_an_iterator(monkeypatch):
    """A garbage collection may run in it: to wait for the reading thread there is to wait for itself."""
    monkeypatch.setattr(read_ahead, "JOIN_SEC", 3600)
    dropped = threading.Event()

    def read(budget: MemoryBudget) -> Iterator[int]:
        yield 1
        within(3600, dropped.wait)
        yield 2

    ahead = [ReadAhead(read, 10)]
    assert next(ahead[0]) == 1
    within(60, ahead.clear)
    dropped.set()
