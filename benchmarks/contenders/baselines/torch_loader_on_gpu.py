"""torch's DataLoader feeding a GPU, over an IterableDataset of pyarrow's iter_batches, as a user would write it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpu_steps import copied_in_the_loop, device_of, network_of, train
from harness import Job, read_job
from row_groups import RowGroups
from torch.utils.data import DataLoader


def epochs_of(job: Job) -> Iterator[Iterator[Any]]:
    """Yield the batches of each epoch."""
    loader = DataLoader(
        RowGroups(job),
        batch_size=None,  # batches come ready made: no collation of single rows
        num_workers=job.workers,
        pin_memory=job.options["pin"],
        persistent_workers=bool(job.workers),
    )
    for _ in range(job.options["epochs"]):
        yield copied_in_the_loop(loader, device_of(job))


if __name__ == "__main__":
    job = read_job()
    train(job, network_of(job), epochs_of(job))
