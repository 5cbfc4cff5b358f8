"""LanceDB's StreamingDataset and StreamingDataLoader, over a table that the files are copied to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from faults.outcome import Row, rows_in
from faults.trainer import Job, files_of
from torch.utils.data import get_worker_info  # noqa: F401 - imported once, before jobs are forked

NUM_SPLITS = 12
"""All numbers of ranks and workers divide it, and it divides the rows of a step, so that each step ends a cycle."""


def columns_of(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns."""
    return {name: [row[name] for row in rows] for name in rows[0]}


def prepare(job: Job) -> None:
    """Copy the files into a table. It is a new one each time: the older version stays where it is."""
    import lancedb  # noqa: PLC0415 - its threads survive no fork

    rows = pa.concat_tables(map(pq.read_table, files_of(job)))
    lancedb.connect(job.converted).create_table("rows", rows, mode="overwrite")


def open(job: Job, saved: list[Any] | None) -> tuple[Iterator[list[Row]], Callable[[], Any]]:  # noqa: A001
    """Open the loader."""
    import lancedb  # noqa: PLC0415
    from lancedb.streaming import StreamingDataLoader, StreamingDataset  # noqa: PLC0415

    table = lancedb.connect(job.converted).open_table("rows")
    version = saved[0][0] if saved is not None else table.version
    table.checkout(version)  # its guide: resume on the same snapshot
    dataset = StreamingDataset(
        table,
        num_splits=NUM_SPLITS,
        shuffle=job.shuffle,
        shuffle_seed=7,
        rank=job.rank,
        world_size=job.num_ranks,
    )
    if saved is not None:
        dataset.load_state_dict(StreamingDataset.merge_state_dicts([state for _, state in saved]))
    loader = StreamingDataLoader(
        dataset,
        batch_size=job.batch_size // job.num_ranks,
        num_workers=job.num_workers,
        collate_fn=columns_of,
        multiprocessing_context="spawn" if job.num_workers else None,
    )
    return (rows_in(batch) for batch in loader), lambda: (version, dataset.state_dict())
