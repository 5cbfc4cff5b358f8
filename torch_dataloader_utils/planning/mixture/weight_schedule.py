"""The weights of a mixture's sources, which may change with the rows that a run has planned. Pure."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import TypeAlias

Shares: TypeAlias = tuple[tuple[int, tuple[Fraction, ...]], ...]
"""From which row on which shares of the sources hold, from 0 on."""


def sections_from(schedule: Shares, rows_before: int, ranks: int) -> Shares:
    """Return the sections of a rank's rows, which begin after so many planned rows of all ranks."""
    begun = max(number for number, (row, _) in enumerate(schedule) if row <= rows_before)
    later = ((-((rows_before - row) // ranks), weights) for row, weights in schedule[begun + 1 :])
    return (0, schedule[begun][1]), *later


def weight_after(schedule: Shares, source: int, rows: int) -> Fraction:
    """Return the share that a source has once so many of its rows are taken, as if the schedule had always held."""
    left = Fraction(rows)
    for (row, weights), (stop, _) in pairwise(schedule):
        taken = weights[source] * (stop - row)
        if left < taken:
            return weights[source]
        left -= taken
    return schedule[-1][1][source]
