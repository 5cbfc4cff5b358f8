"""One rank of a job that packs documents: it saves its state at a step, dies at a step if told to, and can go on.

Run as ``python -m benchmarks.contenders.packing.job JSON``, in the environment of a rank as torchrun makes it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.contenders.rank import RankJob, own_state

__all__ = ["LENGTH", "PADDING", "Job", "Packed", "files", "own_state"]

LENGTH = 4096
PADDING = 0
"""No token is 0: each is the number of its place in all documents, from 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(RankJob):
    """What to pack, and where: the rows of the files' column ``tokens`` are documents.

    Attributes:
        timed: Whether an epoch is timed; nothing else is done then.
    """

    timed: bool = False


class Packed(Protocol):
    """What a contender makes of a job."""

    def batches(self) -> Iterator[Any]:
        """Yield the tokens of each batch, (sequences, length), to the end of the epoch."""

    def state(self) -> Any:
        """Return the state of this rank."""

    def load(self, states: list[Any]) -> None:
        """Resume from the states that all ranks saved."""


def files(job: Job) -> list[str]:
    """Return the Parquet files, in order."""
    return sorted(map(str, Path(job.data).glob("*.parquet")))


def main() -> None:
    """Pack."""
    job = Job(**json.loads(sys.argv[1]))
    module = importlib.import_module(f"benchmarks.contenders.packing.{job.module}")
    if job.timed:
        found = _time(job, module.make)
        Path(job.directory, "timed.json").write_text(json.dumps(found), encoding="utf-8")
        np.save(Path(job.directory, "end-0.npy"), np.zeros((0, LENGTH), np.int32))
        return
    if job.num_ranks > 1:
        torch.distributed.init_process_group("gloo")
    _deliver(job, module.make(job))
    if job.num_ranks > 1:
        torch.distributed.barrier()


def _deliver(job: Job, packed: Packed) -> None:
    if job.states:
        packed.load([pickle.loads(_state(job, rank).read_bytes()) for rank in range(job.states)])  # noqa: S301
    sequences: list[Any] = [np.zeros((0, LENGTH), np.int32)]
    for step, tokens in enumerate(packed.batches(), 1):
        sequences.append(np.array(tokens, np.int32))  # a copy: a loader may use its memory again
        if step == job.save and not job.states:
            _state(job, job.rank).write_bytes(pickle.dumps(packed.state()))
            np.save(Path(job.directory, f"saved-{job.rank}.npy"), np.concatenate(sequences))
        if step == job.die:
            os.kill(os.getpid(), signal.SIGKILL)
    np.save(Path(job.directory, f"end-{job.rank}.npy"), np.concatenate(sequences))


def _time(job: Job, make: Any) -> dict[str, float]:
    """Time an epoch, and what comes before it."""
    begun = time.perf_counter()
    packed = make(job)
    made, before = time.perf_counter(), _processor_time()
    tokens = slots = 0
    for batch in packed.batches():
        values = np.asarray(batch)
        tokens += int(np.count_nonzero(values))
        slots += values.size
    seconds = time.perf_counter() - made
    processor = _processor_time() - before
    return {"before": made - begun, "seconds": seconds, "processor": processor, "tokens": tokens, "slots": slots}


def _processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _state(job: Job, rank: int) -> Path:
    return Path(job.directory, f"state-{rank}.pickle")


if __name__ == "__main__":
    main()
