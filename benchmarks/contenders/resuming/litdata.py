"""LitData: StreamingDataset over indexed Parquet files, in its StreamingDataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import litdata
from litdata.streaming.item_loader import ParquetLoader

from benchmarks.contenders.resuming.job import SEED, Job, own_state


class Streaming:
    """The loader; its state is saved and loaded by each rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        dataset = litdata.StreamingDataset(
            job.data,
            item_loader=ParquetLoader(pre_load_chunk=True, low_memory=False),  # as where its rate is measured
            shuffle=bool(job.way),
            seed=SEED,
            drop_last=True,
        )
        self._loader = litdata.StreamingDataLoader(
            dataset,
            batch_size=job.batch_size,
            num_workers=job.workers,
            multiprocessing_context="spawn",  # it refuses to fork
        )

    def batches(self) -> Iterator[Any]:
        """Yield batches."""
        for batch in self._loader:
            yield batch["row"]

    def state(self) -> Any:
        """Return the loader's state."""
        return self._loader.state_dict()

    def load(self, states: list[Any]) -> None:
        """Load this rank's state, and the first rank's where it has none."""
        state = own_state(self._job, states)
        self._loader.load_state_dict(states[0] if state is None else state)


def make(job: Job) -> Streaming:
    """Make the reader."""
    return Streaming(job)


def convert(job: Job) -> None:
    """Write the index next to the files."""
    litdata.index_parquet_dataset(job.data, num_workers=1)
