"""LitData: its index over Parquet files, then StreamingDataset with ParquetLoader, row by row."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import litdata
from batches import kind_of, rows_of, sum_of
from collation import stack_lists
from harness import Job, deliver, read_job, report
from litdata.streaming.item_loader import ParquetLoader


def loader_of(job: Job) -> Any:
    """Make the loader."""
    dataset = litdata.StreamingDataset(
        job.scratch,
        item_loader=ParquetLoader(
            pre_load_chunk=True,  # load a chunk ahead
            low_memory=False,  # keep whole row groups decoded instead of reading slices of them
            columns=job.columns,
        ),
        shuffle="shuffle_buffer" in job.options,
    )
    return litdata.StreamingDataLoader(
        dataset,
        batch_size=job.batch_size,
        num_workers=job.workers,
        collate_fn=stack_lists if "tokens" in job.path else None,
        multiprocessing_context="spawn" if job.workers else None,  # it refuses to fork
    )


def link_files(job: Job) -> None:
    """Link the files into a new directory: LitData writes its index next to them."""
    shutil.rmtree(job.scratch, ignore_errors=True)
    Path(job.scratch).mkdir(parents=True)
    for path in map(Path, job.files):
        Path(job.scratch, path.name).hardlink_to(path)


if __name__ == "__main__":
    job = read_job()
    if job.options.get("convert"):
        link_files(job)
        began = time.perf_counter()
        litdata.index_parquet_dataset(job.scratch, num_workers=2)
        report(convert_s=time.perf_counter() - began, complete=False)
    else:
        deliver(job, lambda: loader_of(job), rows_of, sum_of, kind_of)
