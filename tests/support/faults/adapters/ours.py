"""This library, as its guide to checkpoints says."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from faults.outcome import Row, rows_in
from faults.trainer import Job

from torch_dataloader_utils import StructuredDataset, UnevenRanksWarning, to_device

warnings.simplefilter("ignore", UnevenRanksWarning)


def open(job: Job, saved: list[Any] | None) -> tuple[Iterator[list[Row]], Callable[[], Any]]:  # noqa: A001
    """Open the loader, or what copies its batches to a device ahead."""
    loader: Any
    loader, _ = StructuredDataset.create_dataloader(
        job.data,
        batch_size=job.batch_size // job.num_ranks,
        shuffle=job.shuffle,
        shuffle_buffer_size=200 if job.shuffle else None,
        num_ranks=job.num_ranks,
        rank=job.rank,
        num_workers=job.num_workers,
    )
    if job.ahead:
        loader = to_device(loader, device="cpu", depth=job.ahead)
    if saved is not None:
        if len(saved) == job.num_ranks:
            loader.load_state_dict(saved[job.rank])
        else:
            loader.load_state_dict(saved, strict=False)
    return (rows_in(batch) for batch in loader), loader.state_dict
