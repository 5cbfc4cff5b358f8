"""The last of many batches as a copy, which does not keep the memory of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.reading.batching import Batches

ROWS, BATCH = 40, 5
RECEIPTS = tuple(Receipt(0, 0, stop, BATCH) for stop in range(BATCH, ROWS + 1, BATCH))
NUMBERS = np.arange(ROWS, dtype=np.float32)


def addresses(values: Any) -> set[int]:
    """Return where the memory of a column begins."""
    if isinstance(values, pa.ChunkedArray):
        return {buffer.address for chunk in values.chunks for buffer in chunk.buffers() if buffer is not None}
    if isinstance(values, torch.Tensor):
        return {values.untyped_storage().data_ptr()}
    array = values
    while isinstance(array.base, np.ndarray):
        array = array.base
    return {array.__array_interface__["data"][0]}


@pytest.mark.parametrize(
    "columns",
    [
        {"score": torch.from_numpy(NUMBERS)},
        {"score": NUMBERS},
        {"score": pa.chunked_array([pa.array(NUMBERS)])},
        {"score": pa.chunked_array([pa.array([f"row {row}" for row in range(ROWS)])])},
        pa.table({"score": NUMBERS}),
    ],
    ids=["tensor", "array", "numbers", "text", "table"],
)
def test_it_has_the_same_rows_in_memory_of_its_own(columns):
    batches = Batches(columns, RECEIPTS)
    expected = [(_plain(batch.data["score"]), batch.receipt) for batch in batches]
    others, last = batches.with_own_last()
    assert [(_plain(batch.data["score"]), batch.receipt) for part in (others, last) for batch in part] == expected
    assert [len(others.receipts), len(last.receipts)] == [len(RECEIPTS) - 1, 1]
    assert addresses(columns["score"]).isdisjoint(addresses(last.columns["score"]))
    assert addresses(columns["score"]) == addresses(others.columns["score"])


def _plain(values: Any) -> list[Any]:
    if isinstance(values, list):
        return values
    found: list[Any] = values.to_pylist() if isinstance(values, (pa.Array, pa.ChunkedArray)) else values.tolist()
    return found
