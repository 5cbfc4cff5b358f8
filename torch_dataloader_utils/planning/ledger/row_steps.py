"""The rows of a step, and the step of a row. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torch_dataloader_utils.planning.ledger.shard_order import Integers


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of a step of a rank, in the order of its batch. Iterating yields (path, row) pairs.

    Attributes:
        files: Each row's file: its path relative to the dataset's root. An array of strings.
        rows: Each row's number in its file, from 0, deleted rows of a table not counted. An array of int64.
        bytes_read: Compressed bytes of the row groups that were read for the answer: 0 unless `scan` had to read.
    """

    files: npt.NDArray[np.str_]
    rows: Integers
    bytes_read: int = 0

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield each row as its file's path and its number there."""
        yield from zip(self.files.tolist(), self.rows.tolist(), strict=True)


@dataclass(frozen=True, slots=True)
class RowStep:
    """Where a row is delivered.

    Attributes:
        epoch: The epoch.
        step: The step of the rank, from 0 in the epoch.
        rank: The rank.
        worker: The rank's worker that makes the batch; 0 where the rank reads in its own process.
        place: The row's number in the batch, from 0.
        others: Where it is delivered as well, because rows are repeated so that all ranks have equally many.
        bytes_read: Compressed bytes of the row groups that were read for the answer: 0 unless `scan` had to read.
    """

    epoch: int
    step: int
    rank: int
    worker: int
    place: int
    others: tuple[RowStep, ...] = ()
    bytes_read: int = 0
