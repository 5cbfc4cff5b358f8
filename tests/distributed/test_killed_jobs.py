"""SIGKILL at any moment: nothing that was committed is lost, and no process is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow.compute as pc
import pytest
import torch
from jobs.processes import ownerless, shared_memory, wait_until_none
from jobs.ranks import RanksJob, running_ranks
from jobs.torchrun import Job, running
from support import batches_of, open_loader, write_dataset

pytestmark = [
    pytest.mark.usefixtures("leaves_nothing_behind"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

IN_ORDER: dict[str, Any] = {}
SHARDS_SHUFFLED = {"shuffle": True, "shuffle_seed": 7}
ROWS_SHUFFLED = {"shuffle": True, "shuffle_seed": 7, "shuffle_buffer_size": 60}

AnyJob: TypeAlias = Job | RanksJob

KILL_FILES = ((900, 40), (33, 33), (1100, 50), (700, 25))
KILL_ROWS = 2733
EVERY = 3
PAUSE_SEC = 0.01
LONG_PAUSE_SEC = 0.1
"""So long that an epoch takes many times what it takes to notice a checkpoint and kill."""
START_SEC = 4.0
"""About what torchrun and its ranks take until the first batch."""


@pytest.fixture(scope="module")
def kill_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("killed") / "data"
    assert write_dataset(directory, KILL_FILES) == KILL_ROWS
    return directory


def workers_of(job: AnyJob) -> list[int]:
    """Return the ids of the data workers of all ranks."""
    found = []
    for pid in job.processes():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().startswith("pt_data_worker"):
                found.append(pid)
    return found


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_everything(job: AnyJob, choice: random.Random) -> None:
    """Take down the whole job, as a machine that goes off would."""
    job.end()


def kill_all_but_workers(job: AnyJob, choice: random.Random) -> None:
    """Take down the ranks and their launcher; their workers have to notice by themselves."""
    kill(job.main_processes())


def kill_one_rank(job: AnyJob, choice: random.Random) -> None:
    """Take down one rank; its launcher has to end the other, and the workers have to notice."""
    kill([choice.choice(job.ranks() or job.main_processes())])


def kill_one_worker(job: AnyJob, choice: random.Random) -> None:
    """Take down one worker; its rank has to fail, not to wait for it."""
    kill([choice.choice(workers_of(job) or job.main_processes())])


Launch: TypeAlias = Callable[..., contextlib.AbstractContextManager[AnyJob]]
Way: TypeAlias = Callable[[AnyJob, random.Random], None]
WAYS: tuple[Way, ...] = (kill_everything, kill_one_rank, kill_all_but_workers, kill_one_worker)


@dataclass
class Epoch:
    """An epoch that is trained under fire until it ends.

    Attributes:
        data: The files.
        directory: Where its checkpoint is.
        options: Those of the loader.
        choice: Decides when and whom to kill.
        launch: Starts its ranks: `running`, under torchrun, or `running_ranks`, which starts at once.
        kills: How often its training was killed.
    """

    data: Path
    directory: Path
    options: dict[str, Any]
    choice: random.Random
    launch: Launch = running
    kills: int = 0

    def checkpoint(self) -> dict[str, Any]:
        """Return what is committed."""
        path = self.directory / "checkpoint.pt"
        if not path.exists():
            return {"trained": [[], []], "ended": False}
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        return saved

    def killed(self, way: Way, seconds: float, *, when: str = "committed", pause: float = PAUSE_SEC) -> None:
        """Train, kill it some time after that, and see that what was committed stays and no process is left.

        Args:
            way: Whom to kill.
            seconds: How long after.
            when: After the job was ``started``, or both ranks have ``begun``, or there is a new checkpoint.
            pause: Seconds that a step takes.
        """
        before, blocks = self.checkpoint()["trained"], shared_memory()
        ready: dict[str, Callable[[], bool]] = {
            "started": lambda: True,
            "begun": lambda: len(list(self.directory.glob("begun-*"))) == 2,
            "committed": lambda: self.checkpoint()["trained"] != before,
        }
        with self._training(pause) as job:
            wait_until_none(lambda: job.is_running and not ready[when](), seconds=240)
            wait_until_none(lambda: job.is_running, seconds)
            if job.is_running:
                way(job, self.choice)
                self.kills += 1
            job.wait(240)
            left = wait_until_none(job.processes)
            assert not left, f"after {way.__name__}, processes were left behind:\n{job.output()}"
        assert not wait_until_none(lambda: ownerless(shared_memory() - blocks))
        after = self.checkpoint()["trained"]
        assert [new[: len(old)] for old, new in zip(before, after, strict=True)] == before

    def finished(self) -> None:
        """Train to the end."""
        with self._training(pause=0) as job:
            job.finish()

    def expected(self) -> list[list[list[int]]]:
        """Return the batches of each rank in an uninterrupted epoch."""
        options = dict(self.options)
        if "least" in options:
            options["filters"] = pc.field("value") >= options.pop("least")
        whole = []
        for rank in range(2):
            loader, dataset = open_loader(self.data, batch_size=8, num_ranks=2, rank=rank, **options)
            dataset.set_epoch(3)
            whole.append(batches_of(loader))
        return whole

    def _training(self, pause: float) -> contextlib.AbstractContextManager[AnyJob]:
        for mark in self.directory.glob("begun-*"):
            mark.unlink()
        arguments = {"data": str(self.data), "directory": str(self.directory), "options": self.options}
        return self.launch(
            "killed_job.py", 2, {**arguments, "every": EVERY, "pause": pause, "epoch": 3}, self.directory
        )


def check_rows(epoch: Epoch) -> None:
    """Count what was committed: no row lost, none repeated, every batch that of an undisturbed epoch."""
    checkpoint = epoch.checkpoint()
    assert checkpoint["ended"]
    rows = [row for rank in checkpoint["trained"] for batch in rank for row in batch]
    expected = set(range(epoch.options.get("least", 0), KILL_ROWS))
    assert expected - set(rows) == set(), "rows lost"
    assert len(rows) == len(expected), "rows repeated"
    assert checkpoint["trained"] == epoch.expected()


def test_an_epoch_killed_in_every_way_commits_each_row_once_and_leaves_no_process_behind(kill_data, tmp_path):
    options = {"num_workers": 2, **ROWS_SHUFFLED, "shuffle_buffer_size": 200}
    epoch = Epoch(kill_data, tmp_path, options, random.Random(5), launch=running_ranks)
    committed = [0]
    for way in (kill_everything, kill_one_rank, kill_all_but_workers, kill_one_worker):
        epoch.killed(way, epoch.choice.uniform(0, 0.3), pause=LONG_PAUSE_SEC)
        assert not epoch.checkpoint()["ended"]
        committed.append(sum(map(len, epoch.checkpoint()["trained"])))
    assert epoch.kills == len(WAYS)
    assert committed == sorted(set(committed))
    assert committed[-1] < KILL_ROWS // 8, "the kills must fall into the epoch"
    epoch.finished()
    check_rows(epoch)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_workers", [2, 0])
@pytest.mark.parametrize(
    "options",
    [
        IN_ORDER,
        SHARDS_SHUFFLED,
        {**ROWS_SHUFFLED, "shuffle_buffer_size": 200},
        {**SHARDS_SHUFFLED, "least": 1000},
        {**ROWS_SHUFFLED, "shuffle_buffer_size": 200, "least": 1000},
    ],
    ids=["in-order", "shards-shuffled", "rows-shuffled", "filtered", "rows-shuffled-and-filtered"],
)
def test_epochs_killed_at_random_moments_commit_each_row_once(kill_data, tmp_path, options, num_workers):
    kills = 0
    for number in range(10):
        epoch = Epoch(kill_data, tmp_path / str(number), {"num_workers": num_workers, **options}, random.Random(number))
        epoch.directory.mkdir()
        while not epoch.checkpoint()["ended"]:
            when = "begun" if epoch.choice.random() < 0.8 else "started"
            longest = 0.8 if when == "begun" else START_SEC
            epoch.killed(epoch.choice.choice(WAYS), epoch.choice.uniform(0, longest), when=when)
        check_rows(epoch)
        kills += epoch.kills
        if kills >= 6:
            return
    pytest.fail("the epochs ended before they were killed")
