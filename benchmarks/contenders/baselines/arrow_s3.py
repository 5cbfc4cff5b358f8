"""Arrow's own S3 client, as its documentation has it: its reader, with pre-buffered column chunks, or its scanner."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
from baselines.raw_arrow import sum_of
from harness import Job, deliver, read_job
from pyarrow import dataset, fs


def filesystem(job: Job) -> fs.S3FileSystem:
    """Return Arrow's S3 client."""
    assert job.s3 is not None
    return fs.S3FileSystem(
        access_key=job.s3["key"],
        secret_key=job.s3["secret"],
        endpoint_override=job.s3["endpoint"].removeprefix("http://"),
        scheme="http",
        region=job.s3["region"],
    )


def files(job: Job) -> Iterator[pa.Table]:
    """List the files, then read one whole file after the other."""
    s3 = filesystem(job)
    found = s3.get_file_info(fs.FileSelector(job.path.removeprefix("s3://")))
    for info in sorted(found, key=lambda info: info.path):
        file = pq.ParquetFile(info.path, filesystem=s3, pre_buffer=True)
        yield file.read(columns=job.columns)


def directory(job: Job) -> Iterator[pa.Table]:
    """Read the whole directory as one table: Arrow reads as many files at once as it likes."""
    yield pq.read_table(
        job.path.removeprefix("s3://"), columns=job.columns, filesystem=filesystem(job), pre_buffer=True
    )


def scan(job: Job) -> Iterator[pa.RecordBatch]:
    """Scan the directory as a dataset, batch by batch."""
    found = dataset.dataset(job.path.removeprefix("s3://"), filesystem=filesystem(job), format="parquet")
    yield from found.to_batches(columns=job.columns)


if __name__ == "__main__":
    job = read_job()
    read = {"files": files, "directory": directory, "scan": scan}[job.options["read"]]
    deliver(job, lambda: read(job), lambda table: table.num_rows, sum_of)
