"""Under Accelerate: this library, `skip_first_batches`, and `use_stateful_dataloader`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

from benchmarks.contenders.frameworks.hf_datasets import converted, streamed
from benchmarks.contenders.frameworks.job import EPOCHS, Job, Recorder
from benchmarks.contenders.frameworks.loaders import FEATURES, loss_of, ours
from torch_dataloader_utils.integrations.accelerate import PreparedLoader, prepare_loader


def train(job: Job, recorder: Recorder) -> None:
    """Train as the guide of Accelerate says: the checkpoint with `save_state`, the loop in a function of its own."""
    stateful = DataLoaderConfiguration(use_stateful_dataloader=job.way == "stateful")
    accelerator = Accelerator(cpu=True, dataloader_config=stateful)
    _train(job, recorder, accelerator)
    accelerator.free_memory()  # it holds the model
    gc.collect()  # DDP is in a reference cycle and holds the process group, whose threads would not end
    accelerator.end_training()


def _train(job: Job, recorder: Recorder, accelerator: Accelerator) -> None:
    model: Any = torch.nn.Linear(len(FEATURES), 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    loader = _prepared(job, accelerator)
    begun = recorder.step  # steps of the checkpoint, all of the first epoch
    recorder.begin()
    if job.checkpoint is not None:
        accelerator.load_state(str(Path(job.directory, f"step-{job.checkpoint}")))
    for epoch in range(EPOCHS):
        batches = loader
        if not isinstance(loader, PreparedLoader):
            loader.set_epoch(epoch)
        if job.way.startswith("skip") and epoch == 0 and begun:
            batches = accelerator.skip_first_batches(loader, begun)
        for batch in batches:
            recorder.train(epoch, batch["row"].tolist())
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if recorder.step % job.every == 0:
                recorder.save()
                accelerator.save_state(str(Path(job.directory, f"step-{recorder.step}")))
            recorder.may_die()


def _prepared(job: Job, accelerator: Accelerator) -> Any:
    if job.way == "ours":
        return prepare_loader(accelerator, ours(job))
    if job.way == "skip, converted":
        generator = torch.Generator().manual_seed(0)
        options = {"shuffle": job.shuffle, "generator": generator if job.shuffle else None}
        loader = torch.utils.data.DataLoader(converted(job), job.batch_size, num_workers=job.workers, **options)
    else:
        loader = torch.utils.data.DataLoader(streamed(job), job.batch_size, num_workers=job.workers)
    return accelerator.prepare(loader)
