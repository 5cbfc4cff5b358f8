"""What a batch costs on top of reading it: a `collate_fn`, and ranks that agree on every step."""

from __future__ import annotations

import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import Job, own_memory, read_job, report

from torch_dataloader_utils import StructuredDataset
from torch_dataloader_utils.distributed import in_step

ROUNDS = 3
SMALL_BATCH = 256
"""Rows of the batches that a `collate_fn` is called with: the fewer, the more of the time is the call's."""

STEPS = 1_000
STEP_SEC = 0.002


def returned(batch: Any) -> Any:
    """Return a batch as it is: a `collate_fn` without work of its own."""
    return batch


def cpu_us_per_batch(job: Job, workers: int, collate_fn: Any) -> float:
    """Return the CPU microseconds a batch of the process that makes the batches: of the worker, if there is one."""
    who = resource.RUSAGE_CHILDREN if workers else resource.RUSAGE_SELF
    before = resource.getrusage(who)
    loader, _ = StructuredDataset.create_dataloader(
        job.path,
        batch_size=SMALL_BATCH,
        columns=["id"],
        num_workers=workers,
        collate_fn=collate_fn,
        **({"persistent_workers": False} if workers else {}),  # its CPU time is known once it has ended
    )
    batches = sum(1 for _ in loader)
    after = resource.getrusage(who)
    return 1e6 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / batches


def collate_us(job: Job, workers: int) -> float:
    """Return the CPU microseconds a batch that a `collate_fn` adds."""
    rounds = [[cpu_us_per_batch(job, workers, collate_fn) for collate_fn in (None, returned)] for _ in range(ROUNDS)]
    return statistics.median(with_fn - without for without, with_fn in rounds)


def steps_of(batches: Any) -> float:
    """Return the median seconds of a step that waits for its accelerator, as a training step does."""
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        if next(batches, None) is None:
            break
        time.sleep(STEP_SEC)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def train(rank: int, job: Job, folder: str) -> None:
    """Make steps of both kinds, in turn, as one of two ranks."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"alone": [], "in step": []}
    for _ in range(ROUNDS):
        for name, seconds in found.items():
            loader, _ = StructuredDataset.create_dataloader(
                job.path, batch_size=job.batch_size, num_workers=0, columns=["id"], uneven_ranks="drop"
            )
            dist.barrier()
            seconds.append(steps_of(iter(loader) if name == "alone" else in_step(loader)))
    if rank == 0:
        medians = {name: statistics.median(seconds) for name, seconds in found.items()}
        Path(folder, "found.json").write_text(json.dumps(medians), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    job = read_job()
    memory = own_memory()
    began = time.perf_counter()
    worker, process = collate_us(job, 1), collate_us(job, 0)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (job, folder), nprocs=2)
        steps = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
    report(
        collate_worker_us=worker,
        collate_process_us=process,
        step_us=1e6 * steps["alone"],
        in_step_us=1e6 * (steps["in step"] - steps["alone"]),
        whole_s=time.perf_counter() - began,
        rows=0,
        complete=True,
        **memory,
    )
