"""Every Arrow type in every output format, with nulls and without: as the guide's tables say, with pyarrow's values."""

from __future__ import annotations

import datetime as dt
import decimal
import functools
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import examples, open_loader

from torch_dataloader_utils import Codes, ColumnError, PackedBytes, Padded, StructuredDataset
from torch_dataloader_utils.columns.convert import convert, split
from torch_dataloader_utils.columns.options import parse_column_options
from torch_dataloader_utils.columns.transform import ColumnTransform

IS_OLD = int(pa.__version__.split(".")[0]) < 26
not_with_old_pyarrow = pytest.mark.skipif(IS_OLD, reason="this pyarrow cannot read such columns back")

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "types.md"
FORMATS = ("torch", "numpy", "dict", "arrow")
ROWS = 13


def table_rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading of the guide."""
    text = GUIDE.read_text(encoding="utf-8").split(f"## {heading}\n", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert lines is not None
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()]
    return cells[2:]


# Examples of every type -----------------------------------------------------------------------------------------------

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
    "string_view": [] if IS_OLD else [({}, pa.string_view())],
    "binary": [({}, pa.binary())],
    "large_binary": [({}, pa.large_binary())],
    "binary_view": [] if IS_OLD else [({}, pa.binary_view())],
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
    if isinstance(kind, pa.BaseExtensionType):
        return 0
    return next(make(kind, number) for is_kind, make in VALUES if is_kind(kind))


def _integer(kind: pa.DataType, number: int) -> int:
    limits = np.iinfo(str(kind))
    return (int(limits.min), int(limits.max), int(limits.max) - 1)[number] if number < 3 else number


def _text(kind: pa.DataType, number: int) -> Any:
    text = "" if number == 4 else f"é\u0000{number}" * (number % 3 + 1)
    return text.encode() if "binary" in str(kind) else text


def _list(kind: pa.DataType, number: int) -> list[Any]:
    size = kind.list_size if pa.types.is_fixed_size_list(kind) else number % 4
    return [value(kind.value_type, number + place) for place in range(size)]


VALUES: list[tuple[Any, Any]] = [
    (pa.types.is_null, lambda *_: None),
    (pa.types.is_union, lambda *_: None),
    (pa.types.is_boolean, lambda _, number: number % 3 == 0),
    (pa.types.is_integer, _integer),
    (pa.types.is_floating, lambda kind, number: np.dtype(f"float{kind.bit_width}").type(number / 8 - 1)),
    (pa.types.is_date, lambda _, number: dt.date(1960 + number, 2, 28)),
    (
        pa.types.is_timestamp,
        lambda kind, number: dt.datetime(1960 + number, 2, 3, 4, 5, 6, tzinfo=dt.timezone.utc if kind.tz else None),
    ),
    (pa.types.is_duration, lambda _, number: dt.timedelta(days=number - 3, seconds=1)),
    (pa.types.is_time, lambda _, number: dt.time(number, 2, 3)),
    (pa.types.is_interval, lambda _, number: pa.MonthDayNano([number, 2, 3])),
    (pa.types.is_decimal, lambda _, number: decimal.Decimal(number * 1001 - 5000).scaleb(-2)),
    (pa.types.is_fixed_size_binary, lambda _, number: bytes([number, 0, 255])),
    (pa.types.is_map, lambda _, number: [(f"key {number}", number)]),
    (pa.types.is_struct, lambda kind, number: {field.name: value(field.type, number) for field in kind}),
    (pa.types.is_dictionary, lambda kind, number: value(kind.value_type, number % 3 + 3)),
    (pa.types.is_run_end_encoded, lambda kind, number: value(kind.value_type, number % 3 + 3)),
    (lambda kind: "list" in str(kind).partition("<")[0], _list),
    (lambda _: True, _text),
]


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


class WrittenFiles:
    """A column `x` in a file of some row groups; in memory if pyarrow cannot store it, or an old one cannot read it."""

    def __init__(self, directory: Path, column: pa.Array) -> None:
        self.table = pa.table({"x": column})
        self.directory: Path | None = directory
        try:
            pq.write_table(self.table, directory / "a.parquet", row_group_size=5)
            if pq.read_schema(directory / "a.parquet").types != self.table.schema.types:
                self.directory = None
            elif IS_OLD:
                pq.read_table(directory / "a.parquet")  # it may not be able to
        except (pa.ArrowException, NotImplementedError):
            self.directory = None

    @functools.cached_property
    def as_read(self) -> pa.Table:
        """The table, as pyarrow reads it."""
        return self.table if self.directory is None else pq.read_table(self.directory / "a.parquet")

    def correct(self, *, listed: bool) -> list[Any]:
        """What pyarrow reads of the file: as it becomes Python lists, or with times as integers."""
        return [row for chunk in self.as_read["x"].chunks for row in rows_of(chunk, listed=listed)]

    def batches(self, **options: Any) -> list[Any]:
        """Deliver it."""
        if self.directory is not None:
            return list(open_loader(self.directory, row_id_column=None, batch_size=4, **options)[0])
        names = ("output_format", "column_formats", "fill_nulls", "mask_nulls")
        choices = parse_column_options(*(options.get(name) for name in names))
        delivery = ColumnTransform.of(self.table.schema, choices)
        sizes = [min(4, len(self.table) - start) for start in range(0, len(self.table), 4)]
        return list(split(convert(delivery.apply(self.table), delivery), sizes))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[pa.DataType, bool], WrittenFiles]:
    """Write a column of a type, without nulls or with some: once for all output formats."""

    @functools.cache
    def write(kind: pa.DataType, nulls: bool) -> WrittenFiles:
        return WrittenFiles(tmp_path_factory.mktemp("column"), example(kind, nulls=nulls))

    return write


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
    if isinstance(values, (list, PackedBytes)):
        return _described_rows(values)
    if isinstance(values, torch.Tensor) and values.is_nested:
        inner = "".join(f", {size}" for size in values.shape[2:])
        return f"jagged `{str(values.dtype)[6:]}`" + (f" `(rows, *{inner})`" if inner else "")
    if isinstance(values, pa.ChunkedArray):
        return f"`{values.type}`"
    dtype = str(values.dtype).removeprefix("torch.")
    return f"`{dtype}`" + (f" `(rows, {', '.join(map(str, values.shape[1:]))})`" if values.ndim > 1 else "")


def _described_rows(values: list[Any] | PackedBytes) -> str:
    if isinstance(values, PackedBytes):
        return "`PackedBytes`"
    example = next((row for row in values if row is not None), None)
    if len({type(row) for row in values if row is not None}) > 1:
        return "list of values"
    if isinstance(example, np.ndarray):
        inner = "".join(f", {size}" for size in example.shape[1:])
        return f"list of `{example.dtype}` arrays" + (f" `(*{inner})`" if inner else "")
    return f"list of `{type(example).__name__.removesuffix('16')}`"


# The table ------------------------------------------------------------------------------------------------------------

TABLE = {cells[0].strip("`"): cells[1:] for cells in table_rows("Every type")}


def cell_for(row: str, replacements: dict[str, str], output_format: str) -> str:
    """Return what the guide says of a type in an output format."""
    cell = TABLE[row][("torch", "numpy", "dict", "arrow").index(output_format)]
    for placeholder, text in replacements.items():
        cell = (
            cell.replace(f"[{placeholder}]", f"[{text}]") if placeholder == "unit" else cell.replace("N`", f"{text}`")
        )
    return cell


def test_the_table_has_a_row_for_each_type_that_is_tested_here():
    assert list(TABLE) == list(EXAMPLES)


@pytest.mark.parametrize("output_format", FORMATS)
@pytest.mark.parametrize(("row", "replacements", "kind"), CASES)
def test_a_type_is_delivered_as_the_table_says_with_the_values_that_pyarrow_reads(
    written, row, replacements, kind, output_format
):
    source = written(kind, False)
    batches = source.batches(output_format=output_format)
    cell = cell_for(row, replacements, output_format)
    for batch in batches:
        values = batch["x"]
        if cell == "unchanged":
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


def is_ragged(kind: pa.DataType) -> bool:
    """Whether it is a type of lists of different lengths."""
    return "list" in str(kind).partition("<")[0] and not pa.types.is_fixed_size_list(kind)


def shape_of(kind: pa.DataType) -> list[int]:
    """Return the sizes of fixed-size lists."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return list(kind.shape)
    return [kind.list_size, *shape_of(kind.value_type)] if pa.types.is_fixed_size_list(kind) else []


