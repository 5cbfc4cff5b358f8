"""Grain: Parquet files as an IterDataset, sliced by rank; and rows by number in the ElasticIterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
import pyarrow.parquet as pq

from benchmarks.contenders.resuming.job import SEED, Job, files, own_state


class Rows:
    """The rows of Parquet files, by number: what Grain calls a random access source."""

    def __init__(self, paths: list[str]) -> None:
        table = pq.ParquetDataset(paths).read()
        self._columns = {name: table[name].to_numpy() for name in table.column_names}

    def __len__(self) -> int:
        return len(self._columns["row"])

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: values[number] for name, values in self._columns.items()}


class Grain:
    """The iterator; its state is saved and loaded by each rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        processes = grain.MultiprocessingOptions(num_workers=job.workers)
        self._iterator: Any
        if job.way:
            self._iterator = grain.experimental.ElasticIterator(
                grain.MapDataset.source(Rows(files(job))).shuffle(seed=SEED),
                job.batch_size * job.num_ranks,
                grain.sharding.ShardOptions(job.rank, job.num_ranks),
                multiprocessing_options=processes,
            )
        else:
            paths = grain.MapDataset.source(files(job))[job.rank :: job.num_ranks]
            rows = grain.experimental.InterleaveIterDataset(
                paths.map(grain.experimental.ParquetIterDataset), cycle_length=len(paths)
            )
            self._iterator = iter(rows.batch(job.batch_size).mp_prefetch(processes))

    def batches(self) -> Iterator[Any]:
        """Yield batches."""
        for batch in self._iterator:
            yield np.asarray(batch["row"])

    def state(self) -> Any:
        """Return the iterator's state."""
        return self._iterator.get_state()

    def load(self, states: list[Any]) -> None:
        """Load this rank's state. That of the ElasticIterator is the same for all ranks."""
        state = states[0] if self._job.way else own_state(self._job, states)
        if state is not None:
            self._iterator.set_state(state)


def make(job: Job) -> Grain:
    """Make the reader."""
    return Grain(job)
