"""A GPU fed by this library's loader; or, where the job says "alone", over batches that are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from typing import Any

import torch
from gpu_steps import device_of, network_of, train
from harness import Job, read_job

from torch_dataloader_utils import StructuredDataset, to_device
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader

HELD = 16
"""Batches that are on the device for steps alone."""


def loader_of(job: Job) -> StructuredDataLoader:
    """Make the loader."""
    storage = None
    if job.s3 is not None:
        client = {"endpoint_url": job.s3["endpoint"], "region_name": job.s3["region"]}
        storage = {"key": job.s3["key"], "secret": job.s3["secret"], "client_kwargs": client}
    loader, _ = StructuredDataset.create_dataloader(
        job.path,
        batch_size=job.batch_size,
        num_workers=job.workers,
        pin_memory=job.options["pin"],
        storage_options=storage,
    )
    return loader


def copied_in_the_loop(loader: StructuredDataLoader, device: torch.device) -> Iterator[dict[str, Any]]:
    """Copy each batch when it is needed, as a loop without `to_device` does."""
    for batch in loader:
        yield {name: values.to(device, non_blocking=True) for name, values in batch.items()}


def epochs_of(job: Job) -> Iterator[Iterable[Any]]:
    """Yield the batches of each epoch."""
    loader, device = loader_of(job), device_of(job)
    ahead = to_device(loader, device)
    if job.options["how"] == "alone":
        held = list(islice(ahead, HELD))
        for _ in range(job.options["epochs"]):
            yield islice(cycle(held), len(loader))
        return
    for epoch in range(job.options["epochs"]):
        loader.set_epoch(epoch)
        yield ahead if job.options["how"] == "ahead" else copied_in_the_loop(loader, device)


if __name__ == "__main__":
    job = read_job()
    train(job, network_of(job), epochs_of(job))
