"""Columns are permuted as Arrow permutes them, few bytes of them together, however wide each of them is."""

from __future__ import annotations

import decimal
from itertools import chain, pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dataloader_utils.reading import permuting
from torch_dataloader_utils.reading.permuting import Permuter, starts_of_groups

COLUMNS = {
    "integers": pa.array([5, None, 7, 8, 9], pa.int64()),
    "floats": pa.array([0.5, 1.5, None, 3.5, float("inf")], pa.float32()),
    "booleans": pa.array([True, None, False, True, False]),
    "times": pa.array([1, 2, 3, None, 5], pa.timestamp("us", "UTC")),
    "decimals": pa.array([decimal.Decimal(n) / 4 for n in range(5)]),
    "texts": pa.array(["a", "", None, "bc", "d"]),
    "codes": pa.array(["x", "y", None, "x", "y"]).dictionary_encode(),
    "lists": pa.array([[1], [], None, [2, 3], [4]]),
    "vectors": pa.array([[1.0, 2.0]] * 5, pa.list_(pa.float64(), 2)),
    "nulls": pa.nulls(5),
}


@pytest.fixture
def permuter(monkeypatch):
    monkeypatch.setattr(permuting, "PERMUTED_BYTES", 16)
    made = Permuter(columns=2 * permuting.COLUMNS_OF_A_THREAD, budget_bytes=1 << 20)
    yield made
    made.close()


@pytest.mark.parametrize("chunks", [[(0, 5)], [(1, 4)], [(0, 2), (2, 5)], [(2, 3)]])
def test_columns_of_every_kind_are_permuted_as_arrow_permutes_them(permuter, chunks):
    parts = [pa.table(COLUMNS).slice(start, stop - start) for start, stop in chunks]
    whole = pa.concat_tables(parts)
    indices = pa.array(range(whole.num_rows - 1, -1, -2), pa.uint32())
    assert permuter.permuted(parts, indices) == whole.take(indices)
    assert not parts


def test_numbers_are_joined_right_before_they_are_taken(permuter, monkeypatch):
    """So they come from the processor's cache. Strings and lists are copied no more often than has to be."""
    chunks: dict[str, int] = {}
    take = pc.take

    def noted(table: pa.Table, indices: pa.Array, **options: Any) -> pa.Table:
        chunks.update((name, table.column(name).num_chunks) for name in table.column_names)
        return take(table, indices, **options)

    monkeypatch.setattr(pc, "take", noted)
    permuter.permuted([pa.table(COLUMNS)], pa.array([4, 3, 2, 1, 0], pa.uint32()))
    assert chunks == {name: 2 if name in {"integers", "floats", "booleans", "times"} else 1 for name in COLUMNS}


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(0, 100))
def test_each_group_of_columns_takes_as_many_bytes_as_are_allowed_or_has_one_column(widths, most):
    columns = [
        pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), 1, [None, pa.py_buffer(bytes(width))])
        for width in widths
    ]
    table = pa.table(columns, names=[str(number) for number in range(len(widths))])
    groups = [widths[start:stop] for start, stop in pairwise([*starts_of_groups(table, most), len(widths)])]
    assert list(chain.from_iterable(groups)) == widths
    assert all(sum(group) <= most or len(group) == 1 for group in groups)
    assert all(sum(group) + following[0] > most for group, following in pairwise(groups))
