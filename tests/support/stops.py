"""After which batches to stop: the first and the last of each kind in `make test`, all of them in `make soak`.

Stops differ in kind where the states saved there differ in more than their numbers: nothing is delivered yet, a shard
is in progress or two are, none is, some are done, something is carried over, all is delivered. Of stops that differ
only in how many rows of the same shard were delivered, the first and the last one stand for those between them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

CHECKSUM = "checksum"


def every_stop(states: Sequence[Any]) -> list[int]:
    """Return the places of all states."""
    return list(range(len(states)))


def some_stops(states: Sequence[Any]) -> list[int]:
    """Return the places of the first and the last state of each kind, and of the last state of all."""
    firsts: dict[str, int] = {}
    lasts: dict[str, int] = {}
    for place, state in enumerate(states):
        kind = json.dumps(_kind(state))
        firsts.setdefault(kind, place)
        lasts[kind] = place
    return sorted({*firsts.values(), *lasts.values()})


def _kind(value: Any) -> Any:
    """Return what a state has in common with others of its kind: numbers are 0 or not, equal ones of a list are one."""
    if isinstance(value, dict):
        return {key: _kind(held) for key, held in value.items() if key != CHECKSUM}
    if isinstance(value, list | tuple):
        kinds = [_kind(held) for held in value]
        return [kind for number, kind in enumerate(kinds) if kind not in kinds[:number]]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(value)
    return value


each_stop = pytest.mark.parametrize(
    "stops", [some_stops, pytest.param(every_stop, marks=pytest.mark.soak)], ids=["some stops", "every stop"]
)
"""Gives a test what chooses among the states after its batches."""


def first_middle_and_last(states: Sequence[Any]) -> list[int]:
    """Return the places of three states, where other tests try all kinds of stops, or workers start at each."""
    return sorted({1, len(states) // 2, len(states) - 2}.intersection(range(len(states))))


at_few_stops = pytest.mark.parametrize(
    "stops",
    [first_middle_and_last, pytest.param(every_stop, marks=pytest.mark.soak)],
    ids=["three stops", "every stop"],
)
"""The same with three of them in `make test`."""
