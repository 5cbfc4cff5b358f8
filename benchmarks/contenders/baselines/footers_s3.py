"""Reading the footers of all objects below a prefix by obstore, listed first: 32 at once, each by one request."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
from baselines.obstore_s3 import store_of
from harness import read_job, report

AT_ONCE = 32
TAIL_BYTES = 64 * 1024
"""Bytes at the end of an object that are read: more than the footer has."""

if __name__ == "__main__":
    job = read_job()
    began = time.perf_counter()
    store = store_of(job)
    found = sorted((info["path"], info["size"]) for part in obstore.list(store, chunk_size=1000) for info in part)
    listed = time.perf_counter()

    def footer(path: str, size: int) -> pq.FileMetaData:
        """Return an object's footer."""
        tail = obstore.get_range(store, path, start=max(0, size - TAIL_BYTES), end=size)
        return pq.read_metadata(pa.BufferReader(pa.py_buffer(tail)))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        footers = list(pool.map(lambda item: footer(*item), found))
    ended = time.perf_counter()
    rows = sum(metadata.num_rows for metadata in footers)
    report(construction_s=ended - began, listing_s=listed - began, rows=rows, complete=True)
