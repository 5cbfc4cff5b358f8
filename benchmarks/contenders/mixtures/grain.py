"""Grain: MapDataset.mix under the ElasticIterator, and IterDataset.mix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grain
import pyarrow.parquet as pq

from benchmarks.contenders.mixtures.job import SEED, SOURCES, Job, files, own_state


class Rows:
    """The rows of Parquet files, by number: what Grain calls a random access source."""

    def __init__(self, paths: list[str]) -> None:
        table = pq.ParquetDataset(paths).read(columns=["source", "row"])
        self._sources, self._rows = table["source"].to_numpy(), table["row"].to_numpy()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, int]:
        return {"source": int(self._sources[number]), "row": int(self._rows[number])}


class Mixed:
    """The iterator; its state is saved and loaded by each rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        sources = {
            name: grain.MapDataset.source(Rows(paths)).shuffle(seed=SEED + place)
            for place, (name, paths) in enumerate(files(job).items())
        }
        processes = grain.MultiprocessingOptions(num_workers=job.workers)
        self._iterator: Any
        if job.way == "elastic":
            self._iterator = grain.experimental.ElasticIterator(
                grain.MapDataset.mix([sources[name] for name in SOURCES], job.weights),
                job.batch_size * job.num_ranks,
                grain.sharding.ShardOptions(job.rank, job.num_ranks),
                multiprocessing_options=processes,
            )
        else:
            own = {name: rows[job.rank :: job.num_ranks].to_iter_dataset() for name, rows in sources.items()}
            mixed = grain.IterDataset.mix(own, dict(zip(SOURCES, job.weights, strict=True)))
            self._iterator = iter(mixed.batch(job.batch_size).mp_prefetch(processes))

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield batches."""
        for batch in self._iterator:
            yield batch["source"], batch["row"]

    def state(self) -> Any:
        """Return the iterator's state."""
        return self._iterator.get_state()

    def load(self, states: list[Any]) -> None:
        """Load this rank's state. That of the ElasticIterator is the same for all ranks."""
        state = states[0] if self._job.way == "elastic" else own_state(self._job, states)
        if state is not None:
            self._iterator.set_state(state)


def make(job: Job) -> Mixed:
    """Make the mixture."""
    return Mixed(job)
