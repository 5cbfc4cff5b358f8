"""Rows of tables that are taken and filtered, against Arrow's own way to do it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    number = pa.field("number", pa.int64(), nullable=False)
    schema = pa.schema([number, pa.field("lists", dtype, metadata={"of": "column"})], metadata={"of": "table"})
    return pa.table([pa.array(range(len(lists)), pa.int64()), lists], schema=schema)


def require_equal(found: pa.Table, expected: pa.Table) -> None:
    found.validate(full=True)
    assert found.schema.equals(expected.schema, check_metadata=True)
    assert found.to_pylist() == expected.to_pylist()


@given(tables(), st.randoms(use_true_random=False), st.booleans())
def test_rows_that_are_taken_are_those_that_arrow_takes(table, random, of_all):
    order = list(range(len(table)))
    random.shuffle(order)
    indices = pa.array(order if of_all else order[: len(order) // 2], pa.uint32())
    require_equal(take_rows(table, indices), table.take(indices))


@given(tables(), st.data())
def test_rows_that_a_filter_keeps_are_those_that_arrow_keeps(table, data):
    flags = st.lists(st.sampled_from([True, False, None]), min_size=len(table), max_size=len(table))
    mask = pa.array(data.draw(flags), pa.bool_())
    require_equal(filter_rows(table, mask), table.filter(mask))


@pytest.mark.parametrize("chunks", [1, 2])
def test_no_index_of_all_values_is_made_of_lists_of_numbers(chunks):
    rows, length = 2_000, 100
    values = pa.array(np.arange(rows * length) % 100, pa.int8())
    lists = pa.ListArray.from_arrays(pa.array(range(0, rows * length + 1, length), pa.int32()), values)
    part = rows // chunks
    table = pa.table({"lists": pa.chunked_array([lists.slice(first, part) for first in range(0, rows, part)])})
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    taken = take_rows(table, pa.array(range(rows - 1, -1, -1), pa.uint32()), pool)
    assert taken["lists"].to_pylist() == lists.to_pylist()[::-1]
    del taken  # before the pool that it is in
    # The rows and, where there are several chunks, these in one piece; an index has four bytes or eight for each value.
    assert rows * length < pool.max_memory() < (chunks + 1.5) * rows * length
