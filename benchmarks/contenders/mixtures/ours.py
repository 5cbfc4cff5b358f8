"""This library: MixedDataset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.contenders.mixtures.job import BUFFER_ROWS, SEED, SOURCES, Job, directories
from torch_dataloader_utils import MixedDataset, Source

EPOCH_ROWS = 10_000
"""Of an epoch, whatever the weights are: as many as all sources have."""


class Mixed:
    """The loader; its states are loaded strictly on the same ranks with the same weights, else elastically."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._loader, _ = MixedDataset.create_dataloader(
            {name: Source(path) for name, path in directories(job).items()},
            weights=dict(zip(SOURCES, job.weights, strict=True)),
            rows_per_epoch=EPOCH_ROWS,
            source_column="source_place",
            batch_size=job.batch_size,
            shuffle=True,
            shuffle_buffer_size=BUFFER_ROWS,
            shuffle_seed=SEED,
            num_workers=job.workers,
        )

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield batches."""
        for batch in self._loader:
            yield batch["source_place"], batch["row"]

    def state(self) -> Any:
        """Return the loader's state."""
        return self._loader.state_dict()

    def load(self, states: list[Any]) -> None:
        """Load the states."""
        if self._job.way == "strict":
            self._loader.load_state_dict(states[self._job.rank])
        else:
            self._loader.load_state_dict(states, strict=False)


def make(job: Job) -> Mixed:
    """Make the mixture."""
    return Mixed(job)
