"""The comparison of two checkouts by their promised figures, measured in turns in one run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.measure.rounds import Measured, described
from benchmarks.measure.workloads import OTHER
from benchmarks.report.claims import CLAIMS, Claim, NotTakenError, errors_of

__all__ = ["Compared", "compare", "table"]

Results = Mapping[str, Any]
TREND_ROUNDS = 5
"""Rounds from which on all of them together say something: five in a row go one way by chance once in sixteen times."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A promised figure of two checkouts.

    Attributes:
        claim: What is promised.
        this: The figure of this checkout, round by round.
        other: The figure of the other checkout, likewise.
        why: Why there are no figures.
    """

    claim: Claim
    this: Sequence[float] = ()
    other: Sequence[float] = ()
    why: str = ""

    @property
    def by_difference(self) -> bool:
        """Whether the checkouts are compared by a difference: a ratio of figures about zero says nothing."""
        return self.claim.aim == 0 or 0 in self.other

    @property
    def changes(self) -> list[float]:
        """The ratio of both figures, or their difference, round by round."""
        pairs = zip(self.this, self.other, strict=True)
        return [this - other if self.by_difference else this / other for this, other in pairs]

    @property
    def trend(self) -> str:
        """Whether this checkout was better in each round, or worse in each, in words."""
        pairs = list(zip(self.this, self.other, strict=True))
        greater, less = all(this > other for this, other in pairs), all(this < other for this, other in pairs)
        if len(pairs) < TREND_ROUNDS or not (greater or less):
            return ""
        return "worse in each round" if greater == self.claim.at_most else "better in each round"


def compare(results: Results) -> list[Compared]:
    """Return the promised figures of both checkouts, as far as a session measured them.

    Figures that are ratios to another loader are left out: no other loader takes part.
    """
    found = []
    for claim in CLAIMS:
        workload = results["workloads"].get(claim.workload)
        if workload is None:
            continue
        try:
            this, other = ([claim.value(taken) for taken in _rounds(workload, of)] for of in ("", OTHER))
        except NotTakenError:
            continue
        except (LookupError, ZeroDivisionError) as error:
            found.append(Compared(claim, why=errors_of(workload) or f"no figure: {error!r}"))
        else:
            found.append(Compared(claim, this, other))
    return found


def table(compared: Sequence[Compared]) -> list[str]:
    """Return the lines that `compare` prints: medians, and the change with its least and greatest."""
    lines = [f"{'':72} {'this':>10} {'other':>10}  this / other [least, greatest]"]
    for row in compared:
        if row.why:
            lines.append(f"{row.claim.name:72} {'-':>10} {'-':>10}  {row.why}")
            continue
        this, other = (f"{statistics.median(figures):.3g}{row.claim.unit}" for figures in (row.this, row.other))
        form = "{:+.3g}" if row.by_difference else "{:.3f}"
        low, median, high = (form.format(at(row.changes)) for at in (min, statistics.median, max))
        change = f"{median} [{low}, {high}]" + (" (difference)" if row.by_difference else "")
        lines.append(f"{row.claim.name:72} {this:>10} {other:>10}  {change:24} {row.trend}".rstrip())
    return lines


def _rounds(workload: Results, of: str) -> Iterator[Results]:
    """Give what a checkout's contenders measured round by round, each as the results of a run of one round.

    Args:
        workload: The results of both checkouts.
        of: What the names of the checkout's contenders end with.
    """
    contenders = workload["contenders"]
    names = {name.removesuffix(OTHER) for name in contenders}
    chosen = {name: contenders.get(name + of, contenders[name]) for name in names}
    for number in range(max([1, *(len(found["runs"]) for found in contenders.values())])):
        measured = {
            name: Measured(found["runs"][number : number + 1], found["checked"], found["error"])
            for name, found in chosen.items()
        }
        base = measured[workload["baseline"]].runs if workload["baseline"] in measured else []
        yield {**workload, "contenders": {name: described(one, base) for name, one in measured.items()}}
