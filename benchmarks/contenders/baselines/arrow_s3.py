"""Arrow's own S3 client, as its documentation has it: its reader, with pre-buffered column chunks, or its scanner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

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


class Reader:
    """A way to read the job's rows. The client, and what it has listed, are kept for another epoch."""

    def __init__(self, job: Job, read: Callable[[Reader], Iterator[Any]]) -> None:
        self.job = job
        self.path = job.path.removeprefix("s3://")
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        """Read an epoch."""
        return self._read(self)

    @cached_property
    def s3(self) -> fs.S3FileSystem:
        """Arrow's S3 client."""
        return filesystem(self.job)

    @cached_property
    def listed(self) -> list[str]:
        """The files."""
        return sorted(info.path for info in self.s3.get_file_info(fs.FileSelector(self.path)))

    @cached_property
    def dataset(self) -> dataset.Dataset:
        """The files as a dataset."""
        return dataset.dataset(self.path, filesystem=self.s3, format="parquet")


def files(reader: Reader) -> Iterator[pa.Table]:
    """List the files, then read one whole file after the other."""
    for path in reader.listed:
        yield pq.ParquetFile(path, filesystem=reader.s3, pre_buffer=True).read(columns=reader.job.columns)


def directory(reader: Reader) -> Iterator[pa.Table]:
    """Read the whole directory as one table: Arrow reads as many files at once as it likes."""
    yield pq.read_table(reader.path, columns=reader.job.columns, filesystem=reader.s3, pre_buffer=True)


def scan(reader: Reader) -> Iterator[pa.RecordBatch]:
    """Scan the directory as a dataset, batch by batch."""
    yield from reader.dataset.to_batches(columns=reader.job.columns)


if __name__ == "__main__":
    job = read_job()
    read = {"files": files, "directory": directory, "scan": scan}[job.options["read"]]
    deliver(job, lambda: Reader(job, read), lambda table: table.num_rows, sum_of)
