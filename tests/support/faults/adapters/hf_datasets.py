"""Hugging Face datasets, streaming, in torchdata's StatefulDataLoader, as its guide to streaming says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import datasets
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
from faults.outcome import Row, rows_in
from faults.trainer import Job, files_of
from torchdata.stateful_dataloader import StatefulDataLoader

BUFFER_ROWS = 200


def columns_of(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns."""
    return {name: [row[name] for row in rows] for name in rows[0]}


def open(job: Job, saved: list[Any] | None) -> tuple[Iterator[list[Row]], Callable[[], Any]]:  # noqa: A001
    """Open the loader."""
    datasets.disable_progress_bars()
    stream = load_dataset("parquet", data_files=files_of(job), split="train", streaming=True)
    if job.shuffle:
        # With several input shards, as by default, its state did not load in worker processes: an IndexError.
        stream = stream.shuffle(seed=7, buffer_size=BUFFER_ROWS, max_buffer_input_shards=1)
    if job.num_ranks > 1:
        stream = split_dataset_by_node(stream, rank=job.rank, world_size=job.num_ranks)
    loader = StatefulDataLoader(
        stream, batch_size=job.batch_size // job.num_ranks, num_workers=job.num_workers, collate_fn=columns_of
    )
    if saved is not None:
        loader.load_state_dict(saved[job.rank])
    return (rows_in(batch) for batch in loader), loader.state_dict
