"""This library's loader of the job, and the loss of its batches."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.contenders.frameworks.job import BUFFER_ROWS, FILTER, SEED, Job
from torch_dataloader_utils import StructuredDataset
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader

FEATURES = ("x0", "x1", "x2", "x3")


def ours(job: Job, **options: Any) -> StructuredDataLoader:
    """Return this library's loader."""
    loader, _ = StructuredDataset.create_dataloader(
        job.data,
        **(options or {"batch_size": job.batch_size}),
        shuffle=job.shuffle,
        shuffle_buffer_size=BUFFER_ROWS if job.shuffle else None,
        shuffle_seed=SEED,
        num_workers=job.workers,
        filters=[FILTER] if job.filtered else None,
        uneven_ranks="allow" if job.filtered else "drop",
    )
    return loader


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a batch."""
    predicted = model(torch.stack([batch[name].float() for name in FEATURES], dim=1))
    return torch.nn.functional.mse_loss(predicted.squeeze(1), batch["y"].float())
