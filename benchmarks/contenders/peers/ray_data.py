"""Ray Data: iter_torch_batches over read_parquet, on a local Ray that this process starts."""

from __future__ import annotations

import logging
from typing import Any

import ray
import ray.data
from batches import kind_of, rows_of, sum_of
from harness import Job, deliver, read_job
from pyarrow import fs


def batches_of(job: Job) -> Any:
    """Make the stream of batches."""
    filesystem = None
    files = job.files
    if job.s3:
        files = [path.removeprefix("s3://") for path in files]
        filesystem = fs.S3FileSystem(
            access_key=job.s3["key"],
            secret_key=job.s3["secret"],
            endpoint_override=job.s3["endpoint"],
            region=job.s3["region"],
        )
    buffer = job.options.get("shuffle_buffer")
    data = ray.data.read_parquet(files, columns=job.columns, filesystem=filesystem, shuffle="files" if buffer else None)
    options = {
        "batch_size": job.batch_size,
        "prefetch_batches": 4,  # format batches ahead, in threads
        "local_shuffle_buffer_size": buffer,
    }
    if "string" in map(str, data.schema().types):
        return data.iter_batches(batch_format="numpy", **options)  # it makes no tensors of strings
    return data.iter_torch_batches(**options)


if __name__ == "__main__":
    job = read_job()
    # PartialShard before the clock: a training that uses Ray has one running. Two CPUs: as many as two workers have.
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    deliver(job, lambda: batches_of(job), rows_of, sum_of, kind_of)
    ray.shutdown()
