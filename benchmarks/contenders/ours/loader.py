"""This library's loader: one epoch."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from batches import kind_of, rows_of, sum_of
from harness import Job, deliver, read_job

from torch_dataloader_utils import StructuredDataset


def burn_one_millisecond(batch: Any) -> Any:
    """Use one millisecond of CPU time, as a `collate_fn` that does some work."""
    until = time.thread_time() + 0.001
    while time.thread_time() < until:
        pass
    return batch


def storage_options(job: Job) -> dict[str, Any] | None:
    """Return fsspec's options for the S3 server, if data is read from it."""
    if job.s3 is None:
        return None
    client = {"endpoint_url": job.s3["endpoint"], "region_name": job.s3["region"]}
    return {"key": job.s3["key"], "secret": job.s3["secret"], "client_kwargs": client}


def loader_of(job: Job) -> Any:
    """Make the loader."""
    options = dict(job.options)
    if options.pop("burn", False):
        options["collate_fn"] = burn_one_millisecond
    loader, _ = StructuredDataset.create_dataloader(
        job.path,
        batch_size=job.batch_size,
        columns=job.columns,
        num_workers=job.workers,
        storage_options=storage_options(job),
        **options,
    )
    return loader


def import_clients(job: Job) -> None:
    """Import what the library imports to read S3 here, as the other readers have done when their clock starts.

    Where workers are forked, they import it, and so does another process that lists and reads footers.
    """
    if job.s3 is not None and not job.workers:
        for name in ("obstore", "obstore.store"):
            import_module(name)


if __name__ == "__main__":
    job = read_job()
    import_clients(job)
    deliver(job, lambda: loader_of(job), rows_of, sum_of, kind_of)
