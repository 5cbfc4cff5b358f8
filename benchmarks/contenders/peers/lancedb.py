"""LanceDB: the rows are copied to a table first, then read by its StreamingDataset, row by row."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lancedb
import pyarrow.dataset as pads
from batches import kind_of, rows_of, sum_of
from collation import stack_lists
from harness import Job, deliver, read_job, report
from lancedb.streaming import StreamingDataLoader, StreamingDataset


def loader_of(job: Job) -> Any:
    """Make the loader."""
    dataset = StreamingDataset(
        lancedb.connect(job.scratch).open_table("rows"),
        num_splits=max(1, job.workers),
        shuffle="shuffle_buffer" in job.options,
        columns=job.columns,
        read_batch_size=1024,  # fewer and larger reads
    )
    return StreamingDataLoader(
        dataset,
        batch_size=job.batch_size,
        num_workers=job.workers,
        collate_fn=stack_lists if "tokens" in job.path else None,
        multiprocessing_context="spawn" if job.workers else None,  # its threads survive no fork
    )


if __name__ == "__main__":
    job = read_job()
    if job.options.get("convert"):
        began = time.perf_counter()
        source = pads.dataset(job.files)
        reader = source.scanner(batch_size=65536).to_reader()
        table = lancedb.connect(job.scratch).create_table("rows", reader, mode="overwrite")
        took = time.perf_counter() - began
        size = sum(path.stat().st_size for path in Path(job.scratch).rglob("*") if path.is_file())
        report(convert_s=took, rows=table.count_rows(), bytes=size, complete=False)
    else:
        deliver(job, lambda: loader_of(job), rows_of, sum_of, kind_of)
