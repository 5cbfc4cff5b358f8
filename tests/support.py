"""What tests share: small datasets of several files and row groups, and the rows of batches by their ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torch_dataloader_utils import StructuredDataLoader, StructuredDataset

DEFAULT_FILES = ((130, 50), (7, 50), (211, 40), (95, 30))
"""Rows and row group size of each file: uneven, one tiny, no row group as long as a batch is."""


def write_dataset(directory: Path, files: tuple[tuple[int, int], ...] = DEFAULT_FILES) -> int:
    """Write one Parquet file for each (rows, row group size) and return the number of rows.

    `value` is the row's place in the dataset, `score` a float made from it, `name` a string.
    """
    directory.mkdir(parents=True, exist_ok=True)
    first = 0
    for number, (rows, group_rows) in enumerate(files):
        values = np.arange(first, first + rows)
        table = pa.table({"value": values, "score": values / 7, "name": [f"row {value}" for value in values]})
        pq.write_table(table, directory / f"part-{number:03d}.parquet", row_group_size=group_rows)
        first += rows
    return first


def open_loader(path: Any, **options: Any) -> tuple[StructuredDataLoader, StructuredDataset]:
    """Open a dataset with row ids in the column `row`, batches of 16, in this process, unless told otherwise."""
    return StructuredDataset.create_dataloader(
        path, **{"row_id_column": "row", "batch_size": 16, "num_workers": 0, **options}
    )


def rows_of(batch: Any) -> list[int]:
    """Return a batch's row ids."""
    return [int(row) for row in batch["row"]]


def batches_of(iterable: Any) -> list[list[int]]:
    """Return the row ids of every batch."""
    return [rows_of(batch) for batch in iterable]
