"""All pairs of parameters in `make test`, all combinations in `make soak`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def pairwise(**parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with all combinations of values; those that bring no new pair of values are for `make soak`.

    Most defects show where one value meets one other. The combinations in `make test` have each value of each
    parameter together with each value of each other one; which they are is the same every time.

    Args:
        **parameters: The values of each parameter.
    """
    values = [list(choices) for choices in parameters.values()]
    cells = list(itertools.product(*map(range, map(len, values))))
    chosen = covering(cells)
    return pytest.mark.parametrize(
        list(parameters),
        [
            pytest.param(
                *(choices[number] for choices, number in zip(values, cell, strict=True)),
                marks=[] if cell in chosen else pytest.mark.soak,
            )
            for cell in cells
        ],
    )


def covering(cells: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Choose cells that have all pairs that all cells have: always the next one that has most of those missing."""
    missing = set().union(*map(pairs_of, cells))
    chosen = set()
    while missing:
        best = max(cells, key=lambda cell: len(pairs_of(cell) & missing))
        chosen.add(best)
        missing -= pairs_of(best)
    return chosen


def pairs_of(cell: tuple[int, ...]) -> set[Any]:
    """Return the pairs of a cell: two parameters, each with its value."""
    return set(itertools.combinations(enumerate(cell), 2))
