"""Plots as SVG files, with the same bytes for the same figures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Bar", "Point", "bars", "dots", "points"]

COLOURS = {"arrow": "#8c8c8c", "ours": "#1f6feb", "peer": "#d9a441"}


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar, or a point in its place.

    Attributes:
        name: Its label.
        value: Where it ends.
        low: The least of all rounds.
        high: The greatest of all rounds.
        kind: One of `COLOURS`.
    """

    name: str
    value: float
    low: float
    high: float
    kind: str


@dataclass(frozen=True, slots=True)
class Point:
    """A point.

    Attributes:
        name: Its label.
        x: Its position.
        y: Its height.
    """

    name: str
    x: float
    y: float


def points(path: Path, title: str, units: tuple[str, str], shown: Sequence[Point]) -> None:
    """Draw points, joined in order, on a logarithmic scale."""
    import matplotlib as mpl  # noqa: PLC0415 - only the report needs it, and measuring has to work without

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "benchmarks"
    from matplotlib import pyplot as plt  # noqa: PLC0415 - the same

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot([point.x for point in shown], [point.y for point in shown], "o-", color=COLOURS["ours"])
    for point in shown:
        axes.annotate(point.name, (point.x, point.y), (6, 4), textcoords="offset points", fontsize=8)
    axes.set_yscale("log")
    axes.set_xlim(left=0, right=1.3 * max(point.x for point in shown))
    axes.set_xlabel(units[0])
    axes.set_ylabel(units[1])
    _save(figure, axes, path, title)
    plt.close(figure)


def bars(path: Path, title: str, unit: str, shown: Sequence[Bar]) -> None:
    """Draw horizontal bars from zero, with whiskers from the least to the greatest of all rounds."""
    with _rows(path, title, unit, shown) as axes:
        axes.barh(
            [bar.name for bar in shown],
            [bar.value for bar in shown],
            xerr=_whiskers(shown),
            color=[COLOURS[bar.kind] for bar in shown],
            error_kw={"elinewidth": 1, "ecolor": "#333333"},
        )


def dots(path: Path, title: str, unit: str, shown: Sequence[Bar]) -> None:
    """Draw points with the same whiskers on a logarithmic axis, on which a bar's length would say nothing."""
    with _rows(path, title, unit, shown) as axes:
        for row, (bar, low, high) in enumerate(zip(shown, *_whiskers(shown), strict=True)):
            axes.errorbar(bar.value, row, xerr=[[low], [high]], fmt="o", color=COLOURS[bar.kind], ecolor="#333333")
        axes.set_yticks(range(len(shown)), [bar.name for bar in shown])
        axes.set_xscale("log")
        axes.grid(axis="x", which="both", color="#dddddd", linewidth=0.5)
        axes.set_axisbelow(True)


@contextlib.contextmanager
def _rows(path: Path, title: str, unit: str, shown: Sequence[Bar]) -> Iterator[Any]:
    """Yield the axes of a figure with a row for each bar, the first one above."""
    import matplotlib as mpl  # noqa: PLC0415 - only the report needs it, and measuring has to work without

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "benchmarks"
    from matplotlib import pyplot as plt  # noqa: PLC0415 - the same

    figure, axes = plt.subplots(figsize=(8, 0.6 + 0.34 * len(shown)), layout="constrained")
    yield axes
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    _save(figure, axes, path, title)
    plt.close(figure)


def _whiskers(shown: Sequence[Bar]) -> tuple[list[float], list[float]]:
    """Return how far the least and the greatest of all rounds are from each value."""
    return [max(0.0, bar.value - bar.low) for bar in shown], [max(0.0, bar.high - bar.value) for bar in shown]


def _save(figure: Any, axes: Any, path: Path, title: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
