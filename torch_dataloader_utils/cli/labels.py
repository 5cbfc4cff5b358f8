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
        names: Names of the labels, the most frequent first, or of the bins from the lowest; then ``others`` or ``NaN``,
            and ``null``, as far as they are there.
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
    null = len(values)
    parts = [chunk.indices.fill_null(null).to_numpy() for chunk in whole.chunks]
    counts = np.sum([np.bincount(part, minlength=null + 1) for part in parts], axis=0)
    if pa.types.is_floating(values.type) and null > MOST_LABELS:
        chosen = _bins(values.to_numpy(zero_copy_only=False).astype(np.float64), counts[:-1])
    else:
        chosen = _most_frequent(values, counts[:-1])
    return _numbered(column, parts, counts, chosen)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The label of each value, the names of the labels, and what they are."""

    label_of: npt.NDArray[np.intp]
    names: list[str]
    described: str = ""


def _most_frequent(values: pa.Array, counts: npt.NDArray[np.intp]) -> _Chosen:
    """Make the most frequent values labels, and all others one."""
    ranked = np.argsort(-counts, kind="stable")[:MOST_LABELS]
    label_of = np.full(len(values), len(ranked), dtype=np.intp)
    label_of[ranked] = np.arange(len(ranked))
    names = [str(values[int(index)].as_py()) for index in ranked]
    if len(values) <= MOST_LABELS:
        return _Chosen(label_of, names)
    described = f"the {MOST_LABELS} most frequent of {len(values):,} values; all others count as one"
    return _Chosen(label_of, [*names, "others"], described)


def _bins(values: npt.NDArray[np.float64], counts: npt.NDArray[np.intp]) -> _Chosen:
    """Make bins of about equally many rows, from the lowest values to the highest, and NaN a label of its own."""
    order = np.argsort(values, kind="stable")  # NaN last
    is_number = ~np.isnan(values[order])
    before = np.cumsum(counts[order]) - counts[order]
    total = max(1, int(counts[order][is_number].sum()))
    label_of = np.empty(len(values), dtype=np.intp)
    label_of[order] = np.where(is_number, np.minimum(before * BINS // total, BINS - 1), BINS)
    names = [*(f"bin {number + 1}" for number in range(BINS)), "NaN"]
    return _Chosen(label_of, names, f"{BINS} bins of about equally many rows")


def _encoded(column: str, chunk: pa.Array) -> pa.DictionaryArray:
    """Return values as indices into a dictionary of them."""
    if pa.types.is_dictionary(chunk.type):
        chunk = chunk.cast(chunk.type.value_type)
    if pa.types.is_boolean(chunk.type) or pa.types.is_temporal(chunk.type):
        chunk = chunk.cast(pa.string())
    if pa.types.is_nested(chunk.type) or pa.types.is_null(chunk.type):
        msg = f"column {column!r} is {chunk.type}: labels are strings, integers, booleans, floats or dates"
        raise ColumnError(msg)
    return pc.dictionary_encode(chunk)


def _numbered(
    column: str, parts: list[npt.NDArray[np.int32]], value_counts: npt.NDArray[np.intp], chosen: _Chosen
) -> Labels:
    """Return labels without those that no row has. The parts have each row's value; the last of the values is null."""
    names, label_of = [*chosen.names, "null"], np.append(chosen.label_of, len(chosen.names))
    counts = np.bincount(label_of, weights=value_counts, minlength=len(names)).astype(int)
    present = np.flatnonzero(counts)
    if len(present) < 2:  # noqa: PLR2004 - one label is mixed in any order
        only = "no rows" if not len(present) else f"one value alone, {names[present[0]]!r}"
        raise ColumnError(f"column {column!r} has {only}: there is nothing to mix")
    numbers = np.zeros(len(names), dtype=np.uint8)
    numbers[present] = np.arange(len(present))
    code_of = numbers[label_of]
    codes = np.concatenate([code_of[part] for part in parts])
    kept = tuple(int(count) for count in counts[present])
    return Labels(tuple(names[index] for index in present), codes, kept, chosen.described)
