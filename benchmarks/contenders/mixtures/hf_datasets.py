"""Hugging Face datasets: interleave_datasets of two streams, split by rank, in torchdata's StatefulDataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
from datasets import interleave_datasets, load_dataset
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.contenders.mixtures.job import BUFFER_ROWS, SEED, Job, files, own_state


class Interleaved:
    """The loader; its state is saved and loaded by each rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        datasets.disable_progress_bars()
        sources = [self._source(paths) for paths in files(job).values()]
        mixed = interleave_datasets(
            sources,
            probabilities=job.weights,
            seed=SEED,
            stopping_strategy="all_exhausted_without_replacement",  # each row once
        )
        mixed = split_dataset_by_node(mixed, rank=job.rank, world_size=job.num_ranks)
        self._loader = StatefulDataLoader(mixed, batch_size=job.batch_size, num_workers=job.workers)

    def _source(self, paths: list[str]) -> Any:
        rows = load_dataset("parquet", data_files=paths, split="train", streaming=True)
        return rows.shuffle(seed=SEED, buffer_size=BUFFER_ROWS) if self._job.way == "shuffled" else rows

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield batches."""
        for batch in self._loader:
            yield batch["source"], batch["row"]

    def state(self) -> Any:
        """Return the loader's state."""
        return self._loader.state_dict()

    def load(self, states: list[Any]) -> None:
        """Load this rank's state; a rank that has none begins its epoch."""
        state = own_state(self._job, states)
        if state is not None:
            self._loader.load_state_dict(state)


def make(job: Job) -> Interleaved:
    """Make the mixture."""
    return Interleaved(job)
