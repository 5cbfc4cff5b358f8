"""Arrow to what the user asked for: tensors, arrays, Arrow tables or plain lists.

A row group is converted once, as a whole; batches are then cut from it as views. Numbers, booleans and fixed-size
lists of them become tensors or arrays; every other type keeps its values as Python lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from torch_dataloader_utils.errors import ColumnError

__all__ = [
    "OUTPUT_FORMATS",
    "Columns",
    "Cut",
    "OutputFormat",
    "convert",
    "copy_rows",
    "find_nulls",
    "interleave",
    "join",
    "null_message",
    "refuses_nulls",
    "size_of",
    "split",
    "with_lists",
]

OutputFormat: TypeAlias = Literal["torch", "numpy", "arrow", "dict"]
OUTPUT_FORMATS: tuple[str, ...] = get_args(OutputFormat)

_DTYPES = {
    pa.bool_(): np.bool_,
    pa.int8(): np.int8,
    pa.int16(): np.int16,
    pa.int32(): np.int32,
    pa.int64(): np.int64,
    pa.uint8(): np.uint8,
    pa.uint16(): np.uint16,
    pa.uint32(): np.uint32,
    pa.uint64(): np.uint64,
    pa.float16(): np.float16,
    pa.float32(): np.float32,
    pa.float64(): np.float64,
}
"""Arrow's numeric types and NumPy's of the same layout (booleans apart: Arrow packs them into bits)."""

Columns: TypeAlias = Mapping[str, Any] | pa.Table
"""Converted columns, each indexed by row: tensors, arrays, or Arrow columns that become lists in a batch."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows `start` to `stop` of converted columns."""

    columns: Columns
    start: int
    stop: int


def refuses_nulls(kind: pa.DataType, output_format: str) -> bool:
    """Whether a column becomes a tensor or an array that has no value for null: integers and booleans."""
    if output_format not in ("torch", "numpy"):
        return False
    element = kind.value_type if pa.types.is_fixed_size_list(kind) else kind
    return bool(pa.types.is_integer(element) or pa.types.is_boolean(element))


def find_nulls(table: pa.Table, output_format: str) -> tuple[str, int] | None:
    """Return the first column whose nulls would have no value, and how many there are; None where there is none."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        if refuses_nulls(column.type, output_format):
            nulls = column.null_count
            if pa.types.is_fixed_size_list(column.type):
                nulls += sum(_elements(chunk).null_count for chunk in column.chunks)
            if nulls:
                return name, nulls
    return None


def null_message(column: str, nulls: int) -> str:
    """Say what is wrong with nulls in a column and what to do."""
    return (
        f"column {column!r} holds {nulls} nulls, and a tensor or array of integers or booleans has no value for null: "
        "leave those rows out by a filter, store the column as floats, or use output_format='arrow' or 'dict'"
    )


def convert(table: pa.Table, output_format: str) -> Columns:
    """Convert the rows of a table, to be cut into batches by `join`.

    Args:
        table: The rows, without nulls that have no value (see `find_nulls`).
        output_format: ``"torch"``, ``"numpy"``, ``"arrow"`` or ``"dict"``.

    Returns:
        For ``"torch"`` tensors and for ``"numpy"`` arrays, of shape ``(rows,)``, or ``(rows, size)`` for a fixed-size
        list, in the column's own dtype; Arrow columns for every other type and for ``"dict"``; for ``"arrow"`` the
        table.
    """
    if output_format == "arrow":
        return table
    if output_format == "dict":
        return dict(zip(table.column_names, table.columns, strict=True))
    columns: dict[str, Any] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if not _is_numeric(column.type):
            columns[name] = column
            continue
        array = _array(column)
        columns[name] = torch.from_numpy(array) if output_format == "torch" else array
    return columns


def join(cuts: Sequence[Cut]) -> Columns:
    """Return the rows of consecutive cuts as columns: views where it is one cut, copies where there are several."""
    first = cuts[0].columns
    if isinstance(first, pa.Table):
        return pa.concat_tables(_rows(cut.columns, cut) for cut in cuts)
    return {name: _join_column([_rows(cut.columns[name], cut) for cut in cuts]) for name in first}


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


def with_lists(columns: Columns, sizes: Sequence[int]) -> Columns:
    """Return columns of which those that become lists are lists already, one to each batch: ready to be sent."""
    if isinstance(columns, pa.Table):
        return columns
    return {
        name: list(_split_column(name, values, sizes)) if isinstance(values, pa.ChunkedArray) else values
        for name, values in columns.items()
    }


def copy_rows(cut: Cut) -> Columns:
    """Return a copy of a cut's rows that does not keep the columns it was cut from in memory."""
    if isinstance(cut.columns, pa.Table):
        table = _rows(cut.columns, cut)
        return table.take(pa.array(range(len(table))))
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
        return pa.concat_tables(parts).take(order)
    return {name: _interleave_column([part[name] for part in parts], count) for name in first}


