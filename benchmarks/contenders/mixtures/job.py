"""One rank of a job that reads a mixture: it saves its state at a step, dies at a step if told to, and can go on.

Run as ``python -m benchmarks.contenders.mixtures.job JSON``, in the environment of a rank as torchrun makes it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

SOURCES = ("web", "code")
SEED = 7
BUFFER_ROWS = 500


@dataclasses.dataclass(frozen=True)
class Job:
    """What to read, and where.

    Attributes:
        module: The module of this folder that reads.
        way: How it reads.
        data: The directory that has a directory of Parquet files for each source.
        directory: Where states and rows are.
        weights: The share of each of `SOURCES`.
        batch_size: Rows of a batch of this rank.
        workers: Number of worker processes of this rank.
        save: The step after which the state is saved.
        die: The step after which this process kills itself, or None.
        states: Number of ranks that saved a state to resume from; 0 for none.
    """

    module: str
    way: str
    data: str
    directory: str
    weights: list[float]
    batch_size: int
    workers: int
    save: int
    die: int | None = None
    states: int = 0

    @property
    def rank(self) -> int:
        """This rank."""
        return int(os.environ.get("RANK", "0"))

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return int(os.environ.get("WORLD_SIZE", "1"))


class Mixture(Protocol):
    """What a contender makes of a job."""

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield the sources and the row numbers of each batch, to the end of the epoch."""

    def state(self) -> Any:
        """Return the state of this rank."""

    def load(self, states: list[Any]) -> None:
        """Resume from the states that all ranks saved."""


def directories(job: Job) -> dict[str, str]:
    """Return the directory of each source."""
    return {name: str(Path(job.data, name)) for name in SOURCES}


def files(job: Job) -> dict[str, list[str]]:
    """Return the Parquet files of each source, in order."""
    return {name: sorted(map(str, Path(path).glob("*.parquet"))) for name, path in directories(job).items()}


def own_state(job: Job, states: list[Any]) -> Any | None:
    """Return the state of this rank, None if no rank of its number saved one."""
    return states[job.rank] if job.rank < len(states) else None


def main() -> None:
    """Read."""
    job = Job(**json.loads(sys.argv[1]))
    if job.num_ranks > 1:
        torch.distributed.init_process_group("gloo")
    mixture = importlib.import_module(f"benchmarks.contenders.mixtures.{job.module}").make(job)
    if job.states:
        mixture.load([pickle.loads(_state(job, rank).read_bytes()) for rank in range(job.states)])  # noqa: S301
    rows: list[Any] = []
    for step, (sources, ids) in enumerate(mixture.batches(), 1):
        batch = np.stack([np.full(len(ids), step), np.asarray(sources), np.asarray(ids)], axis=1).astype(np.int64)
        rows.append(batch)
        if step == job.save and not job.states:
            _state(job, job.rank).write_bytes(pickle.dumps(mixture.state()))
            np.save(Path(job.directory, f"saved-{job.rank}.npy"), np.concatenate(rows))
        if step == job.die:
            os.kill(os.getpid(), signal.SIGKILL)
    np.save(Path(job.directory, f"end-{job.rank}.npy"), np.concatenate(rows) if rows else np.zeros((0, 3), np.int64))
    if job.num_ranks > 1:
        torch.distributed.barrier()


def _state(job: Job, rank: int) -> Path:
    return Path(job.directory, f"state-{rank}.pickle")


if __name__ == "__main__":
    main()
