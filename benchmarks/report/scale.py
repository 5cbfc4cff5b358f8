"""The section of docs/benchmarks.md on files, row groups and ranks by the million, from the raw results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.measure.scale import FILES_OF_RANKS, GROUP_ROWS, GROUPS, RANKS, WORKERS
from benchmarks.report.markdown import table

__all__ = ["exponents", "section"]

Results = Mapping[str, Any]

MIB = 1 << 20

METHOD = f"""\
What one rank does at the beginning of a job, measured in a process of its own for each size. Plans are those of
{max(RANKS):,} ranks with {WORKERS} workers each where nothing else is said, and each row group is a shard of its own,
which is the most work. **Exponent**: by which power of the size the figure grew over the last step; 1 is linear. A
figure that grows by less than its size did has costs in it that do not depend on the size.

- **Memory** is the most that the process, and its workers, had until then (PSS), less that before the first step.
- **Files** are real: {GROUPS} row groups of {GROUP_ROWS} rows each. They are hard links to some few, so that they lie
  in the page cache. The rank opens all of them, plans a shuffled epoch, starts its {WORKERS} workers, delivers the
  first batch, and saves and loads its state.
- **Row groups** are only described: of 100,000 rows and 100 MB. All ranks have delivered half of each worker's share.
  Their states are gathered as `gather_states` does, and one of half as many ranks loads all of them with
  `strict=False`, which plans what is left.
- A loader prepares what all states share when an iteration begins, while the garbage collector of Python rests. For the
  first state of described row groups the collector runs, and looks at all of them: that figure grows by more than they
  do. The first state of real files is the one that a loader gives.
- **Ranks** are the same with {FILES_OF_RANKS * GROUPS:,} row groups, and 16 to {max(RANKS):,} ranks.
"""

CURVES: dict[str, tuple[str, str, tuple[tuple[str, str], ...]]] = {
    "files": (
        "Files",
        "files",
        (
            ("open", "open"),
            ("plan", "plan an epoch"),
            ("first_batch", "workers and first batch"),
            ("first_state", "first state"),
            ("state_s", "each further state"),
            ("load", "load it"),
        ),
    ),
    "row_groups": (
        "Row groups",
        "row groups",
        (
            ("plan", "plan an epoch"),
            ("plan_even", 'plan it with `uneven_ranks="drop"`'),
            ("own_share", "the rank's own share"),
            ("state", "its first state"),
            ("load_elastically", "load the states of all ranks on half as many"),
        ),
    ),
    "ranks": (
        "Ranks",
        "ranks",
        (
            ("plan", "plan an epoch"),
            ("plan_even", 'plan it with `uneven_ranks="drop"`'),
            ("own_share", "the rank's own share"),
            ("load_elastically", "load the states of all ranks on half as many"),
        ),
    ),
}
"""For each curve its title, what grows, and its seconds: the name in the results, and on the page."""

BYTES = {"state_bytes": "state as JSON", "states_bytes": "states of all ranks, pickled"}


def section(results: Results) -> Iterator[str]:
    """Give the section's lines.

    Args:
        results: The raw results.
    """
    yield from ("## Millions of files, row groups and ranks", "", METHOD)
    for name, (title, unit, seconds) in CURVES.items():
        points = results["curves"].get(name)
        if points:
            yield from (f"### {title}", "", *_curve(points, unit, seconds))
    yield from (_machine(results), "")


def _curve(points: Sequence[Results], unit: str, seconds: Sequence[tuple[str, str]]) -> Iterator[str]:
    sizes = [_size(point, unit) for point in points]
    rows = [
        [f"{words}, s", *_row(sizes, [_seconds(point, name) for point in points], _shown)] for name, words in seconds
    ]
    peaks = [max(stage["bytes"] for stage in point["stages"].values()) / MIB for point in points]
    rows.append(["memory, MiB", *_row(sizes, peaks, "{:,.0f}".format)])
    for name, words in BYTES.items():
        if all(name in point for point in points):
            found = [point[name] / 1024 for point in points]
            rows.append([f"{words}, KiB", *_row(sizes, found, "{:,.0f}".format)])
    yield from table([unit, *(f"{size:,}" for size in sizes), "exponent"], rows)


def _row(sizes: Sequence[int], values: Sequence[float], shown: Any) -> Iterator[str]:
    yield from map(shown, values)
    yield f"{exponents(sizes, values)[-1]:.2f}"


def exponents(sizes: Sequence[int], values: Sequence[float]) -> list[float]:
    """Return by which power of the size the value grew, from each size to the next.

    Args:
        sizes: The sizes, rising.
        values: A positive value for each.
    """
    steps = zip(sizes, sizes[1:], values, values[1:], strict=False)
    return [math.log(later / value) / math.log(larger / size) for size, larger, value, later in steps]


def _size(point: Results, unit: str) -> int:
    sizes: dict[str, int] = {"files": point["files"], "row groups": point["files"] * GROUPS, "ranks": point["ranks"]}
    return sizes[unit]


def _seconds(point: Results, name: str) -> float:
    found = point[name] if name in point else point["stages"][name]["seconds"]
    return float(found)


def _shown(seconds: float) -> str:
    """Show seconds with about three digits."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2g}"


def _machine(results: Results) -> str:
    machine, code = results["machine"], results["code"]
    commit = f"commit `{(code['commit'] or 'unknown')[:12]}`{' with changes' if code['changed'] else ''}"
    return f"Measured on {machine['cores']} cores ({machine['cpu']}), Python {machine['python']}, {commit}."
