"""This library: Packing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.contenders.packing.job import LENGTH, PADDING, Job
from torch_dataloader_utils import Packing, StructuredDataset


class Packed:
    """The loader; its states are loaded strictly on the same ranks, else elastically."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._loader, _ = StructuredDataset.create_dataloader(
            job.data,
            columns=["tokens"],
            packing=Packing(
                "tokens",
                LENGTH,
                pad_value=PADDING,
                strategy="concat" if job.way == "concat" else "best_fit",
                outputs=("document_ids", "position_ids"),
            ),
            batch_size=job.batch_size,
            num_workers=job.workers,
        )

    def batches(self) -> Iterator[Any]:
        """Yield batches."""
        for batch in self._loader:
            yield batch["tokens"]

    def state(self) -> Any:
        """Return the loader's state."""
        return self._loader.state_dict()

    def load(self, states: list[Any]) -> None:
        """Load the states."""
        if len(states) == self._job.num_ranks:
            self._loader.load_state_dict(states[self._job.rank])
        else:
            self._loader.load_state_dict(states, strict=False)


def make(job: Job) -> Packed:
    """Make the loader."""
    return Packed(job)
