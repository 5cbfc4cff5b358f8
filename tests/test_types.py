"""Every Arrow type in every output format, with nulls and without: as the guide's tables say, with pyarrow's values."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import open_loader

from torch_dataloader_utils import Codes, ColumnError, PackedBytes, Padded
from torch_dataloader_utils.choices import parse_choices
from torch_dataloader_utils.convert import convert, split
from torch_dataloader_utils.delivery import Delivery

GUIDE = Path(__file__).parent.parent / "docs" / "guide" / "types.md"
FORMATS = ("torch", "numpy", "dict", "arrow")
ROWS = 13


def table_rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading of the guide."""
    text = GUIDE.read_text(encoding="utf-8").split(f"## {heading}\n", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert lines is not None
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()]
    return cells[2:]


# Examples of every type ------------------------------------------------------------------------------------------------

UNITS = ("s", "ms", "us", "ns")


def _if_known(name: str, *arguments: Any) -> list[tuple[dict[str, str], pa.DataType]]:
    """Return a type that older releases of pyarrow do not have."""
    return [({}, getattr(pa, name)(*arguments))] if hasattr(pa, name) else []


def _each_unit(make: Any, units: tuple[str, ...] = UNITS) -> list[tuple[dict[str, str], pa.DataType]]:
    return [({"unit": unit}, make(unit)) for unit in units]


EXAMPLES: dict[str, list[tuple[dict[str, str], pa.DataType]]] = {
    "bool": [({}, pa.bool_())],
    "intN": [({"N": n}, getattr(pa, f"int{n}")()) for n in ("8", "16", "32", "64")],
    "uintN": [({"N": n}, getattr(pa, f"uint{n}")()) for n in ("8", "16", "32", "64")],
    "floatN": [({"N": n}, getattr(pa, f"float{n}")()) for n in ("16", "32", "64")],
    "date32": [({}, pa.date32())],
    "date64": [({}, pa.date64())],
    "timestamp[unit]": _each_unit(pa.timestamp),
    "timestamp[unit, tz]": _each_unit(lambda unit: pa.timestamp(unit, "Europe/Berlin")),
    "duration[unit]": _each_unit(pa.duration),
    "time32[unit]": _each_unit(pa.time32, ("s", "ms")),
    "time64[unit]": _each_unit(pa.time64, ("us", "ns")),
    "month_day_nano_interval": [({}, pa.month_day_nano_interval())],
    "fixed_size_list<int32>[3]": [({}, pa.list_(pa.int32(), 3))],
    "fixed_size_list<float32>[3]": [({}, pa.list_(pa.float32(), 3))],
    "fixed_size_list<fixed_size_list<float32>[3]>[2]": [({}, pa.list_(pa.list_(pa.float32(), 3), 2))],
    "fixed_size_list<timestamp[us]>[2]": [({}, pa.list_(pa.timestamp("us"), 2))],
    "fixed_size_list<string>[2]": [({}, pa.list_(pa.string(), 2))],
    "fixed_shape_tensor<int32>[2,3]": [({}, pa.fixed_shape_tensor(pa.int32(), [2, 3]))],
    "list<int32>": [({}, pa.list_(pa.int32()))],
    "list<bool>": [({}, pa.list_(pa.bool_()))],
    "list<float32>": [({}, pa.list_(pa.float32()))],
    "list<timestamp[us]>": [({}, pa.list_(pa.timestamp("us")))],
    "list<fixed_size_list<float32>[3]>": [({}, pa.list_(pa.list_(pa.float32(), 3)))],
    "large_list<int64>": [({}, pa.large_list(pa.int64()))],
    "list_view<int64>": [({}, pa.list_view(pa.int64()))],
    "large_list_view<int64>": [({}, pa.large_list_view(pa.int64()))],
    "list<string>": [({}, pa.list_(pa.string()))],
    "list<list<int64>>": [({}, pa.list_(pa.list_(pa.int64())))],
    "list<struct>": [({}, pa.list_(pa.struct([("a", pa.int64())])))],
    "string": [({}, pa.string())],
    "large_string": [({}, pa.large_string())],
    "string_view": [({}, pa.string_view())],
    "binary": [({}, pa.binary())],
    "large_binary": [({}, pa.large_binary())],
    "binary_view": [({}, pa.binary_view())],
    "fixed_size_binary[3]": [({}, pa.binary(3))],
    "decimalN": [
        ({"N": n}, getattr(pa, f"decimal{n}")(precision, 2))
        for n, precision in (("32", 9), ("64", 18), ("128", 38), ("256", 60))
        if hasattr(pa, f"decimal{n}")
    ],
    "dictionary<string>": [({}, pa.dictionary(pa.int32(), pa.string()))],
    "dictionary<int64>": [({}, pa.dictionary(pa.int32(), pa.int64()))],
    "run_end_encoded<int64>": [({}, pa.run_end_encoded(pa.int32(), pa.int64()))],
    "struct": [({}, pa.struct([("a", pa.int64()), ("b", pa.string())]))],
    "map": [({}, pa.map_(pa.string(), pa.int64()))],
    "union": [({}, pa.dense_union([pa.field("a", pa.int64()), pa.field("b", pa.string())]))],
    "null": [({}, pa.null())],
    "bool8": _if_known("bool8"),
    "uuid": _if_known("uuid"),
    "json": _if_known("json_"),
}

