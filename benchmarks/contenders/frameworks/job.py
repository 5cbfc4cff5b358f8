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

EPOCHS = 2
EVERY = 50
"""Steps between two checkpoints."""

BUFFER_ROWS = 2_000
SEED = 7


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
        workers: Number of worker processes of this rank.
        die: The step at which this process kills itself, or None.
        checkpoint: The step of the checkpoint to continue from, or None.
    """

    module: str
    way: str
    data: str
    directory: str
    batch_size: int
    shuffle: bool
    workers: int
    die: int | None
    checkpoint: int | None

    @property
    def rank(self) -> int:
        """This rank."""
        return int(os.environ.get("RANK", "0"))

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return int(os.environ.get("WORLD_SIZE", "1"))


class Recorder:
    """The rows that this rank has trained: they are written with each checkpoint, and read with it.

    A batch that is trained after the newest checkpoint is trained again after a kill, as the model is.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rows: list[np.ndarray[Any, Any]] = []
        self._begun = time.monotonic()
        self._first: float | None = None
        self.step = 0
        if job.checkpoint is not None:
            self._rows = [np.load(self._path(job.checkpoint))]
            self.step = job.checkpoint

    def begin(self) -> None:
        """Note when the loop begins: the first batch is waited for from here on."""
        self._begun = time.monotonic()

    def train(self, epoch: int, rows: Sequence[int]) -> None:
        """Note that a batch is trained."""
        if self._first is None:
            self._first = time.monotonic() - self._begun
        self._rows.append(np.array([(epoch, row) for row in rows], dtype=np.int64).reshape(-1, 2))
        self.step += 1

    def save(self) -> None:
        """Write the rows of a checkpoint, before the framework writes its own part."""
        np.save(self._path(self.step), np.concatenate(self._rows))

    def may_die(self) -> None:
        """Kill this process at the step at which it is to die."""
        if self.step == self._job.die:
            os.kill(os.getpid(), signal.SIGKILL)

    def report(self) -> None:
        """Write what was trained."""
        np.save(self._path("end"), np.concatenate(self._rows))
        report = {"first_batch_s": self._first, "steps": self.step}
        Path(self._job.directory, f"report-{self._job.rank}.json").write_text(json.dumps(report), encoding="utf-8")

    def _path(self, step: int | str) -> Path:
        return Path(self._job.directory, f"rows-{step}-{self._job.rank}.npy")


def files_of(job: Job) -> list[str]:
    """Return the Parquet files, in order."""
    return sorted(map(str, Path(job.data).glob("*.parquet")))


def main() -> None:
    """Train."""
    job = Job(**json.loads(sys.argv[1]))
    recorder = Recorder(job)
    importlib.import_module(f"benchmarks.contenders.frameworks.{job.module}").train(job, recorder)
    recorder.report()


if __name__ == "__main__":
    main()
