"""Two machines, one of which is taken away: the other one goes on alone, and delivers what is left, each row once."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from jobs.hosts import INTERFACE, Host, reason_against, two_hosts
from jobs.ranks import run_ranks
from jobs.torchrun import running
from support import write_dataset

FILES = ((900, 20), (7, 7), (411, 35), (695, 12))
ROWS = 2013
PORT = 29_511
"""Free in any case: the network namespaces are this test's own."""


def read_ledgers(directory: Path, run: str) -> list[tuple[int, list[int]]]:
    """Return the step and the rows of every batch that any rank of a run wrote down."""
    files = directory.glob(f"{run}-*.jsonl")
    lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]


def test_a_job_on_two_hosts_goes_on_alone_when_one_of_them_is_killed(tmp_path, leaves_nothing_behind):
    reason = reason_against()
    if reason:
        pytest.skip(reason)
    write_dataset(tmp_path / "data", FILES)
    arguments = {"data": str(tmp_path / "data"), "directory": str(tmp_path)}
    with two_hosts() as (first, second):

        def start(number: int, host: Host):
            return running(
                "host_job.py",
                2,
                {**arguments, "run": "together", "load": False, "pause_sec": 0.05},
                tmp_path,
                entry=host.entry,
                nodes=["--nnodes=2", f"--node-rank={number}", f"--master-addr={first.address}"],
                port=PORT,
                interface=INTERFACE,
            )

        with start(0, first) as staying, start(1, second) as taken_away:
            deadline = time.monotonic() + 180
            while sum(step > 12 for step, _ in read_ledgers(tmp_path, "together")) < 4:
                assert time.monotonic() < deadline, staying.output() + taken_away.output()
                assert staying.is_running, staying.output()
                time.sleep(0.02)
            taken_away.end()
            assert staying.wait(240) != 0

    step = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"]
    assert step >= 10
    run_ranks("host_job.py", 2, {**arguments, "run": "alone", "load": True, "pause_sec": 0}, tmp_path)

    together = read_ledgers(tmp_path, "together")
    assert {rank.name for rank in tmp_path.glob("together-*.jsonl")} == {f"together-{rank}.jsonl" for rank in range(4)}
    kept = [row for made, rows in together if made <= step for row in rows]
    after = [row for _, rows in read_ledgers(tmp_path, "alone") for row in rows]
    counts = Counter(kept + after)
    assert set(counts) == set(range(ROWS))
    assert counts.total() - ROWS <= 1
