"""obstore with Arrow's decoder: whole files, four of them at once, each fetched by one request."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

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


class Files:
    """Lists the files, fetches them in threads, and decodes one after the other; lists no more for another epoch."""

    def __init__(self, job: Job) -> None:
        self._job = job

    @cached_property
    def _store(self) -> S3Store:
        return store_of(self._job)

    @cached_property
    def _names(self) -> list[str]:
        return sorted(info["path"] for part in obstore.list(self._store) for info in part)

    def _fetch(self, name: str) -> pa.Buffer:
        return pa.py_buffer(obstore.get(self._store, name).bytes())

    def __iter__(self) -> Iterator[pa.Table]:
        """Read an epoch."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for content in pool.map(self._fetch, self._names):
                yield pq.ParquetFile(pa.BufferReader(content)).read(columns=self._job.columns)


if __name__ == "__main__":
    job = read_job()
    deliver(job, lambda: Files(job), lambda table: table.num_rows, sum_of)
