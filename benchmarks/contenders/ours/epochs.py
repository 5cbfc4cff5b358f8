"""This library's loader over many epochs: memory, open files, threads, and the gap from one epoch to the next."""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from pathlib import Path

from harness import memory_of, own_memory, read_job, report

from torch_dataloader_utils import StructuredDataset


def pss_of(pid: str) -> int:
    """Return the PSS of a process in bytes; zero if it has ended."""
    try:
        return memory_of(pid)[0]
    except (OSError, KeyError):  # a process that is ending may have a file without lines
        return 0


def children() -> list[str]:
    """Return the processes that this one started."""
    found: list[str] = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            found += (thread / "children").read_text(encoding="ascii").split()
    return found


if __name__ == "__main__":
    job = read_job()
    memory = own_memory()
    began = time.perf_counter()
    loader, dataset = StructuredDataset.create_dataloader(
        job.path, batch_size=job.batch_size, num_workers=job.workers, shuffle=True, **job.options["loader"]
    )
    rows = 0
    gaps, pss, files, threads = [], [], [], []
    last = looked = 0.0
    for epoch in range(job.options["epochs"]):
        dataset.set_epoch(epoch)
        batches = iter(loader)
        batch = next(batches)
        if epoch:
            gaps.append(time.perf_counter() - last - looked)
        rows += len(batch["id"])
        for batch in batches:
            rows += len(batch["id"])
            last = time.perf_counter()
        del batch, batches
        look = time.perf_counter()
        gc.collect()
        pss.append(sum(map(pss_of, ["self", *children()])))
        files.append(len(os.listdir("/proc/self/fd")))  # noqa: PTH208 - it is /proc of this process
        threads.append(len(os.listdir("/proc/self/task")))  # noqa: PTH208
        looked = time.perf_counter() - look  # not counted in the gap
    report(
        gap_s=statistics.median(gaps),
        greatest_gap_s=max(gaps),
        whole_s=time.perf_counter() - began,
        pss_by_epoch=pss,
        files_by_epoch=files,
        threads_by_epoch=threads,
        rows=rows,
        complete=True,
        **memory,
    )
