"""This library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.contenders.resuming.job import BUFFER_ROWS, SEED, Job
from torch_dataloader_utils import StructuredDataset


class Structured:
    """The loader; its states are loaded strictly on as many ranks, else elastically."""

    def __init__(self, job: Job) -> None:
        self._job = job
        shuffle = {"shuffle": True, "shuffle_buffer_size": BUFFER_ROWS, "shuffle_seed": SEED} if job.way else {}
        self._loader, _ = StructuredDataset.create_dataloader(
            job.data, batch_size=job.batch_size, num_workers=job.workers, **shuffle
        )

    def batches(self) -> Iterator[Any]:
        """Yield batches."""
        for batch in self._loader:
            yield batch["row"]

    def state(self) -> Any:
        """Return the loader's state."""
        return self._loader.state_dict()

    def load(self, states: list[Any]) -> None:
        """Load the states."""
        if len(states) == self._job.num_ranks:
            self._loader.load_state_dict(states[self._job.rank])
        else:
            self._loader.load_state_dict(states, strict=False)


def make(job: Job) -> Structured:
    """Make the reader."""
    return Structured(job)
