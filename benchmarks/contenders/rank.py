"""One rank of a job that reads: it saves its state at a step, dies at a step if told to, and can go on from states.

What reads is a module of its own, see `Loader`. A job's program calls `read`.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.contenders.page_cache import bytes_in_memory

__all__ = ["Loader", "RankJob", "own_state", "read"]


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """What to read, and where.

    Attributes:
        module: The module that reads, of the program's folder.
        way: How it reads.
        data: The directory of the Parquet files, and of what was made of them.
        directory: Where states and rows are.
        batch_size: Rows of a batch of this rank.
        workers: Number of worker processes of this rank.
        save: The step after which the state is saved.
        die: The step after which this process kills itself, or None.
        stop: The step after which it ends, or None to read to the end of the epoch.
        states: Number of ranks that saved a state to resume from; 0 for none.
        began: When this process was started, on the clock of `time.monotonic`.
        count: Whether to count what the first batch has brought into memory of the files in ``data``.
    """

    module: str
    way: str
    data: str
    directory: str
    batch_size: int
    workers: int
    save: int
    die: int | None = None
    stop: int | None = None
    states: int = 0
    began: float = 0.0
    count: bool = False

    @property
    def rank(self) -> int:
        """This rank."""
        return int(os.environ.get("RANK", "0"))

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return int(os.environ.get("WORLD_SIZE", "1"))


class Loader(Protocol):
    """What a contender makes of a job."""

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield the sources and the row numbers of each batch, to the end of the epoch."""

    def state(self) -> Any:
        """Return the state of this rank."""

    def load(self, states: list[Any]) -> None:
        """Resume from the states that all ranks saved."""


def own_state(job: RankJob, states: list[Any]) -> Any | None:
    """Return the state of this rank, None if no rank of its number saved one."""
    return states[job.rank] if job.rank < len(states) else None


def read(job: RankJob, make: Callable[[], Loader]) -> None:
    """Read, and write what was delivered.

    Args:
        job: The job.
        make: Makes the loader. What it needs has been imported.
    """
    imported = time.monotonic()
    if job.num_ranks > 1:
        torch.distributed.init_process_group("gloo")
    loader = make()
    if job.states:
        loader.load([pickle.loads(_state(job, rank).read_bytes()) for rank in range(job.states)])  # noqa: S301
    rows: list[Any] = []
    for step, (sources, ids) in enumerate(loader.batches(), 1):
        if step == 1:
            _write_first(job, imported)
        batch = np.stack([np.full(len(ids), step), np.asarray(sources), np.asarray(ids)], axis=1).astype(np.int64)
        rows.append(batch)
        if step == job.save and not job.states:
            _state(job, job.rank).write_bytes(pickle.dumps(loader.state()))
            np.save(Path(job.directory, f"saved-{job.rank}.npy"), np.concatenate(rows))
        if step == job.die:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == job.stop:
            break
    np.save(Path(job.directory, f"end-{job.rank}.npy"), np.concatenate(rows) if rows else np.zeros((0, 3), np.int64))
    if job.num_ranks > 1:
        torch.distributed.barrier()


def _write_first(job: RankJob, imported: float) -> None:
    """Write the seconds from the start of the process to the first batch, and what is in memory of the files."""
    first = {"imported_s": imported - job.began, "first_batch_s": time.monotonic() - job.began}
    if job.count:
        first["bytes"] = bytes_in_memory(job.data)
    Path(job.directory, f"first-{job.rank}.json").write_text(json.dumps(first), encoding="utf-8")


def _state(job: RankJob, rank: int) -> Path:
    return Path(job.directory, f"state-{rank}.pickle")