def filled(row: Any, kind: pa.DataType, value: Any) -> Any:
    """Return a row with a value in place of each null: at all places of fixed-size lists, and none of a null list."""
    if is_ragged(kind):
        return [] if row is None else [filled(one, kind.value_type, value) for one in row]
    shape = shape_of(kind)
    if not shape:
        return value if row is None else row
    inner = pa.list_(pa.int8(), shape[1]) if isinstance(kind, pa.FixedShapeTensorType) else kind.value_type
    return [filled(one, inner, value) for one in ([None] * shape[0] if row is None else row)]


def marked(row: Any, shape: list[int]) -> Any:
    """Return where a row is null: place by place in fixed-size lists."""
    if not shape:
        return row is None
    return [marked(one, shape[1:]) for one in ([None] * shape[0] if row is None else row)]


def can_be_filled(kind: pa.DataType) -> bool:
    leaf = innermost(kind)
    is_odd = pa.types.is_nested(leaf) or pa.types.is_null(leaf) or pa.types.is_interval(leaf)
    return not is_odd and not isinstance(leaf, pa.BaseExtensionType)


@pytest.mark.parametrize(
    ("row", "replacements", "kind", "output_format"),
    [
        pytest.param(*case.values, output_format, id=f"{case.id}-{output_format}", marks=marks)
        for number, case in enumerate(CASES)
        for output_format in FORMATS
        # As Python's values and Arrow's, nulls stay what they are: each type has one of these two in `make test`.
        for marks in [pytest.mark.soak if output_format == ("dict", "arrow")[number % 2] else ()]
    ],
)
def test_nulls_are_what_the_table_says_and_what_is_chosen(written, row, replacements, kind, output_format):
    if IS_OLD and pa.types.is_union(kind):
        pytest.skip("this pyarrow does not tell nulls in unions")
    source = written(kind, True)
    says = TABLE[row][-1].split(" / ")
    without_a_choice = "`None`" if output_format in ("dict", "arrow") else says[-1 if output_format == "numpy" else 0]
    if without_a_choice == "choose":
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
    _check_mask(source, kind, output_format, refuses=without_a_choice == "choose")


