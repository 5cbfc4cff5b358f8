"""All pairs of parameters, or the first of them, in `make test`; all combinations in `make soak`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest


def pairwise(most: int | None = None, **parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with all combinations of values; those that bring no new pair of values are for `make soak`.

    Most defects show where one value meets one other. The combinations in `make test` have each value of each
    parameter together with each value of each other one; which they are is the same every time.

    Args:
        most: How many of these combinations `make test` has at most; None for all of them. Those that bring the most
            pairs are the first, so that each value is in one of them if there are enough.
        **parameters: The values of each parameter.
    """
    values = [list(choices) for choices in parameters.values()]
    cells = list(itertools.product(*map(range, map(len, values))))
    chosen = set(covering(cells)[:most])
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


def covering(cells: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Choose cells that have all pairs that all cells have: always the next one that has most of those missing."""
    missing = set().union(*map(pairs_of, cells))
    chosen: list[tuple[int, ...]] = []
    used: Counter[tuple[int, int]] = Counter()
    while missing:
        # Of those that bring equally many pairs, the one with the values that were used least.
        best = max(cells, key=lambda cell: (len(pairs_of(cell) & missing), -sum(used[one] for one in enumerate(cell))))
        chosen.append(best)
        used.update(enumerate(best))
        missing -= pairs_of(best)
    return chosen


def pairs_of(cell: tuple[int, ...]) -> set[Any]:
    """Return the pairs of a cell: two parameters, each with its value."""
    return set(itertools.combinations(enumerate(cell), 2))
