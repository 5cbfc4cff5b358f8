"""Plots as SVG: the same bytes for the same figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Bar", "bars"]

COLOURS = {"arrow": "#8c8c8c", "ours": "#1f6feb", "peer": "#d9a441"}


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar.

    Attributes:
        name: What stands beside it.
        value: Its length.
        low: The least that was measured.
        high: The greatest.
        kind: One of `COLOURS`.
    """

    name: str
    value: float
    low: float
    high: float
    kind: str


def bars(path: Path, title: str, unit: str, shown: Sequence[Bar], *, logarithmic: bool = False) -> None:
    """Draw horizontal bars, with the least and the greatest of all rounds as whiskers."""
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
    axes.set_title(title, fontsize=10)
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
