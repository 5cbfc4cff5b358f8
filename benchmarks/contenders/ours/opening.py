"""This library's loader over many files of S3: opening alone, which lists them and reads their footers."""

from __future__ import annotations

import time

from harness import own_memory, read_job, report
from ours.loader import import_clients, loader_of

if __name__ == "__main__":
    job = read_job()
    import_clients(job)
    memory = own_memory()
    began = time.perf_counter()
    loader = loader_of(job)
    built = time.perf_counter()
    report(construction_s=built - began, batches=len(loader), complete=False, **memory)
