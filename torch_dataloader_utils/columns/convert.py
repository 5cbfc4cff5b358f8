"""Tables as they are delivered become batches: tensors, arrays, Arrow tables or plain lists.

A row group is converted once, as a whole, and batches are views of the result. Values of one shape become a tensor or
an array. Rows of different lengths stay together as values and offsets. Columns that become Python lists stay in Arrow
until a batch is made of them, or are rows that share objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from torch_dataloader_utils.columns.arrow import (
    any_type,
    copied,
    is_encoded_bytes,
    is_view,
    nbytes,
    takeable,
    without_dictionary,
)
from torch_dataloader_utils.columns.arrow_memory import memory_pool, new_array
from torch_dataloader_utils.columns.column_plan import Form
from torch_dataloader_utils.columns.dense import dense_array
from torch_dataloader_utils.columns.options import Padded
from torch_dataloader_utils.columns.packed import SegmentBatches
from torch_dataloader_utils.columns.python_lists import list_maker
from torch_dataloader_utils.columns.ragged import Ragged, RaggedBatches, concat, ragged, split_values
from torch_dataloader_utils.columns.selection import filter_rows, take_rows
from torch_dataloader_utils.columns.shared import Shared, joined_lists, shared
from torch_dataloader_utils.columns.transform import ColumnTransform
from torch_dataloader_utils.gc_pause import without_gc

OutputFormat: TypeAlias = Literal["torch", "numpy", "arrow", "dict"]
OUTPUT_FORMATS: tuple[str, ...] = get_args(OutputFormat)

VIEWS_AT_ONCE = 256
"""Batches are split off so many tensors at a time. Python's garbage collector runs for every 700 objects that are made
and not dropped: all batches of a block at once would let it run for nearly each block."""

LEAST_AT_ONCE = 4
"""At least so many batches are split off at a time, however many columns they have: fewer would take longer."""

LISTED = (pa.ChunkedArray, Shared)
"""What converted columns are of which lists are made."""

Columns: TypeAlias = Mapping[str, Any] | pa.Table
"""Converted columns: tensors, arrays, rows of different lengths, or columns that become lists in a batch (`LISTED`)."""


@dataclass(frozen=True, slots=True)
class ColumnSlice:
    """Rows `start` to `stop` of converted columns."""

    columns: Columns
    start: int
    stop: int


def convert(table: pa.Table, transform: ColumnTransform) -> Columns:
    """Convert the rows of a table in the form that is delivered; `join` and `split` make batches of the result.

    Returns:
        For ``"arrow"`` the table. Else for each column its array of shape ``(rows, ...)``, its rows of different
        lengths, or one of `LISTED`, which become Python lists. `with_tensors` makes tensors of arrays, once no rows are
        to be joined any more: a tensor takes longer to make, to cut and to drop than an array.
    """
    if transform.output_format == "arrow":
        return table
    forms, tensors = transform.forms, transform.output_format == "torch"
    return {
        name: _converted(name, column, forms[name], tensors=tensors)
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def _converted(name: str, column: pa.ChunkedArray, form: Form, *, tensors: bool) -> Any:
    if form == "list":
        return shared(name, column) if is_encoded_bytes(column.type) else column
    if form != "dense":
        return ragged(column, form, tensors=tensors)
    # Arrow joins all chunks in one call. NumPy would need an array of each first.
    whole = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks(memory_pool())
    return dense_array(whole, numpy_times=not tensors)


def with_tensors(columns: Columns) -> Columns:
    """Return columns with tensors in the place of arrays, which share their memory."""
    if isinstance(columns, pa.Table):
        return columns
    return {
        name: torch.from_numpy(values) if isinstance(values, np.ndarray) else values for name, values in columns.items()
    }


def join(slices: Sequence[ColumnSlice]) -> Columns:
    """Return the rows of slices, one after the other: a view of a single slice, copies of several."""
    first = slices[0].columns
    if isinstance(first, pa.Table):
        return pa.concat_tables(_rows(part.columns, part) for part in slices)
    return {name: _join_column(name, [_rows(part.columns[name], part) for part in slices]) for name in first}


def _join_column(name: str, parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return joined_lists(name, parts) if isinstance(parts[0], LISTED) else concat(parts)


def _rows(values: Any, part: ColumnSlice) -> Any:
    if type(values) is np.ndarray:  # mostly
        return values[part.start : part.stop]
    if isinstance(values, (pa.Table, pa.ChunkedArray)):
        return values.slice(part.start, part.stop - part.start)
    if isinstance(values, (Ragged, Shared)):
        return values.slice(part.start, part.stop)
    return values[part.start : part.stop]


def split(columns: Columns, sizes: Sequence[int]) -> Iterator[Any]:
    """Split converted columns, or what `sendable` made of them, into batches of these sizes, which use up all rows.

    Yields:
        For each size a table, or a dictionary of tensors and arrays, which are views, and of lists.
    """
    if isinstance(columns, pa.Table):
        yield from _slices(columns, sizes)
        return
    names = tuple(columns)
    together = max(LEAST_AT_ONCE, VIEWS_AT_ONCE // max(1, len(names)))
    parts = (_split_column(name, columns[name], sizes, together) for name in names)
    made = zip(sizes, *parts, strict=True)
    # A list or a dictionary for each value: the collector would run several times for a batch, and find nothing.
    following = without_gc(next) if any(map(_has_containers, columns.values())) else next
    while (batch := following(made, None)) is not None:
        yield dict(zip(names, batch[1:], strict=True))


def _has_containers(values: Any) -> bool:
    """Whether a column becomes lists of lists or dictionaries."""
    return isinstance(values, pa.ChunkedArray) and pa.types.is_nested(values.type)


def _split_column(name: str, values: Any, sizes: Sequence[int], together: int) -> Iterable[Any]:
    """Split a column into batches; tensors and arrays so many at a time."""
    if isinstance(values, (list, RaggedBatches, SegmentBatches)):
        return values
    if isinstance(values, (Ragged, Shared)):
        return values.batches(sizes)
    if isinstance(values, pa.ChunkedArray):
        return map(list_maker(name, values.type), _slices(values, sizes))
    return chain.from_iterable(_split_in_parts(values, sizes, together))


def _split_in_parts(values: Any, sizes: Sequence[int], together: int) -> Iterator[Sequence[Any]]:
    """Split off some batches at a time, and the rest by the same call.

    To slice a tensor takes as long as to split off four batches.
    """
    left = sum(sizes)
    for first in range(0, len(sizes), together):
        of_part = sizes[first : first + together]
        left -= sum(of_part)
        *batches, values = split_values(values, [*of_part, left])
        yield batches


def _slices(values: Any, sizes: Sequence[int]) -> Iterator[Any]:
    for size, stop in zip(sizes, accumulate(sizes), strict=True):
        yield values.slice(stop - size, size)


def with_offsets(columns: Columns, sizes: Sequence[int]) -> Columns:
    """Return columns in which rows of different lengths, unless they are padded, have offsets for each batch.

    That is what `split` would compute for each batch. Padded rows take more memory, so they are made later.
    """
    if isinstance(columns, pa.Table):
        return columns
    return {
        name: values.split(sizes) if isinstance(values, Ragged) and not isinstance(values.form, Padded) else values
        for name, values in columns.items()
    }


def sendable(columns: Columns, sizes: Sequence[int]) -> Columns:
    """Return columns that are ready to be sent: padded rows are made, one tensor for each batch.

    What becomes Python lists stays in Arrow, and the lists are made where it arrives: to make an object takes less time
    than to read it from a pickle. Of rows that share objects, those are sent. But of what Arrow would send as a whole,
    whatever few rows there are, or as something else, lists are sent.
    """
    if isinstance(columns, pa.Table):
        return columns
    return {name: _sendable(name, values, sizes) for name, values in with_offsets(columns, sizes).items()}


def _sendable(name: str, values: Any, sizes: Sequence[int]) -> Any:
    if isinstance(values, Shared):
        values = values.copied()
        return values if values.has_few_objects() else list(values.batches(sizes))
    if isinstance(values, pa.ChunkedArray):
        values = without_dictionary(values)
        if not any_type(values.type, _is_sent_otherwise):
            return values
    is_made = isinstance(values, (pa.ChunkedArray, Ragged))
    return list(_split_column(name, values, sizes, len(sizes))) if is_made else values


def _is_sent_otherwise(dtype: pa.DataType) -> bool:
    """Whether Arrow sends more of an array than the values of its rows, or does not send its type.

    It sends dictionaries, and the memory that views point into, as a whole. A type that a user has made arrives as what
    it is stored as, unless it is registered where it arrives.
    """
    return bool(pa.types.is_dictionary(dtype) or is_view(dtype) or isinstance(dtype, pa.ExtensionType))


def copy_rows(part: ColumnSlice) -> Columns:
    """Return a copy of a slice's rows, which does not keep the other rows of the columns in memory."""
    if isinstance(part.columns, pa.Table):
        table = _rows(part.columns, part)
        return pa.table([copied(column) for column in table.columns], schema=table.schema)
    rows = {name: _rows(values, part) for name, values in part.columns.items()}
    return {name: _copied(values) for name, values in rows.items()}


