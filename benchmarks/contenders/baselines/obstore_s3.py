"""obstore with Arrow's decoder: whole files, four of them at once, each fetched by one request."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
from baselines.raw_arrow import sum_of
from harness import Job, deliver, read_job
from obstore.store import S3Store

AT_ONCE = 4


def store_of(job: Job) -> S3Store:
    """Return the server's objects below the job's path."""
    assert job.s3 is not None
    return S3Store.from_url(
        job.path,
        endpoint=job.s3["endpoint"],
        access_key_id=job.s3["key"],
        secret_access_key=job.s3["secret"],
        region=job.s3["region"],
        client_options={"allow_http": True},
    )


def files(job: Job) -> Iterator[pa.Table]:
    """List the files, fetch them in threads, and decode one after the other."""
    store = store_of(job)
    names = sorted(info["path"] for part in obstore.list(store) for info in part)

    def fetch(name: str) -> pa.Buffer:
        return pa.py_buffer(obstore.get(store, name).bytes())

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for content in pool.map(fetch, names):
            yield pq.ParquetFile(pa.BufferReader(content)).read(columns=job.columns)


if __name__ == "__main__":
    job = read_job()
    deliver(job, lambda: files(job), lambda table: table.num_rows, sum_of)
