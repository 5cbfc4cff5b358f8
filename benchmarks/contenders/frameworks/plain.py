"""A plain training loop with DistributedDataParallel, for the modules that differ in what saves and loads."""

from __future__ import annotations

import functools
import gc
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # DDP imports it; imported later, it would keep the process group alive
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.frameworks.job import EPOCHS, Job, Recorder
from benchmarks.contenders.frameworks.loaders import FEATURES, loss_of, ours


@dataclass
class Training:
    """A model and a loader.

    Attributes:
        model: The model, as it is trained.
        inner: The model, without what wraps it.
        loader: This library's loader, or a `StatefulDataLoader` with its epoch.
        is_ours: Whether it is this library's.
    """

    model: torch.nn.Module
    inner: torch.nn.Module
    loader: Any
    is_ours: bool

    def __post_init__(self) -> None:
        """Make the optimizer, which imports what the first batch should not wait for."""
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)

    @property
    def epoch(self) -> int:
        """The epoch that begins or goes on."""
        found: int = self.loader.dataset.epoch if self.is_ours else self.loader.epoch
        return found


def begin(job: Job) -> Training:
    """Return a small model, under DistributedDataParallel if there are other processes, and the loader of the job."""
    torch.manual_seed(0)
    inner = torch.nn.Linear(len(FEATURES), 1)
    is_ours = job.way.startswith("ours")
    model = DistributedDataParallel(inner) if dist.is_initialized() else inner
    return Training(model, inner, ours(job) if is_ours else _stateful(job), is_ours)


def _stateful(job: Job) -> Any:
    """Return a `StatefulDataLoader`. What it needs is imported only here: that takes seconds."""
    return importlib.import_module("benchmarks.contenders.frameworks.stateful").stateful(job)


def joined(train: Callable[[Job, Recorder], None]) -> Callable[[Job, Recorder], None]:
    """Have a training join the other processes, if there are others, and leave them when it has ended."""

    @functools.wraps(train)
    def join(job: Job, recorder: Recorder) -> None:
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group("gloo")
        train(job, recorder)
        if dist.is_initialized():
            gc.collect()  # DDP is in a reference cycle and holds the process group, whose threads would not end
            dist.destroy_process_group()

    return join


def run(job: Job, recorder: Recorder, training: Training, save: Callable[[int], None]) -> None:
    """Train the rest of an epoch, and those after it; `save` saves the checkpoint of a step, on all processes."""
    for epoch in range(training.epoch, EPOCHS):
        training.loader.set_epoch(epoch)
        for batch in training.loader:
            recorder.train(epoch, batch["row"].tolist())
            training.optimizer.zero_grad()
            loss_of(training.model, batch).backward()
            training.optimizer.step()
            if recorder.step % job.every == 0:
                recorder.save()
                save(recorder.step)
            recorder.may_die()
