"""What became of the rows of two sources that ranks delivered: shares, losses, repetitions, order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

__all__ = ["Rows", "compare", "deviation", "passes", "share", "uninterrupted"]

Rows = list[np.ndarray[Any, Any]]
"""For each rank, a line (step, source, row) for each row that it delivered, in order."""


def uninterrupted(whole: Rows, weights: Sequence[float], sizes: Sequence[int]) -> dict[str, Any]:
    """Return what an epoch without an interruption delivers.

    Args:
        whole: What each rank delivered.
        weights: The share of each source.
        sizes: Rows of each source.

    Returns:
        Its ``deviation``, and of each source ``rows`` and those ``left_out``.
    """
    counts = [_count(_ids(whole, source)) for source in range(len(sizes))]
    return {
        "deviation": deviation(whole, weights),
        "rows": [count.total() for count in counts],
        "left_out": [size - len(count) for count, size in zip(counts, sizes, strict=True)],
    }


def deviation(rows: Rows, weights: Sequence[float]) -> dict[str, float]:
    """Return how far the rows of a source were from the share that was asked, at most after any batch.

    Args:
        rows: What each rank delivered.
        weights: The share of each source.

    Returns:
        Rows: of one ``rank``, and of ``all`` ranks together, that have delivered as many batches each.
    """
    return {"rank": max(_deviation([own], weights) for own in rows), "all": _deviation(rows, weights)}


def compare(expected: Rows, delivered: Rows) -> list[dict[str, int]]:
    """Compare what ranks delivered with what they deliver without an interruption, source by source.

    Returns:
        For each source, rows ``lost`` and ``repeated`` against the uninterrupted run, and ``out_of_order``: rows that
        follow another row of the source than there.
    """
    found = []
    for source in range(_sources(expected)):
        wanted, got = _ids(expected, source), _ids(delivered, source)
        all_wanted, all_got = _count(wanted), _count(got)
        moved = sum(
            len(set(pairwise([None, *own])) - set(pairwise([None, *meant])))
            for own, meant in zip(got, wanted, strict=True)
        )
        counts = {"lost": (all_wanted - all_got).total(), "repeated": (all_got - all_wanted).total()}
        found.append(counts | {"out_of_order": moved})
    return found


def passes(
    whole: Rows, delivered: Rows, sizes: Sequence[int], ends: str, *, same_weights: bool = False
) -> list[dict[str, int]]:
    """Compare what was delivered with passes that have each row once, source by source.

    Args:
        whole: What ranks deliver without an interruption.
        delivered: What each rank delivered.
        sizes: Rows of each source.
        ends: What ends an epoch, see `Way`.
        same_weights: Whether the weights are those of ``whole``: then all of its sources come to their end, once.

    Returns:
        For each source, ``rows`` delivered; those ``repeated``: more often than the passes that so many rows begin; and
        those ``lost``, which an epoch without an interruption has: of a source that came to its end, never delivered.
    """
    ids = [_count(_ids(delivered, source)) for source in range(len(sizes))]
    missing = [size - len(counts) for counts, size in zip(ids, sizes, strict=True)]
    found = []
    for source, (counts, size) in enumerate(zip(ids, sizes, strict=True)):
        rows = counts.total()
        ended = {"all": True, "first": same_weights or missing[source] == min(missing), "cycles": rows >= size}[ends]
        begun = -(-rows // size) if ends == "cycles" and not same_weights else 1
        lost = len(set(_count(_ids(whole, source))) - set(counts)) if ended else 0
        repeated = sum(max(0, count - begun) for count in counts.values())
        found.append({"rows": rows, "lost": lost, "repeated": repeated})
    return found


def share(rows: Rows, steps: int = 20) -> float:
    """Return the share of the first source in the first steps.

    Args:
        rows: What each rank delivered.
        steps: The number of steps.
    """
    begun = np.concatenate([own[own[:, 0] <= steps, 1] for own in rows])
    return round(float((begun == 0).mean()), 4) if len(begun) else 0.0


def _deviation(rows: Rows, weights: Sequence[float]) -> float:
    steps = min(int(own[-1, 0]) for own in rows)
    counts = np.zeros((steps, len(weights)))
    for own in rows:
        own = own[own[:, 0] <= steps]  # noqa: PLW2901 - the same rows
        np.add.at(counts, (own[:, 0] - 1, own[:, 1]), 1)
    counts = counts.cumsum(axis=0)
    asked = counts.sum(axis=1, keepdims=True) * np.array(weights)
    return round(float(np.abs(counts - asked).max()), 1)


def _ids(rows: Rows, source: int) -> list[list[int]]:
    return [own[own[:, 1] == source, 2].tolist() for own in rows]


def _count(ids: Iterable[Iterable[int]]) -> Counter[int]:
    return Counter(row for own in ids for row in own)


def _sources(rows: Rows) -> int:
    return int(max(own[:, 1].max() for own in rows)) + 1
