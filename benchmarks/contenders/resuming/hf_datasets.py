"""Hugging Face datasets: a stream, or a dataset on disk, split by rank, in torchdata's StatefulDataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.contenders.resuming.job import BUFFER_ROWS, SEED, Job, files, own_state


class HuggingFace:
    """The loader; its state is saved and loaded by each rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        datasets.disable_progress_bars()
        if job.way == "map":
            rows = load_dataset("parquet", data_files=files(job), split="train", cache_dir=f"{job.data}/cache")
        else:
            rows = load_dataset("parquet", data_files=files(job), split="train", streaming=True)
        rows = rows.with_format("torch")
        if job.way == "shuffled":
            # With several input shards, as by default, its state did not load in worker processes: an IndexError.
            rows = rows.shuffle(seed=SEED, buffer_size=BUFFER_ROWS, max_buffer_input_shards=1)
        if job.num_ranks > 1:
            rows = split_dataset_by_node(rows, rank=job.rank, world_size=job.num_ranks)
        if job.way == "map":
            self._loader = StatefulDataLoader(rows, batch_size=job.batch_size, num_workers=job.workers)
        else:
            self._loader = StatefulDataLoader(
                rows.batch(job.batch_size),  # batched by the stream: the loader would collate single rows
                batch_size=None,
                num_workers=job.workers,
            )

    def batches(self) -> Iterator[Any]:
        """Yield batches."""
        for batch in self._loader:
            yield batch["row"]

    def state(self) -> Any:
        """Return the loader's state."""
        return self._loader.state_dict()

    def load(self, states: list[Any]) -> None:
        """Load this rank's state; a rank that has none begins its epoch."""
        state = own_state(self._job, states)
        if state is not None:
            self._loader.load_state_dict(state)


def make(job: Job) -> HuggingFace:
    """Make the reader."""
    return HuggingFace(job)


def convert(job: Job) -> None:
    """Write the cache of Arrow files that a dataset on disk is read from."""
    datasets.disable_progress_bars()
    load_dataset("parquet", data_files=files(job), split="train", cache_dir=f"{job.data}/cache")