def _copied(values: Any) -> Any:
    if isinstance(values, Shared):
        return values.copied()
    return copied(values) if isinstance(values, pa.ChunkedArray) else concat([values])


def without_column(columns: Columns, name: str) -> tuple[Columns, npt.NDArray[Any]]:
    """Return columns without one that has numbers or booleans, and that one as an array."""
    if isinstance(columns, pa.Table):
        others: Columns = columns.drop_columns([name])
    else:
        others = {each: values for each, values in columns.items() if each != name}
    values = columns[name]
    return others, values.to_numpy() if isinstance(values, pa.ChunkedArray) else np.asarray(values)


def keep(columns: Columns, flags: npt.NDArray[np.bool_]) -> Columns:
    """Return a copy of the rows whose flag is True."""
    if isinstance(columns, pa.Table):
        return filter_rows(takeable(columns), pa.array(flags))
    return {name: _keep_values(values, flags) for name, values in columns.items()}


def _keep_values(values: Any, flags: npt.NDArray[np.bool_]) -> Any:
    if isinstance(values, pa.ChunkedArray):
        return filter_rows(takeable(pa.table({"": values})), pa.array(flags))[""]
    if isinstance(values, Shared):
        return values.of_numbers(values.numbers[flags])
    if isinstance(values, Ragged):
        return values.keep(flags)
    return values[torch.from_numpy(flags) if isinstance(values, torch.Tensor) else flags]


