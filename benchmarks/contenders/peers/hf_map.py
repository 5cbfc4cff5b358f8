"""Hugging Face datasets, map-style: its cache of Arrow files is made first, then batches are read by row number."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import datasets
from batches import kind_of, rows_of, sum_of
from datasets import load_dataset
from harness import Job, deliver, read_job, report
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler


def rows_on_disk(job: Job) -> Any:
    """Return the dataset."""
    datasets.disable_progress_bars()
    return load_dataset("parquet", data_files=job.files, split="train", cache_dir=job.scratch)


def loader_of(job: Job) -> Any:
    """Make the loader."""
    rows = rows_on_disk(job)
    if job.columns:
        rows = rows.select_columns(job.columns)
    rows = rows.with_format("torch")
    numbers = RandomSampler(rows) if "shuffle_buffer" in job.options else SequentialSampler(rows)
    return DataLoader(
        rows,
        sampler=BatchSampler(
            numbers, job.batch_size, drop_last=False
        ),  # whole batches from Arrow, by a list of numbers
        batch_size=None,
        num_workers=job.workers,
    )


if __name__ == "__main__":
    job = read_job()
    if job.options.get("convert"):
        shutil.rmtree(job.scratch, ignore_errors=True)
        began = time.perf_counter()
        rows = len(rows_on_disk(job))
        size = sum(path.stat().st_size for path in Path(job.scratch).rglob("*") if path.is_file())
        report(convert_s=time.perf_counter() - began, rows=rows, bytes=size, complete=False)
    else:
        deliver(job, lambda: loader_of(job), rows_of, sum_of, kind_of)
