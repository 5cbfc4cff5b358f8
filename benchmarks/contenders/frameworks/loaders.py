"""The loaders of the job: this library's, and Hugging Face datasets over the same files."""

from __future__ import annotations

from typing import Any

import datasets
import torch
from datasets import load_dataset

from benchmarks.contenders.frameworks.job import BUFFER_ROWS, SEED, Job, files_of
from torch_dataloader_utils import StructuredDataset
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader

FEATURES = ("x0", "x1", "x2", "x3")


def ours(job: Job) -> StructuredDataLoader:
    """Return this library's loader."""
    loader, _ = StructuredDataset.create_dataloader(
        job.data,
        batch_size=job.batch_size,
        shuffle=job.shuffle,
        shuffle_buffer_size=BUFFER_ROWS if job.shuffle else None,
        shuffle_seed=SEED,
        num_workers=job.workers,
        uneven_ranks="drop",
    )
    return loader


def streamed(job: Job) -> Any:
    """Return a dataset that is read from the files as it is iterated over."""
    datasets.disable_progress_bars()
    stream = load_dataset("parquet", data_files=files_of(job), split="train", streaming=True)
    return stream.shuffle(seed=SEED, buffer_size=BUFFER_ROWS) if job.shuffle else stream


def converted(job: Job) -> Any:
    """Return a dataset of rows that can be looked up: the files are converted, at the first use, and kept."""
    datasets.disable_progress_bars()
    return load_dataset("parquet", data_files=files_of(job), split="train", cache_dir=f"{job.data}-converted")


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a batch."""
    predicted = model(torch.stack([batch[name].float() for name in FEATURES], dim=1))
    return torch.nn.functional.mse_loss(predicted.squeeze(1), batch["y"].float())
