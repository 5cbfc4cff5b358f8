"""A store of checkpoints: whole after a kill at any moment, loaded by any number of ranks, damaged ones refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.outcome import Outcome, Row
from jobs.processes import wait_until_none
from jobs.ranks import running_ranks
from jobs.store_job import EPOCH, NUM_ROWS, Counting
from support import open_loader, write_dataset

from torch_dataloader_utils import CheckpointStore

pytestmark = [
    pytest.mark.usefixtures("leaves_nothing_behind"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

FILES = ((130, 50), (7, 50), (211, 40), (96, 30))
TABLE_ROW = "SIGKILL of a training that saves into a CheckpointStore"
NAMES = ("disk", "S3")
PAUSE_SEC = 0.3
"""So long that an epoch takes many times what it takes to notice a checkpoint and kill."""
LONGEST_SEC = 0.7
OPTIONS = {"num_workers": 0, "shuffle": True, "shuffle_seed": 7, "shuffle_buffer_size": 60}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stored") / "data"
    assert write_dataset(directory, FILES) == NUM_ROWS
    return directory


@dataclass
class Training:
    """An epoch that is trained with a store.

    Attributes:
        data: The files.
        directory: For marks, output and results.
        url: The store.
        storage_options: Its storage's.
        is_async: Whether it saves asynchronously.
        every: Steps between two checkpoints.
        kills: How often it was killed.
    """

    data: Path
    directory: Path
    url: str
    storage_options: dict[str, Any] = field(default_factory=dict)
    is_async: bool = False
    every: int = 1
    kills: int = 0

    def run(self, ranks: int, *, kill_after: float | None = None, when: str = "begun", **arguments: Any) -> None:
        """Train to the end, or until the whole job is killed, so many seconds after something.

        Args:
            ranks: How many.
            kill_after: The seconds, or None.
            when: After the job was ``started``, or all ranks have ``begun``, or it has ``saved`` a checkpoint.
            **arguments: More for the job.
        """
        self.directory.mkdir(exist_ok=True)
        before = self.store().latest()
        for mark in self.directory.glob("begun-*"):
            mark.unlink()
        given = {
            "data": str(self.data),
            "directory": str(self.directory),
            "url": self.url,
            "storage_options": self.storage_options,
            "options": OPTIONS,
            "every": self.every,
            "async": self.is_async,
            "pause": 0.0 if kill_after is None else PAUSE_SEC,
            **arguments,
        }
        with running_ranks("store_job.py", ranks, given, self.directory) as job:
            if kill_after is None:
                job.finish()
                return
            ready: dict[str, Callable[[], bool]] = {
                "started": lambda: True,
                "begun": lambda: len(list(self.directory.glob("begun-*"))) == ranks,
                "saved": lambda: self.store().latest() != before,
            }
            wait_until_none(lambda: job.is_running and not ready[when](), 240)
            wait_until_none(lambda: job.is_running, kill_after)
            failed = any(rank.exitcode for rank in job._ranks)
            if job.is_running and not failed:
                self.kills += 1
                job.end()
            else:
                job.finish()

    def store(self) -> CheckpointStore:
        """Return the store, in this process."""
        return CheckpointStore(self.url, storage_options=self.storage_options)

    def result(self) -> dict[str, Any]:
        """Return the last job's step and weights."""
        loaded: dict[str, Any] = torch.load(self.directory / "result.pt", weights_only=True)
        return loaded

    def compare(self, outcome: Outcome) -> int:
        """Compare the rows of the latest checkpoint's model, and those its loader has left, with the files.

        Returns:
            The checkpoint's step; 0 if there is none.
        """
        model = Counting()
        loader, dataset = open_loader(self.data, **OPTIONS)
        found = self.store().restore(model=model, optimizer=model.optimizer(), loader=loader)
        dataset.set_epoch(EPOCH)
        left = [row for batch in loader for row in zip(batch["row"].tolist(), batch["score"].tolist(), strict=True)]
        times = model.times.detach().round().to(torch.int64)
        trained = times.nonzero().flatten()
        sums = zip(trained.tolist(), model.scores.detach()[trained].tolist(), strict=True)
        rows = [(row, score) for row, score in sums for _ in range(times[row])] + left
        outcome.compare(content_of((row, row / 7) for row in range(NUM_ROWS)), content_of(rows))
        return found.step if found else 0


