"""Integers in text that are read as floats, since other values of their column are: which floats may not hold them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

LARGEST_EXACT = 2**53
"""Every smaller integer is a float64 without loss."""

MOST_DIGITS = 400
"""More than the largest float has. Python refuses to make integers of thousands of digits."""

DIGITS = len(str(LARGEST_EXACT))
"""An integer that is larger has as many digits, or more."""


def floats_of(
    values: pa.Array | pa.ChunkedArray, inferred: pa.DataType, is_of: Callable[[pa.DataType], bool]
) -> Iterator[pa.Array | pa.ChunkedArray]:
    """Yield the floats of a column, at any depth, that are of a kind by the type that was inferred of the file."""
    if pa.types.is_floating(values.type) and is_of(inferred):
        yield values
    elif pa.types.is_list(values.type) and pa.types.is_list(inferred):
        yield from floats_of(pc.list_flatten(values), inferred.value_type, is_of)
    elif pa.types.is_struct(values.type) and pa.types.is_struct(inferred):
        for field in inferred:
            index = values.type.get_field_index(field.name)
            if index >= 0:
                yield from floats_of(pc.struct_field(values, [index]), field.type, is_of)


def bounds(values: pa.Array | pa.ChunkedArray) -> tuple[float, float]:
    """Return the least and the greatest float of a column; NaN if there is one, infinities if there is no value.

    NumPy looks through values in a quarter of Arrow's time.
    """
    least, most = math.inf, -math.inf
    for chunk in values.chunks if isinstance(values, pa.ChunkedArray) else [values]:
        numbers = (chunk.drop_null() if chunk.null_count else chunk).to_numpy()
        if len(numbers):
            least, most = float(np.minimum(least, numbers.min())), float(np.maximum(most, numbers.max()))
    return least, most


def are_large(least: float, most: float) -> bool:
    """Whether floats between these bounds may stand for an integer that they do not hold."""
    return least <= -LARGEST_EXACT or most >= LARGEST_EXACT


def may_be_rounded(values: pa.Array | pa.ChunkedArray) -> bool:
    """Whether there is a float so large that it may stand for an integer that it does not hold."""
    least, most = bounds(values)
    if math.isnan(least):
        least, most = (bound.as_py() or 0.0 for bound in pc.min_max(values).values())  # without NaN
    return are_large(least, most)


def integer_of(text: str) -> int:
    """Return the integer that a text stands for, or one of its first digits, if that is beyond all floats as well."""
    return int(text.strip()[:MOST_DIGITS])


def is_rounded(value: int) -> bool:
    """Whether no float64 holds an integer."""
    try:
        return float(value) != value
    except OverflowError:
        return True


def rounded(column: str, value: int, option: str) -> str:
    """Return what is wrong with such an integer, and what to do; the option gives the column's type."""
    what = f"column {column!r} is read as floats, and none of them is the integer {value}: "
    return f"{what}set its type by format_options={{{option}}}; float64 rounds it"
