"""Batches that hold as many rows as fit into a number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.columns.convert import Columns
from torch_dataloader_utils.columns.options import TokenBudget
from torch_dataloader_utils.columns.ragged import Ragged
from torch_dataloader_utils.errors import ColumnError
from torch_dataloader_utils.planning.plan import ShardSlice
from torch_dataloader_utils.reading.batching import Batcher, Batches, Chunk


def row_lengths(columns: Columns, name: str) -> npt.NDArray[np.int64]:
    """Return the length of each list of a column; that of null is 0."""
    values = columns[name]
    if isinstance(values, Ragged):
        return np.diff(values.offsets)
    lengths: npt.NDArray[np.int64] = pc.fill_null(pc.list_value_length(values), 0).to_numpy().astype(np.int64)
    return lengths


def fitting(lengths: npt.NDArray[np.int64], budget: TokenBudget) -> int:
    """Return how many of the first rows fit into a batch; they are all where none is left over.

    Args:
        lengths: The tokens of each row.
        budget: What a batch may hold: the rows' tokens, or the places of as many rows as long as the longest.
    """
    if not budget.padded:
        return int(np.searchsorted(np.cumsum(lengths), budget.tokens, side="right"))
    if len(lengths) and lengths[0]:
        lengths = lengths[: budget.tokens // lengths[0] + 1]  # no more rows can fit
    places = np.maximum.accumulate(lengths) * np.arange(1, len(lengths) + 1)
    return int(np.searchsorted(places, budget.tokens, side="right"))


class BudgetBatcher(Batcher):
    """Holds chunks that are not yet cut into batches. A batch is cut once a row is there that does not fit into it.

    The cut depends on the rows from the batch's first on, so a resume that begins with that row cuts the same.
    """

    def __init__(self, stream: int, slices: Sequence[ShardSlice], budget: TokenBudget) -> None:
        super().__init__(stream, 1)
        self._slices = slices
        self._budget = budget
        self._lengths: npt.NDArray[np.int64] = np.empty(0, np.int64)  # of the rows that are held

    def add(self, chunk: Chunk) -> None:
        """Take over a chunk.

        Raises:
            ColumnError: If a row is larger than a batch, unless it may be a batch of its own.
        """
        lengths = row_lengths(chunk.columns, self._budget.column)
        if self._budget.oversized == "error":
            self._require_fitting(chunk, lengths)
        self._lengths = np.concatenate([self._lengths, lengths])
        self._batch_size = self._next_size()
        super().add(chunk)

    def full_batches(self) -> Iterator[Batches]:
        """Cut off the batches that are complete. The rows that are left are of one chunk, if any was cut."""
        if self.rows < self._batch_size:
            return
        while self.rows >= self._batch_size:
            rows = self._batch_size
            self._lengths = self._lengths[rows:]
            self._batch_size = self._next_size()
            yield self.take(rows)
        self._compact()

    def _next_size(self) -> int:
        """Return the rows of the next batch; more than there are, if the rows behind these may fit as well."""
        rows = fitting(self._lengths[: self._most_rows()], self._budget)
        return len(self._lengths) + 1 if rows == len(self._lengths) else max(rows, 1)

    def _most_rows(self) -> int:
        """Return a number of rows that surely do not fit into a batch, as far as there are so many."""
        most = 64
        while most < len(self._lengths) and fitting(self._lengths[:most], self._budget) == most:
            most *= 2
        return most

    def _require_fitting(self, chunk: Chunk, lengths: npt.NDArray[np.int64]) -> None:
        if lengths.max(initial=0) <= self._budget.tokens:
            return
        number = int(np.argmax(lengths > self._budget.tokens))
        split = self._slices[chunk.position].shard.splits[0]
        msg = f"column {self._budget.column!r} holds a list of {lengths[number]} tokens, more than TokenBudget(tokens="
        msg += (
            f"{self._budget.tokens}) allows: row {chunk.first + number}, in the order of delivery, of the shard that "
        )
        msg += f"begins with row {split.row_offset} of {split.path}; oversized='alone' makes it a batch of its own"
        raise ColumnError(msg)


def require_lists(budget: TokenBudget, schema: pa.Schema) -> None:
    """Raise a ColumnError unless a budget's column is one of lists."""
    if budget.column not in schema.names:
        msg = f"TokenBudget({budget.column!r}): there is no such column; there are {', '.join(map(repr, schema.names))}"
        raise ColumnError(msg)
    dtype = schema.field(budget.column).type
    if not (pa.types.is_list(dtype) or pa.types.is_large_list(dtype)):
        raise ColumnError(f"TokenBudget({budget.column!r}): the column is of type {dtype}, and tokens are lists")