CASES = [
    pytest.param(row, replacements, kind, id=str(kind)) for row, each in EXAMPLES.items() for replacements, kind in each
]


STORED = {
    "arrow.fixed_shape_tensor": lambda number: list(range(number, number + 6)),
    "arrow.bool8": lambda number: number % 2,
    "arrow.uuid": lambda number: bytes([number]) * 16,
    "arrow.json": str,
}


def value(kind: pa.DataType, number: int) -> Any:
    """Return a value of a type, another for each number."""
    types = pa.types
    if types.is_null(kind) or types.is_union(kind):
        return None
    if isinstance(kind, pa.BaseExtensionType):
        return 0
    if types.is_boolean(kind):
        return number % 3 == 0
    if types.is_integer(kind):
        limits = np.iinfo(kind.to_pandas_dtype())
        return (int(limits.min), int(limits.max), int(limits.max) - 1)[number] if number < 3 else number
    if types.is_floating(kind):
        return np.dtype(kind.to_pandas_dtype()).type(number / 8 - 1)
    if types.is_date(kind):
        return dt.date(1960 + number, 2, 28)
    if types.is_timestamp(kind):
        return dt.datetime(1960 + number, 2, 3, 4, 5, 6, tzinfo=dt.timezone.utc if kind.tz else None)
    if types.is_duration(kind):
        return dt.timedelta(days=number - 3, seconds=1)
    if types.is_time(kind):
        return dt.time(number, 2, 3)
    if types.is_interval(kind):
        return pa.MonthDayNano([number, 2, 3])
    if types.is_decimal(kind):
        return decimal.Decimal(number * 1001 - 5000).scaleb(-2)
    if types.is_fixed_size_binary(kind):
        return bytes([number, 0, 255])
    if types.is_fixed_size_list(kind):
        return [value(kind.value_type, number + place) for place in range(kind.list_size)]
    if types.is_map(kind):
        return [(f"key {number}", number)]
    if types.is_struct(kind):
        return {field.name: value(field.type, number) for field in kind}
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return value(kind.value_type, number % 3 + 3)
    if types.is_nested(kind):
        return [value(kind.value_type, number + place) for place in range(number % 4)]
    text = "" if number == 4 else f"é\u0000{number}" * (number % 3 + 1)
    return text.encode() if "binary" in str(kind) else text


def example(kind: pa.DataType, *, nulls: bool) -> pa.Array:
    """Return a column of a type: its first rows and every fourth null where there are nulls, and some inside lists."""
    values = [None if nulls and (number < 3 or number % 4 == 0) else value(kind, number) for number in range(ROWS)]
    if nulls and "list" in str(kind) and values[7]:
        values[7] = [None, *values[7][1:]]
    if pa.types.is_union(kind):
        places = pa.array([0, 1] * 2, pa.int8()), pa.array([0, 0, 1, 1], pa.int32())
        children = [pa.array([1, None if nulls else 2]), pa.array(["x", "y"])]
        return pa.UnionArray.from_dense(*places, children, [field.name for field in kind])
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode()
    if pa.types.is_run_end_encoded(kind):
        ends = pa.array(range(1, ROWS + 1), pa.int32())
        return pa.RunEndEncodedArray.from_arrays(ends, pa.array(values, kind.value_type))
    if isinstance(kind, pa.BaseExtensionType):
        missing = [row is None for row in values]
        rows = [None if null else STORED[kind.extension_name](number) for number, null in enumerate(missing)]
        return pa.ExtensionArray.from_storage(kind, pa.array(rows, kind.storage_type))
    return pa.array(values, kind)


