"""One rank of a training job: it writes a checkpoint now and then, dies at a step if told to, and can go on.

Run as ``python -m benchmarks.contenders.frameworks.job JSON``, in the environment of a rank as torchrun makes it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset

EPOCHS = 2
BUFFER_ROWS = 2_000
SEED = 7
FILTER = ("y", "<", 0.5)
"""What a filtered job trains on."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What to train, and where.

    Attributes:
        module: The module of this folder that trains.
        way: How it loads.
        data: The directory of the Parquet files.
        directory: Where checkpoints and reports are.
        batch_size: Rows of a batch of this rank.
        shuffle: Whether rows are shuffled.
        filtered: Whether only rows that pass `FILTER` are trained on.
        workers: Number of worker processes of this rank.
        every: Steps between two checkpoints.
        die: The step at which the last rank kills itself, if it has not resumed, or None.
        checkpoint: The step of the checkpoint to continue from, or None. A job that finds its newest checkpoint by
            itself says by `Recorder.resume` which one that is.
    """

    module: str
    way: str
    data: str
    directory: str
    batch_size: int
    shuffle: bool
    filtered: bool
    workers: int
    every: int
    die: int | None
    checkpoint: int | None

    @property
    def rank(self) -> int:
        """This process."""
        return int(os.environ.get("RANK", "0"))

    @property
    def num_ranks(self) -> int:
        """Number of processes."""
        return int(os.environ.get("WORLD_SIZE", "1"))


class Recorder:
    """The rows that this rank has trained: with each checkpoint, those since the one before are written.

    A batch that is trained after the newest checkpoint is trained again after a kill, as the model is.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rows: list[np.ndarray[Any, Any]] = []
        self._begun = time.monotonic()
        self._first: float | None = None
        self.resume(job.checkpoint or 0)

    def resume(self, step: int) -> None:
        """Count on from a checkpoint."""
        self.step = self._start = step

    def begin(self) -> None:
        """Note when the loop begins, or the checkpoint is loaded: the first batch is waited for from here on."""
        self._begun = time.monotonic()

    def train(self, epoch: int, rows: Sequence[int]) -> None:
        """Note that a batch is trained."""
        if self._first is None:
            self._first = time.monotonic() - self._begun
        self._rows.append(np.array([(epoch, row) for row in rows], dtype=np.int64).reshape(-1, 2))
        self.step += 1

    def save(self) -> None:
        """Write the rows of a checkpoint, before the framework writes its own part."""
        if self._rows:
            path = Path(self._job.directory, f"rows-{self._start}-{self.step}-{self._job.rank}.npy")
            np.save(path, np.concatenate(self._rows))
            self._rows.clear()

    def may_die(self) -> None:
        """Kill this process, if it is the last rank, at the step at which it is to die."""
        is_last = self._job.rank == self._job.num_ranks - 1
        if is_last and self._start == 0 and self.step == self._job.die:
            os.kill(os.getpid(), signal.SIGKILL)

    def report(self) -> None:
        """Write what was trained since the last checkpoint, and how long the first batch was waited for."""
        self.save()
        report = {"start": self._start, "steps": self.step, "first_batch_s": self._first}
        path = Path(self._job.directory, f"report-{self._start}-{self._job.rank}.json")
        path.write_text(json.dumps(report), encoding="utf-8")


def files_of(job: Job) -> list[str]:
    """Return the Parquet files, in order."""
    return sorted(map(str, Path(job.data).glob("*.parquet")))


def steps_of(job: Job) -> int:
    """Return the steps of all epochs, which a framework asks for where a loader has no length."""
    column, _, limit = FILTER
    passing = pyarrow.dataset.field(column) < limit if job.filtered else None
    rows = pyarrow.dataset.dataset(files_of(job)).count_rows(filter=passing)
    return EPOCHS * -(-rows // (job.batch_size * job.num_ranks))


def run(job: Job) -> None:
    """Train."""
    recorder = Recorder(job)
    importlib.import_module(f"benchmarks.contenders.frameworks.{job.module}").train(job, recorder)
    recorder.report()


if __name__ == "__main__":
    run(Job(**json.loads(sys.argv[1])))
