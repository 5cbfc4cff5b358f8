"""Hugging Face datasets over the files of the job: streamed, or converted to Arrow."""

from __future__ import annotations

from typing import Any

import datasets
from datasets import load_dataset

from benchmarks.contenders.frameworks.job import BUFFER_ROWS, SEED, Job, files_of


def streamed(job: Job) -> Any:
    """Return a dataset that is read from the files as it is iterated over."""
    datasets.disable_progress_bars()
    stream = load_dataset("parquet", data_files=files_of(job), split="train", streaming=True)
    return stream.shuffle(seed=SEED, buffer_size=BUFFER_ROWS) if job.shuffle else stream


def converted(job: Job) -> Any:
    """Return a dataset of rows that can be looked up: the files are converted, at the first use, and kept."""
    datasets.disable_progress_bars()
    return load_dataset("parquet", data_files=files_of(job), split="train", cache_dir=f"{job.data}-converted")