# What is delivered, and what is to be ---------------------------------------------------------------------------------


class Source:
    """A column `x` in a file of several row groups, or in memory where Parquet cannot store its type."""

    def __init__(self, directory: Path, column: pa.Array) -> None:
        self.table = pa.table({"x": column})
        self.directory: Path | None = directory
        try:
            pq.write_table(self.table, directory / "a.parquet", row_group_size=5)
            if pq.read_schema(directory / "a.parquet").types != self.table.schema.types:
                self.directory = None
        except (pa.ArrowException, NotImplementedError):
            self.directory = None

    def correct(self, *, listed: bool) -> list[Any]:
        """What pyarrow reads of the file: as it becomes Python lists, or with times as integers."""
        table = self.table if self.directory is None else pq.read_table(self.directory / "a.parquet")
        return [row for chunk in table["x"].chunks for row in rows_of(chunk, listed=listed)]

    def batches(self, **options: Any) -> list[Any]:
        """Deliver it."""
        if self.directory is not None:
            return list(open_loader(self.directory, row_id_column=None, batch_size=4, **options)[0])
        names = ("output_format", "column_formats", "fill_nulls", "mask_nulls")
        choices = parse_choices(*(options.get(name) for name in names))
        delivery = Delivery.of(self.table.schema, choices)
        sizes = [min(4, len(self.table) - start) for start in range(0, len(self.table), 4)]
        return list(split(convert(delivery.deliver(self.table), delivery), sizes))


def rows_of(values: pa.Array, *, listed: bool) -> list[Any]:
    """Return pyarrow's own reading of an array's rows, times as integers unless they are to be Python's."""
    kind = values.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return [row and np.reshape(row, kind.shape).tolist() for row in values.storage.to_pylist()]
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.bool8":
        return [None if row is None else bool(row) for row in values.storage.to_pylist()]
    if listed or pa.types.is_run_end_encoded(kind):
        return [_known(row) for row in values.to_pylist()]
    return [_raw(scalar) for scalar in values]


def _raw(scalar: Any) -> Any:
    if not scalar.is_valid:
        return None
    kind = scalar.type
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return scalar.value
    if "list" in str(kind).partition("<")[0]:
        return [_raw(one) for one in scalar.values]
    found = scalar.as_py()
    return float(found) if isinstance(found, np.floating) else found


def python_rows(values: Any) -> list[Any]:
    """Return what was delivered of a column row by row, times as integers, NaN and NaT as None."""
    if isinstance(values, pa.ChunkedArray):
        return [row for chunk in values.chunks for row in rows_of(chunk, listed=True)]
    if isinstance(values, PackedBytes):
        content, ends = bytes(np.asarray(values.values)), np.asarray(values.offsets).tolist()
        return [content[start:stop] for start, stop in pairwise(ends)]
    if isinstance(values, torch.Tensor) and values.is_nested:
        return [python_rows(row) for row in values.unbind()]
    if isinstance(values, np.ndarray) and values.dtype.kind in "mM":
        return [_where(*pair) for pair in zip(np.isnat(values), values.astype(np.int64), strict=True)]
    if isinstance(values, (torch.Tensor, np.ndarray)):
        return [_known(row) for row in values.tolist()]
    return [python_rows(row) if isinstance(row, np.ndarray) else _known(row) for row in values]


def _where(missing: Any, row: Any) -> Any:
    return [_where(*pair) for pair in zip(missing, row, strict=True)] if row.ndim else None if missing else int(row)


def _known(row: Any) -> Any:
    """Return a value with None for NaN, and a time that Python has as the integer that it is to be compared as."""
    if isinstance(row, list):
        return [_known(one) for one in row]
    if isinstance(row, (float, np.floating)):
        return None if math.isnan(row) else float(row)
    return row


