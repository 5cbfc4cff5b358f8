"""Arrow to what the user asked for: tensors, arrays, Arrow tables or plain lists.

A row group is converted once, as a whole; batches are then cut from it as views. What has one shape becomes a tensor
or an array; lists of different lengths stay together with their offsets; what becomes Python lists stays in Arrow until
a batch is made of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa
import torch

from torch_dataloader_utils.columns.arrow import copied, takeable
from torch_dataloader_utils.columns.dense import concatenated, dense_array
from torch_dataloader_utils.columns.lists import to_list
from torch_dataloader_utils.columns.options import Padded
from torch_dataloader_utils.columns.ragged import Ragged, RaggedBatches, concatenate, ragged
from torch_dataloader_utils.columns.transform import ColumnTransform, Form

__all__ = [
    "OUTPUT_FORMATS",
    "ColumnSlice",
    "Columns",
    "OutputFormat",
    "convert",
    "copy_rows",
    "interleave",
    "join",
    "size_of",
    "split",
    "with_lists",
    "with_offsets",
]


OutputFormat: TypeAlias = Literal["torch", "numpy", "arrow", "dict"]


OUTPUT_FORMATS: tuple[str, ...] = get_args(OutputFormat)


Columns: TypeAlias = Mapping[str, Any] | pa.Table
"""Converted columns: tensors, arrays, rows of different lengths, or Arrow columns that become lists in a batch."""


@dataclass(frozen=True, slots=True)
class ColumnSlice:
    """Rows `start` to `stop` of converted columns."""

    columns: Columns
    start: int
    stop: int


def convert(table: pa.Table, delivery: ColumnTransform) -> Columns:
    """Convert the rows of a table, to be cut into batches by `join`.

    Args:
        table: The rows as they are delivered.
        delivery: What each column is in a batch.

    Returns:
        For ``"arrow"`` the table. Else for each column its tensor or array of shape ``(rows, ...)``, its rows of
        different lengths, or the Arrow column that becomes Python lists.
    """
    if delivery.output_format == "arrow":
        return table
    forms, tensors = delivery.forms, delivery.output_format == "torch"
    return {
        name: _converted(column, forms[name], tensors=tensors)
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def _converted(column: pa.ChunkedArray, form: Form, *, tensors: bool) -> Any:
    if form == "list":
        return column
    if form != "dense":
        return ragged(column, form, tensors=tensors)
    chunks = column.chunks or [pa.array([], column.type)]
    array = concatenated([dense_array(chunk, times=not tensors) for chunk in chunks])
    return torch.from_numpy(array) if tensors else array


def join(slices: Sequence[ColumnSlice]) -> Columns:
    """Return the rows of consecutive slices as columns: views where it is one cut, copies where there are several."""
    first = slices[0].columns
    if isinstance(first, pa.Table):
        return pa.concat_tables(_rows(cut.columns, cut) for cut in slices)
    return {name: _join_column([_rows(cut.columns[name], cut) for cut in slices]) for name in first}


def split(columns: Columns, sizes: Sequence[int]) -> Iterator[Any]:
    """Yield the batches that columns consist of.

    Args:
        columns: Converted columns, or what `with_lists` made of them.
        sizes: The rows of each batch; together those of the columns.

    Yields:
        For each size a table, or a dictionary of tensors and arrays, which are views, and of lists.
    """
    if isinstance(columns, pa.Table):
        yield from _slices(columns, sizes)
        return
    names = tuple(columns)
    for _, *values in zip(sizes, *(_split_column(name, columns[name], sizes) for name in names), strict=True):
        yield dict(zip(names, values, strict=True))


def with_offsets(columns: Columns, sizes: Sequence[int]) -> Columns:
    """Return columns of which those of different lengths have, where they are not padded, offsets in each batch."""
    if isinstance(columns, pa.Table):
        return columns
    return {
        name: values.apart(sizes) if isinstance(values, Ragged) and not isinstance(values.form, Padded) else values
        for name, values in columns.items()
    }


def with_lists(columns: Columns, sizes: Sequence[int]) -> Columns:
    """Return columns of which those that become lists, or are padded, are so already, one to each batch: to be sent."""
    if isinstance(columns, pa.Table):
        return columns
    return {
        name: list(_split_column(name, values, sizes)) if isinstance(values, (pa.ChunkedArray, Ragged)) else values
        for name, values in with_offsets(columns, sizes).items()
    }


def copy_rows(cut: ColumnSlice) -> Columns:
    """Return a copy of a cut's rows that does not keep the columns it was cut from in memory."""
    if isinstance(cut.columns, pa.Table):
        table = _rows(cut.columns, cut)
        return pa.table([copied(column) for column in table.columns], schema=table.schema)
    return {name: _copy(_rows(values, cut)) for name, values in cut.columns.items()}