def _check_fill(source: WrittenFiles, kind: pa.DataType, output_format: str) -> None:
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


def _check_mask(source: WrittenFiles, kind: pa.DataType, output_format: str, *, refuses: bool) -> None:
    """Lists of integers with nulls in them need a value for these, too."""
    options: dict[str, Any] = {"output_format": output_format, "mask_nulls": ["x"]}
    zero: Any = None
    leaf = innermost(kind)
    if refuses:
        zero = False if pa.types.is_boolean(leaf) else 0
        has_nat = output_format == "numpy" and pa.types.is_temporal(leaf) and not pa.types.is_time(leaf)
        if has_nat or pa.types.is_floating(leaf):
            zero = None
        elif is_ragged(kind):
            with pytest.raises(ColumnError, match=r"replace nulls inside its lists with fill_nulls=\{'x': ...\}"):
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


# On request -----------------------------------------------------------------------------------------------------------

TEXTS = [f"é\u0000{number}" * (number % 3 + 1) for number in range(ROWS)] + [""]
NUMBERS = [2**63 - 2, 2**63 - 1, -(2**63), *range(3, ROWS)]
NAMES = {"Padded": Padded, "Codes": Codes, "TEXTS": TEXTS, "NUMBERS": NUMBERS, "float": float}
KINDS = {
    "int64": pa.int64(),
    "timestamp[us]": pa.timestamp("us"),
    "decimal128": pa.decimal128(38, 2),
    "decimal256": pa.decimal256(60, 2),
}
ON_REQUEST = table_rows("On request")


def requested(kind: pa.DataType, asked: Any, rows: list[Any]) -> list[Any]:
    """Return rows as they are to be delivered."""
    if asked == "list":
        return rows
    if isinstance(asked, Codes):
        return [asked.vocabulary.index(row) for row in rows]
    if asked == "float64":
        return [float(row) for row in rows]
    if asked == "int64":
        return [int(row.scaleb(kind.scale)) for row in rows]
    if asked == "packed":
        return [row.encode() if isinstance(row, str) else row for row in rows]
    padding = Padded() if asked == "padded" else asked
    inner: Any = [None] * 3 if pa.types.is_fixed_size_list(kind.value_type) else padding.value
    batches = [rows[start : start + 4] for start in range(0, len(rows), 4)]
    lengths = [padding.length or max(map(len, batch)) for batch in batches]
    return [
        row + [inner] * (length - len(row)) for batch, length in zip(batches, lengths, strict=True) for row in batch
    ]


