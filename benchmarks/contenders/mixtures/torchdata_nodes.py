"""torchdata.nodes: a sampler and worker processes for each source, then MultiNodeWeightedSampler, Batcher, Loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq
from torch.utils.data import Dataset, DistributedSampler
from torchdata.nodes import Batcher, Loader, MultiNodeWeightedSampler, ParallelMapper, SamplerWrapper, StopCriteria

from benchmarks.contenders.mixtures.job import SEED, SOURCES, Job, files, own_state


class Rows(Dataset[tuple[int, int]]):
    """The rows of Parquet files, by number."""

    def __init__(self, paths: list[str]) -> None:
        table = pq.ParquetDataset(paths).read(columns=["source", "row"])
        self._sources, self._rows = table["source"].to_numpy(), table["row"].to_numpy()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> tuple[int, int]:
        return int(self._sources[number]), int(self._rows[number])


class Nodes:
    """The loader; its state is saved and loaded by each rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sources = {name: Rows(paths) for name, paths in files(job).items()}
        mixed = MultiNodeWeightedSampler(
            {name: self._node(rows) for name, rows in self._sources.items()},
            dict(zip(SOURCES, job.weights, strict=True)),
            stop_criteria=StopCriteria.ALL_DATASETS_EXHAUSTED,  # each row once
            seed=SEED,
        )
        self._loader = Loader(Batcher(mixed, job.batch_size, drop_last=False))

    def _node(self, rows: Rows) -> ParallelMapper[Any, Any]:
        sampler = DistributedSampler(rows, self._job.num_ranks, self._job.rank, shuffle=True, seed=SEED)
        return ParallelMapper(
            SamplerWrapper(sampler),
            rows.__getitem__,
            num_workers=self._job.workers,
            method="process",
            multiprocessing_context="forkserver",
        )

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield batches."""
        for batch in self._loader:
            sources, rows = zip(*batch, strict=True)
            yield sources, rows

    def state(self) -> Any:
        """Return the loader's state."""
        return self._loader.state_dict()

    def load(self, states: list[Any]) -> None:
        """Load this rank's state; a rank that has none begins its epoch."""
        state = own_state(self._job, states)
        if state is not None:
            self._loader.load_state_dict(state)


def make(job: Job) -> Nodes:
    """Make the mixture."""
    return Nodes(job)