def content_of(rows: Iterable[tuple[int, float]]) -> list[Row]:
    """Return rows with their scores as texts: of three ranks, the sum of gradients is off by a bit."""
    return [(row, f"{score:.9f}") for row, score in rows]


def weights_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def uninterrupted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of an epoch on two ranks that nobody kills."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    training = Training(data, directory, f"{directory}/store", every=1000)
    training.run(2)
    return training.result()


@pytest.fixture(scope="module", params=["disk", pytest.param("s3", marks=pytest.mark.soak)])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A directory's URL, and the options of its storage."""
    if request.param == "disk":
        return f"{tmp_path_factory.mktemp('place')}", {}
    s3 = request.getfixturevalue("s3")
    return f"s3://{s3.new_bucket()}/run", s3.storage_options()


# Kills --------------------------------------------------------------------------------------------------------------


def test_a_training_killed_at_random_moments_goes_on_exactly(data, place, tmp_path, uninterrupted, record):
    url, options = f"{place[0]}/killed", place[1]
    choice = random.Random(11)
    training = Training(data, tmp_path / "job", url, options, is_async=bool(options))
    steps = [0]
    with record(TABLE_ROW, f"{NAMES[bool(options)]}, 2 ranks") as outcome:
        for when in ("saved", "begun", "saved"):
            training.run(2, kill_after=choice.uniform(0, LONGEST_SEC), when=when)
            steps.append(training.compare(outcome))
        outcome.faults = training.kills
        training.run(2)
        steps.append(training.compare(outcome))
    assert training.kills == 3
    assert steps == sorted(steps)
    assert steps[0] < steps[1] < steps[3] < steps[4], "the kills fell into the epoch, after checkpoints"
    result = training.result()
    assert result["step"] == uninterrupted["step"]
    assert weights_equal(result["weights"], uninterrupted["weights"])
    if not options:
        left = [len(list(directory.glob("checkpoint.json"))) for directory in Path(url).iterdir()]
        assert left == [1, 1, 1], "there are the last two, the one that was restored, and nothing that the kills left"


# Other numbers of ranks ---------------------------------------------------------------------------------------------


IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6)
FSDP2 = pytest.mark.skipif(IS_OLD, reason="a later release of torch has it")


@pytest.mark.parametrize("sharded", [pytest.param(False, id="ddp"), pytest.param(True, id="fsdp2", marks=FSDP2)])
def test_two_ranks_then_one_then_three_have_the_same_weights_and_each_row_once(data, tmp_path, record, sharded):
    training = Training(data, tmp_path / "job", f"{tmp_path}/store", every=5)
    with record(TABLE_ROW, "2, then 1, then 3 ranks, not killed") as outcome:
        for ranks, steps in ((2, 7), (1, 17), (3, None)):
            training.run(ranks, steps=steps, sharded=sharded)
            training.compare(outcome)
            model = Counting()
            found = training.store().restore(model=model)
            assert found is not None
            assert found.step == training.result()["step"]
            assert weights_equal(model.state_dict(), training.result()["weights"])
        assert model.times.tolist() == [1.0] * NUM_ROWS


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_trainings_killed_at_random_moments_go_on_exactly_under_any_number_of_ranks(
    data, place, tmp_path, record, seeds
):
    for seed in seeds(100):
        choice = random.Random(seed)
        is_async = bool(seed % 2)
        training = Training(data, tmp_path / str(seed), f"{place[0]}/{seed}", place[1], is_async=is_async)
        training.every = choice.choice([1, 2, 3])
        with record(TABLE_ROW, f"{NAMES[bool(place[1])]}, 1 to 3 ranks, asynchronous: {is_async}") as outcome:
            for _ in range(choice.randint(2, 6)):
                when = choice.choice(["started", "begun", "saved", "saved"])
                longest = 5.0 if when == "started" else 1.5
                pause = choice.choice([0.0, 0.05, PAUSE_SEC])
                training.run(choice.choice([1, 2, 3]), kill_after=choice.uniform(0, longest), when=when, pause=pause)
                training.compare(outcome)
            outcome.faults = training.kills
            training.run(2)
            training.compare(outcome)
            model = Counting()
            training.store().restore(model=model)
            assert model.times.tolist() == [1.0] * NUM_ROWS