@pytest.mark.parametrize("output_format", FORMATS)
@pytest.mark.parametrize(
    "cells", ON_REQUEST, ids=lambda cells: f"{cells[0]} {cells[1]}".replace("`", "").replace('"', "")
)
def test_a_column_is_delivered_as_it_was_asked_for(tmp_path, cells, output_format):
    name, asked = cells[0].strip("`"), eval(cells[1].strip("`"), NAMES)  # noqa: S307 - the guide's own words
    kind = KINDS[name] if name in KINDS else EXAMPLES[name][0][1]
    cell = cells[2 + FORMATS.index(output_format)]
    source = WrittenFiles(tmp_path, example(kind, nulls=False))
    options = {"output_format": output_format, "column_formats": {"x": asked}}
    if cell == "an error":
        with pytest.raises(ColumnError, match=r"needs output_format='torch' or 'numpy'|is for|not 'arrow'"):
            source.batches(**options)
        return
    batches = source.batches(**options)
    rows, _ = together(batches)
    values = batches[0]["x"]
    assert described([row for batch in batches for row in batch["x"]] if isinstance(values, list) else values) == cell
    assert rows == requested(kind, asked, source.correct(listed=True))


@pytest.mark.parametrize("output_format", ["torch", "numpy"])
@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        (pa.string(), "packed"),
        (pa.large_binary(), "packed"),
        (pa.binary(3), "packed"),
        (pa.string(), Codes(TEXTS)),
        (pa.decimal128(38, 2), "int64"),
        (pa.list_(pa.int32()), "padded"),
    ],
)
def test_nulls_of_a_column_that_was_asked_for_otherwise_need_a_choice_too(tmp_path, kind, asked, output_format):
    source = WrittenFiles(tmp_path, example(kind, nulls=True))
    options: dict[str, Any] = {"output_format": output_format, "column_formats": {"x": asked}}
    with pytest.raises(ColumnError, match=r"column 'x' holds \d+ nulls.*a\.parquet"):
        source.batches(**options)
    listed = source.correct(listed=True)
    if asked == "packed":
        chosen: Any = value(kind, 5)
        empty: Any = b"\x00\x00\x00" if pa.types.is_fixed_size_binary(kind) else b""
    else:
        chosen, empty = -100, 0
    known = [row if row is not None else value(kind, 5) for row in listed]
    is_list = pa.types.is_list(kind)
    correct = requested(kind, asked, [filled(row, kind, -100) for row in listed] if is_list else known)
    rows, _ = together(source.batches(**options, fill_nulls={"x": chosen}))
    if not is_list and asked != "packed":
        correct = [chosen if row is None else one for row, one in zip(listed, correct, strict=True)]
    assert rows == correct
    batches = source.batches(**options, mask_nulls=["x"], **({"fill_nulls": {"x": -100}} if is_list else {}))
    assert [mark for batch in batches for mark in python_rows(batch["x_is_null"])] == [row is None for row in listed]
    rows, _ = together(batches)
    if not is_list:
        correct = [empty if row is None else one for row, one in zip(listed, correct, strict=True)]
    assert rows == correct


def test_floats_that_are_null_may_be_filled_too_and_nan_stays(tmp_path):
    source = WrittenFiles(tmp_path, pa.array([1.5, None, float("nan")]))
    (batch,) = source.batches(output_format="torch", fill_nulls={"x": 9})
    assert repr(batch["x"].tolist()) == "[1.5, 9.0, nan]"
    (batch,) = source.batches(output_format="torch", mask_nulls=["x"])
    assert repr(batch["x"].tolist()) == "[1.5, nan, nan]"
    assert batch["x_is_null"].tolist() == [False, True, False]


@not_with_old_pyarrow
def test_a_mask_follows_its_column_and_the_schema_says_so(tmp_path):
    table = pa.table({"a": [1, None], "b": ["x", None], "c": pa.array([[1, 2], None], pa.list_(pa.int8(), 2))})
    pq.write_table(table, tmp_path / "a.parquet")
    loader, dataset = open_loader(
        tmp_path, mask_nulls=["c", "a"], column_formats={"b": Codes(["x"])}, fill_nulls={"b": -1}
    )
    (batch,) = loader
    assert list(batch) == ["a", "a_is_null", "b", "c", "c_is_null", "row"]
    assert batch["c_is_null"].tolist() == [[False, False], [True, True]]
    assert dataset.schema.names == list(batch)[:-1]
    assert dataset.schema.field("b").type == pa.int64()
    assert dataset.schema.field("c_is_null").type == pa.list_(pa.bool_(), 2)