def _interleave_column(values: list[Any], count: int) -> Any:
    if isinstance(values[0], pa.ChunkedArray):
        together = pa.chunked_array([chunk for each in values for chunk in each.chunks], values[0].type)
        return together.take(_interleaved_rows(list(map(len, values)), count))
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
        return values.take(pa.array(range(len(values))))
    return values.clone() if isinstance(values, torch.Tensor) else values.copy()


def _rows(values: Any, cut: Cut) -> Any:
    if isinstance(values, (pa.Table, pa.ChunkedArray)):
        return values.slice(cut.start, cut.stop - cut.start)
    return values[cut.start : cut.stop]


def _join_column(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], pa.ChunkedArray):
        return pa.chunked_array([chunk for part in parts for chunk in part.chunks], parts[0].type)
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else np.concatenate(parts)


def _split_column(name: str, values: Any, sizes: Sequence[int]) -> Iterable[Any]:
    if isinstance(values, list):
        return values
    if isinstance(values, torch.Tensor):
        # Not views in autograd's eyes: what a training loop computes in place on one batch is not the others' business.
        return torch.unsafe_split_with_sizes(values, list(sizes))
    if isinstance(values, pa.ChunkedArray):
        return (_to_list(name, part) for part in _slices(values, sizes))
    stops = list(accumulate(sizes))
    return [values[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]


def _slices(values: Any, sizes: Sequence[int]) -> Iterator[Any]:
    start = 0
    for size in sizes:
        yield values.slice(start, size)
        start += size


def _to_list(name: str, column: pa.ChunkedArray) -> list[Any]:
    kind = column.type
    try:
        return _without_nanoseconds(column).to_pylist()  # type: ignore[no-any-return]
    except (pa.ArrowException, ValueError, OverflowError) as error:  # such as nanoseconds in a datetime
        msg = f"column {name!r} of type {kind} holds a value that Python cannot: {error}; "
        msg += "use output_format='arrow', or leave the column out"
        raise ColumnError(msg) from None


def _without_nanoseconds(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return times in microseconds, as Python has them; an ArrowInvalid where that would lose something.

    pyarrow's own way out depends on whether pandas is installed.
    """
    kind = _in_microseconds(column.type)
    return column if kind == column.type else column.cast(kind)


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    """Return a type with microseconds in place of nanoseconds, at any depth."""
    if pa.types.is_nested(kind):
        return _nested_in_microseconds(kind)
    if getattr(kind, "unit", None) != "ns":
        return kind
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    return pa.duration("us") if pa.types.is_duration(kind) else pa.time64("us")


def _nested_in_microseconds(kind: pa.DataType) -> pa.DataType:
    fields = [kind.field(number) for number in range(kind.num_fields)]
    inner = [field.with_type(_in_microseconds(field.type)) for field in fields]
    if pa.types.is_struct(kind):
        return pa.struct(inner)
    if pa.types.is_map(kind):
        return pa.map_(_in_microseconds(kind.key_type), _in_microseconds(kind.item_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(inner[0], kind.list_size)
    make = {"list": pa.list_, "large_list": pa.large_list}.get(str(kind).partition("<")[0])
    return kind if make is None else make(inner[0])


def _is_numeric(kind: pa.DataType) -> bool:
    return (kind.value_type if pa.types.is_fixed_size_list(kind) else kind) in _DTYPES


def _array(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return a numeric column as a writable array that nothing else reads or writes."""
    make = _nested_array if pa.types.is_fixed_size_list(column.type) else _flat_array
    parts = [make(chunk) for chunk in column.chunks] or [make(pa.array([], column.type))]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _flat_array(values: pa.Array) -> npt.NDArray[Any]:
    """Return a numeric Arrow array's values; nulls of floats become NaN."""
    if values.null_count == 0 and not pa.types.is_boolean(values.type):
        buffer = values.buffers()[1]
        if buffer is not None and buffer.is_mutable:
            dtype: np.dtype[Any] = np.dtype(_DTYPES[values.type])
            return np.frombuffer(buffer, dtype, count=len(values), offset=values.offset * dtype.itemsize)
    array: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return array if array.flags.writeable else array.copy()


def _nested_array(values: pa.FixedSizeListArray) -> npt.NDArray[Any]:
    """Return the elements of fixed-size lists as rows; null lists and null elements of floats become NaN."""
    array = _flat_array(_elements(values)).reshape(len(values), values.type.list_size)
    if values.null_count:
        array[values.is_null().to_numpy(zero_copy_only=False)] = np.nan
    return array


def _elements(values: pa.FixedSizeListArray) -> pa.Array:
    size = values.type.list_size
    return values.values.slice(values.offset * size, len(values) * size)
