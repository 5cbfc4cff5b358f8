"""Rows that share objects: the lists of Arrow's values, whatever is done with the rows before lists are made."""

from __future__ import annotations

import pickle
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import examples

from torch_dataloader_utils.columns import shared as shared_rows
from torch_dataloader_utils.columns.shared import Shared, joined_lists, shared

DTYPES = {pa.string(): "abc", pa.large_string(): "abc", pa.binary(): [b"a", b"b", b"c"], pa.binary(1): [b"a", b"b"]}


def listed(column: Shared | pa.ChunkedArray) -> list[Any]:
    if isinstance(column, Shared):
        return next(iter(column.batches([len(column)])))
    values: list[Any] = column.to_pylist()
    return values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", [pa.int8(), pa.uint32(), pa.int64()], ids=str)
def test_lists_are_those_of_arrow(monkeypatch: pytest.MonkeyPatch, dtype: pa.DataType, index: pa.DataType) -> None:
    monkeypatch.setattr(shared_rows, "has_few_values", lambda _: True)
    values = pa.array([*DTYPES[dtype], None], dtype)
    indices = st.lists(st.none() | st.integers(0, len(values) - 1), min_size=1, max_size=8)

    @examples(100, least=12, part=10)
    @given(st.lists(indices, min_size=1, max_size=3), st.integers(0, 7), st.lists(st.integers(0, 5), max_size=4))
    def check(chunks: list[list[int | None]], start: int, sizes: list[int]) -> None:
        arrays = [pa.DictionaryArray.from_arrays(pa.array(chunk, index), values) for chunk in chunks]
        column = pa.chunked_array(arrays).slice(min(start, len(chunks[0]) - 1))
        rows = column.to_pylist()
        found = shared("a", column)
        assert isinstance(found, Shared)
        for own in (found, found.copied(), pickle.loads(pickle.dumps(found)), joined_lists("a", [found])):
            left = iter(rows)
            sizes_left = [min(size, len(rows)) for size in sizes]
            assert list(own.batches(sizes_left)) == [list(islice(left, size)) for size in sizes_left]
            assert listed(own.slice(1, 3)) == rows[1:3]
        assert set(found.copied().objects) == set(rows)
        plain = pa.chunked_array([chunk.cast(dtype) for chunk in arrays])
        assert listed(joined_lists("a", [found, plain, found])) == rows + plain.to_pylist() + rows
        assert listed(joined_lists("a", [plain, found.slice(0, 1)])) == plain.to_pylist() + rows[:1]

    check()


def test_parts_of_one_column_have_its_objects() -> None:
    column = shared("a", pa.chunked_array([pa.array(["x", "y"] * 8).dictionary_encode()]))
    assert isinstance(column, Shared)
    joined = joined_lists("a", [column.slice(8, 16), column.slice(0, 3)])
    assert isinstance(joined, Shared)
    assert joined.objects is column.objects
    assert listed(joined) == ["x", "y"] * 4 + ["x", "y", "x"]


def test_a_copy_has_the_objects_of_its_rows_alone() -> None:
    column = shared("a", pa.chunked_array([pa.array([str(row // 20) for row in range(200)]).dictionary_encode()]))
    assert isinstance(column, Shared)
    copy = column.slice(10, 30).copied()
    assert copy.objects.tolist() == ["0", "1"]
    assert copy.numbers.base is None
    assert copy.nbytes < column.slice(10, 30).nbytes
    assert copy.has_few_objects()
    assert not column.slice(10, 30).has_few_objects()


def test_many_values_and_what_python_has_no_string_for_stay_in_arrow() -> None:
    many = pa.chunked_array([pa.array(list(map(str, range(20)))).dictionary_encode()])
    assert shared("a", many) == many.cast(pa.string())
    damaged = pa.array([b"a", b"\xff"]).cast(pa.binary()).view(pa.string())
    column = pa.chunked_array([pa.DictionaryArray.from_arrays(np.zeros(20, np.int32), damaged)])
    assert listed(shared("a", column)) == ["a"] * 20
