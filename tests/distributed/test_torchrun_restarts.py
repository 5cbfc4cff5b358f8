"""torchrun's own restarts: the example goes on by itself after a rank was killed, and with fewer nodes, or more."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.processes import wait_until_none
from jobs.ranks import run_ranks, running_ranks
from jobs.torchrun import Job, running
from support import batches_of
from torch.distributed import TCPStore

from torch_dataloader_utils import StructuredDataset

EXAMPLE = Path(__file__).parents[2] / "examples"
DATA = EXAMPLE / "flights" / "data" / "flights-2013-01.parquet"
ROWS = 27_004
EVERY = 10
"""Steps between two checkpoints."""


@pytest.fixture(autouse=True)
def new_store_at_each_start(monkeypatch):
    """Have the ranks of each start meet in a store of their own, as docs/guide/torchrun.md recommends."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def arguments(directory: Path, stops: dict[int, Any], *more: str) -> dict[str, Any]:
    line = ["--run-dir", str(directory), "--data", str(DATA), "--checkpoint-every", str(EVERY), *more]
    return {"arguments": line, "directory": str(directory), "stops": stops}


def trained(directory: Path) -> dict[str, Any]:
    """Return the last checkpoint."""
    checkpoint: dict[str, Any] = torch.load(directory / "checkpoint.pt", weights_only=True)
    return checkpoint


def check_rows(checkpoint: dict[str, Any], epochs: int) -> None:
    """Count what was committed: in every epoch no row is lost and none is repeated."""
    counts = Counter((epoch, row) for epoch, rows in checkpoint["rows"] for row in rows.tolist())
    expected = {(epoch, row) for epoch in range(epochs) for row in range(ROWS)}
    assert expected - counts.keys() == set(), "rows lost"
    assert counts.keys() - expected == set()
    assert counts.total() == len(expected), "rows repeated"


@pytest.mark.parametrize(
    "stops",
    [
        pytest.param({1: {"step": 25, "rank": 1, "how": "die"}}, id="once"),
        pytest.param(
            {1: {"step": 25, "rank": 1, "how": "die"}, 2: {"step": 18, "rank": 0, "how": "die"}},
            id="twice",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_job_whose_rank_is_killed_restarts_and_the_same_batches_follow(tmp_path, stops, leaves_nothing_behind):
    nodes = ["--standalone", "--max-restarts=3"]
    with running("torchrun_job.py", 2, arguments(tmp_path, stops), tmp_path, nodes=nodes) as job:
        job.finish()
        assert "27,004 rows, 0 lost, 0 repeated" in job.output()
    checkpoint = trained(tmp_path)
    assert checkpoint["starts"] == len(stops) + 1
    check_rows(checkpoint, epochs=1)
    for rank in range(2):
        loader, _ = StructuredDataset.create_dataloader(
            str(DATA),
            batch_size=256,
            columns=["month"],
            shuffle=True,
            shuffle_buffer_size=20_000,
            row_id_column="row",
            uneven_ranks="drop",
            num_workers=1,
            num_ranks=2,
            rank=rank,
        )
        whole = [row for batch in batches_of(loader) for row in batch]
        assert [row for _, rows in checkpoint["rows"][rank::2] for row in rows.tolist()] == whole


def test_ranks_of_which_one_is_told_to_end_save_after_the_same_step_and_go_on_there(tmp_path, leaves_nothing_behind):
    stops = {1: {"step": 25, "rank": 1, "how": "terminate"}}
    with running_ranks("torchrun_job.py", 2, arguments(tmp_path, stops), tmp_path) as job:
        assert job.wait(240) != 0, job.output()  # 1, or that of a rank which was ended because another had left
    assert [state["batches_delivered"] for state in trained(tmp_path)["loaders"]] == [25, 25]
    assert [(tmp_path / f"steps-1-{rank}").read_text() for rank in range(2)] == ["25", "25"]
    run_ranks("torchrun_job.py", 2, arguments(tmp_path, stops), tmp_path)
    assert trained(tmp_path)["starts"] == 2
    check_rows(trained(tmp_path), epochs=1)


@pytest.mark.soak
@pytest.mark.parametrize("lost", [0, 1], ids=["the node that writes checkpoints", "the other node"])
def test_a_job_goes_on_alone_when_a_node_is_lost_and_on_both_when_it_is_back(tmp_path, lost, leaves_nothing_behind):
    # The store is on neither node: either may be lost.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nodes = [
        "--nnodes=1:2",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{store.port}",
        "--rdzv-id=job",
        "--rdzv-conf=is_host=0,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3",
        "--local-addr=127.0.0.1",
    ]
    stops = {1: {"step": 25, "rank": lost, "how": "hold"}, 2: {"step": 18, "rank": 0, "how": "hold"}}

    def start() -> AbstractContextManager[Job]:
        return running("torchrun_job.py", 1, arguments(tmp_path, stops, "--epochs", "2"), tmp_path, nodes=nodes)

    def stopped(start: int, jobs: list[Job]) -> Job:
        """Wait until a rank has stopped, and return its torchrun."""
        file = tmp_path / f"stopped-{start}"
        wait_until_none(lambda: all(job.is_running for job in jobs) and not file.exists(), seconds=240)
        assert file.exists(), "".join(job.output() for job in jobs)
        return next(job for job in jobs if job.mark.endswith(file.read_text()))

    with start() as one, start() as other:
        taken_away = stopped(1, [one, other])
        staying = one if taken_away is other else other
        taken_away.end()
        assert stopped(2, [staying]) is staying
        with start() as again:
            again.finish()
        staying.finish()
    checkpoint = trained(tmp_path)
    assert checkpoint["starts"] == 3
    assert "27,004 rows, 0 lost, 0 repeated" in staying.output() + again.output()
    check_rows(checkpoint, epochs=2)
