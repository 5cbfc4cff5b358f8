"""The labels of a column as small numbers: few enough to count, whatever the column's type."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.errors import ColumnError

MOST_LABELS = 50
"""Labels that are told apart. If there are more, the most frequent ones are, and all others are one."""

BINS = 10
"""Bins of equally many rows, of floats with more values than `MOST_LABELS`."""


@dataclass(frozen=True, slots=True)
class Labels:
    """The label of each row, in the order of the files.

    Attributes:
        names: Names of the labels, the most frequent first; then ``others``, ``NaN`` and ``null``, as far as they are
            there.
        codes: Each row's label, as an index into the names.
        counts: How many rows have each label.
        described: What the labels are, where they are not simply the column's values.
    """

    names: tuple[str, ...]
    codes: npt.NDArray[np.uint8]
    counts: tuple[int, ...]
    described: str


def read_labels(column: str, chunks: Iterable[pa.Array]) -> Labels:
    """Return the labels of a column, given in parts.

    Raises:
        ColumnError: If its values cannot be labels, or are all the same.
    """
    encoded = [_encoded(column, chunk) for chunk in chunks]
    if not encoded:
        raise ColumnError(f"column {column!r} has no rows")
    whole = pa.chunked_array(encoded).unify_dictionaries()
    values = whole.chunk(0).dictionary
    codes = np.concatenate([chunk.indices.fill_null(len(values)).to_numpy() for chunk in whole.chunks])
    names = [str(value) for value in values.to_pylist()]
    if pa.types.is_floating(values.type) and len(values) > MOST_LABELS:
        return _binned(column, values.to_numpy(zero_copy_only=False).astype(np.float64), codes)
    counts = np.bincount(codes, minlength=len(names) + 1)
    ranked = np.argsort(-counts[:-1], kind="stable")
    kept = ranked[:MOST_LABELS]
    labels = np.full(len(names) + 1, len(kept), dtype=np.intp)
    labels[kept] = np.arange(len(kept))
    labels[-1] = len(kept) + 1
    described = f"the {MOST_LABELS} most frequent of {len(names):,} values; all others count as one" * (
        len(names) > MOST_LABELS
    )
    return _of_codes(column, labels[codes], [*(names[index] for index in kept), "others", "null"], described)


def _encoded(column: str, chunk: pa.Array) -> pa.DictionaryArray:
    """Return values as indices into a dictionary of them."""
    if pa.types.is_dictionary(chunk.type):
        chunk = chunk.cast(chunk.type.value_type)
    if pa.types.is_boolean(chunk.type):
        chunk = chunk.cast(pa.string())
    if pa.types.is_nested(chunk.type) or pa.types.is_null(chunk.type):
        msg = f"column {column!r} is {chunk.type}: labels are strings, integers, booleans, floats or dates"
        raise ColumnError(msg)
    return pc.dictionary_encode(chunk)


def _binned(column: str, values: npt.NDArray[np.float64], codes: npt.NDArray[np.int32]) -> Labels:
    """Return the labels of floats: bins of about equally many rows, from the lowest to the highest."""
    known = codes < len(values)
    order = np.argsort(values, kind="stable")  # NaN last
    counts = np.bincount(codes, minlength=len(values) + 1)[:-1][order]
    is_number = ~np.isnan(values[order])
    before = np.cumsum(counts) - counts
    bins = np.minimum(before * BINS // max(1, int(counts[is_number].sum())), BINS - 1)
    bins[~is_number] = BINS
    of_value = np.empty(len(values) + 1, dtype=np.intp)
    of_value[order] = bins
    of_value[-1] = BINS + 1
    names = [f"bin {number + 1}" for number in range(BINS)]
    found = of_value[np.where(known, codes, len(values))]
    return _of_codes(column, found, [*names, "NaN", "null"], f"{BINS} bins of about equally many rows")


def _of_codes(column: str, codes: npt.NDArray[np.intp], names: list[str], described: str) -> Labels:
    """Return labels without those that no row has."""
    counts = np.bincount(codes, minlength=len(names))
    present = np.flatnonzero(counts)
    if len(present) < 2:  # noqa: PLR2004 - one label is mixed in any order
        only = "no rows" if not len(present) else f"one value alone, {names[present[0]]!r}"
        raise ColumnError(f"column {column!r} has {only}: there is nothing to mix")
    numbers = np.zeros(len(names), dtype=np.uint8)
    numbers[present] = np.arange(len(present))
    kept = tuple(int(counts[index]) for index in present)
    return Labels(tuple(names[index] for index in present), numbers[codes], kept, described)