def is_listed(values: Any) -> bool:
    """Whether a column is a Python list of Python values, or Arrow's."""
    is_list = isinstance(values, list) and not any(isinstance(row, np.ndarray) for row in values)
    return is_list or isinstance(values, pa.ChunkedArray)


def together(batches: list[Any], name: str = "x") -> tuple[list[Any], bool]:
    """Return the rows of all batches, and whether they are Python's own values."""
    listed = all(is_listed(batch[name]) for batch in batches)
    return [row for batch in batches for row in python_rows(batch[name])], listed


def described(values: Any) -> str:
    """Return how the guide says what a column is in a batch."""
    if isinstance(values, PackedBytes):
        return "`PackedBytes`"
    if isinstance(values, torch.Tensor) and values.is_nested:
        inner = "".join(f", {size}" for size in values.shape[2:])
        return f"jagged `{str(values.dtype)[6:]}`" + (f" `(rows, *{inner})`" if inner else "")
    if isinstance(values, (torch.Tensor, np.ndarray)):
        dtype = str(values.dtype).removeprefix("torch.")
        return f"`{dtype}`" + (f" `(rows, {', '.join(map(str, values.shape[1:]))})`" if values.ndim > 1 else "")
    if isinstance(values, pa.ChunkedArray):
        return f"`{values.type}`"
    example = next((row for row in values if row is not None), None)
    if len({type(row) for row in values if row is not None}) > 1:
        return "list of values"
    if isinstance(example, np.ndarray):
        inner = "".join(f", {size}" for size in example.shape[1:])
        return f"list of `{example.dtype}` arrays" + (f" `(*{inner})`" if inner else "")
    return f"list of `{type(example).__name__}`"


# The table ------------------------------------------------------------------------------------------------------------

TABLE = {cells[0].strip("`"): cells[1:] for cells in table_rows("Every type")}


def cell_for(row: str, replacements: dict[str, str], output_format: str) -> str:
    """Return what the guide says of a type in an output format."""
    cell = TABLE[row][("torch", "numpy", "dict", "arrow").index(output_format)]
    for placeholder, text in replacements.items():
        cell = cell.replace(f"[{placeholder}]", f"[{text}]") if placeholder == "unit" else cell.replace("N`", f"{text}`")
    return cell


def test_the_table_has_a_row_for_each_type_that_is_tested_here():
    assert list(TABLE) == list(EXAMPLES)


@pytest.mark.parametrize("output_format", FORMATS)
@pytest.mark.parametrize(("row", "replacements", "kind"), CASES)
def test_a_type_is_delivered_as_the_table_says_with_the_values_that_pyarrow_reads(
    tmp_path, row, replacements, kind, output_format
):
    source = Source(tmp_path, example(kind, nulls=False))
    batches = source.batches(output_format=output_format)
    cell = cell_for(row, replacements, output_format)
    for batch in batches:
        values = batch["x"]
        if cell == "as it is":
            assert values.type == kind
        elif isinstance(values, list):  # lists may be empty
            assert described([row for batch in batches for row in batch["x"]]) == cell
        else:
            assert described(values) == cell
    rows, listed = together(batches)
    assert rows == source.correct(listed=listed)


# Nulls ----------------------------------------------------------------------------------------------------------------


