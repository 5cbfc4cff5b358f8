"""Grain: ParquetIterDataset and its packers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from benchmarks.contenders.packing.job import LENGTH, Job, files, own_state

PACKING_BINS = 64


class CutLong(grain.experimental.FlatMapTransform):
    """Cuts documents that are longer than a sequence, which the packers that fit whole documents refuse."""

    max_fan_out = 8

    def flat_map(self, element: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the pieces of a document."""
        tokens = element["tokens"]
        return [{"tokens": tokens[begin : begin + LENGTH]} for begin in range(0, len(tokens), LENGTH)]


class Packed:
    """The iterator; its state is saved and loaded by each rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        documents = grain.experimental.ParquetIterDataset(files(job)[job.rank :: job.num_ranks])
        length = {"tokens": LENGTH}
        sequences: Any
        if job.way == "concat":
            sequences = grain.experimental.ConcatThenSplitIterDataset(documents, length_struct=length)
        else:
            fit = grain.experimental.BestFitPackIterDataset
            if job.way == "first_fit":
                fit = grain.experimental.FirstFitPackIterDataset
            pieces = grain.experimental.FlatMapIterDataset(documents, CutLong())
            sequences = fit(pieces, length_struct=length, num_packing_bins=PACKING_BINS)
        batches = sequences.batch(job.batch_size, drop_remainder=False)
        if job.workers:
            batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=job.workers))
        self._iterator = iter(batches)

    def batches(self) -> Iterator[Any]:
        """Yield batches."""
        for batch in self._iterator:
            yield np.asarray(batch["tokens"])

    def state(self) -> Any:
        """Return the iterator's state."""
        return self._iterator.get_state()

    def load(self, states: list[Any]) -> None:
        """Load this rank's state; a rank that has none begins its epoch."""
        state = own_state(self._job, states)
        if state is not None:
            self._iterator.set_state(state)


def make(job: Job) -> Packed:
    """Make the iterator."""
    return Packed(job)
