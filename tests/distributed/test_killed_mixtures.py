"""A mixture killed while ranks, workers and weights change: no row lost, none repeated, shares exact."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from jobs.processes import wait_until_none
from jobs.ranks import running_ranks
from jobs.torchrun import running

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

ROWS = {"web": 700, "code": 260, "math": 90}
FIRST = {"web": 0.7, "code": 0.2, "math": 0.1}
SECOND = {"web": 0.3, "code": 0.3, "math": 0.4}
Stage: TypeAlias = tuple[int, int, dict[str, float]]

STAGES: tuple[Stage, ...] = ((2, 2, FIRST), (3, 1, SECOND), (1, 2, SECOND))
"""Ranks, workers of each, and weights."""
EPOCHS = 9
"""So many that what was carried over is delivered, and each source is in its second pass or a later one."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixture")
    for name, rows in ROWS.items():
        (root / name).mkdir()
        for part in range(2):
            values = np.arange(rows // 2) + part * (rows // 2)
            pq.write_table(pa.table({"x": values}), root / name / f"part-{part}.parquet", row_group_size=30)
    return root


class Run:
    """A training that is killed, and continued by others."""

    def __init__(self, data: Path, directory: Path, seed: int, launch: Any) -> None:
        self.data, self.directory, self.launch = data, directory, launch
        self.choice = random.Random(seed)
        self.kills = 0

    @property
    def checkpoint(self) -> dict[str, Any]:
        path = self.directory / "checkpoint.pt"
        saved: dict[str, Any] = torch.load(path, weights_only=True) if path.exists() else {"plans": [], "ended": False}
        return saved

    def _training(self, stage: Stage, *, pause: float = 0, hold: int | None = None) -> Any:
        ranks, workers, weights = stage
        for mark in self.directory.glob("held-*"):
            mark.unlink()
        options = {"rows_per_epoch": 480, "batch_size": 24 // ranks, "num_workers": workers, "shuffle": True}
        arguments = {
            "data": str(self.data),
            "directory": str(self.directory),
            "weights": weights,
            "options": {**options, "shuffle_buffer_size": 120},
            "every": 3,
            "pause": pause,
            "hold": hold,
            "epochs": EPOCHS,
        }
        return self.launch("mixture_job.py", ranks, arguments, self.directory)

    def killed(self, stage: Stage, steps: int) -> None:
        """Train some steps, and kill all processes."""
        with self._training(stage, hold=steps) as job:
            wait_until_none(lambda: job.is_running and len(list(self.directory.glob("held-*"))) < stage[0], seconds=240)
            assert job.is_running, job.output()
            job.end()
            assert not wait_until_none(job.processes), job.output()

    def killed_at_random(self, stage: Stage) -> None:
        """Train until there is a new checkpoint, and kill all processes some time after it."""
        before = self.checkpoint["plans"]
        with self._training(stage, pause=0.02) as job:
            wait_until_none(lambda: job.is_running and self.checkpoint["plans"] == before, seconds=240)
            wait_until_none(lambda: job.is_running, self.choice.uniform(0, 0.3))
            self.kills += job.is_running
            job.end()
            assert not wait_until_none(job.processes), job.output()

    def finished(self, stage: Stage) -> None:
        """Train to the end."""
        with self._training(stage) as job:
            job.finish()

    def require_exact(self) -> None:
        """Raise unless each row came once a pass, and each source had its share after every batch."""
        checkpoint = self.checkpoint
        assert checkpoint["ended"]
        taken = Counter[tuple[int, int]]()
        for plan in checkpoint["plans"]:
            for batches in plan["ranks"]:
                require_shares(batches, plan["weights"])
                taken.update(tuple(row) for batch in batches for row in batch)
        for number, rows in enumerate(ROWS.values()):
            counts = [taken[number, row] for row in range(rows)]
            assert max(counts) - min(counts) <= 1
        of_epochs = Counter[int]()
        for plan in checkpoint["plans"]:
            of_epochs[plan["epoch"]] += sum(len(batch) for batches in plan["ranks"] for batch in batches)
        # All ranks make equal steps: each plan leaves fewer rows than ranks to the next epoch.
        assert all(480 - 3 < rows <= 480 for rows in of_epochs.values())


def require_shares(batches: Sequence[Sequence[tuple[int, int]]], weights: dict[str, float]) -> None:
    exact = [Fraction(repr(weight)) for weight in weights.values()]
    counts, rows = Counter[int](), 0
    for batch in batches:
        counts.update(source for source, _ in batch)
        rows += len(batch)
        assert all(abs(counts[source] - rows * share) < 1 for source, share in enumerate(exact))


def test_a_mixture_killed_while_ranks_and_weights_change_loses_and_repeats_no_row(data, tmp_path):
    run = Run(data, tmp_path, 5, running_ranks)
    # The steps from the last checkpoint to a kill are made again. The 2 ranks are killed twice, in both epochs.
    for stage, steps in ((STAGES[0], 7), (STAGES[0], 19), (STAGES[1], 8), (STAGES[2], 5)):
        run.killed(stage, steps)
    plans = [(*plan["run"][:2], plan["epoch"]) for plan in run.checkpoint["plans"]]
    assert plans == [(2, 2, 0), (2, 2, 1), (3, 1, 1), (1, 2, 1)]
    run.finished(STAGES[-1])
    run.require_exact()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("launch", [running_ranks, running], ids=["ranks", "torchrun"])
@pytest.mark.parametrize("seed", range(3))
def test_a_mixture_killed_many_times_in_a_row_loses_and_repeats_no_row(data, tmp_path, launch, seed):
    run = Run(data, tmp_path, seed, launch)
    for _ in range(12):
        weights = run.choice.choice([FIRST, SECOND])
        run.killed_at_random((run.choice.choice([1, 2, 3]), run.choice.choice([1, 2]), weights))
        if run.checkpoint["ended"] or run.checkpoint["plans"][-1]["epoch"] >= EPOCHS - 3:
            break
    assert run.kills >= 4
    run.finished(STAGES[-1])
    run.require_exact()
