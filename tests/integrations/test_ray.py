"""Ray Train: a rank is killed, Ray starts all ranks again, and each row is trained once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs.processes import inherited, processes_with, wait_until_none
from support import all_rows_of, open_loader, write_dataset

ROOT = Path(__file__).parents[2]
FILES = ((230, 50), (7, 50), (411, 40), (96, 30))
ROWS = 744

pytest.importorskip("ray.train", reason="Ray is not installed: pip install 'ray[train]'")


@contextmanager
def ended(mark: str) -> Iterator[None]:
    """End all processes that have a mark, among them those that Ray started."""
    try:
        yield
    finally:
        while doomed := processes_with(mark):
            for pid in doomed:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def run(directory: Path, **arguments: Any) -> dict[str, Any]:
    """Run the job, and return its report."""
    assert write_dataset(directory / "dataset", FILES) == ROWS
    given = {"data": str(directory / "dataset"), "directory": str(directory), "page": None, **arguments}
    job, mark = ROOT / "tests" / "support" / "jobs" / "ray_job.py", uuid.uuid4().hex
    with ended(f"TEST_JOB={mark}"):
        done = subprocess.run(
            [sys.executable, str(job), json.dumps(given)],
            cwd=directory,
            env=inherited(TEST_JOB=mark, GLOO_SOCKET_IFNAME="lo", RAY_USAGE_STATS_ENABLED="0"),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert not wait_until_none(lambda: processes_with(f"TEST_JOB={mark}"))
    report: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return report


def rows_of_rank(report: dict[str, Any], rank: int) -> list[int]:
    return [row for every in report["trained"] for row in every[rank]]


def test_ray_restarts_a_killed_rank_and_the_same_batches_follow(tmp_path):
    report = run(tmp_path, fits=[2], dies={1: 25})
    assert report["starts"] == 2
    for rank in range(2):
        options = {"shuffle": True, "shuffle_buffer_size": 60, "uneven_ranks": "drop", "num_workers": 1}
        loader, _ = open_loader(tmp_path / "dataset", batch_size=8, num_ranks=2, rank=rank, **options)
        assert rows_of_rank(report, rank) == all_rows_of(loader)


def test_another_number_of_ranks_continues_a_failed_run(tmp_path):
    report = run(tmp_path, fits=[2, 1], dies={1: 25, 2: 18})
    assert report["starts"] == 3
    counts = Counter(row for every in report["trained"] for rank in every for row in rank)
    assert counts == Counter(range(ROWS))


def test_the_guide_runs_and_rays_own_loader_is_a_batch_ahead_as_it_says(tmp_path):
    (tmp_path / "data").mkdir()
    x = np.linspace(0, 1, 12_000)
    pq.write_table(pa.table({"x": x, "y": 2 * x}), tmp_path / "data" / "part-0.parquet", row_group_size=1_000)
    report = run(tmp_path, fits=[], dies={}, page=str(ROOT / "docs" / "guide" / "ray.md"))
    assert report["taken"] == 2
    assert list((tmp_path / "runs" / "run").glob("checkpoint_*"))
