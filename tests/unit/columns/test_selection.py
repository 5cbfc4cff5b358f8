"""Rows of tables that are taken and filtered, against Arrow's own way to do it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dataloader_utils.columns import selection
from torch_dataloader_utils.columns.selection import filter_rows, take_rows

VALUES = [
    *(pa.int8(), pa.uint16(), pa.float16(), pa.int32(), pa.float64(), pa.date32(), pa.timestamp("us", "UTC")),
    *(pa.time64("us"), pa.duration("us"), pa.bool_(), pa.decimal128(9), pa.string(), pa.binary(2)),
]
"""Types with values of one byte to eight, and those of which lists are not moved as bytes."""


def values_of(numbers: list[int | None], dtype: pa.DataType) -> pa.Array:
    """Return an array with a value of any type for each number from 0 to 99."""
    texts = pa.array([None if number is None else f"{number:02}" for number in numbers], pa.string())
    if pa.types.is_string(dtype):
        return texts
    if pa.types.is_fixed_size_binary(dtype):
        return texts.cast(pa.binary()).cast(dtype)
    if pa.types.is_boolean(dtype):
        return pa.array([None if number is None else number > 50 for number in numbers], dtype)
    if pa.types.is_floating(dtype):
        return pa.array([None if number is None else np.float64(number) for number in numbers], pa.float64()).cast(
            dtype
        )
    stored = pa.int32() if dtype == pa.date32() else pa.int64()
    return pa.array(numbers, stored).cast(pa.decimal128(21) if pa.types.is_decimal(dtype) else dtype).cast(dtype)


@st.composite
def chunks_of_lists(draw, dtype: pa.DataType) -> pa.Array:
    """Draw an array of lists: a slice of one whose values are a slice, too, and some of whose nulls have values."""
    number = st.integers(0, 99)
    may_be_null = dtype.value_field.nullable and draw(st.booleans())
    fewest = draw(st.sampled_from([6, 3, 0]))  # few values in a list are left to Arrow
    values = st.lists(st.none() | number if may_be_null else number, min_size=fewest, max_size=8)
    rows = draw(st.lists(values, min_size=draw(st.sampled_from([5, 0])), max_size=8))
    valid = draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    before = draw(st.lists(number, max_size=2))
    numbers = [*before, *(each for row in rows for each in row)]
    stored = values_of(numbers, dtype.value_type).slice(len(before))
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int64 if pa.types.is_large_list(dtype) else np.int32)
    validity = pa.array(valid, pa.bool_()).buffers()[1] if rows and draw(st.booleans()) else None
    lists = pa.Array.from_buffers(dtype, len(rows), [validity, pa.py_buffer(offsets)], children=[stored])
    start = draw(st.integers(0, len(rows) // 2))
    return lists.slice(start, len(rows) - start - draw(st.integers(0, (len(rows) - start) // 2)))


@st.composite
def tables(draw) -> pa.Table:
    value = pa.field(draw(st.sampled_from(["item", "element"])), draw(st.sampled_from(VALUES)), draw(st.booleans()))
    dtype = draw(st.sampled_from([pa.list_, pa.large_list]))(value)
    chunks = st.lists(chunks_of_lists(dtype), min_size=draw(st.sampled_from([1, 2, 0])), max_size=3)
    lists = pa.chunked_array(draw(chunks), dtype)
    lists_field = pa.field("lists", dtype, metadata={"of": "column"})
    schema = pa.schema(
        [lists_field, pa.field("number", pa.int64(), nullable=False), lists_field], metadata={"of": "table"}
    )
    return pa.table([lists, pa.array(range(len(lists)), pa.int64()), lists], schema=schema)


def require_equal(found: pa.Table, expected: pa.Table) -> None:
    found.validate(full=True)
    assert found.schema.equals(expected.schema, check_metadata=True)
    assert [column.to_pylist() for column in found.columns] == [column.to_pylist() for column in expected.columns]


@pytest.fixture
def few_values_are_enough(monkeypatch):
    monkeypatch.setattr(selection, "LEAST_VALUES", 0)


@pytest.mark.usefixtures("few_values_are_enough")
@given(tables(), st.randoms(use_true_random=False), st.booleans())
def test_rows_that_are_taken_are_those_that_arrow_takes(table, random, of_all):
    order = list(range(len(table)))
    random.shuffle(order)
    indices = pa.array(order if of_all else order[: len(order) // 2], pa.uint32())
    require_equal(take_rows(table, indices), table.take(indices))


@pytest.mark.usefixtures("few_values_are_enough")
@given(tables(), st.data())
def test_rows_that_a_filter_keeps_are_those_that_arrow_keeps(table, data):
    flags = st.lists(st.sampled_from([True, False, None]), min_size=len(table), max_size=len(table))
    mask = pa.array(data.draw(flags), pa.bool_())
    cut = data.draw(st.integers(0, len(mask)))
    require_equal(filter_rows(table, mask), table.filter(mask))
    require_equal(filter_rows(table, pa.chunked_array([mask[:cut], mask[cut:]])), table.filter(mask))


@pytest.mark.usefixtures("few_values_are_enough")
@pytest.mark.parametrize("dtype", VALUES)
def test_lists_of_each_type_are_those_of_arrow(dtype):
    values = values_of(list(range(60)), dtype)
    table = pa.table({"lists": pa.ListArray.from_arrays(pa.array(range(0, 61, 6), pa.int32()), values)})
    order = pa.array([7, 0, 9, 3, 4], pa.uint32())
    require_equal(take_rows(table, order), table.take(order))


def test_a_number_that_no_row_has_is_an_error():
    with pytest.raises(IndexError):
        take_rows(lists_of(pa.list_(pa.int8()), 10, length=8), pa.array([0, 10], pa.uint32()))


def lists_of(dtype: pa.DataType, rows: int, *, length: int, chunks: int = 1, nulls: bool = False) -> pa.Table:
    """Return a table with a column of lists, which all have the same length."""
    values = pa.array(np.arange(rows * length) % 100, dtype.value_type)
    offsets = np.arange(rows + 1) * length
    stored = pa.py_buffer(offsets.astype(np.int64 if pa.types.is_large_list(dtype) else np.int32))
    validity = pa.array(np.arange(rows) % 2 == 0).buffers()[1] if nulls else None
    lists = pa.Array.from_buffers(dtype, rows, [validity, stored], children=[values])
    part = rows // chunks
    return pa.table({"lists": pa.chunked_array([lists.slice(first, part) for first in range(0, rows, part)])})


def peak_of(select: Callable[[], pa.Table]) -> int:
    """Return the most bytes that Arrow held while rows were selected."""
    default = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(default)
    pa.set_memory_pool(pool)
    try:
        selected = select()
        del selected  # before the pool that it is in
        return pool.max_memory()
    finally:
        pa.set_memory_pool(default)


@pytest.mark.parametrize(
    ("dtype", "chunks", "nulls"),
    [
        (pa.list_(pa.int8()), 1, False),
        (pa.list_(pa.int8()), 2, False),
        (pa.list_(pa.int8()), 1, True),
        (pa.list_(pa.int16()), 1, False),
        (pa.large_list(pa.int8()), 2, False),
    ],
)
def test_no_index_of_all_values_is_made_of_lists_of_numbers(dtype, chunks, nulls):
    rows = 2_000
    table = lists_of(dtype, rows, length=100, chunks=chunks, nulls=nulls)
    size = rows * 100 * dtype.value_type.bit_width // 8
    order, every = pa.array(range(rows - 1, -1, -1), pa.uint32()), pa.array([True] * rows)
    # The rows and, where there are several chunks, these in one piece; an index has four bytes or eight for each value.
    assert size // 2 <= peak_of(lambda: take_rows(table, order)) < (chunks + 0.5) * size
    assert size // 2 <= peak_of(lambda: filter_rows(table, every)) < 1.5 * size


@pytest.mark.parametrize("dtype", [pa.list_(pa.int8()), pa.large_list(pa.int8())])
def test_more_values_than_offsets_can_count_are_left_to_arrow(dtype, monkeypatch):
    monkeypatch.setattr(selection, "MOST_VALUES", 100)
    table, order = lists_of(dtype, 1_000, length=100), pa.array(range(1_000), pa.uint32())
    is_index_made = peak_of(lambda: take_rows(table, order)) > 2 * 1_000 * 100
    assert is_index_made is not pa.types.is_large_list(dtype)


@pytest.mark.parametrize(("rows", "length"), [(20_000, 3), (20, 100)])
def test_lists_of_few_values_are_left_to_arrow(rows, length, monkeypatch):
    monkeypatch.setattr(selection, "_binary", lambda _: pytest.fail("they became binary"))
    table = lists_of(pa.list_(pa.int8()), rows, length=length)
    require_equal(take_rows(table, pa.array([3, 1], pa.uint32())), table.take([3, 1]))
