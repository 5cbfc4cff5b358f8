"""Transformers' Trainer: killed and resumed with its own checkpoints, in any epoch, under any number of ranks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jobs.ranks import run_ranks, running_ranks
from support import batches_of, open_loader, write_dataset

pytest.importorskip("transformers", reason="the group of frameworks is not installed")

FILES = ((130, 50), (7, 50), (211, 40), (96, 30))
ROWS = 444
FILTERED = 344
"""Rows that the job's filter leaves."""

LOADER = {"columns": ["score"], "batch_size": 8, "shuffle": True, "shuffle_buffer_size": 60, "uneven_ranks": "drop"}
"""The job's loader, where nothing else is said."""

soak = pytest.mark.soak


class Training:
    """A training of one or more runs in a directory, and what its ranks wrote."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.directory = directory
        self.options = options
        assert write_dataset(directory / "data", FILES) == ROWS

    def job(self, runs: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Return the argument of a job."""
        shared = {"data": str(self.directory / "data"), "directory": str(self.directory)}
        return {**shared, "options": self.options | options, "runs": list(runs.items())}

    def run(self, ranks: int, runs: dict[str, Any]) -> None:
        """Train to the end."""
        run_ranks("transformers_job.py", ranks, self.job(runs), self.directory)

    def run_killed(self, ranks: int, name: str, *, resumes: bool, **die: int) -> None:
        """Train until it kills itself."""
        with running_ranks("transformers_job.py", ranks, self.job({name: resumes}, **die), self.directory) as job:
            assert job.wait(120) == -9, job.output()
            job.end()

    def batches(self, name: str, rank: int = 0) -> list[dict[str, Any]]:
        """Return what a rank was trained on: the step, the epoch and the rows of each batch."""
        return [json.loads(line) for line in (self.directory / f"{name}-{rank}.jsonl").read_text().splitlines()]

    def end(self, name: str, rank: int = 0) -> dict[str, Any]:
        """Return how a rank ended."""
        return json.loads((self.directory / f"{name}-{rank}.json").read_text())

    def checkpoints(self) -> list[str]:
        """Return the names of the checkpoints, oldest first."""
        found = (path.name for path in (self.directory / "checkpoints").iterdir())
        return sorted(found, key=lambda name: int(name.removeprefix("checkpoint-")))

    def committed(self, ranks: list[int]) -> list[list[dict[str, Any]]]:
        """Return for each run and rank the batches of the steps after which no later run began."""
        runs = [[self.batches(f"run-{number}", rank) for rank in range(count)] for number, count in enumerate(ranks)]
        began = [run[0][0]["step"] for run in runs[1:]] + [10**9]
        pairs = zip(runs, began, strict=True)
        return [[batch for batch in rank if batch["step"] < step] for run, step in pairs for rank in run]


def trained_rows(batches: list[list[dict[str, Any]]]) -> Counter[tuple[int, int]]:
    """Return how often each row was trained in each epoch."""
    return Counter((batch["epoch"], row) for part in batches for batch in part for row in batch["rows"])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"validates": 2, "accumulated": 5, "batch_size": 24}, id="accumulated and evaluated"),
        pytest.param({"filtered": True, "max_steps": 14, "batch_size": 24}, id="a filter and max_steps", marks=soak),
        pytest.param({"workers": 2, "accumulated": 2, "batch_size": 24, "saves": 5}, id="with workers", marks=soak),
        pytest.param({"save_strategy": "epoch", "batch_size": 24}, id="a checkpoint an epoch", marks=soak),
    ],
)
def test_every_checkpoint_continues_with_the_batches_that_were_to_come(tmp_path: Path, options: dict[str, Any]):
    training = Training(tmp_path, **{"saves": 1} | options)
    training.run(1, {"whole": None})
    whole, end = training.batches("whole"), training.end("whole")
    checkpoints = training.checkpoints()
    training.run(1, {name: name for name in checkpoints[:-1]})
    for name in checkpoints[:-1]:
        step = int(name.removeprefix("checkpoint-"))
        resumed, its_end = training.batches(name), training.end(name)
        assert resumed == [batch for batch in whole if batch["step"] >= step], name
        assert its_end["epochs"] == {after: epoch for after, epoch in end["epochs"].items() if int(after) > step}
        last = [batch["rows"] for batch in resumed if batch["epoch"] == whole[-1]["epoch"]]
        assert its_end["rows_read"] == sum(map(len, last)), "rows were read to be skipped"
        assert its_end["weights"] == end["weights"]
    assert len(checkpoints) > 1


@pytest.mark.usefixtures("leaves_nothing_behind")
@pytest.mark.parametrize(
    ("runs", "options"),
    [
        pytest.param([(2, 22), (2, 20), (2, None)], {"workers": 2, "limit": 1}, id="2 ranks in both epochs"),
        pytest.param([(2, 40), (1, None)], {}, id="2 ranks in the second epoch, then 1"),
        pytest.param([(1, 22), (1, 60), (1, None)], {"validates": 2}, id="1 rank in both epochs", marks=soak),
        pytest.param([(2, 40), (3, 5), (1, None)], {"saves": 1}, id="2 ranks, then 3, then 1", marks=soak),
        pytest.param([(2, 16), (3, None)], {"saves": 2}, id="2 ranks in the first epoch, then 3", marks=soak),
    ],
)
def test_a_killed_training_goes_on_with_each_row_once(
    tmp_path: Path, runs: list[tuple[int, int | None]], options: dict[str, Any]
):
    training = Training(tmp_path, **options)
    for number, (ranks, die) in enumerate(runs):
        name, resumes = f"run-{number}", number > 0
        if die is None:
            training.run(ranks, {name: resumes})
        else:
            training.run_killed(ranks, name, resumes=resumes, die=die)
    counts = [ranks for ranks, _ in runs]
    batches = training.committed(counts)
    trained = trained_rows(batches)
    assert trained.total() == len(trained), "rows repeated"
    assert trained.keys() == {(epoch, row) for epoch in range(2) for row in range(ROWS)}
    end = training.end(name)
    assert end["steps"] == end["max_steps"]
    assert end["epochs"][str(end["steps"])] == 2
    if len(set(counts)) == 1:
        assert_order_of_loader(training, ranks, batches)
    if "limit" in options:
        assert len(training.checkpoints()) == options["limit"]


def assert_order_of_loader(training: Training, ranks: int, batches: list[list[dict[str, Any]]]) -> None:
    """Assert that each rank got over all runs what its loader delivers where nothing stops it."""
    workers = training.options.get("workers", 0)
    for rank in range(ranks):
        loader, _ = open_loader(training.directory / "data", **LOADER, num_workers=workers, num_ranks=ranks, rank=rank)
        expected = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            expected += batches_of(loader)
        assert [batch["rows"] for part in batches[rank::ranks] for batch in part] == expected
