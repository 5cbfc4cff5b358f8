"""Takes the column of row marks out of batches that are cut, and gives each batch the hash of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from torch_dataloader_utils.columns.convert import Columns
from torch_dataloader_utils.planning.row_hash import Marks, hash_batches
from torch_dataloader_utils.reading.batching import Batches
from torch_dataloader_utils.reading.row_groups import MARKS_COLUMN


def with_hashes(batches: Batches) -> Batches:
    """Return batches without the column of marks, each with the hash of its rows in its receipt."""
    columns, marks = _without_marks(batches.columns)
    hashes = hash_batches(marks, batches.sizes)
    receipts = tuple(replace(receipt, row_hash=own) for receipt, own in zip(batches.receipts, hashes, strict=True))
    return replace(batches, columns=columns, receipts=receipts)


def _without_marks(columns: Columns) -> tuple[Columns, Marks]:
    if isinstance(columns, pa.Table):
        return columns.drop_columns([MARKS_COLUMN]), _marks(columns[MARKS_COLUMN])
    rest: Mapping[str, Any] = {name: values for name, values in columns.items() if name != MARKS_COLUMN}
    return rest, _marks(columns[MARKS_COLUMN])


def _marks(values: Any) -> Marks:
    """Return marks as they were made, from a tensor, an array or an Arrow column."""
    array = values.to_numpy() if isinstance(values, pa.ChunkedArray) else np.asarray(values)
    return array.view(np.uint64)
