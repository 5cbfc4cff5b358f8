"""torchdata's StatefulDataLoader over an IterableDataset of pyarrow's iter_batches, as a user would write it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from batches import kind_of, rows_of, sum_of
from harness import Job, deliver, read_job
from pyarrow import fs
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader


def tensor_of(column: pa.Array) -> torch.Tensor:
    """Convert a column without a copy where there are no nulls."""
    if pa.types.is_fixed_size_list(column.type):
        return torch.from_numpy(column.flatten().to_numpy()).reshape(len(column), -1)
    return torch.from_numpy(column.to_numpy())


class RowGroups(IterableDataset[Any]):
    """Batches of row groups, which workers take in turns; its state is how many batches of its share are done."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._done = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        skip, self._done = self._done, 0
        for path in self._job.files:
            file = self._open(path)
            groups = list(range(first, file.num_row_groups, step))
            for batch in file.iter_batches(self._job.batch_size, row_groups=groups, columns=self._job.columns):
                self._done += 1
                if self._done > skip:
                    yield {name: tensor_of(batch.column(name)) for name in batch.schema.names}

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"done": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position."""
        self._done = state["done"]

    def _open(self, path: str) -> pq.ParquetFile:
        if self._job.s3 is None:
            return pq.ParquetFile(path, memory_map=True)  # no copy of the compressed bytes
        s3 = fs.S3FileSystem(
            access_key=self._job.s3["key"],
            secret_key=self._job.s3["secret"],
            endpoint_override=self._job.s3["endpoint"],
            region=self._job.s3["region"],
        )
        return pq.ParquetFile(s3.open_input_file(path.removeprefix("s3://")), pre_buffer=True)  # for slow storage


if __name__ == "__main__":
    job = read_job()
    deliver(
        job,
        lambda: StatefulDataLoader(
            RowGroups(job),
            batch_size=None,  # batches come ready made: no collation of single rows
            num_workers=job.workers,
            snapshot_every_n_steps=1000,  # a state travels with every 1,000th batch instead of with each
            multiprocessing_context="forkserver" if job.workers and job.s3 else None,  # Arrow's S3 survives no fork
        ),
        rows_of,
        sum_of,
        kind_of,
    )
