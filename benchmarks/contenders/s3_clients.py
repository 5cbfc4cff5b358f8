"""Three S3 clients that fetch the same byte ranges, those of every row group, with as many requests in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pyarrow.parquet as pq
from harness import Job, deliver, read_job
from pyarrow import fs

IN_FLIGHT = 32
"""Requests at once, as many as the loader makes."""

Fetch = Callable[[str, int, int], Any]


def s3fs_client(job: Job) -> Fetch:
    """Return what fetches a range by s3fs, as the loader does: sync calls of threads, one event loop beneath."""
    import s3fs  # noqa: PLC0415 - what it takes to load a client is part of its start

    assert job.s3 is not None
    endpoint = {"endpoint_url": job.s3["endpoint"], "region_name": job.s3["region"]}
    files = s3fs.S3FileSystem(key=job.s3["key"], secret=job.s3["secret"], client_kwargs=endpoint)
    return lambda path, start, stop: files.cat_file(path, start=start, end=stop)


def pyarrow_client(job: Job) -> Fetch:
    """Return what fetches a range by Arrow's own client."""
    assert job.s3 is not None
    files = fs.S3FileSystem(
        access_key=job.s3["key"],
        secret_key=job.s3["secret"],
        endpoint_override=job.s3["endpoint"].removeprefix("http://"),
        scheme="http",
        region=job.s3["region"],
    )

    def fetch(path: str, start: int, stop: int) -> Any:
        with files.open_input_file(path) as file:
            return file.read_at(stop - start, start)

    return fetch


def obstore_client(job: Job) -> Fetch:
    """Return what fetches a range by obstore, which is written in Rust."""
    import obstore  # noqa: PLC0415
    from obstore.store import S3Store  # noqa: PLC0415

    assert job.s3 is not None
    bucket = job.path.removeprefix("s3://").split("/")[0]
    store = S3Store(
        bucket,
        endpoint=job.s3["endpoint"],
        access_key_id=job.s3["key"],
        secret_access_key=job.s3["secret"],
        region=job.s3["region"],
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    return lambda path, start, stop: obstore.get_range(store, path.split("/", 1)[1], start=start, end=stop)


CLIENTS = {"s3fs": s3fs_client, "pyarrow": pyarrow_client, "obstore": obstore_client}


def ranges(job: Job) -> Iterator[tuple[str, int, int, int]]:
    """Yield path, start, stop and rows of each row group; footers are read from the local copy."""
    for path in job.files:
        metadata = pq.read_metadata(path)
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            chunks = [group.column(place) for place in range(group.num_columns)]
            starts = [chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks]
            stops = [start + chunk.total_compressed_size for start, chunk in zip(starts, chunks, strict=True)]
            name = path.rsplit("/", 1)[1]
            yield f"{job.path.removeprefix('s3://')}/{name}", min(starts), max(stops), group.num_rows


def fetched(job: Job) -> Iterator[int]:
    """Fetch all ranges and yield the rows in each, in order."""
    fetch = CLIENTS[job.options["client"]](job)
    with ThreadPoolExecutor(IN_FLIGHT) as threads:

        def one(path: str, start: int, stop: int, rows: int) -> int:
            assert len(fetch(path, start, stop)) == stop - start
            return rows

        yield from threads.map(lambda place: one(*place), list(ranges(job)))


if __name__ == "__main__":
    job = read_job()
    deliver(job, partial(fetched, job), lambda rows: rows, lambda _rows, _column: 0)
