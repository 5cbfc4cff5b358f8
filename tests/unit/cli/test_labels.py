"""Columns as labels."""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from torch_dataloader_utils.cli.labels import BINS, MOST_LABELS, Labels, read_labels
from torch_dataloader_utils.errors import ColumnError


def labels_of(*parts: Any, dtype=None) -> Labels:
    return read_labels("y", [array_of(part, dtype) for part in parts])


def array_of(values: list[Any], dtype: pa.DataType | None) -> pa.Array:
    if dtype is None or not pa.types.is_dictionary(dtype):
        return pa.array(values, dtype)
    encoded = pa.array(values, dtype.value_type).dictionary_encode()
    return pa.DictionaryArray.from_arrays(encoded.indices.cast(dtype.index_type), encoded.dictionary)


def values_of(labels: Labels) -> list[str]:
    return [labels.names[code] for code in labels.codes]


@pytest.mark.parametrize(
    ("parts", "dtype", "expected"),
    [
        ([["b", "a"], ["a", None]], pa.string(), ["b", "a", "a", "null"]),
        ([["b", "a"], ["a", "c"]], pa.dictionary(pa.int8(), pa.large_string()), ["b", "a", "a", "c"]),
        ([[3, -1], [3, None]], pa.int16(), ["3", "-1", "3", "null"]),
        ([[True, None], [False, True]], pa.bool_(), ["true", "null", "false", "true"]),
        ([[0.5, float("nan")], [0.5, None]], pa.float32(), ["0.5", "nan", "0.5", "null"]),
        ([[dt.date(2024, 2, 29)], [dt.date(2024, 3, 1)]], pa.date32(), ["2024-02-29", "2024-03-01"]),
        ([[1], [2, None]], pa.timestamp("ns"), [f"1970-01-01 00:00:00.00000000{n}" for n in (1, 2)] + ["null"]),
    ],
    ids=["strings", "dictionary", "integers", "booleans", "floats with few values", "dates", "nanoseconds"],
)
def test_each_row_gets_the_label_of_its_value_over_all_parts(parts, dtype, expected):
    labels = labels_of(*parts, dtype=dtype)
    assert values_of(labels) == expected
    assert labels.counts == tuple(expected.count(name) for name in labels.names)
    assert labels.described == ""


def test_of_many_values_the_most_frequent_are_told_apart():
    values = [f"v{number}" for number in range(80) for _ in range(number + 1)]
    labels = labels_of([*values, None])
    assert len(labels.names) == MOST_LABELS + 2
    assert labels.names[:2] == ("v79", "v78")
    assert labels.names[-2:] == ("others", "null")
    assert labels.counts[:2] == (80, 79)
    assert labels.counts[-2:] == (30 * 31 // 2, 1)
    assert values_of(labels)[0] == "others"
    assert "50 most frequent of 80 values" in labels.described


def test_floats_with_many_values_are_put_into_bins_of_equally_many_rows():
    values = np.random.default_rng(0).normal(size=10_000)
    values[:100] = np.nan
    labels = labels_of(values[:3_000], pa.array(values[3_000:], from_pandas=False), dtype=None)
    assert labels.names == (*(f"bin {number + 1}" for number in range(BINS)), "NaN")
    assert labels.counts == (*[990] * BINS, 100)
    order = np.argsort(values)[:-100]
    assert (np.diff(labels.codes[order].astype(int)) >= 0).all()


def test_nulls_among_binned_floats_are_a_label_of_their_own():
    labels = labels_of([None, *np.linspace(0, 1, 100)], dtype=pa.float64())
    assert labels.names[-1] == "null"
    assert labels.codes[0] == len(labels.names) - 1
    assert labels.counts[-1] == 1


@pytest.mark.parametrize(
    "dtype", [pa.list_(pa.int64()), pa.struct({"x": pa.int64()}), pa.null()], ids=["list", "struct", "null"]
)
def test_nested_columns_are_refused(dtype):
    with pytest.raises(ColumnError, match="labels are strings, integers"):
        labels_of([None], dtype=dtype)


@pytest.mark.parametrize("parts", [[[1, 1], [1]], [["a"]], [[None, None]]], ids=["integers", "a row", "nulls"])
def test_a_single_label_is_refused(parts):
    with pytest.raises(ColumnError, match="one value alone"):
        labels_of(*parts, dtype=pa.int64() if parts[0][0] is None else None)


def test_no_rows_are_refused():
    with pytest.raises(ColumnError, match="no rows"):
        read_labels("y", [])
