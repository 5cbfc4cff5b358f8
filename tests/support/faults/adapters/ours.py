"""This library, as its guide to checkpoints says."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from faults.outcome import Row, rows_in
from faults.trainer import Job

from torch_dataloader_utils import StructuredDataset, UnevenRanksWarning

warnings.simplefilter("ignore", UnevenRanksWarning)


def open(  # noqa: A001
    job: Job, saved: list[Any] | None, prepared: Callable[[Any], Any] = lambda loader: loader
) -> tuple[Iterator[list[Row]], Callable[[], Any]]:
    """Open the loader, or what is made of it."""
    loader, _ = StructuredDataset.create_dataloader(
        job.data,
        batch_size=job.batch_size // job.num_ranks,
        shuffle=job.shuffle,
        shuffle_buffer_size=200 if job.shuffle else None,
        num_ranks=job.num_ranks,
        rank=job.rank,
        num_workers=job.num_workers,
    )
    loader = prepared(loader)
    if saved is not None:
        if len(saved) == job.num_ranks:
            loader.load_state_dict(saved[job.rank])
        else:
            loader.load_state_dict(saved, strict=False)
    return (rows_in(batch) for batch in loader), loader.state_dict
