"""TRL: `pack_dataset` packs all documents ahead, and torchdata's StatefulDataLoader reads the sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from trl import pack_dataset

from benchmarks.contenders.packing.job import LENGTH, PADDING, Job, files, own_state


def stack(rows: list[dict[str, Any]]) -> torch.Tensor:
    """Return the sequences of a batch, filled up to their length."""
    batch = torch.full((len(rows), LENGTH), PADDING, dtype=torch.int32)
    for row, tokens in zip(batch, (row["tokens"] for row in rows), strict=True):
        row[: len(tokens)] = tokens
    return batch


class Packed:
    """The loader; its state is saved and loaded by each rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        documents = datasets.load_dataset(
            "parquet", data_files=files(job), split="train", cache_dir=f"{job.directory}/cache-{job.rank}"
        )
        sequences = pack_dataset(documents, seq_length=LENGTH, strategy=job.way).with_format("torch")
        sampler = StatefulDistributedSampler(sequences, job.num_ranks, job.rank, shuffle=False)
        self._loader = StatefulDataLoader(
            sequences, batch_size=job.batch_size, sampler=sampler, num_workers=job.workers, collate_fn=stack
        )

    def batches(self) -> Iterator[Any]:
        """Yield batches."""
        yield from self._loader

    def state(self) -> Any:
        """Return the loader's state."""
        return self._loader.state_dict()

    def load(self, states: list[Any]) -> None:
        """Load this rank's state; a rank that has none begins its epoch."""
        state = own_state(self._job, states)
        if state is not None:
            self._loader.load_state_dict(state)


def make(job: Job) -> Packed:
    """Make the loader."""
    return Packed(job)
