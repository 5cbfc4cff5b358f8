"""torch-dataloader-utils 0.2.0, the package that PyPI has, as its README there says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from faults.outcome import Row, rows_in
from faults.trainer import Job

from torch_dataloader_utils import StructuredDataset


def open(job: Job, saved: list[Any] | None) -> tuple[Iterator[list[Row]], Callable[[], Any]]:  # noqa: A001
    """Open the loader."""
    loader, dataset = StructuredDataset.create_dataloader(
        path=job.data,
        format="parquet",
        num_workers=job.num_workers,
        batch_size=job.batch_size // job.num_ranks,
        shuffle=job.shuffle,
        shuffle_buffer_size=200 if job.shuffle else None,
        split_rows=50,  # it begins an unfinished part of a file again: small ones repeat least
        output_format="dict",
        collate_fn=dict,
        num_ranks=job.num_ranks,
        rank=job.rank,
    )
    if saved is not None:
        dataset.load_state_dict(saved[job.rank])
    return (rows_in(batch) for batch in loader), dataset.state_dict
