"""LitData: CombinedStreamingDataset of two StreamingDatasets over indexed Parquet files, in a StreamingDataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import litdata
from litdata.streaming.item_loader import ParquetLoader

from benchmarks.contenders.mixtures.job import SEED, Job, directories, own_state


class Combined:
    """The loader; its state is saved and loaded by each rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        sources = [
            litdata.StreamingDataset(path, item_loader=ParquetLoader(), shuffle=True, seed=SEED, drop_last=True)
            for path in directories(job).values()
        ]
        mixed = litdata.CombinedStreamingDataset(
            sources,
            seed=SEED,
            weights=job.weights,
            iterate_over_all=False,  # it takes no weights otherwise
        )
        self._loader = litdata.StreamingDataLoader(
            mixed,
            batch_size=job.batch_size,
            num_workers=job.workers,
            multiprocessing_context="spawn",  # it refuses to fork
        )

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield batches."""
        for batch in self._loader:
            yield batch["source"], batch["row"]

    def state(self) -> Any:
        """Return the loader's state."""
        return self._loader.state_dict()

    def load(self, states: list[Any]) -> None:
        """Load this rank's state."""
        state = own_state(self._job, states)
        self._loader.load_state_dict(states[0] if state is None else state)


def make(job: Job) -> Combined:
    """Make the mixture."""
    return Combined(job)


def convert(job: Job) -> None:
    """Write the index next to the files of each source."""
    for path in directories(job).values():
        litdata.index_parquet_dataset(path, num_workers=1)
