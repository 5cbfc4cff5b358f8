"""torchdata's StatefulDataLoader over pyarrow: a dataset with a state of its own, as its documentation recommends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.contenders.resuming.job import SEED, Job, files, own_state


class RowGroups(IterableDataset[Any]):
    """Batches of the row groups that a worker of a rank has: every so-manieth of all, in order or shuffled.

    Its state is the number of row groups that are done, and of rows of the next one.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._groups_done = self._rows_done = 0
        self._loaded = False

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if not self._loaded:
            self._groups_done = self._rows_done = 0
        self._loaded = False
        groups = self._groups()
        while self._groups_done < len(groups):
            path, group = groups[self._groups_done]
            rows = pq.ParquetFile(path).read_row_group(group)
            if self._job.way:
                rows = rows.take(np.random.default_rng([SEED, self._groups_done]).permutation(len(rows)))
            while self._rows_done < len(rows):
                batch = rows.slice(self._rows_done, self._job.batch_size)
                self._rows_done += len(batch)
                yield {name: torch.from_numpy(batch[name].to_numpy()) for name in batch.column_names}
            self._groups_done, self._rows_done = self._groups_done + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"groups_done": self._groups_done, "rows_done": self._rows_done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position."""
        self._groups_done, self._rows_done = state["groups_done"], state["rows_done"]
        self._loaded = True

    def _groups(self) -> list[tuple[str, int]]:
        groups = [(path, group) for path in files(self._job) for group in range(pq.ParquetFile(path).num_row_groups)]
        if self._job.way:
            random.Random(SEED).shuffle(groups)
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        return groups[self._job.rank + self._job.num_ranks * number :: self._job.num_ranks * workers]


class Stateful:
    """The loader; its state is saved and loaded by each rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._loader = StatefulDataLoader(RowGroups(job), batch_size=None, num_workers=job.workers)

    def batches(self) -> Iterator[Any]:
        """Yield batches."""
        for batch in self._loader:
            yield batch["row"]

    def state(self) -> Any:
        """Return the loader's state."""
        return self._loader.state_dict()

    def load(self, states: list[Any]) -> None:
        """Load this rank's state; a rank that has none begins its epoch."""
        state = own_state(self._job, states)
        if state is not None:
            self._loader.load_state_dict(state)


def make(job: Job) -> Stateful:
    """Make the reader."""
    return Stateful(job)
