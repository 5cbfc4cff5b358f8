"""torchtitan: the packing of its text dataset, in its loader over torchdata's StatefulDataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

from benchmarks.contenders.packing.job import LENGTH, PADDING, Job, files, own_state


class Tokens:
    """Stands for a tokenizer: the documents are tokens already."""

    def encode(self, tokens: list[int], **_: bool) -> list[int]:
        """Return the tokens and an end, which is the last one's label and no input."""
        return [*tokens, PADDING]


class Packed:
    """The loader; its state is saved and loaded by each rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        DATASETS["documents"] = DatasetConfig(
            path=job.data,
            loader=lambda _: datasets.load_dataset("parquet", data_files=files(job), split="train", streaming=True),
            sample_processor=lambda row: row["tokens"],
        )
        self._loader = HuggingFaceTextDataLoader(
            HuggingFaceTextDataLoader.Config(dataset="documents", infinite=False, num_workers=job.workers),
            dp_world_size=job.num_ranks,
            dp_rank=job.rank,
            tokenizer=Tokens(),
            seq_len=LENGTH,
            local_batch_size=job.batch_size,
        )

    def batches(self) -> Iterator[Any]:
        """Yield batches."""
        for inputs, _ in self._loader:
            yield inputs["input"]

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
