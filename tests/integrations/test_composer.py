"""Composer: the guide's code is killed and started again, under the same number of ranks and another."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs.ranks import run_ranks, running_ranks

from torch_dataloader_utils import StructuredDataset

pytest.importorskip("composer", reason="Composer is not installed: pip install mosaicml")

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "composer.md"
ROWS = 15_360
"""30 steps of two ranks in an epoch."""


def train(directory: Path, runs: list[tuple[int, int | None]]) -> list[list[list[tuple[int, float]]]]:
    """Train under some ranks each, killed after a step, and return the rows that each run kept, by rank."""
    (directory / "data").mkdir()
    table = pa.table({"x": np.arange(ROWS), "y": np.zeros(ROWS)})
    pq.write_table(table, directory / "data" / "part-0.parquet", row_group_size=1_000)
    for ranks, die in runs:
        arguments: dict[str, Any] = {"page": str(PAGE), "directory": str(directory), "die": die}
        if die is None:
            run_ranks("composer_job.py", ranks, arguments, directory)
            continue
        with running_ranks("composer_job.py", ranks, arguments, directory) as job:
            assert job.wait(180) == -9, job.output()
            job.end()
    kept = json.loads((directory / "runs.json").read_text())
    return [[[tuple(row) for row in rank] for rank in run] for run in kept]


def test_a_killed_training_continues_with_the_batches_that_were_to_come(tmp_path):
    kept = train(tmp_path, [(2, 15), (2, 33), (2, None)])
    for rank in range(2):
        loader, _ = StructuredDataset.create_dataloader(
            str(tmp_path / "data"),
            batch_size=256,
            shuffle=True,
            uneven_ranks="drop",
            num_workers=1,
            num_ranks=2,
            rank=rank,
        )
        whole = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            whole += [(epoch, x) for batch in loader for x in batch["x"].tolist()]
        assert [len(run[rank]) // 256 for run in kept] == [10, 30, 20]
        assert [row for run in kept for row in run[rank]] == whole


def test_another_number_of_ranks_continues_with_each_row_once(tmp_path):
    kept = train(tmp_path, [(2, 15), (1, None)])
    assert [len(run) for run in kept] == [2, 1]
    counts = Counter(row for run in kept for rank in run for row in rank)
    assert counts == Counter((epoch, row) for epoch in range(2) for row in range(ROWS))