def interleave(parts: Sequence[ColumnSlice], count: int) -> Columns:
    """Interleave the batches of several streams: the first batch of each stream, then the second of each.

    Each part is the batches of one stream, together as columns, and all of one size. `count` is their number in each.
    The result is a copy, which keeps none of the parts in memory.
    """
    first = parts[0].columns
    if isinstance(first, pa.Table):
        order = _interleaved_rows([part.stop - part.start for part in parts], count)
        return take_rows(takeable(pa.concat_tables(_rows(part.columns, part) for part in parts)), pa.array(order))
    return {name: _interleave_column(name, parts, count) for name in first}


def _interleave_column(name: str, parts: Sequence[ColumnSlice], count: int) -> Any:
    first = parts[0].columns[name]
    streams = [_rows(part.columns[name], part) for part in parts]
    if isinstance(first, LISTED):
        order = _interleaved_rows(list(map(len, streams)), count)
        return taken(joined_lists(name, streams), order)
    if count == 1:
        return concat(streams)
    if isinstance(first, Ragged):
        sized = [(values, len(values) // count) for values in streams]
        return concat([values.slice(n * size, (n + 1) * size) for n in range(count) for values, size in sized])
    return _interleaved(streams, count)


def _interleaved(streams: Sequence[npt.NDArray[Any]], count: int) -> npt.NDArray[Any]:
    """Return the rows of several arrays interleaved: `count` times the next rows of each."""
    batches = [values.reshape(count, len(values) // count, *values.shape[1:]) for values in streams]
    found = new_array((count, sum(each.shape[1] for each in batches), *batches[0].shape[2:]), batches[0].dtype)
    start = 0
    for each in batches:
        stop = start + each.shape[1]
        found[:, start:stop] = each
        start = stop
    return found.reshape(count * start, *found.shape[2:])


def _interleaved_rows(lengths: Sequence[int], count: int) -> npt.NDArray[np.int64]:
    """Return the order of rows in which the batches of concatenated streams are interleaved."""
    starts = accumulate(lengths, initial=0)
    rows = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=False)]
    return _interleaved(rows, count)


def taken(values: Any, order: npt.NDArray[np.integer[Any]]) -> Any:
    """Return rows, of which lists are made, in an order."""
    if isinstance(values, Shared):
        return values.of_numbers(values.numbers[order])
    return take_rows(takeable(pa.table({"": values})), pa.array(order))[""]


def list_lengths(columns: Columns, name: str) -> npt.NDArray[np.int64]:
    """Return how many values each row of a column of lists has; a null has none."""
    values = columns[name]
    if isinstance(values, Ragged):
        return np.diff(values.offsets)
    if isinstance(values, pa.ChunkedArray):
        return pc.fill_null(pc.list_value_length(values), 0).to_numpy().astype(np.int64)  # type: ignore[no-any-return]
    return np.full(len(values), values.shape[1], np.int64)  # lists of one length


def size_of(columns: Columns) -> int:
    """Return the bytes that converted columns take."""
    if isinstance(columns, pa.Table):
        return nbytes(columns)
    return sum(nbytes(values) if isinstance(values, pa.ChunkedArray) else values.nbytes for values in columns.values())
