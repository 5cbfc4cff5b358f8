"""Grain: ParquetIterDataset for each file, interleaved and batched; its rows are dictionaries of NumPy values."""

from __future__ import annotations

from typing import Any

import grain
from batches import kind_of, rows_of, sum_of
from harness import Job, deliver, read_job


def batches_of(job: Job) -> Any:
    """Make the stream of batches."""
    files = grain.MapDataset.source(job.files).map(grain.experimental.ParquetIterDataset)
    rows = grain.experimental.InterleaveIterDataset(
        files,
        cycle_length=len(job.files),  # all files are open at once
    )
    if "shuffle_buffer" in job.options:
        rows = grain.experimental.WindowShuffleIterDataset(rows, window_size=job.options["shuffle_buffer"], seed=7)
    if job.columns:
        # Its Parquet dataset takes no columns, so that all of them are read.
        rows = rows.map(lambda row: {name: row[name] for name in job.columns or ()})
    batches = rows.batch(job.batch_size)
    if job.workers:
        # Each process batches rows of its own share of the files.
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=job.workers, per_worker_buffer_size=4))
    return batches


if __name__ == "__main__":
    job = read_job()
    deliver(job, lambda: batches_of(job), rows_of, sum_of, kind_of)
