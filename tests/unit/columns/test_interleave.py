"""Rows of several sources that are put together step by step, against a plain loop over steps and sources."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import examples

from torch_dataloader_utils.columns.column_plan import plan_column
from torch_dataloader_utils.columns.convert import ColumnSlice, convert, interleave, join, split, with_tensors
from torch_dataloader_utils.columns.interleave import Interleaved
from torch_dataloader_utils.columns.options import ColumnOptions
from torch_dataloader_utils.columns.transform import ColumnTransform

COUNTS = st.integers(1, 4).flatmap(
    lambda sources: st.lists(st.lists(st.integers(0, 4), min_size=sources, max_size=sources), min_size=1, max_size=6)
)
EQUAL = st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 6)).map(
    lambda drawn: [drawn[0]] * drawn[1]
)


def rows_from(first: int, count: int) -> pa.Table:
    return rows_of(range(first, first + count))


def rows_of(numbers: Sequence[int]) -> pa.Table:
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "half": pa.array([number / 2 for number in numbers], pa.float32()),
            "flag": pa.array([number % 3 == 0 for number in numbers], pa.bool_()),
            "pair": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(numbers, 2), pa.int32()), 2),
            "jagged": pa.array([[number] * (number % 4) for number in numbers], pa.list_(pa.int64())),
            "text": pa.array([f"row {number}" for number in numbers], pa.string()),
        }
    )


FORMATS = ["torch", "numpy", "arrow", "dict"]


def transform_of(output_format: str, schema: pa.Schema) -> ColumnTransform:
    options = ColumnOptions(output_format)
    plans = tuple(plan_column(field, options) for field in schema)
    return ColumnTransform(output_format, plans, schema)


def delivered(columns, output_format):
    return with_tensors(columns) if output_format == "torch" else columns


def plain(value):
    if isinstance(value, pa.ChunkedArray):
        return value.to_pylist()
    if isinstance(value, torch.Tensor):
        return [row.tolist() for row in value.unbind()] if value.is_nested else value.tolist()
    return [row.tolist() if isinstance(row, np.ndarray) else row for row in value]


@pytest.mark.parametrize("output_format", FORMATS)
@given(counts=st.one_of(COUNTS, EQUAL), data=st.data())
@examples(100, least=12, part=8)
def test_each_step_has_the_next_rows_of_each_source_one_source_after_the_other(output_format, counts, data):
    counts = np.array(counts, dtype=np.int64)
    schema = rows_from(0, 1).schema
    transform = transform_of(output_format, schema)
    block = Interleaved(counts)
    sources = []
    for source, rows in enumerate(counts.sum(axis=0).tolist()):
        table = rows_from(1000 * source, rows)
        sources.append(table["id"].to_pylist())
        done = 0
        while done < rows:
            stop = data.draw(st.integers(done + 1, rows), label="stop")
            chunk = convert(rows_from(1000 * source + done - 1, stop - done + 2), transform)
            block.add(source, ColumnSlice(chunk, 1, 1 + stop - done), is_whole=stop == rows)
            done = stop
    sizes = counts.sum(axis=1).tolist()
    expected = [
        list(
            chain.from_iterable(
                ids[start : start + rows] for ids, start, rows in zip(sources, begin, step, strict=True)
            )
        )
        for step, begin in zip(counts.tolist(), (counts.cumsum(axis=0) - counts).tolist(), strict=True)
    ]
    if not sum(sizes):
        return
    for batch, ids in zip(split(delivered(block.columns(), output_format), sizes), expected, strict=True):
        if not ids:
            continue
        wanted = rows_of(ids)
        for name in schema.names:
            assert plain(batch[name]) == wanted[name].to_pylist(), name


@pytest.mark.parametrize("output_format", FORMATS)
@given(streams=st.integers(1, 3), count=st.integers(1, 4), size=st.integers(1, 3), before=st.integers(0, 2))
@examples(100, least=12, part=8)
def test_batches_of_virtual_streams_alternate_wherever_they_begin(output_format, streams, count, size, before):
    schema = rows_from(0, 1).schema
    transform = transform_of(output_format, schema)
    tables = [rows_from(1000 * stream, before + count * size + 1) for stream in range(streams)]
    parts = [ColumnSlice(convert(table, transform), before, before + count * size) for table in tables]
    order = [table.slice(before + step * size, size) for step in range(count) for table in tables]
    expected = delivered(convert(pa.concat_tables(order), transform), output_format)
    sizes = [size] * (streams * count)
    found = list(split(delivered(interleave(parts, count), output_format), sizes))
    wanted = list(split(join([ColumnSlice(expected, 0, sum(sizes))]), sizes))
    for batch, other in zip(found, wanted, strict=True):
        assert all(plain(batch[name]) == plain(other[name]) for name in schema.names)
        assert all(type(batch[name]) is type(other[name]) for name in schema.names)
