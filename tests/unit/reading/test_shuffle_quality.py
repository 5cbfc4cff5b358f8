"""How well rows are mixed: files sorted by label, and the labels of each batch held against a perfect shuffle."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import numpy.typing as npt
import pytest
from pairwise import pairwise

from torch_dataloader_utils.planning.manifest import DataFile, Manifest, RowGroup
from torch_dataloader_utils.planning.plan import PlanOptions, Shard
from torch_dataloader_utils.planning.planner import make_plan
from torch_dataloader_utils.planning.shuffle import delivery_order

LABELS = 50
ROWS = 500_000
BATCH = 250

Rows = npt.NDArray[np.int64]


def chi_square(rows: Rows) -> float:
    """Return chi-square per degree of freedom of the labels of batches: 1 where each row is drawn from all."""
    labels = (rows * LABELS // ROWS)[: len(rows) // BATCH * BATCH].reshape(-1, BATCH)
    counts = np.stack([np.bincount(batch, minlength=LABELS) for batch in labels])
    expected = BATCH / LABELS
    return float((((counts - expected) ** 2) / expected).sum(axis=1).mean() / (LABELS - 1))


def manifest_of(group: int) -> Manifest:
    """Ten files of one width, sorted by label."""
    groups = (RowGroup(group, 100 * group),) * (ROWS // 10 // group)
    return Manifest("/data", tuple(DataFile(f"{n}.parquet", 1, "0" * 16, groups) for n in range(10)))


def ours(group: int, buffer: int, streams: int = 1, interleave: int = 8) -> float:
    """Return what the streams of an epoch come to."""
    manifest = manifest_of(group)
    options = PlanOptions(2**40, shuffle=True, shuffle_buffer_size=buffer, shuffle_interleave=interleave)
    found = []
    for epoch in range(3):
        plan = make_plan(manifest, options, epoch=epoch, num_ranks=1, num_workers=streams)
        for stream in plan.rank_streams(0):
            rows = [
                places(manifest, shard_slice.shard)[delivery_order(shard_slice, seed=42, epoch=epoch)]
                for shard_slice in stream
            ]
            found.append(chi_square(np.concatenate(rows)))
    return float(np.mean(found))


def places(manifest: Manifest, shard: Shard) -> Rows:
    first = manifest.first_rows
    return np.concatenate([np.arange(s.row_length) + first[s.path] + s.row_offset for s in shard.splits])


@functools.cache
def perfect_window(group: int, buffer: int) -> float:
    """Row groups in random order, and windows of the buffer's size mixed perfectly."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(3):
        rows = np.concatenate([np.arange(group) + group * number for number in random.permutation(ROWS // group)])
        windows = [random.permutation(rows[start : start + buffer]) for start in range(0, ROWS, buffer)]
        found.append(chi_square(np.concatenate(windows)))
    return float(np.mean(found))


def test_the_measure_gives_one_for_a_full_shuffle_and_much_for_none():
    assert chi_square(np.random.default_rng(0).permutation(ROWS)) == pytest.approx(1, abs=0.02)
    assert chi_square(np.arange(ROWS)) == pytest.approx(BATCH)


@pairwise(most=5, buffer=[5_000, 20_000, 50_000], streams=[1, 2, 4])
def test_small_row_groups_mix_as_well_as_a_perfect_window_of_the_buffers_size(buffer, streams):
    assert ours(500, buffer, streams) <= 1.15 * perfect_window(500, buffer)


@pairwise(most=5, buffer=[1_000, 5_000, 9_999], streams=[1, 2, 4])
def test_row_groups_larger_than_the_buffer_mix_better_than_a_perfect_window_of_its_size(buffer, streams):
    assert ours(10_000, buffer, streams) <= 0.15 * perfect_window(10_000, buffer)


def test_more_row_groups_side_by_side_mix_better():
    found = [ours(10_000, 5_000, interleave=count) for count in (1, 2, 4, 8, 16)]
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(perfect_window(10_000, 5_000), rel=0.01)
    assert all(after <= 0.6 * before for before, after in itertools.pairwise(found))
