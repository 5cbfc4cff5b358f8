"""Row groups are requested as far ahead as the memory budget allows, and no further."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from torch_dataloader_utils.reading.memory_budget import BudgetClosedError, MemoryBudget
from torch_dataloader_utils.reading.requests import Requests, Step

SIZE = 5
"""Bytes of a step; the budget has room for two."""


class Sizes:
    def stored_bytes(self, _: Any) -> int:
        return 1


class Reader:
    """Notes what is requested."""

    request_size = None
    sizes = Sizes()

    def __init__(self) -> None:
        self.requested: list[int] = []

    def most_requested(self, _: Any) -> int:
        return 10

    def request(self, group: Any, _: Any, *, whole: bool) -> None:
        assert whole
        self.requested.append(group)


def steps(until: int, error: Exception | None = None) -> Iterator[Step]:
    """Yield steps, each of the row group of its number."""
    for number in range(until):
        group: Any = number
        shard_slice: Any = None
        yield Step(number, shard_slice, group, 0, last=True, number=0, whole=True, size=SIZE)
    if error is not None:
        raise error


def requests_of(found: Iterator[Step], budget: MemoryBudget) -> tuple[Requests, list[int]]:
    """Return the requests for steps, and the list of those that are made."""
    reader: Any = Reader()
    return Requests(found, reader, budget), reader.requested


def test_what_was_released_since_the_last_step_is_requested_when_more_is_asked_for():
    budget = MemoryBudget(2 * SIZE)
    requests, made = requests_of(steps(5), budget)
    step, lease = next(requests)
    assert (step.position, made) == (0, [0, 1])
    requests.more()
    assert made == [0, 1]
    lease.release()
    requests.more()
    assert made == [0, 1, 2]
    step, lease = next(requests)
    assert (step.position, made) == (1, [0, 1, 2])
    lease.release()
    positions = []
    for step, lease in requests:
        positions.append(step.position)
        lease.release()
    assert positions == [2, 3, 4]
    assert budget.leased == 0


@pytest.mark.parametrize("asks", [True, False])
def test_an_error_comes_after_the_steps_that_were_found_before_it(asks):
    requests, _ = requests_of(steps(3, OSError("gone")), MemoryBudget(2 * SIZE))
    for number in range(3):
        step, lease = next(requests)
        assert step.position == number
        lease.release()
        if asks:
            requests.more()
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            next(requests)


def test_a_closed_budget_ends_the_requests_at_once():
    budget = MemoryBudget(2 * SIZE)
    requests, made = requests_of(steps(5), budget)
    _, lease = next(requests)
    lease.release()
    budget.close()
    with pytest.raises(BudgetClosedError):
        requests.more()
    assert made == [0, 1]