def interleave(parts: Sequence[Columns], count: int) -> Columns:
    """Return the batches of several streams in turn: the first of each, then the second of each.

    Args:
        parts: For each stream its batches, together as columns; all of one size, unless there is one of each.
        count: How many batches each has.

    Returns:
        Copies, which keep none of the parts in memory.
    """
    first = parts[0]
    if isinstance(first, pa.Table):
        order = _interleaved_rows([len(part) for part in parts], count)
        return takeable(pa.concat_tables(parts)).take(order)
    return {name: _interleave_column([part[name] for part in parts], count) for name in first}


def _interleave_column(values: list[Any], count: int) -> Any:
    if isinstance(values[0], pa.ChunkedArray):
        together = pa.chunked_array([chunk for each in values for chunk in each.chunks], values[0].type)
        order = _interleaved_rows(list(map(len, values)), count)
        return takeable(pa.table({"": together}))[""].take(order)
    if isinstance(values[0], Ragged):
        steps = [len(each) // count for each in values]
        parts = [
            each.slice(number * step, (number + 1) * step)
            for number in range(count)
            for each, step in zip(values, steps, strict=True)
        ]
        return concatenate(parts)
    if count == 1:
        return torch.cat(values) if isinstance(values[0], torch.Tensor) else np.concatenate(values)
    shape = (count, -1, *values[0].shape[1:])
    if isinstance(values[0], torch.Tensor):
        return torch.stack([each.reshape(shape) for each in values], dim=1).reshape(-1, *shape[2:])
    return np.stack([each.reshape(shape) for each in values], axis=1).reshape(-1, *shape[2:])


def _interleaved_rows(lengths: Sequence[int], count: int) -> pa.Array:
    starts = accumulate(lengths, initial=0)
    rows = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=False)]
    return pa.array(
        np.concatenate(rows) if count == 1 else np.stack([each.reshape(count, -1) for each in rows], 1).ravel()
    )


def size_of(columns: Columns) -> int:
    """Return the bytes that converted columns take."""
    return int(columns.nbytes if isinstance(columns, pa.Table) else sum(values.nbytes for values in columns.values()))


def _copy(values: Any) -> Any:
    if isinstance(values, pa.ChunkedArray):
        return copied(values)
    return values.clone() if isinstance(values, torch.Tensor) else values.copy()


def _rows(values: Any, cut: ColumnSlice) -> Any:
    if isinstance(values, (pa.Table, pa.ChunkedArray)):
        return values.slice(cut.start, cut.stop - cut.start)
    if isinstance(values, Ragged):
        return values.slice(cut.start, cut.stop)
    return values[cut.start : cut.stop]


def _join_column(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], pa.ChunkedArray):
        return pa.chunked_array([chunk for part in parts for chunk in part.chunks], parts[0].type)
    if isinstance(parts[0], Ragged):
        return concatenate(parts)
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else np.concatenate(parts)


def _split_column(name: str, values: Any, sizes: Sequence[int]) -> Iterable[Any]:
    if isinstance(values, (list, RaggedBatches)):
        return values
    if isinstance(values, Ragged):
        return values.batches(sizes)
    if isinstance(values, torch.Tensor):
        # Not views in autograd's eyes: what a training loop computes in place on one batch is not the others' business.
        return torch.unsafe_split_with_sizes(values, list(sizes))
    if isinstance(values, pa.ChunkedArray):
        return (to_list(name, part) for part in _slices(values, sizes))
    stops = list(accumulate(sizes))
    return [values[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]


def _slices(values: Any, sizes: Sequence[int]) -> Iterator[Any]:
    start = 0
    for size in sizes:
        yield values.slice(start, size)
        start += size
