"""How many rows of each source the steps of a rank take. Pure, in exact integers.

After every step each source has `n * weight` of the rank's `n` rows, less than one row off. Row `j` of a source with
weight `w` has to come after row `(j - 1) / w` of the rank and before row `j / w`. Giving the next rows to those whose
time ends first keeps all of these bounds (Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980).
Of the rows of one step, that is: all whose time ends with the step, and then those whose time ends first of those whose
time has begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm


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

    def steps(self) -> Iterator[tuple[int, ...]]:
        """Yield for each step the rows of each source."""
        waiting = deque(self.sections)
        for start in range(0, self.rows, self.step_rows):
            while waiting and waiting[0][0] <= start:
                parts, whole = _in_parts(waiting.popleft()[1])
                first, before = start, [0] * len(parts)
            stop = min(start + self.step_rows, self.rows)
            after = _after(parts, whole, before, stop - first)
            yield tuple(now - then for now, then in zip(after, before, strict=True))
            before = after

    def of_worker(self, worker: int, workers: int) -> tuple[int, ...]:
        """Return the rows of each source in the steps of a worker, which makes every so many-th step."""
        taken = [0] * self.sources
        for number, step in enumerate(self.steps()):
            if number % workers == worker:
                taken = [before + rows for before, rows in zip(taken, step, strict=True)]
        return tuple(taken)


def _in_parts(weights: tuple[Fraction, ...]) -> tuple[list[int], int]:
    """Return shares as parts of a whole, in integers."""
    whole = lcm(*(weight.denominator for weight in weights))
    return [weight.numerator * (whole // weight.denominator) for weight in weights], whole


def _after(parts: Sequence[int], whole: int, before: Sequence[int], rows: int) -> list[int]:
    """Return the rows of each source among the rank's first ones, given those among its first ones a step earlier."""
    after = [max(had, rows * part // whole) for had, part in zip(before, parts, strict=True)]
    missing = rows - sum(after)
    if missing:
        # A source that has only the rows whose time has ended may have one more, unless its share is a whole number.
        begun = [index for index, part in enumerate(parts) if after[index] * whole < rows * part]
        begun.sort(key=lambda index: (Fraction(after[index] + 1, parts[index]), index))
        for index in begun[:missing]:
            after[index] += 1
    return after
