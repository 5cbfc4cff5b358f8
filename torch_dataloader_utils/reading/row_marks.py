"""Takes the column of row marks out of batches that are cut, and gives each batch the hash of its rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pyarrow as pa

from torch_dataloader_utils.columns.convert import Columns, without_column
from torch_dataloader_utils.planning.row_hash import hash_batches
from torch_dataloader_utils.reading.batching import Batches
from torch_dataloader_utils.reading.removal import rows_removed
from torch_dataloader_utils.reading.row_groups.selection import MARKS_COLUMN, REMOVED_COLUMN


def with_hashes(batches: Batches) -> Batches:
    """Return batches without the column of marks, each with the hash of its rows in its receipt.

    Rows that the batches are still to lose are not hashed: they are not delivered.
    """
    columns, numbers = without_column(batches.columns, MARKS_COLUMN)
    marks, sizes = numbers.view(np.uint64), batches.sizes
    if REMOVED_COLUMN in _names(columns):
        removed = without_column(columns, REMOVED_COLUMN)[1]
        marks = marks[~removed]
        sizes = [size - lost for size, lost in zip(sizes, rows_removed(removed, sizes), strict=True)]
    hashes = hash_batches(marks, sizes)
    receipts = tuple(receipt._replace(row_hash=own) for receipt, own in zip(batches.receipts, hashes, strict=True))
    return replace(batches, columns=columns, receipts=receipts)


def _names(columns: Columns) -> Iterable[str]:
    return columns.column_names if isinstance(columns, pa.Table) else columns
