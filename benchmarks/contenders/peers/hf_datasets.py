"""Hugging Face datasets, streaming Parquet in its torch format."""

from __future__ import annotations

from typing import Any

from batches import kind_of, rows_of, sum_of
from datasets import load_dataset
from harness import Job, deliver, read_job
from torch.utils.data import DataLoader


def batches_of(job: Job) -> Any:
    """Make the stream of batches."""
    options: dict[str, Any] = {}
    if job.s3:
        client = {"endpoint_url": job.s3["endpoint"], "region_name": job.s3["region"]}
        options["storage_options"] = {"key": job.s3["key"], "secret": job.s3["secret"], "client_kwargs": client}
    stream = load_dataset(
        "parquet", data_files=job.files, split="train", streaming=True, columns=job.columns, **options
    ).with_format("torch")
    if "shuffle_buffer" in job.options:
        stream = stream.shuffle(seed=7, buffer_size=job.options["shuffle_buffer"])
    if job.workers == 0:
        return stream.iter(batch_size=job.batch_size)  # whole batches from Arrow, without DataLoader between
    return DataLoader(
        stream.batch(job.batch_size),  # batched by the stream: DataLoader would collate single rows
        batch_size=None,
        num_workers=job.workers,
    )


if __name__ == "__main__":
    job = read_job()
    deliver(job, lambda: batches_of(job), rows_of, sum_of, kind_of)
