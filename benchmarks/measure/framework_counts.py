"""Count the rows that trainings have lost, repeated, and trained in another order. Pure but for reading their files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["committed", "compare", "count", "peers_differ", "trained"]

Rows = np.ndarray[Any, Any]
"""(epoch, row) in the order of the training."""


def compare(expected: Sequence[Rows], got: Sequence[Rows], wanted: Rows, epochs: int) -> dict[str, int]:
    """Compare what ranks trained with what they train without an interruption.

    Args:
        expected: For each rank, (epoch, row) in order, of the uninterrupted run.
        got: The same of the killed and resumed run.
        wanted: The rows that an epoch should have.
        epochs: Number of epochs.

    Returns:
        Rows ``lost`` and ``repeated`` against the uninterrupted run; ``out_of_order``, rows that follow another row
        than there; ``left_out`` and ``extra``, rows that the uninterrupted run itself leaves out and repeats.
    """
    size = 1 + max(int(rows.max(initial=0)) for rows in (*expected, *got, wanted))
    begun = _epochs((*expected, *got), epochs)
    before, after = (_times_trained(ranks, size, begun) for ranks in (expected, got))
    should = _should(wanted, size, epochs, begun)
    return {
        "lost": _sum(before - after),
        "repeated": _sum(after - before),
        "out_of_order": sum(
            np.setdiff1d(_pairs(resumed, size, begun), _pairs(whole, size, begun)).size
            for resumed, whole in zip(got, expected, strict=True)
        ),
        "left_out": _sum(should - before),
        "extra": _sum(before - should),
    }


def count(got: Sequence[Rows], wanted: Rows, epochs: int) -> dict[str, int]:
    """Count the rows that were not trained once an epoch, whichever rank trained them.

    Returns:
        Rows ``lost`` and ``repeated`` in the first epoch, and ``next_lost`` and ``next_repeated`` in those after it.
    """
    size = 1 + max(int(rows.max(initial=0)) for rows in (*got, wanted))
    begun = _epochs(got, epochs)
    first, *others = _times_trained(got, size, begun) - _should(wanted, size, epochs, begun)
    return {
        "lost": _sum(-first),
        "repeated": _sum(first),
        "next_lost": sum(_sum(-other) for other in others),
        "next_repeated": sum(_sum(other) for other in others),
    }


def peers_differ(ranks: Sequence[Rows], peers: int) -> int:
    """Return how many processes trained other rows than the first of those that they share a rank with."""
    return sum(not np.array_equal(ranks[number], ranks[number - number % peers]) for number in range(len(ranks)))


def trained(directory: str | Path) -> list[Rows]:
    """Return what each rank of a job has trained, up to its checkpoints and from them on."""
    chosen = committed(path.name for path in Path(directory).glob("rows-*.npy"))
    return [np.concatenate([np.load(Path(directory, name)) for name in names]) for names in chosen]


def committed(names: Iterable[str]) -> list[list[str]]:
    """Return the names of the files of rows that count, by rank.

    Args:
        names: ``rows-{start}-{step}-{rank}.npy``: rows up to a step, of a process that began after the step `start`.
            What a process has trained after the checkpoint that a later one continued does not count.
    """
    files = sorted((*map(int, name.removesuffix(".npy").split("-")[1:]), name) for name in names)
    starts = sorted({start for start, *_ in files})
    ends = dict(zip(starts, [*starts[1:], float("inf")], strict=True))
    ranks: dict[int, list[str]] = {rank: [] for rank in sorted({rank for _, _, rank, _ in files})}
    for start, step, rank, name in files:
        if step <= ends[start]:
            ranks[rank].append(name)
    return list(ranks.values())


def _epochs(ranks: Sequence[Rows], least: int) -> int:
    """Return the number of epochs that were begun: a training may have gone on for too long."""
    return max(least, *(1 + int(rows[:, 0].max(initial=0)) for rows in ranks))


def _should(wanted: Rows, size: int, epochs: int, begun: int) -> Rows:
    """Return how often each row should be trained, by epoch: not at all in epochs that should not have begun."""
    should = np.zeros((begun, size), dtype=np.int64)
    should[:epochs] = np.bincount(wanted, minlength=size)
    return should


def _times_trained(ranks: Sequence[Rows], size: int, epochs: int) -> Rows:
    """Return how often each row was trained, by epoch."""
    rows = np.concatenate(ranks)
    return np.bincount(rows[:, 0] * size + rows[:, 1], minlength=epochs * size).reshape(epochs, size)


def _pairs(rows: Rows, size: int, epochs: int) -> Rows:
    """Return each row, of an epoch, with the one that it follows, as one number."""
    keys = rows[:, 0] * size + rows[:, 1] + 1
    return np.concatenate([[0], keys[:-1]]) * (epochs * size + 1) + keys


def _sum(differences: Rows) -> int:
    return int(np.maximum(differences, 0).sum())
