"""How many rows of each source the steps of a rank take. Pure, in exact integers.

After every step each source has `n * weight` of the rank's `n` rows, less than one row off. Row `j` of a source with
weight `w` has to come after row `(j - 1) / w` of the rank and no later than row `ceil(j / w)`. Giving the next rows to
those whose time ends first keeps all of these bounds (Tijdeman, "The chairman assignment problem", Discrete Mathematics
32, 1980; Steiner and Yeomans, "Level schedules for mixed-model, just-in-time processes", Management Science 39, 1993).
Of the rows of one step, that is: all whose time ends with the step, and then those whose time ends first of those whose
time has begun.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Counts: TypeAlias = npt.NDArray[np.int64]
"""Rows by step and source."""

INT64_BITS = 63


@dataclass(frozen=True, slots=True)
class Quotas:
    """The rows of each source in each step of a rank.

    Attributes:
        sections: From which row of the rank on which shares of the sources hold, from 0 on; shares add up to 1. A
            section begins with the first step that begins there, and counts anew.
        rows: Rows of the rank.
        step_rows: Rows of a step; only the last one may have fewer.
    """

    sections: tuple[tuple[int, tuple[Fraction, ...]], ...]
    rows: int
    step_rows: int

    @property
    def sources(self) -> int:
        """Number of sources."""
        return len(self.sections[0][1])

    @property
    def counts(self) -> Counts:
        """Rows of each source in each step: int64 of shape (steps, sources), which nobody writes to."""
        return _counts(self)

    @property
    def totals(self) -> tuple[int, ...]:
        """Rows of each source in all steps."""
        return _totals(self)

    def of_worker(self, worker: int, workers: int) -> tuple[int, ...]:
        """Return the rows of each source in the steps of a worker, which makes every so many-th step."""
        return tuple(self.counts[worker::workers].sum(axis=0).tolist())


@lru_cache(maxsize=8)
def _totals(quotas: Quotas) -> tuple[int, ...]:
    return quotas.of_worker(0, 1)


@lru_cache(maxsize=8)
def _counts(quotas: Quotas) -> Counts:
    steps = -(-quotas.rows // quotas.step_rows)
    begins = [min(steps, -(-row // quotas.step_rows)) for row, _ in quotas.sections] + [steps]
    parts = [np.empty((0, quotas.sources), dtype=np.int64)]
    for (_, shares), first, end in zip(quotas.sections, begins[:-1], begins[1:], strict=True):
        if first < end:
            stops = np.minimum(np.arange(first, end + 1) * quotas.step_rows, quotas.rows)
            parts.append(np.diff(_reached(shares, (stops - stops[0]).tolist()), axis=0))
    counts = np.concatenate(parts)
    counts.flags.writeable = False
    return counts


def _reached(shares: Sequence[Fraction], stops: Sequence[int]) -> Counts:
    """Return how many rows each source has given after so many rows of all; `stops` begins with 0."""
    denominator = math.lcm(*(share.denominator for share in shares))
    parts = [share.numerator * (denominator // share.denominator) for share in shares]
    full = len(stops) - 1  # the last step may be short
    is_frequent = full > 1 and all(stops[1] * part >= denominator for part in parts if part)
    if not is_frequent or (stops[-1] + 2) * denominator >= 1 << INT64_BITS:
        return _reached_in_turn(parts, denominator, stops, (0,) * len(parts))
    first = _reached_at_once(parts, denominator, np.array(stops[:full], dtype=np.int64))
    last = _reached_in_turn(parts, denominator, stops[full - 1 :], first[-1].tolist())
    return np.concatenate([first, last[1:]])


def _reached_at_once(parts: Sequence[int], denominator: int, stops: Counts) -> Counts:
    """Return the same where every source gives a row to each step.

    Then a source has given no more rows than those whose time ends in the next step, so that what it has given before
    does not matter: the rows that are not due yet go to those whose time ends first.
    """
    due, rest = np.divmod(stops[:, None] * np.array(parts, dtype=np.int64), denominator)
    left = stops - due.sum(axis=1)
    last = np.iinfo(np.int64).max
    weights = np.maximum(np.array(parts, dtype=np.int64), 1)
    ends = np.where(rest > 0, -(-((due + 1) * denominator) // weights), last)
    order = np.argsort(ends, axis=1, kind="stable")
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.arange(len(parts))[None, :], axis=1)
    reached: Counts = due + (places < left[:, None])
    return reached


def _reached_in_turn(parts: Sequence[int], denominator: int, stops: Sequence[int], begun: Sequence[int]) -> Counts:
    """Return the same step by step, in integers of any size. `begun` is what is reached at the first stop."""
    reached = list(begun)
    found = [tuple(reached)]
    for stop in stops[1:]:
        free = stop
        early = []
        for source, part in enumerate(parts):
            due, rest = divmod(stop * part, denominator)
            reached[source] = max(reached[source], due)
            if rest and reached[source] == due:
                early.append((-(-(due + 1) * denominator // part), source))
            free -= reached[source]
        if free:
            early.sort()
            for _, source in early[:free]:
                reached[source] += 1
        found.append(tuple(reached))
    return np.array(found, dtype=np.int64)
