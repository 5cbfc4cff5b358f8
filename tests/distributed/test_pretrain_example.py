"""The pretraining example: packed documents, killed in mid-epoch and started on other ranks, with each token once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jobs.processes import inherited
from jobs.ranks import run_ranks, running_ranks

pytest.importorskip("tokenizers", reason="the group of examples is not installed")

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain"
STARTS = ((2, 2, 3), (3, 1, 5), (1, 2, None))
"""Ranks, workers, and the step after which each run is killed. Every second step is saved."""
pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")


def test_a_training_killed_twice_goes_on_elsewhere_with_each_token_once(tmp_path: Path, monkeypatch):
    command = [sys.executable, str(EXAMPLE / "make_data.py"), str(tmp_path), "--documents", "14"]
    subprocess.run(command, env=inherited(), check=True, capture_output=True, timeout=120)
    arguments = ["--data", str(tmp_path), "--run-dir", str(tmp_path / "run"), "--checkpoint-every", "2", "--width", "8"]
    for ranks, workers, die in STARTS:
        job = {"example": "pretrain", "arguments": [*arguments, "--workers", str(workers)], "die": die}
        if die is None:
            run_ranks("example_job.py", ranks, job, tmp_path)
            continue
        with running_ranks("example_job.py", ranks, job, tmp_path) as running:
            assert running.wait(120) == -9, running.output()
    checkpoint = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert [(start["step"], start["ranks"]) for start in checkpoint["starts"]] == [(0, 2), (2, 3), (6, 1)]

    monkeypatch.syspath_prepend(EXAMPLE)
    for name in ("make_data", "train", "demo"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import demo  # noqa: PLC0415 - only there now

    tokens = demo.tokens_in(tmp_path / "documents")
    trained = demo.trained_in(tmp_path / "run")
    assert tokens > 10_000
    assert torch.equal(trained.sort().values, torch.arange(tokens, dtype=torch.int32))
    assert demo.count(trained, tokens) == (tokens, 0, 0)
    assert demo.count(torch.cat([trained[3:], trained[:4]]), tokens) == (tokens, 0, 1)
    assert demo.count(trained[2:], tokens) == (tokens, 2, 0)


@pytest.mark.soak
def test_the_demonstration_kills_and_counts(tmp_path: Path):
    command = [sys.executable, str(EXAMPLE / "demo.py"), str(tmp_path), "--documents", "40", "--width", "8"]
    command += ["--checkpoint-every", "2"]
    done = subprocess.run(command, env=inherited(), check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("with SIGKILL") == 2
    assert "0 lost, 0 repeated" in done.stdout
