"""Training steps on a GPU that this library's loader feeds; or, for "alone", over batches that are there already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

from gpu_steps import copied_in_the_loop, device_of, network_of, train
from harness import Job, read_job
from ours.loader import loader_of

from torch_dataloader_utils import to_device

HELD = 16
"""Batches that are on the device for steps alone."""


def epochs_of(job: Job) -> Iterator[Iterable[Any]]:
    """Yield the batches of each epoch."""
    loader = loader_of(replace(job, options={"pin_memory": job.options["pin"]}))
    device = device_of(job)
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