@not_with_old_pyarrow
def test_a_tensor_whose_dimensions_are_stored_in_another_order_has_its_logical_shape(tmp_path):
    kind = pa.fixed_shape_tensor(pa.int32(), [2, 3], permutation=[1, 0])
    column = pa.ExtensionArray.from_storage(kind, pa.array([list(range(6)), None], kind.storage_type))
    source = WrittenFiles(tmp_path, column)
    (batch,) = source.batches(output_format="torch", fill_nulls={"x": -1})
    assert batch["x"].tolist() == [[[0, 3], [1, 4], [2, 5]], [[-1] * 2] * 3]


@not_with_old_pyarrow
@pytest.mark.parametrize("mixing", [{}, {"shuffle": True, "shuffle_buffer_size": 2}])
def test_types_that_parquet_alone_tells_are_those_that_pyarrow_reads(tmp_path, mixing):
    """Writers that do not store Arrow's schema, such as DuckDB and Java, tell UUID and JSON by Parquet's own types."""
    path = tmp_path / "some.parquet"
    ids = pa.array([bytes([number]) * 16 for number in range(5)], pa.uuid())
    table = pa.table({"u": ids, "j": pa.array(["{}"] * 5, pa.json_()), "s": pa.StructArray.from_arrays([ids], ["u"])})
    pq.write_table(table, path, store_schema=False, row_group_size=2)
    loader, dataset = StructuredDataset.create_dataloader(path, num_workers=0, output_format="arrow", **mixing)
    assert dataset.schema.types == pq.ParquetFile(path).schema_arrow.types == table.schema.types
    (batch,) = loader
    assert sorted(batch["u"].to_pylist()) == sorted(table["u"].to_pylist())


def test_lists_of_no_places_have_as_many_rows_as_there_are(tmp_path):
    """Parquet does not store them; other formats may."""
    source = WrittenFiles(
        tmp_path,
        pa.FixedSizeListArray.from_buffers(pa.list_(pa.int32(), 0), 6, [None], children=[pa.nulls(0, pa.int32())]),
    )
    source.directory = None
    batches = source.batches(output_format="torch", fill_nulls={"x": 1}, mask_nulls=["x"])
    assert [tuple(batch[name].shape) for batch in batches for name in ("x", "x_is_null")] == [
        (4, 0),
        (4, 0),
        (2, 0),
        (2, 0),
    ]


def test_decimals_become_the_nearest_floats(tmp_path):
    for precision, scale in ((10, 2), (15, 15), (18, 4), (16, 0), (22, 22), (23, 23), (38, 37)):
        numbers = [int(str(7**number)[:precision].rjust(precision, "3")) for number in range(500)]
        values = [decimal.Decimal(number).scaleb(-scale, decimal.Context(prec=50)) for number in numbers]
        source = WrittenFiles(tmp_path, pa.array(values, pa.decimal128(precision, scale)))
        rows, _ = together(source.batches(output_format="torch", column_formats={"x": "float64"}))
        assert rows == [float(one) for one in values]


def test_digits_that_a_float_has_not_leave_other_values_as_they_are(tmp_path):
    values = [decimal.Decimal(text) for text in ("0.10", "-1.23", f"{2**53}.01", "-90071992547409.93", f"{10**30}.99")]
    source = WrittenFiles(tmp_path, pa.array([*values, None], pa.decimal128(38, 2)))
    rows, _ = together(source.batches(output_format="torch", column_formats={"x": "float64"}))
    assert rows == [*map(float, values), None]


@pytest.mark.parametrize("values", [["b", "a"], ["b", "a", "unused"], ["b", "a", None]], ids=str)
def test_a_dictionary_may_have_more_values_than_the_rows(tmp_path, values):
    indices = pa.array([1, 0, None, 1, 1, 0, 0], pa.int8())
    column = pa.DictionaryArray.from_arrays(indices, pa.array(values))
    source = WrittenFiles(tmp_path, column)
    source.directory = None  # in memory the dictionary stays as it is
    source.table = pa.table({"x": column})
    options = {"column_formats": {"x": Codes(["a", "b"])}, "fill_nulls": {"x": -1}, "mask_nulls": ["x"]}
    rows, _ = together(source.batches(output_format="torch", **options))
    assert rows == [0, 1, -1, 0, 0, 1, 1]


