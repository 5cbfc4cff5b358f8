"""Lance: LanceDataset of a dataset in its format that the files are copied to. It has no state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import pyarrow.dataset as pads
from lance.sampler import ShardedBatchSampler
from lance.torch.data import LanceDataset

from benchmarks.contenders.resuming.job import Job, Skipping, files


def batches_of(job: Job) -> Iterator[Any]:
    """Yield batches. Worker processes are not used: its threads read ahead."""
    dataset = LanceDataset(
        str(Path(job.data, "lance-format")),
        batch_size=job.batch_size,
        batch_readahead=16,
        sampler=ShardedBatchSampler(job.rank, job.num_ranks) if job.num_ranks > 1 else None,
    )
    for batch in dataset:
        yield batch["row"]


def make(job: Job) -> Skipping:
    """Make the reader."""
    return Skipping(job, batches_of(job))


def convert(job: Job) -> None:
    """Copy the files into a Lance dataset."""
    source = pads.dataset(files(job))
    rows = source.count_rows() // len(files(job))
    lance.write_dataset(
        source.to_table(), str(Path(job.data, "lance-format")), mode="overwrite", max_rows_per_file=rows
    )
