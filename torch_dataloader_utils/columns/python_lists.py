"""Arrow columns as Python lists: the objects that Arrow's own `to_pylist` makes, in a fraction of its time.

Before pyarrow 26 `to_pylist` makes a scalar of Arrow of each value first, and of times, decimals, floats of 16 bits,
fixed-size binary and values of dictionaries it still does (seen in 26.0). Conversions to NumPy make the same objects in
C++, and lists and structs are put together of the lists of their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.columns.arrow import any_type, children, is_bytes, is_list, with_fields, without_dictionary
from torch_dataloader_utils.errors import ColumnError

FIRST_DIRECT = 26
"""The pyarrow release from which on `to_pylist` makes most objects without a scalar of Arrow for each."""

IS_DIRECT = int(pa.__version__.partition(".")[0]) >= FIRST_DIRECT


def list_maker(name: str, dtype: pa.DataType) -> Callable[[pa.ChunkedArray], list[Any]]:
    """Return a function that makes lists of Python objects of columns of a type, those that `to_pylist` makes.

    Nulls become None. The name is the column's, for a ColumnError if Python's types cannot hold a value.
    """
    # Python's times have microseconds. pyarrow's own conversion of nanoseconds depends on whether pandas is installed;
    # this cast fails where it would lose digits.
    coarse = _in_microseconds(dtype)
    is_coarse, conversion = coarse == dtype, _conversion(coarse)

    def made(column: pa.ChunkedArray) -> list[Any]:
        try:
            chunks = (column if is_coarse else column.cast(coarse)).chunks
            return conversion(chunks[0]) if len(chunks) == 1 else list(chain.from_iterable(map(conversion, chunks)))
        except (pa.ArrowException, ValueError, OverflowError) as error:
            msg = f"column {name!r} of type {dtype} holds a value that Python's types cannot hold: {error}; "
            msg += "use output_format='arrow', or leave the column out"
            raise ColumnError(msg) from None

    return made


def _objects(array: pa.Array) -> list[Any]:
    return _conversion(array.type)(array)


def _conversion(dtype: pa.DataType) -> Callable[[pa.Array], list[Any]]:
    arrows: Callable[[pa.Array], list[Any]] = pa.Array.to_pylist
    if (IS_DIRECT and not _needs_scalars(dtype)) or _holds_unions(dtype):
        return arrows
    return next((conversion for is_of, conversion in CONVERSIONS if is_of(dtype)), arrows)


def _needs_scalars(dtype: pa.DataType) -> bool:
    """Whether `to_pylist` makes scalars of values of a type, or of values within them."""
    return any_type(dtype, _is_made_by_scalar)


def _is_made_by_scalar(dtype: pa.DataType) -> bool:
    is_short = pa.types.is_float16(dtype) or pa.types.is_fixed_size_binary(dtype)
    is_temporal = pa.types.is_temporal(dtype) or pa.types.is_decimal(dtype)
    return bool(is_short or is_temporal or pa.types.is_dictionary(dtype))


def _holds_unions(dtype: pa.DataType) -> bool:
    """Whether there are unions at any depth. In a null struct they make pyarrow end the process (seen in 26.0)."""
    return any_type(dtype, pa.types.is_union)


def _without_dictionary(array: pa.Array) -> list[Any]:
    plain = without_dictionary(array)
    return array.to_pylist() if plain is array else _objects(plain)


def _by_numpy(array: pa.Array) -> list[Any]:
    """Return what NumPy has as objects, or as numbers without nulls, as a list."""
    objects: list[Any] = array.to_numpy(zero_copy_only=False).tolist()
    return objects


def _numbers(array: pa.Array) -> list[Any]:
    """Return numbers or booleans as a list. With nulls, NumPy would make floats of integers."""
    filled = array.fill_null(pa.scalar(0).cast(array.type)) if array.null_count else array
    return _with_nulls(_by_numpy(filled), array)


def _with_nulls(objects: list[Any], array: pa.Array) -> list[Any]:
    """Put None into a list where an array has nulls, and return the list."""
    if array.null_count:
        for row in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
            objects[row] = None
    return objects


def _short_floats(array: pa.Array) -> list[Any]:
    """Return floats of 16 bits, of which no kernel fills nulls, as a list."""
    return _with_nulls(_by_numpy(array), array)


def _times(array: pa.Array) -> list[Any]:
    """Return times, dates or durations as a list.

    NumPy makes integers of those that Python's types cannot hold, and has no value but NaT, its null, for the least of
    64 bits. Arrow's conversion raises an error for them.
    """
    if pa.types.is_timestamp(array.type) and array.type.tz is not None:
        return _in_zone(array)
    values = array.to_numpy(zero_copy_only=False)
    ends = (np.fmin.reduce(values), np.fmax.reduce(values)) if len(values) else ()  # of those that are not null
    is_beyond = any(isinstance(end.item(), int) for end in ends)
    has_least = np.count_nonzero(np.isnat(values)) > array.null_count
    objects: list[Any] = array.to_pylist() if is_beyond or has_least else values.tolist()
    return objects


def _in_zone(array: pa.Array) -> list[datetime | None]:
    """Return times in a time zone, which Arrow counts from 1970 in UTC, as a list."""
    if array.null_count == len(array):
        return [None] * len(array)  # also where Python does not know the zone
    zone = pa.scalar(0, array.type).as_py().tzinfo
    begin = datetime(1970, 1, 1, tzinfo=zone)  # `fromutc` takes such times for those of UTC
    since = _times(array.cast(pa.int64()).cast(pa.duration(array.type.unit)))
    if array.type.tz == "UTC":
        return [time if time is None else begin + time for time in since]
    return [time if time is None else zone.fromutc(begin + time) for time in since]


def _lists(array: pa.Array) -> list[list[Any] | None]:
    values = _objects(array.flatten())  # without those of nulls
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_pylist()
    return _with_nulls([values[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))], array)


def _structs(array: pa.Array) -> list[dict[str, Any] | None]:
    """Return structs as a list of dictionaries, filled field by field: to make each of its pairs takes longer."""
    rows: list[Any] = [{} for _ in range(len(array))]
    for field, values in zip(array.type, array.flatten(), strict=True):
        name = field.name
        for row, value in zip(rows, _objects(values), strict=True):
            row[name] = value
    return _with_nulls(rows, array)


CONVERSIONS: Sequence[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], list[Any]]]] = (
    (lambda dtype: pa.types.is_dictionary(dtype) and _is_single(dtype.value_type), _without_dictionary),
    (lambda dtype: is_bytes(dtype) or pa.types.is_decimal(dtype) or pa.types.is_time(dtype), _by_numpy),
    (lambda dtype: pa.types.is_integer(dtype) or pa.types.is_boolean(dtype), _numbers),
    (lambda dtype: pa.types.is_float32(dtype) or pa.types.is_float64(dtype), _numbers),
    (pa.types.is_float16, _short_floats),
    (lambda dtype: pa.types.is_timestamp(dtype) or pa.types.is_date32(dtype) or pa.types.is_duration(dtype), _times),
    (is_list, _lists),
    (lambda dtype: pa.types.is_struct(dtype) and _has_own_names(dtype), _structs),
)
"""How arrays of which types become lists. Of other types Arrow's conversion is the only one."""


def _is_single(dtype: pa.DataType) -> bool:
    """Whether values are single ones, of which Arrow has a kernel that looks them up in a dictionary."""
    is_encoded = pa.types.is_dictionary(dtype) or pa.types.is_run_end_encoded(dtype)
    return not (pa.types.is_nested(dtype) or is_encoded or isinstance(dtype, pa.BaseExtensionType))


def _has_own_names(dtype: pa.DataType) -> bool:
    """Whether each field of a struct has a name that no other has, so that a dictionary can hold them."""
    return bool(0 < len({field.name for field in dtype}) == dtype.num_fields)


def _in_microseconds(dtype: pa.DataType) -> pa.DataType:
    """Return a type with microseconds in place of nanoseconds, at any depth."""
    if pa.types.is_nested(dtype):
        return with_fields(dtype, [field.with_type(_in_microseconds(field.type)) for field in children(dtype)])
    if getattr(dtype, "unit", None) != "ns":
        return dtype
    if pa.types.is_timestamp(dtype):
        return pa.timestamp("us", dtype.tz)
    return pa.duration("us") if pa.types.is_duration(dtype) else pa.time64("us")
