"""Batches of row groups as a user of torch's DataLoader would write them, by pyarrow's iter_batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from harness import Job
from pyarrow import fs
from torch.utils.data import IterableDataset, get_worker_info

__all__ = ["RowGroups"]


def _values_of(column: pa.Array) -> torch.Tensor | list[str]:
    """Convert a column: numbers without a copy where there are no nulls, strings to a list."""
    if pa.types.is_string(column.type):
        values: list[str] = column.to_pylist()
        return values
    if pa.types.is_fixed_size_list(column.type):
        return torch.from_numpy(column.flatten().to_numpy()).reshape(len(column), -1)
    return torch.from_numpy(column.to_numpy())


class RowGroups(IterableDataset[Any]):
    """Batches of row groups, which workers take in turns; its state is how many batches of its share are done."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._done = self._skipped = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        skip, self._skipped, self._done = self._skipped, 0, 0
        if "shuffle_buffer" in self._job.options:
            yield from self._shuffled(first, step)
            return
        for path in self._job.files:
            file = self._open(path)
            groups = list(range(first, file.num_row_groups, step))
            for batch in file.iter_batches(self._job.batch_size, row_groups=groups, columns=self._job.columns):
                self._done += 1
                if self._done > skip:
                    yield {name: _values_of(batch.column(name)) for name in batch.schema.names}

    def _shuffled(self, first: int, step: int) -> Iterator[dict[str, Any]]:
        """Yield the rows of row groups in random order, mixed in a buffer of several."""
        random = np.random.default_rng(7)
        groups = [(path, group) for path in self._job.files for group in range(self._open(path).num_row_groups)]
        order = [groups[number] for number in random.permutation(len(groups))[first::step]]
        tables: list[pa.Table] = []
        while order or tables:
            while order and sum(map(len, tables)) < self._job.options["shuffle_buffer"]:
                path, group = order.pop()
                tables.append(self._open(path).read_row_group(group, columns=self._job.columns))
            rows = pa.concat_tables(tables)
            tables = []
            rows = rows.take(random.permutation(len(rows))).combine_chunks()
            for batch in rows.to_batches(self._job.batch_size):
                yield {name: _values_of(batch.column(name)) for name in batch.schema.names}

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"done": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position."""
        self._done = self._skipped = state["done"]

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
