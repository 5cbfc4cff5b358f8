"""Plots as SVG files, with the same bytes for the same figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Bar", "Point", "bars", "points"]

COLOURS = {"arrow": "#8c8c8c", "ours": "#1f6feb", "peer": "#d9a441"}


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar.

    Attributes:
        name: Its label.
        value: Its length.
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


def bars(path: Path, title: str, unit: str, shown: Sequence[Bar], *, logarithmic: bool = False) -> None:
    """Draw horizontal bars, with whiskers from the least to the greatest of all rounds."""
    import matplotlib as mpl  # noqa: PLC0415 - only the report needs it, and measuring has to work without

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "benchmarks"
    from matplotlib import pyplot as plt  # noqa: PLC0415 - the same

    figure, axes = plt.subplots(figsize=(8, 0.6 + 0.34 * len(shown)), layout="constrained")
    values = [bar.value for bar in shown]
    whiskers: Mapping[str, list[float]] = {
        "below": [max(0.0, bar.value - bar.low) for bar in shown],
        "above": [max(0.0, bar.high - bar.value) for bar in shown],
    }
    axes.barh(
        [bar.name for bar in shown],
        values,
        xerr=[whiskers["below"], whiskers["above"]],
        color=[COLOURS[bar.kind] for bar in shown],
        error_kw={"elinewidth": 1, "ecolor": "#333333"},
    )
    axes.invert_yaxis()
    if logarithmic:
        axes.set_xscale("log")
    axes.set_xlabel(unit)
    _save(figure, axes, path, title)
    plt.close(figure)


def _save(figure: Any, axes: Any, path: Path, title: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
