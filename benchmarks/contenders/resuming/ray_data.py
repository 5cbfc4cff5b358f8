"""Ray Data: iter_torch_batches over read_parquet, on a local Ray that this process starts. It has no state."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import ray
import ray.data

from benchmarks.contenders.resuming.job import Job, Skipping, files


def batches_of(job: Job) -> Iterator[Any]:
    """Yield batches."""
    ray.init(
        num_cpus=job.workers,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True  # without it the same batches do not come again
    data = ray.data.read_parquet(files(job)[job.rank :: job.num_ranks])
    for batch in data.iter_torch_batches(batch_size=job.batch_size, prefetch_batches=4):
        yield batch["row"]


def make(job: Job) -> Skipping:
    """Make the reader."""
    return Skipping(job, batches_of(job))
