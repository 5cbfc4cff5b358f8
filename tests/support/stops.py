"""After which batches a test stops a run: one stop of each kind in `make test`, every one in `make soak`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def one_of_each_kind(states: Sequence[Any]) -> list[int]:
    """Return the numbers of stops that differ in kind: the first two, the last two, and one of each kind between.

    Stops differ in whether a shard has just been completed, in how many are under way, and in whose turn it is.

    Args:
        states: The states of a loader before its first batch and after each.
    """
    kinds: dict[Any, list[int]] = {}
    before = None
    for number, state in enumerate(states):
        kind = state["completed_shards"] == before, len(state["in_progress"]), state["next_worker"]
        kinds.setdefault(kind, []).append(number)
        before = state["completed_shards"]
    between = {numbers[len(numbers) // 2] for numbers in kinds.values()}
    return sorted(between.union(range(len(states))[:2], range(len(states))[-2:]))


def every_one(states: Sequence[Any]) -> list[int]:
    """Return the numbers of all stops."""
    return list(range(len(states)))


at_stops = pytest.mark.parametrize("stops", [one_of_each_kind, pytest.param(every_one, marks=pytest.mark.soak)])
"""Gives a test the function that chooses its stops: those of each kind in `make test`, and all in `make soak`."""


def first_middle_and_last(states: Sequence[Any]) -> list[int]:
    """Return the numbers of three stops, for tests that start workers at each."""
    return sorted({1, len(states) // 2, len(states) - 2}.intersection(range(len(states))))


at_few_stops = pytest.mark.parametrize(
    "stops", [first_middle_and_last, pytest.param(every_one, marks=pytest.mark.soak)]
)
"""The same with three stops in `make test`."""
