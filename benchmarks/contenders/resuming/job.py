"""One rank of a job that reads a dataset.

Run as ``python -m benchmarks.contenders.resuming.job JSON``, in the environment of a rank as torchrun makes it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.contenders.rank import RankJob, own_state, read

__all__ = ["BUFFER_ROWS", "SEED", "Job", "Reader", "Skipping", "files", "own_state"]

SEED = 7
BUFFER_ROWS = 10_000
"""Rows of a buffer in which rows are shuffled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(RankJob):
    """What to read, and where. ``data`` has Parquet files."""


class Reader(Protocol):
    """What a contender makes of a job."""

    def batches(self) -> Iterator[Any]:
        """Yield the row numbers of each batch, to the end of the epoch. All columns are read."""

    def state(self) -> Any:
        """Return the state of this rank."""

    def load(self, states: list[Any]) -> None:
        """Resume from the states that all ranks saved."""


class Skipping:
    """A reader of a loader that has no state: the number of batches is saved, and as many are read and dropped.

    Args:
        job: The job.
        batches: The row numbers of each batch.
    """

    def __init__(self, job: Job, batches: Iterator[Any]) -> None:
        self._job = job
        self._batches = batches
        self._done = 0

    def batches(self) -> Iterator[Any]:
        """Yield batches."""
        for batch in self._batches:
            self._done += 1
            yield batch

    def state(self) -> int:
        """Return the number of batches."""
        return self._done

    def load(self, states: list[int]) -> None:
        """Drop as many batches as this rank had."""
        for _ in range(own_state(self._job, states) or 0):
            next(self._batches)


class Counted:
    """A reader whose rows are those of a single source."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.state, self.load = reader.state, reader.load

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield the source, which is 0, and the row numbers of each batch."""
        return ((np.zeros(len(ids)), ids) for ids in self._reader.batches())


def files(job: Job) -> list[str]:
    """Return the Parquet files, in order."""
    return sorted(map(str, Path(job.data).glob("*.parquet")))


def main() -> None:
    """Read."""
    job = Job(**json.loads(sys.argv[1]))
    module = importlib.import_module(f"benchmarks.contenders.resuming.{job.module}")
    read(job, lambda: Counted(module.make(job)))


if __name__ == "__main__":
    main()
