"""The mixture example: killed in mid-epoch and started on other ranks, with each row of each source once a pass."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.processes import inherited
from jobs.ranks import run_ranks, running_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "mixture"
SOURCES, ROWS, EPOCHS, ROWS_PER_EPOCH, STEP_ROWS = ("prose", "code"), 250, 2, 360, 60
STARTS = ((2, 2, 3), (3, 1, 5), (1, 2, None))
"""Ranks, workers, and the step after which each run is killed. There are 12 in all, and every second is saved."""
SCHEDULE = ((4, 0.8), (8, 0.5), (12, 0.2))
"""Up to which step which share of prose is asked."""
pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the texts, as the example makes them, with the same number of rows each."""
    folder = tmp_path_factory.mktemp("corpora")
    command = [sys.executable, str(EXAMPLE / "make_data.py"), str(folder), "--rows", str(ROWS)]
    subprocess.run(command, env=inherited(), check=True, capture_output=True, timeout=120)
    return folder


def train(data: Path, directory: Path) -> dict[str, Any]:
    """Train in three runs on different ranks, two of them killed, and return the last checkpoint."""
    arguments = ["--data", str(data), "--run-dir", str(directory / "run"), "--checkpoint-every", "2", "--width", "8"]
    arguments += ["--epochs", str(EPOCHS), "--rows-per-epoch", str(ROWS_PER_EPOCH)]
    for ranks, workers, die in STARTS:
        job = {"example": "mixture", "arguments": [*arguments, "--workers", str(workers)], "die": die}
        if die is None:
            run_ranks("example_job.py", ranks, job, directory)
            continue
        with running_ranks("example_job.py", ranks, job, directory) as running:
            assert running.wait(120) == -9, running.output()
    checkpoint: dict[str, Any] = torch.load(directory / "run" / "checkpoint.pt", weights_only=True)
    return checkpoint


def test_a_training_killed_twice_goes_on_elsewhere_with_each_row_once_a_pass(data: Path, tmp_path: Path, monkeypatch):
    checkpoint = train(data, tmp_path)
    assert [start["step"] for start in checkpoint["starts"]] == [0, 2, 6]
    assert [(start["ranks"], start["workers"]) for start in checkpoint["starts"]] == [(2, 2), (3, 1), (1, 2)]
    trained = checkpoint["trained"].long()
    steps = Counter(trained[:, 0].tolist())
    assert steps == dict.fromkeys(range(1, 13), STEP_ROWS)
    rows = {source: Counter(trained[trained[:, 1] == source, 2].tolist()) for source in range(len(SOURCES))}
    assert [counts.total() for counts in rows.values()] == [360, 360], "shares of 0.8, 0.5 and 0.2, of 240 rows each"
    for counts in rows.values():
        assert set(counts) == set(range(ROWS)), "a row of the first pass is lost"
        assert Counter(counts.values()) == {1: 2 * ROWS - 360, 2: 360 - ROWS}, "a row came twice in a pass"
    check_shares(trained)
    check_report(checkpoint, data, tmp_path, monkeypatch)


def check_shares(trained: torch.Tensor) -> None:
    """Check that each step has the shares of its time."""
    first = 0
    for last, share in SCHEDULE:
        for step in range(first + 1, last + 1):
            prose = (trained[trained[:, 0] == step, 1] == 0).sum().item()
            assert abs(prose - STEP_ROWS * share) < 6, "of each of 3 ranks less than two rows off"
        first = last


def check_report(checkpoint: dict[str, Any], data: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check what the example counts and draws, and that it would count a row that is lost or repeated."""
    monkeypatch.syspath_prepend(EXAMPLE)
    for name in ("train", "shares"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import shares  # noqa: PLC0415 - only there now

    counts = shares.show(directory / "run", data, [(0, {"prose": 0.8, "code": 0.2})])
    assert counts == [shares.Counted(360, ROWS, 0, 0)] * 2
    picture = (directory / "run" / "shares.svg").read_text()
    assert picture.count("<polyline") == 4
    assert ">3 × 1</text>" in picture
    changed = checkpoint["trained"].clone()
    of_prose = (changed[:, 1] == 0).nonzero().flatten()
    once, twice = rows_by_count(changed, 1), rows_by_count(changed, 2)
    changed[of_prose[changed[of_prose, 2] == once], 2] = float(twice)
    found = shares.count({"trained": changed}, [ROWS, ROWS])
    assert found == [shares.Counted(360, ROWS, 1, 1), shares.Counted(360, ROWS, 0, 0)]
    for name in ("train", "shares"):
        monkeypatch.delitem(sys.modules, name)


def rows_by_count(trained: torch.Tensor, count: int) -> int:
    """Return a row of prose that came so many times."""
    times = Counter(trained[trained[:, 1] == 0, 2].tolist())
    return int(next(row for row, came in times.items() if came == count))


@pytest.mark.soak
def test_the_demonstration_kills_counts_and_draws(tmp_path: Path):
    command = [sys.executable, str(EXAMPLE / "demo.py"), str(tmp_path), "--rows-per-epoch", "900", "--width", "8"]
    command += ["--checkpoint-every", "2"]
    done = subprocess.run(command, env=inherited(), check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("with SIGKILL") == 2
    assert done.stdout.count("0 lost, 0 repeated") == 2
    assert (tmp_path / "run" / "shares.svg").exists()
