"""What a batch costs beside itself: seeding a `collate_fn`, and ranks that agree on every step."""

from __future__ import annotations

import json
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
from torch_dataloader_utils.model import Assignment, Lane, Piece, Receipt, Shard, Split
from torch_dataloader_utils.seeding import Seeding

BATCHES = 20_000
STEPS = 1_000
STEP_SEC = 0.002


def seeding_us(*, keeps: bool) -> float:
    """Return the microseconds that seeding costs a batch."""
    shard = Shard((Split("part-0.parquet", 0, BATCHES),))
    seeding = Seeding(42, 0, Assignment(0, 0, 0, ((Lane(0, (Piece(shard),)),),)), keeps=keeps)
    began = time.perf_counter()
    for number in range(BATCHES):
        with seeding.of(Receipt(0, 0, number, rows=1, last=(0, number))):
            pass
    return 1e6 * (time.perf_counter() - began) / BATCHES


def steps_of(batches: Any) -> float:
    """Return the median seconds of a step that waits for its accelerator, as a training step does."""
    seconds = []
    for number in range(STEPS):
        began = time.perf_counter()
        if next(batches, None) is None:
            raise RuntimeError(f"only {number} batches")
        time.sleep(STEP_SEC)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def walk(rank: int, job: Job, folder: str) -> None:
    """Make steps of both kinds, in turn, as one of two ranks."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"alone": [], "in step": []}
    for _ in range(3):
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
    worker, process = seeding_us(keeps=False), seeding_us(keeps=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(walk, (job, folder), nprocs=2)
        steps = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
    report(
        seeding_worker_us=worker,
        seeding_process_us=process,
        step_us=1e6 * steps["alone"],
        in_step_us=1e6 * (steps["in step"] - steps["alone"]),
        whole_s=time.perf_counter() - began,
        rows=0,
        complete=True,
        **memory,
    )
