"""This library's loader of a mixture: the files of a data set as sources of equal weight, one epoch."""

from __future__ import annotations

from typing import Any

from batches import kind_of, rows_of, sum_of
from harness import Job, deliver, read_job

from torch_dataloader_utils import MixedDataset, Source


def loader_of(job: Job) -> Any:
    """Make the loader. The option `sources` says of how many sources; each has as many files."""
    options = dict(job.options)
    count = options.pop("sources")
    sources = {f"source {number}": Source(job.files[number::count]) for number in range(count)}
    loader, _ = MixedDataset.create_dataloader(
        sources, dict.fromkeys(sources, 1.0), batch_size=job.batch_size, num_workers=job.workers, **options
    )
    return loader


if __name__ == "__main__":
    job = read_job()
    deliver(job, lambda: loader_of(job), rows_of, sum_of, kind_of)
