"""Reading the footers of all files of a directory with Arrow, listed first: in a plain loop, or in 16 threads."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pyarrow.parquet as pq
from harness import read_job, report

if __name__ == "__main__":
    job = read_job()
    began = time.perf_counter()
    paths = sorted(entry.path for entry in os.scandir(job.path))
    listed = time.perf_counter()
    if job.options["threads"]:
        with ThreadPoolExecutor(job.options["threads"]) as pool:
            footers = list(pool.map(pq.read_metadata, paths))
    else:
        footers = [pq.read_metadata(path) for path in paths]
    ended = time.perf_counter()
    rows = sum(footer.num_rows for footer in footers)
    report(construction_s=ended - began, listing_s=listed - began, rows=rows, complete=True)
