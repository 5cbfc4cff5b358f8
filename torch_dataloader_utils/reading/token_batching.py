"""The batcher of a token budget: it cuts batches by the lengths of their rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from torch_dataloader_utils.columns.convert import list_lengths
from torch_dataloader_utils.planning.token_budget import Lengths, TokenBudget, batch_stops
from torch_dataloader_utils.reading.batching import Batcher, Batches, Chunk


class TokenBatcher(Batcher):
    """Holds chunks like any batcher. A batch is full once a row is held that does not fit into it."""

    def __init__(self, stream: int, budget: TokenBudget) -> None:
        super().__init__(stream, batch_size=1)
        self._budget = budget
        self._lengths: Lengths = np.empty(0, np.int64)
        self._stops: list[int] = []

    def add(self, chunk: Chunk) -> None:
        """Take over a chunk."""
        if chunk.rows:
            self._lengths = np.concatenate([self._lengths, list_lengths(chunk.columns, self._budget.column)])
            self._stops = batch_stops(self._lengths, self._budget)
            self._batch_size = self._stops[0] if self._stops else len(self._lengths) + 1
        super().add(chunk)

    def full_batches(self) -> Iterator[Batches]:
        """Cut off all full batches. The rows that are left fit into one, and keep no chunk in memory."""
        if not self._stops:
            return
        stops, self._stops = self._stops, []
        self._lengths = self._lengths[stops[-1] :].copy()
        sizes = [stop - start for start, stop in pairwise([0, *stops])]
        if len(self._chunks) > 1:  # all but the newest fit into one batch, of which they are the beginning
            self._batch_size = sizes[1] if len(sizes) > 1 else self.rows + 1
            yield self.take(sizes.pop(0))
        if sizes:
            self._batch_size = self.rows + 1
            yield self._take_each([self._start + stop for stop in np.cumsum(sizes).tolist()])
        self._compact()