def innermost(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values in lists, without the ways to store them."""
    if isinstance(kind, pa.FixedShapeTensorType) or "dictionary" in str(kind) or "run_end" in str(kind):
        return kind.value_type
    if isinstance(kind, pa.BaseExtensionType):
        return pa.bool_() if kind.extension_name == "arrow.bool8" else kind
    return innermost(kind.value_type) if "list" in str(kind).partition("<")[0] else kind


def shape_of(kind: pa.DataType) -> list[int] | None:
    """Return the sizes of fixed-size lists; None for lists of different lengths."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return list(kind.shape)
    if pa.types.is_fixed_size_list(kind):
        inner = shape_of(kind.value_type)
        return None if inner is None else [kind.list_size, *inner]
    return None if "list" in str(kind).partition("<")[0] else []


def filled(row: Any, kind: pa.DataType, value: Any) -> Any:
    """Return a row with a value in place of each null: at all places of fixed-size lists, and none of a null list."""
    shape = shape_of(kind)
    if shape == []:
        return value if row is None else row
    if shape is not None:
        inner = shape[1:]
        kinds = pa.list_(pa.int8(), shape[1]) if len(inner) == 1 else pa.int8()
        return [filled(one, kinds, value) for one in ([None] * shape[0] if row is None else row)]
    return [] if row is None else [filled(one, kind.value_type, value) for one in row]


def marked(row: Any, shape: list[int] | None) -> Any:
    """Return where a row is null: place by place in fixed-size lists."""
    if not shape:
        return row is None
    return [marked(one, shape[1:]) for one in ([None] * shape[0] if row is None else row)]


def can_be_filled(kind: pa.DataType) -> bool:
    leaf = innermost(kind)
    is_odd = pa.types.is_nested(leaf) or pa.types.is_null(leaf) or pa.types.is_interval(leaf)
    return not is_odd and not isinstance(leaf, pa.BaseExtensionType)


@pytest.mark.parametrize("output_format", FORMATS)
@pytest.mark.parametrize(("row", "replacements", "kind"), CASES)
def test_nulls_are_what_the_table_says_and_what_is_chosen(tmp_path, row, replacements, kind, output_format):
    source = Source(tmp_path, example(kind, nulls=True))
    says = TABLE[row][-1].split(" / ")
    without_a_choice = "`None`" if output_format in ("dict", "arrow") else says[-1 if output_format == "numpy" else 0]
    if without_a_choice == "a choice":
        with pytest.raises(ColumnError, match=r"column 'x' holds \d+ nulls.*fill_nulls=\{'x'.*mask_nulls=\['x'\]"):
            source.batches(output_format=output_format)
    else:
        batches = source.batches(output_format=output_format)
        rows, listed = together(batches)
        correct = source.correct(listed=listed)
        if without_a_choice == "NaN":
            correct = [filled(one, kind, None) for one in correct]
        if without_a_choice == "NaT":
            assert {batch["x"].dtype.kind for batch in batches} <= {"m", "M"}
            correct = [filled(one, kind, None) for one in correct]
        assert rows == correct
    _check_fill(source, kind, output_format)
    _check_mask(source, kind, output_format, refuses=without_a_choice == "a choice")


def _check_fill(source: Source, kind: pa.DataType, output_format: str) -> None:
    leaf = innermost(kind)
    chosen = value(leaf, 5)
    options = {"output_format": output_format, "fill_nulls": {"x": chosen}}
    if not can_be_filled(kind):
        with pytest.raises(ColumnError, match="cannot be filled"):
            source.batches(**options | {"fill_nulls": {"x": 0}})
        return
    rows, listed = together(source.batches(**options))
    [as_read] = rows_of(pa.array([chosen], leaf), listed=listed)
    assert rows == [filled(one, kind, as_read) for one in source.correct(listed=listed)]


def _check_mask(source: Source, kind: pa.DataType, output_format: str, *, refuses: bool) -> None:
    """Lists of integers with nulls in them need a value for these, too."""
    options: dict[str, Any] = {"output_format": output_format, "mask_nulls": ["x"]}
    zero: Any = None
    leaf = innermost(kind)
    if refuses:
        zero = False if pa.types.is_boolean(leaf) else 0
        has_nat = output_format == "numpy" and pa.types.is_temporal(leaf) and not pa.types.is_time(leaf)
        if has_nat or pa.types.is_floating(leaf):
            zero = None
        elif shape_of(kind) is None:
            with pytest.raises(ColumnError, match=r"fill_nulls=\{'x': ...\} what stands for those inside lists"):
                source.batches(**options)
            options["fill_nulls"] = {"x": zero}
    batches = source.batches(**options)
    rows, listed = together(batches)
    correct = source.correct(listed=listed)
    marks = [mark for batch in batches for mark in python_rows(batch["x_is_null"])]
    assert marks == [marked(one, shape_of(kind)) for one in correct]
    if output_format in ("torch", "numpy"):
        assert {str(batch["x_is_null"].dtype).removeprefix("torch.") for batch in batches} == {"bool"}
    if refuses or not listed:
        assert rows == [filled(one, kind, zero) for one in correct]
    else:
        assert rows == correct
