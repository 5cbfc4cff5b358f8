"""torchdata's StatefulDataLoader over pyarrow: a dataset with a state of its own, as its documentation recommends."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow.parquet as pq
from faults.outcome import Row, rows_in
from faults.trainer import Job, files_of
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader


class RowGroups(IterableDataset[dict[str, list[Any]]]):
    """Batches of the row groups that a worker of a rank has: every so-manieth of all, shuffled or not.

    Its state is the number of row groups that are done, and of rows of the next one.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._groups_done = self._rows_done = 0
        self._loaded = False

    def __iter__(self) -> Iterator[dict[str, list[Any]]]:
        if not self._loaded:
            self._groups_done = self._rows_done = 0
        self._loaded = False
        groups, size = self._groups(), self._job.batch_size // self._job.num_ranks
        while self._groups_done < len(groups):
            path, group = groups[self._groups_done]
            rows = pq.ParquetFile(path).read_row_group(group)
            order = list(range(len(rows)))
            if self._job.shuffle:
                random.Random(f"{path} {group}").shuffle(order)
            while self._rows_done < len(rows):
                batch = rows.take(order[self._rows_done : self._rows_done + size])
                self._rows_done += len(batch)
                yield batch.to_pydict()
            self._groups_done, self._rows_done = self._groups_done + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"groups_done": self._groups_done, "rows_done": self._rows_done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position."""
        self._groups_done, self._rows_done = state["groups_done"], state["rows_done"]
        self._loaded = True

    def _groups(self) -> list[tuple[str, int]]:
        groups = [(path, group) for path in files_of(self._job) for group in range(pq.ParquetFile(path).num_row_groups)]
        if self._job.shuffle:
            random.Random(7).shuffle(groups)
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        return groups[self._job.rank + self._job.num_ranks * number :: self._job.num_ranks * workers]


def open(job: Job, saved: list[Any] | None) -> tuple[Iterator[list[Row]], Callable[[], Any]]:  # noqa: A001
    """Open the loader."""
    loader = StatefulDataLoader(RowGroups(job), batch_size=None, num_workers=job.num_workers)
    if saved is not None:
        loader.load_state_dict(saved[job.rank])
    return (rows_in(batch) for batch in loader), loader.state_dict
