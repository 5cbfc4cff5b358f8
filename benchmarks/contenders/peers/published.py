"""torch-dataloader-utils 0.2.0, the package that PyPI has: used as its README on PyPI says."""

from __future__ import annotations

from typing import Any

from batches import kind_of, rows_of, sum_of
from harness import Job, deliver, read_job

from torch_dataloader_utils import StructuredDataset


def loader_of(job: Job) -> Any:
    """Make the loader."""
    storage_options = None
    if job.s3:
        client = {"endpoint_url": job.s3["endpoint"], "region_name": job.s3["region"]}
        storage_options = {"key": job.s3["key"], "secret": job.s3["secret"], "client_kwargs": client}
    shuffle: dict[str, Any] = {}
    if "shuffle_buffer" in job.options:
        shuffle = {"shuffle": True, "shuffle_buffer_size": job.options["shuffle_buffer"]}
    loader, _ = StructuredDataset.create_dataloader(
        path=job.path,
        format="parquet",
        batch_size=job.batch_size,
        columns=job.columns,
        num_workers=job.workers,
        output_format="torch",
        storage_options=storage_options,
        **shuffle,
    )
    return loader


if __name__ == "__main__":
    job = read_job()
    deliver(job, lambda: loader_of(job), rows_of, sum_of, kind_of)
