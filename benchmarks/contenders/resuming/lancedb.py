"""LanceDB: StreamingDataset of a table that the files are copied to, in its StreamingDataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lancedb
import pyarrow as pa
import pyarrow.parquet as pq
from lancedb.streaming import StreamingDataLoader, StreamingDataset

from benchmarks.contenders.resuming.job import SEED, Job, files

NUM_SPLITS = 12
"""All numbers of ranks and workers divide it, and it divides the rows of a step, so that each step ends a cycle."""


class Table:
    """The loader; the states of all ranks are merged and loaded, with the version of the table."""

    def __init__(self, job: Job) -> None:
        self._table = lancedb.connect(str(Path(job.data, "lance"))).open_table("rows")
        self._dataset = StreamingDataset(
            self._table,
            num_splits=NUM_SPLITS,
            shuffle=bool(job.way),
            shuffle_seed=SEED,
            rank=job.rank,
            world_size=job.num_ranks,
        )
        self._loader = StreamingDataLoader(
            self._dataset,
            batch_size=job.batch_size,
            num_workers=job.workers,
            multiprocessing_context="spawn",  # its threads survive no fork
        )

    def batches(self) -> Iterator[Any]:
        """Yield batches."""
        for batch in self._loader:
            yield batch["row"]

    def state(self) -> Any:
        """Return the dataset's state."""
        return self._dataset.state_dict()

    def load(self, states: list[Any]) -> None:
        """Load what the states of all ranks make together. The table has one version only."""
        self._dataset.load_state_dict(StreamingDataset.merge_state_dicts(states))


def make(job: Job) -> Table:
    """Make the reader."""
    return Table(job)


def convert(job: Job) -> None:
    """Copy the files into a table."""
    rows = pa.concat_tables(map(pq.read_table, files(job)))
    lancedb.connect(str(Path(job.data, "lance"))).create_table("rows", rows, mode="overwrite")
