"""LitData over the Parquet files, with its loader that has a state, and its elastic resume."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import litdata
from faults.outcome import Row, rows_in
from faults.trainer import Job, files_of
from litdata.streaming.item_loader import ParquetLoader


def prepare(job: Job) -> None:
    """Index the files, in a directory of its own, for the index is written next to them."""
    shutil.rmtree(job.converted, ignore_errors=True)
    Path(job.converted).mkdir()
    for path in files_of(job):
        Path(job.converted, Path(path).name).hardlink_to(path)
    litdata.index_parquet_dataset(job.converted, num_workers=1)


def open(job: Job, saved: list[Any] | None) -> tuple[Iterator[list[Row]], Callable[[], Any]]:  # noqa: A001
    """Open the loader."""
    os.environ |= {"WORLD_SIZE": str(job.num_ranks), "GLOBAL_RANK": str(job.rank), "NNODES": "1"}
    dataset = litdata.StreamingDataset(
        job.converted,
        item_loader=ParquetLoader(),
        shuffle=job.shuffle,
        drop_last=job.num_ranks > 1 or bool(job.earlier),  # its default, kept when one rank takes over from several
        seed=7,
    )
    loader = litdata.StreamingDataLoader(
        dataset,
        batch_size=job.batch_size // job.num_ranks,
        num_workers=job.num_workers,
        multiprocessing_context="spawn" if job.num_workers else None,  # as it asks for with ParquetLoader
    )
    if saved is not None:
        loader.load_state_dict(saved[job.rank % len(saved)])
    return (rows_in(batch) for batch in loader), loader.state_dict
