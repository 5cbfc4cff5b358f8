"""The digits example, under torchrun, Accelerate and Lightning: killed in mid-epoch, started again, and exact."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.processes import inherited
from jobs.ranks import run_ranks, running_ranks
from jobs.torchrun import run_torchrun, running
from support import skip_unless_installed

skip_unless_installed(
    "sklearn", "accelerate", "lightning", reason="the groups of examples and frameworks are not installed"
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
SCRIPTS = ("train.py", "train_accelerate.py", "train_lightning.py")
RANKS, ROWS, STEPS = 2, 1_500, 24
"""Steps of an epoch: 750 rows of each rank in batches of 32."""

Batches = list[list[int]]
soak = pytest.mark.soak
pytestmark = pytest.mark.usefixtures("preloaded_frameworks", "leaves_nothing_behind")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the images, as the example makes them."""
    folder = tmp_path_factory.mktemp("digits")
    command = [sys.executable, str(EXAMPLE / "make_data.py"), str(folder)]
    subprocess.run(command, env=inherited(), check=True, capture_output=True, timeout=120)
    return folder


class Training:
    """A training by one of the scripts, in several runs, each going on where the last checkpoint was.

    Args:
        script: The script's name.
        data: The images.
        directory: Where the checkpoints, and what each run trained on, are kept.
        epochs: Number of epochs.
    """

    def __init__(self, script: str, data: Path, directory: Path, epochs: int) -> None:
        self.run_dir = directory / "run"
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self._notes: list[Path] = []
        self._script = str(EXAMPLE / script)
        self._arguments = ["--data", str(data), "--run-dir", str(self.run_dir), "--epochs", str(epochs)]

    def job(self, die: int | None = None) -> dict[str, Any]:
        """Return the arguments of one more run, which kills itself at a step of its own if it is given one."""
        self._notes.append(self.directory / f"notes-{len(self._notes)}")
        return {"script": self._script, "arguments": self._arguments, "notes": str(self._notes[-1]), "die": die}

    def steps(self) -> int:
        """Return how many steps the last run has made."""
        return len(_read(self._notes[-1] / "rank-0.jsonl"))

    def runs(self, rank: int) -> list[Batches]:
        """Return the ids that each run of a rank trained on, step by step."""
        return [_read(notes / f"rank-{rank}.jsonl") for notes in self._notes]

    def kept(self, rank: int) -> Batches:
        """Return what the final model of a rank was trained on: what a run did after its last checkpoint was undone."""
        batches: Batches = []
        for run in self.runs(rank):
            if run and run[0] in batches:
                del batches[batches.index(run[0]) :]
            batches += run
        return batches


def _read(path: Path) -> Batches:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def uninterrupted(data: Path, epochs: int, monkeypatch: pytest.MonkeyPatch) -> list[Batches]:
    """Return the ids of the batches that each rank's loader delivers when nothing is interrupted."""
    monkeypatch.syspath_prepend(EXAMPLE)
    import digits  # noqa: PLC0415 - only there now

    found: list[Batches] = []
    for rank in range(RANKS):
        monkeypatch.setenv("WORLD_SIZE", str(RANKS))
        monkeypatch.setenv("RANK", str(rank))
        loader, _ = digits.training_loader(data, 32)
        found.append([])
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            found[-1] += [batch.ids.tolist() for batch in loader]
    return found


def check_epochs(kept: Sequence[Batches], expected: Sequence[Batches], epochs: int) -> None:
    """Check that each epoch has each row once, in the order of an uninterrupted training."""
    for epoch in range(epochs):
        steps = slice(epoch * STEPS, (epoch + 1) * STEPS)
        ids = [number for batches in kept for batch in batches[steps] for number in batch]
        assert sorted(ids) == list(range(ROWS))
    assert list(kept) == list(expected)


@pytest.mark.parametrize("script", [SCRIPTS[0], *(pytest.param(script, marks=soak) for script in SCRIPTS[1:])])
def test_a_killed_training_goes_on_with_each_image_once(script: str, data: Path, tmp_path: Path, monkeypatch):
    training = Training(script, data, tmp_path, epochs=2)
    with running_ranks("digits_job.py", RANKS, training.job(die=STEPS + 12), tmp_path) as job:
        assert job.wait(120) == -9, job.output()
    run_ranks("digits_job.py", RANKS, training.job(), tmp_path)
    first, second = training.runs(0)
    assert first.index(second[0]) == STEPS + 8, "it goes on after the last checkpoint, in the middle of the epoch"
    check_epochs([training.kept(rank) for rank in range(RANKS)], uninterrupted(data, 2, monkeypatch), 2)


def checkpoint_of(training: Training) -> dict[str, Any]:
    """Return the last checkpoint of `train.py`."""
    checkpoint: dict[str, Any] = torch.load(training.run_dir / "checkpoint.pt", weights_only=True)
    return checkpoint


@soak
def test_a_killed_training_ends_with_the_weights_and_metrics_of_an_uninterrupted_one(data: Path, tmp_path: Path):
    whole = Training("train.py", data, tmp_path / "whole", epochs=10)
    run_torchrun("digits_job.py", RANKS, whole.job(), tmp_path)
    killed = Training("train.py", data, tmp_path / "killed", epochs=10)
    for die in (1, STEPS, STEPS + 5, None):
        with running("digits_job.py", RANKS, killed.job(die), tmp_path) as job:
            assert (job.wait(240) == 0) == (die is None), job.output()
    expected, found = checkpoint_of(whole), checkpoint_of(killed)
    assert all(torch.equal(found["model"][name], weights) for name, weights in expected["model"].items())
    for one, other in zip(found["history"], expected["history"], strict=True):
        assert one["validation"] == other["validation"]
        assert one["training"] == pytest.approx(other["training"], abs=1e-9)
    assert found["history"][-1]["validation"]["accuracy"] > 0.9


@soak
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_training_under_torchrun_survives_kills_at_random_moments(
    script: str, data: Path, tmp_path: Path, monkeypatch
):
    numbers = random.Random(7)
    training = Training(script, data, tmp_path, epochs=3)
    for _ in range(6):
        with running("digits_job.py", RANKS, training.job(), tmp_path) as job:
            enough, end = numbers.randrange(1, 25), time.monotonic() + 120
            while job.is_running and training.steps() < enough:
                assert time.monotonic() < end, job.output()
                time.sleep(0.01)
            time.sleep(numbers.uniform(0, 0.1))
    assert sum(map(bool, training.runs(0))) > 2, "it was killed more than once while it trained"
    run_torchrun("digits_job.py", RANKS, training.job(), tmp_path)
    check_epochs([training.kept(rank) for rank in range(RANKS)], uninterrupted(data, 3, monkeypatch), 3)
