"""Columns are split into batches some at a time: the same batches, of any sizes and any number of columns."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_dataloader_utils.columns import convert
from torch_dataloader_utils.columns.convert import LEAST_AT_ONCE, VIEWS_AT_ONCE, split


@given(st.lists(st.integers(0, 5), max_size=40), st.sampled_from([0, 1, 3, VIEWS_AT_ONCE // LEAST_AT_ONCE + 1]))
def test_each_batch_has_its_rows_of_every_column(sizes, tensors):
    rows = sum(sizes)
    columns = {f"tensor {number}": torch.arange(rows * 2).view(rows, 2) + number for number in range(tensors)}
    columns["array"] = np.arange(rows) * 3
    columns["strings"] = pa.chunked_array([[f"row {row}" for row in range(rows)]], pa.string())
    columns["made"] = [[number] for number in range(len(sizes))]
    batches = list(split(columns, sizes))
    bounds = list(accumulate(sizes, initial=0))
    assert len(batches) == len(sizes)
    for number, batch in enumerate(batches):
        here = slice(bounds[number], bounds[number + 1])
        assert list(batch) == list(columns)
        assert all(batch[f"tensor {each}"].equal(columns[f"tensor {each}"][here]) for each in range(tensors))
        assert batch["array"].tolist() == columns["array"][here].tolist()
        assert batch["strings"] == columns["strings"].to_pylist()[here]
        assert batch["made"] == [number]


def test_batches_without_columns():
    assert list(split({}, [2, 3])) == [{}, {}]


@pytest.mark.parametrize("made", [1, 3])
@pytest.mark.parametrize("others", [{}, {"numbers": torch.arange(3)}], ids=["alone", "beside a tensor"])
def test_a_column_of_fewer_or_more_batches_is_refused(made, others):
    with pytest.raises(ValueError, match=r"shorter|longer"):
        list(split({**others, "made": [[0]] * made}, [1, 2]))


def test_lists_are_made_batch_by_batch(monkeypatch):
    made = []
    monkeypatch.setattr(convert, "list_maker", lambda *_: lambda part: made.append(part) or part.to_pylist())
    batches = split({"strings": pa.chunked_array([["a", "b", "c"]])}, [1, 1, 1])
    assert next(batches) == {"strings": ["a"]}
    assert len(made) == 1