def test_a_null_in_a_dictionary_has_no_code(tmp_path):
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(["a", None]))
    source = WrittenFiles(tmp_path, column)
    source.directory = None
    options = {"column_formats": {"x": Codes(["a"])}, "fill_nulls": {"x": 7}}
    rows, _ = together(source.batches(output_format="torch", **options))
    assert rows == [0, 7, 0]


# What does not fit ----------------------------------------------------------------------------------------------------

MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "no column": ({"column_formats": {"txt": "packed"}}, "no column 'txt' for column_formats; did you mean 'text'"),
    "no column to fill": ({"fill_nulls": {"Age": 1}}, "no column 'Age' for fill_nulls; did you mean 'age'"),
    "no column to mask": ({"mask_nulls": ["ages"]}, "no column 'ages' for mask_nulls; did you mean 'age'"),
    "not delivered": ({"columns": ["text"], "fill_nulls": {"age": 1}}, "no column 'age' for fill_nulls"),
    "packed numbers": ({"column_formats": {"age": "packed"}}, "'packed'} is for strings and binary; .* type int8"),
    "padded numbers": ({"column_formats": {"age": Padded()}}, "is for lists of numbers"),
    "padded texts": ({"column_formats": {"texts": "padded"}}, "is for lists of numbers"),
    "integers as float64": ({"column_formats": {"age": "float64"}}, "'float64'} is for decimals"),
    "codes of lists": ({"column_formats": {"list": Codes([1])}}, "is for strings, integers"),
    "codes of another type": (
        {"column_formats": {"age": Codes(["a"])}},
        "in the vocabulary of column 'age': 'a' does not",
    ),
    "padding too large": ({"column_formats": {"list": Padded(2**40)}}, f"{2**40} does not fit the type int32"),
    "padding of a fraction": ({"column_formats": {"list": Padded(0.5)}}, "0.5 does not fit the type int32"),
    "filling too large": ({"fill_nulls": {"age": 128}}, "fill_nulls={'age': 128}: 128 does not fit the type int8"),
    "filling a fraction": ({"fill_nulls": {"age": 1.5}}, "1.5 does not fit the type int8"),
    "filling with a flag": ({"fill_nulls": {"age": True}}, "True does not fit the type int8"),
    "filling with infinity": ({"fill_nulls": {"x": 1e300}}, r"1e\+300 does not fit the type float"),
    "filling a text with bytes": ({"fill_nulls": {"text": b"a"}}, "b'a' does not fit the type string"),
    "filling with half a second": (
        {"fill_nulls": {"for": dt.timedelta(seconds=1.5)}},
        "does not fit the type duration",
    ),
    "filling a struct": ({"fill_nulls": {"struct": {"a": 1}}}, "nulls of type struct.* cannot be filled"),
    "a mask of that name": (
        {"mask_nulls": ["text"]},
        "adds the column 'text_is_null', but there is a column of that name",
    ),
    "a mask named as row ids": (
        {"mask_nulls": ["age"], "row_id_column": "age_is_null"},
        "there is a column of that name",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_a_column_is_an_error_at_construction(tmp_path, case):
    columns = {
        "age": pa.array([1, None], pa.int8()),
        "x": pa.array([1, None], pa.float32()),
        "text": pa.array(["a", None]),
        "text_is_null": pa.array([True, False]),
        "texts": pa.array([["a"], None]),
        "list": pa.array([[1], None], pa.list_(pa.int32())),
        "for": pa.array([1, None], pa.duration("s")),
        "struct": pa.array([{"a": 1}, None]),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    options, message = MISFITS[case]
    with pytest.raises(ColumnError, match=message):
        open_loader(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column_formats": {"x": "tensor"}}, "expected one of 'list', 'padded'"),
        ({"column_formats": {"x": 3}}, "expected one of"),
        ({"column_formats": ["x"]}, "column_formats=.*expected a dictionary"),
        ({"fill_nulls": 0}, "fill_nulls=0: expected a dictionary"),
        ({"fill_nulls": {"x": None}}, "expected a value that replaces null"),
        ({"mask_nulls": "age"}, "mask_nulls='age': expected a list"),
        ({"mask_nulls": ["age", "age"]}, "names a column twice"),
    ],
)
def test_malformed_arguments_are_refused_before_anything_is_read(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        open_loader("/no/such/place", **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Codes("abc"), "expected a list of values"),
        (lambda: Codes(["a", "b", "a"]), "'a' appears in the vocabulary more than once"),
        (lambda: Codes(["a", None]), "a null has no code"),
        (lambda: Padded(length=-1), "length=-1"),
    ],
    ids=["a text", "a value twice", "a null", "a negative length"],
)
def test_malformed_formats_are_refused_when_they_are_made(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize("mixing", [{}, {"shuffle": True, "shuffle_buffer_size": 50}], ids=["in file order", "mixed"])
@pytest.mark.parametrize(
    ("values", "asked", "message"),
    [
        (["a", "b", "c", "d"], Codes(["a", "b", "c"]), "column 'x' holds 'd', which is not in the vocabulary"),
        ([[1], [], [], [1, 2, 3]], Padded(length=2), r"a list of 3 values, more than Padded\(length=2\) allows"),
        (
            [decimal.Decimal(1)] * 3 + [decimal.Decimal(2**63)],
            "int64",
            "column 'x' of type decimal.*do not fit into int64",
        ),
    ],
    ids=["codes", "padded", "decimals"],
)
def test_a_value_that_cannot_be_delivered_as_asked_is_an_error_that_names_its_place(
    tmp_path, values, asked, message, mixing
):
    kind = pa.decimal128(38, 0) if asked == "int64" else None
    pq.write_table(pa.table({"x": pa.array(values, kind)}), tmp_path / "a.parquet", row_group_size=2)
    loader, _ = open_loader(tmp_path, column_formats={"x": asked}, **mixing)
    with pytest.raises(ColumnError, match=f"{message}.*row group 1 of .*a.parquet"):
        list(loader)


def test_announced_nulls_of_columns_with_a_choice_are_no_error_and_others_are_named(tmp_path):
    pq.write_table(pa.table({"a": [1, None], "b": [1, None], "c": ["x", None]}), tmp_path / "a.parquet")
    with pytest.raises(
        ColumnError, match=r"'b' holds 1 nulls.*fill_nulls=\{'b': \.\.\.\}.*row group 0 of .*a\.parquet"
    ):
        open_loader(tmp_path, fill_nulls={"a": 0})
    with pytest.raises(ColumnError, match=r"'c' holds 1 nulls.*row group 0 of .*a\.parquet"):
        open_loader(tmp_path, fill_nulls={"a": 0}, mask_nulls=["b"], column_formats={"c": "packed"})
    open_loader(tmp_path, fill_nulls={"a": 0}, column_formats={"b": "list"})


def test_empty_lists_are_no_nulls_whatever_statistics_count(tmp_path):
    pq.write_table(pa.table({"x": pa.array([[1], [], [2, 3]], pa.list_(pa.int32()))}), tmp_path / "a.parquet")
    assert pq.read_metadata(tmp_path / "a.parquet").row_group(0).column(0).statistics.null_count > 0
    (batch,) = open_loader(tmp_path)[0]
    assert python_rows(batch["x"]) == [[1], [], [2, 3]]


# Any schema, and files of others --------------------------------------------------------------------------------------

LEAVES = [
    *(
        kind
        for each in ("bool", "intN", "uintN", "floatN", "date32", "timestamp[unit, tz]")
        for _, kind in EXAMPLES[each]
    ),
    *(pa.duration("ns"), pa.time64("us"), pa.decimal128(20, 2), pa.string(), pa.large_binary(), pa.binary(3)),
]


def kinds() -> st.SearchStrategy[pa.DataType]:
    """Any type of columns, lists in lists among them."""

    def deeper(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
        sizes = st.integers(1, 3)
        return st.one_of(
            st.builds(pa.list_, inner),
            st.builds(pa.large_list, inner),
            st.builds(pa.list_, inner, sizes),
            inner.map(lambda kind: pa.struct([("a", kind)])),
        )

    return st.recursive(
        st.sampled_from([kind for kind in LEAVES if kind != pa.timestamp("s", "Europe/Berlin")]), deeper, max_leaves=3
    )


@st.composite
def rows(draw: st.DrawFn, kind: pa.DataType, *, nulls: bool) -> Any:
    """A value of a type, or null, at any depth."""
    if nulls and draw(st.integers(0, 3)) == 0:
        return None
    if pa.types.is_struct(kind):
        return {field.name: draw(rows(field.type, nulls=nulls)) for field in kind}
    if "list" in str(kind).partition("<")[0]:
        size = kind.list_size if pa.types.is_fixed_size_list(kind) else draw(st.integers(0, 3))
        return [draw(rows(kind.value_type, nulls=nulls)) for _ in range(size)]
    return value(kind, draw(st.integers(0, ROWS - 1)))


@st.composite
def columns(draw: st.DrawFn, count: int) -> tuple[pa.Array, dict[str, Any]]:
    """A column and what is chosen for it, so that it can be delivered."""
    kind = draw(kinds())
    nulls = draw(st.booleans())
    column = pa.array([draw(rows(kind, nulls=nulls)) for _ in range(count)], kind)
    chosen: dict[str, Any] = {}
    if nulls and draw(st.booleans()):
        chosen["column_formats"] = "list"
    elif nulls and can_be_filled(kind):
        chosen["fill_nulls"] = value(innermost(kind), 5)
        if draw(st.booleans()):
            chosen["mask_nulls"] = True
    return column, chosen


@not_with_old_pyarrow
@given(st.data())
@examples(60)
def test_any_schema_is_delivered_as_pyarrow_reads_it(tmp_path_factory, data):
    count = data.draw(st.integers(1, 12))
    drawn = {f"c{number}": data.draw(columns(count)) for number in range(data.draw(st.integers(1, 4)))}
    path = tmp_path_factory.getbasetemp() / "any.parquet"
    table = pa.table({name: column for name, (column, _) in drawn.items()})
    pq.write_table(table, path, row_group_size=data.draw(st.integers(1, 5)))
    options: dict[str, Any] = {
        option: {name: chosen[option] for name, (_, chosen) in drawn.items() if option in chosen}
        for option in ("column_formats", "fill_nulls", "mask_nulls")
    }
    output_format = data.draw(st.sampled_from(FORMATS))
    if output_format == "arrow":
        options["column_formats"] = None
    options["mask_nulls"] = list(options["mask_nulls"])
    options |= data.draw(st.sampled_from([{}, {"shuffle": True, "shuffle_buffer_size": 4}]))
    batches = list(
        open_loader(path, output_format=output_format, batch_size=data.draw(st.integers(1, 5)), **options)[0]
    )
    order = [int(row) for batch in batches for row in python_rows(batch["row"])]
    assert sorted(order) == list(range(count))
    whole = pq.read_table(path)
    for name, (column, chosen) in drawn.items():
        found, listed = together(batches, name)
        read = [row for chunk in whole[name].chunks for row in rows_of(chunk, listed=listed)]
        correct = read
        if "fill_nulls" in chosen:
            [as_read] = rows_of(pa.array([chosen["fill_nulls"]], innermost(column.type)), listed=listed)
            correct = [filled(row, column.type, as_read) for row in read]
        elif not listed:
            correct = [filled(row, column.type, None) if shape_of(column.type) else row for row in read]
        assert found == [correct[row] for row in order], name
        if "mask_nulls" in chosen:
            marks = [mark for batch in batches for mark in python_rows(batch[f"{name}_is_null"])]
            assert marks == [marked(read[row], shape_of(column.type)) for row in order]


@functools.cache
def files_of_others() -> list[Path]:
    """Return the Parquet files that installed packages bring along, pyarrow's own test files among them."""
    packages = Path(pa.__file__).parent.parent
    return sorted(path for ending in ("parquet", "parq") for path in packages.rglob(f"*.{ending}") if path.is_file())


@pytest.mark.parametrize("output_format", FORMATS)
def test_files_that_others_wrote_are_delivered_as_pyarrow_reads_them(output_format):
    files = files_of_others()
    assert len(files) >= 4
    for path in files:
        whole = pq.read_table(path)
        loader, dataset = open_loader(path, output_format=output_format, mask_nulls=whole.column_names, batch_size=7)
        batches = list(loader)
        assert dataset.schema.names == [f"{name}{end}" for name in whole.column_names for end in ("", "_is_null")]
        for name in whole.column_names:
            found, listed = together(batches, name)
            correct = [row for chunk in whole[name].chunks for row in rows_of(chunk, listed=listed)]
            marks = [mark for batch in batches for mark in python_rows(batch[f"{name}_is_null"])]
            assert marks == [row is None for row in correct]
            assert [row for row, mark in zip(found, marks, strict=True) if not mark] == [
                row for row in correct if row is not None
            ]
