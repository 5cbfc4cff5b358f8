"""How well a plan mixes labels: those of each batch, compared with a sample drawn at random from all rows. Pure.

The measure is the design effect of sampling theory (Kish, "Survey Sampling", 1965): the variance of a batch's label
proportions, relative to that of a simple random sample of the same size. For more than two labels it is chi-square for
each degree of freedom (Rao and Scott, "The analysis of categorical data from complex sample surveys", 1981).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torch_dataloader_utils.planning.manifest import Manifest
from torch_dataloader_utils.planning.plan import Plan, ShardSlice
from torch_dataloader_utils.planning.shuffle import delivery_order

Codes = npt.NDArray[np.uint8]
"""Each row's label as a number."""

MOST_DRAWN = 20_000_000
"""Rows whose order is drawn, about. Of more, a part of the batches is counted; a shard is drawn as a whole."""

RUN_BATCHES = 64
"""Batches of that part that are neighbours in their stream."""

BLOCK_ROWS = 1 << 20
"""Rows whose batches are counted at once: an index of 8 bytes for each row is needed meanwhile."""


@dataclass(frozen=True, slots=True)
class LabelMixing:
    """How well batches are mixed.

    Attributes:
        batches: Number of batches that were counted.
        design_effect: 1 for a uniform shuffle of all rows; about the batch size where each batch has one label.
        intraclass_correlation: The same from 0, a uniform shuffle, to 1, batches of one label each. It may be a little
            less than 0 by chance.
        effective_rows: How many rows drawn at random have as much variety of labels as a batch has: its rows divided by
            the design effect (Kish's effective sample size).
        error: The standard error of the design effect of a uniform shuffle with as many batches.
    """

    batches: int
    design_effect: float
    intraclass_correlation: float
    effective_rows: float
    error: float


def label_mixing(
    plans: Sequence[Plan], manifest: Manifest, codes: Codes, *, labels: int, batch_size: int, seed: int | None
) -> LabelMixing:
    """Return how well the batches of all ranks and workers are mixed.

    Args:
        plans: The plans of some epochs, of all rows. Their orders differ, so several tell more than one.
        manifest: The files; their rows are counted.
        codes: Each row's label, from 0, in the order of the manifest.
        labels: Number of labels, at least 2. Each is there.
        batch_size: Rows in a batch.
        seed: The seed of a row-level shuffle; None without one.

    Raises:
        ValueError: If there is one batch alone.
    """
    rows = len(codes)
    proportions = np.bincount(codes, minlength=labels) / rows
    statistic = ideal = 0.0
    batches = counted = 0
    for epoch, slices in _streams(plans, batch_size, draws=seed is not None):
        delivered = _delivered(slices, manifest, codes, seed=seed, epoch=epoch)
        for size, counts in _batch_counts(delivered, labels, batch_size):
            expected = size * proportions
            statistic += float(((counts - expected) ** 2 / expected).sum())
            # The mean of chi-square for each degree of freedom, if rows are drawn at random without replacement
            # (multivariate hypergeometric distribution).
            ideal += len(counts) * (rows - size) / max(1, rows - 1)
            batches += len(counts)
            counted += len(counts) * size
    if not ideal:
        raise ValueError(f"all {rows:,} rows are in one batch: choose a smaller batch size")
    found = statistic / (labels - 1)
    return LabelMixing(
        batches=batches,
        design_effect=found / ideal,
        intraclass_correlation=(found - ideal) / (counted - ideal),  # if each batch has one label, `found` is all rows
        effective_rows=counted / batches * ideal / found,
        error=math.sqrt(2 / (batches * (labels - 1))),
    )


def _streams(plans: Sequence[Plan], batch_size: int, *, draws: bool) -> Sequence[tuple[int, Sequence[ShardSlice]]]:
    """Return the epoch and the slices of all streams.

    Where orders are drawn and there are very many rows, these are neighbouring slices instead, evenly spread over all
    streams.
    """
    streams = [
        (plan.epoch, plan.stream(rank, worker))
        for plan in plans
        for rank in range(plan.num_ranks)
        for worker in range(plan.streams)
    ]
    rows = sum(part.rows for _, slices in streams for part in slices)
    if not draws or rows <= MOST_DRAWN:
        return streams
    runs = [(epoch, run) for epoch, slices in streams for run in _runs(slices, RUN_BATCHES * batch_size)]
    return runs[:: -(-rows // MOST_DRAWN)]


def _runs(slices: Sequence[ShardSlice], rows: int) -> Iterator[list[ShardSlice]]:
    """Yield neighbouring slices that have so many rows together, or a few more."""
    held: list[ShardSlice] = []
    for part in slices:
        held.append(part)
        if sum(one.rows for one in held) >= rows:
            yield held
            held = []
    if held:
        yield held


def _delivered(
    slices: Sequence[ShardSlice], manifest: Manifest, codes: Codes, *, seed: int | None, epoch: int
) -> Codes:
    """Return the labels of a stream's rows in the order of delivery."""
    first, parts = manifest.first_rows, [codes[:0]]
    for shard_slice in slices:
        starts = [first[split.path] + split.row_offset for split in shard_slice.shard.splits]
        ranges = zip(starts, shard_slice.shard.splits, strict=True)
        held = np.concatenate([codes[start : start + split.row_length] for start, split in ranges])
        parts.append(held[delivery_order(shard_slice, seed=seed, epoch=epoch)])
    return np.concatenate(parts)


def _batch_counts(delivered: Codes, labels: int, batch_size: int) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Yield numbers of rows, and for some batches of so many rows how often they have each label."""
    together = max(1, BLOCK_ROWS // batch_size)
    full = len(delivered) // batch_size
    for begin in range(0, full, together):
        count = min(together, full - begin)
        block = delivered[begin * batch_size : (begin + count) * batch_size].reshape(count, batch_size)
        numbered = block + labels * np.arange(count)[:, None]
        yield batch_size, np.bincount(numbered.ravel(), minlength=count * labels).reshape(count, labels)
    rest = delivered[full * batch_size :]
    if len(rest):
        yield len(rest), np.bincount(rest, minlength=labels)[None, :]
