"""Every value is the one that pyarrow reads, in the dtype of its column, in every output format."""

from __future__ import annotations

import copy
import datetime as dt
import decimal
import operator
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairwise import pairwise
from support import examples, open_loader, row_ids, shards_of

from torch_dataloader_utils import ColumnError
from torch_dataloader_utils.planning.plan import PlanOptions
from torch_dataloader_utils.planning.planner import make_plan
from torch_dataloader_utils.planning.shuffle import permutation

IS_OLD = int(pa.__version__.split(".")[0]) < 26
not_with_old_pyarrow = pytest.mark.skipif(IS_OLD, reason="this pyarrow cannot store such a column at all")

ROWS = 60
GROUP = 7
FIRST_FILE = 33

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
FLOATS = [pa.float16(), pa.float32(), pa.float64()]

DTYPES = {
    pa.int8(): torch.int8,
    pa.int16(): torch.int16,
    pa.int32(): torch.int32,
    pa.int64(): torch.int64,
    pa.uint8(): torch.uint8,
    pa.uint16(): torch.uint16,
    pa.uint32(): torch.uint32,
    pa.uint64(): torch.uint64,
    pa.float16(): torch.float16,
    pa.float32(): torch.float32,
    pa.float64(): torch.float64,
    pa.bool_(): torch.bool,
}


def _numpy_dtype(kind: pa.DataType) -> np.dtype[Any]:
    return torch.empty(0, dtype=DTYPES[kind]).numpy().dtype


def _integers(kind: pa.DataType) -> list[int]:
    """Both ends of the range, and what lies between."""
    limits = np.iinfo(_numpy_dtype(kind))
    low, high = int(limits.min), int(limits.max)
    return [low, high, high - 1, 0, *(low + (high - low) * number // ROWS for number in range(4, ROWS))]


def _floats(kind: pa.DataType) -> list[Any]:
    odd = [float("inf"), float("-inf"), -0.0, 0.1, float(np.finfo(_numpy_dtype(kind)).max)]
    values = [*odd, *(number / 8 - 3 for number in range(5, ROWS))]
    return list(np.array(values, _numpy_dtype(kind)))


def _some_null(values: list[Any]) -> list[Any]:
    """The first seven are null, so that a whole row group is, and every fifth."""
    return [None if number < GROUP or number % 5 == 0 else value for number, value in enumerate(values)]


def _threes(values: list[Any]) -> list[list[Any]]:
    return [[values[number], values[number - 1], values[number - 2]] for number in range(ROWS)]


def _numeric() -> Iterator[tuple[str, pa.Array]]:
    for kind in INTEGERS:
        yield f"{kind}", pa.array(_integers(kind), kind)
        yield f"three {kind}", pa.array(_threes(_integers(kind)), pa.list_(kind, 3))
    for kind in FLOATS:
        yield f"{kind}", pa.array(_floats(kind), kind)
        yield f"three {kind}", pa.array(_threes(_floats(kind)), pa.list_(kind, 3))
        yield f"{kind} with nulls", pa.array(_some_null(_floats(kind)), kind)
        yield f"three {kind} with nulls", pa.array(_threes(_some_null(_floats(kind))), pa.list_(kind, 3))
        yield f"three {kind} with null lists", pa.array(_some_null(_threes(_floats(kind))), pa.list_(kind, 3))
    flags = [number % 3 == 0 for number in range(ROWS)]
    yield "bool", pa.array(flags)
    yield "three bool", pa.array(_threes(flags), pa.list_(pa.bool_(), 3))
    yield "one int64", pa.array([[number] for number in range(ROWS)], pa.list_(pa.int64(), 1))


def _made(kind: pa.DataType, make: Any) -> pa.Array:
    return pa.array(_some_null([make(number) for number in range(ROWS)]), kind)


def _others() -> Iterator[tuple[str, pa.Array]]:
    texts = _made(pa.string(), lambda number: "" if number == 8 else f"é\u0000{number}" * (number % 4 + 1))
    yield "string", texts
    yield "large_string", texts.cast(pa.large_string())
    yield "binary", _made(pa.binary(), lambda number: bytes([number, 0, 255]) * (number % 3))
    yield "large_binary", _made(pa.large_binary(), lambda number: bytes([number]))
    yield "fixed_size_binary", _made(pa.binary(3), lambda number: bytes([number, 0, 255]))
    yield "decimal128", _made(pa.decimal128(12, 3), lambda number: decimal.Decimal(number * 1001).scaleb(-3))
    yield "decimal256", _made(pa.decimal256(60, 2), lambda number: decimal.Decimal(10**50 + number).scaleb(-2))
    for unit in ("s", "ms", "us", "ns"):
        yield f"timestamp {unit}", _made(pa.timestamp(unit), lambda number: dt.datetime(2020, 2, 1, 3, 4, number))  # noqa: DTZ001
        yield f"timestamp {unit} Berlin", _made(pa.timestamp(unit, "Europe/Berlin"), _in_summer)
        yield f"duration {unit}", _made(pa.duration(unit), lambda number: dt.timedelta(days=number, seconds=1))
    yield "date32", _made(pa.date32(), lambda number: dt.date(1900 + number, 2, 28))
    yield "date64", _made(pa.date64(), lambda number: dt.date(1900 + number, 2, 28))
    yield "time32", _made(pa.time32("ms"), lambda number: dt.time(1, number, 3, 4000))
    yield "time64", _made(pa.time64("us"), lambda number: dt.time(1, number, 3, 4))
    yield "list", _made(pa.list_(pa.int64()), lambda number: [None, *range(number % 4)])
    yield "large_list", _made(pa.large_list(pa.string()), lambda number: ["x"] * (number % 4))
    yield "list of lists", _made(pa.list_(pa.list_(pa.int8())), lambda number: [[number], None, []])
    yield "two strings", _made(pa.list_(pa.string(), 2), lambda number: [str(number), None])
    yield "two by two", _made(pa.list_(pa.list_(pa.float32(), 2), 2), lambda number: [[number, 1.0], [2.0, None]])
    inner = pa.struct([("b", pa.string()), ("c", pa.list_(pa.int64()))])
    yield (
        "struct",
        _made(
            pa.struct([("a", pa.int64()), ("in", inner)]),
            lambda number: {"a": number, "in": {"b": None, "c": [number]}},
        ),
    )
    yield "map", _made(pa.map_(pa.string(), pa.int64()), lambda number: [("k", number), ("l", None)])
    yield "dictionary", _made(pa.string(), lambda number: f"key {number % 5}").dictionary_encode()
    yield "null", pa.nulls(ROWS)
    if hasattr(pa, "uuid"):  # pyarrow 18
        yield "uuid", pa.array([uuid.UUID(int=number).bytes for number in range(ROWS)], pa.uuid())


def _in_summer(number: int) -> dt.datetime:
    return dt.datetime(2020, 8, 1, 3, 4, number, tzinfo=dt.timezone.utc)


def _can_be_stored(values: pa.Array) -> bool:
    """Whether this pyarrow writes and reads them: old ones know no null in fixed-size lists, and no views."""
    sink = pa.BufferOutputStream()
    try:
        pq.write_table(pa.table({"x": values}), sink)
        kind = pq.read_table(pa.BufferReader(sink.getvalue()))["x"].type
    except pa.ArrowException:
        return False
    return kind == values.type


NUMERIC = {name: values for name, values in _numeric() if not IS_OLD or _can_be_stored(values)}
OTHERS = {name: values for name, values in _others() if not IS_OLD or _can_be_stored(values)}

BY_DEFAULT = (
    "string", "large_string", "binary", "large_binary", "fixed_size_binary", "decimal128", "decimal256", "large_list",
    "list of lists", "two strings", "struct", "map", "dictionary", "null", "uuid",
)  # fmt: skip
"""What becomes Python lists without being asked for."""

AS_LISTS = {name: "list" for name in OTHERS if name not in BY_DEFAULT}

MIXED = {"shuffle": True, "shuffle_buffer_size": 20}
ORDERS = {
    "in file order": {},
    "filtered": {"filters": pc.field("keep")},
    "mixed": MIXED,
    "filtered and mixed": {**MIXED, "filters": pc.field("keep")},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Every type in one table, in two files of several row groups, the last of each short."""
    directory = tmp_path_factory.mktemp("data")
    table = pa.table({"keep": [number % 3 != 1 for number in range(ROWS)], **NUMERIC, **OTHERS})
    pq.write_table(table.slice(0, FIRST_FILE), directory / "a.parquet", row_group_size=GROUP)
    pq.write_table(table.slice(FIRST_FILE), directory / "b.parquet", row_group_size=GROUP)
    return directory


@pytest.fixture(scope="module")
def expected(data) -> pa.Table:
    """What pyarrow reads of the same files."""
    return pa.concat_tables([pq.read_table(data / "a.parquet"), pq.read_table(data / "b.parquet")])


def wanted_rows(order: str) -> set[int]:
    return {row for row in range(ROWS) if "filtered" not in order or row % 3 != 1}


def comparable(values: Any) -> list[str]:
    """Values as text: NaN equals NaN, 1 does not equal 1.0 nor True."""
    return [repr(value.item() if isinstance(value, np.generic) else value) for value in values]


def as_numbers(column: pa.ChunkedArray) -> list[Any]:
    """What a column's values become in a tensor or an array: null floats and their lists are NaN."""
    if not pa.types.is_fixed_size_list(column.type):
        return [float("nan") if value is None else value for value in column.to_pylist()]
    size = column.type.list_size
    return [
        [
            float("nan") if value is None else float(value) if isinstance(value, np.floating) else value
            for value in (row if row is not None else [None] * size)
        ]
        for row in column.to_pylist()
    ]


# Numbers -----------------------------------------------------------------------------------------------------------


@pairwise(output_format=["torch", "numpy"], batch_size=[1, 5, 1000], order=ORDERS)
def test_numbers_become_tensors_and_arrays_of_their_own_dtype(data, expected, output_format, batch_size, order):
    """Batches of 1 are cut from one row group; those of 5 span row groups, files and shards."""
    names = list(NUMERIC)
    options = {**ORDERS[order], "output_format": output_format, "batch_size": batch_size, "columns": names}
    delivered: dict[str, dict[int, Any]] = {name: {} for name in names}
    for batch in open_loader(data, **options)[0]:
        rows = batch["row"].tolist()
        for name in names:
            values, kind = batch[name], NUMERIC[name].type
            size = kind.list_size if pa.types.is_fixed_size_list(kind) else None
            element = kind if size is None else kind.value_type
            if output_format == "torch":
                assert type(values) is torch.Tensor
                assert values.dtype == DTYPES[element]
                assert values.is_contiguous()
            else:
                assert type(values) is np.ndarray
                assert values.dtype == _numpy_dtype(element)
                assert values.flags.writeable
            assert tuple(values.shape) == (len(rows),) if size is None else (len(rows), size)
            delivered[name] |= dict(zip(rows, values.tolist(), strict=True))
    for name in names:
        assert set(delivered[name]) == wanted_rows(order)
        correct = as_numbers(expected[name])
        rows = sorted(delivered[name])
        assert comparable(delivered[name][row] for row in rows) == comparable(correct[row] for row in rows), name


@pytest.mark.parametrize("output_format", ["torch", "numpy"])
def test_integers_beyond_what_a_float_holds_are_exact(tmp_path, output_format):
    values = [2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63), 2**62 + 1]
    pq.write_table(pa.table({"x": values, "u": pa.array([2**64 - 1] * 5, pa.uint64())}), tmp_path / "a.parquet")
    for options in ({}, MIXED, {"filters": pc.field("x") != 0}):
        loader, _ = open_loader(tmp_path, output_format=output_format, **options)
        [batch] = loader
        assert sorted(batch["x"].tolist()) == sorted(values)
        assert batch["u"].tolist() == [2**64 - 1] * 5


@not_with_old_pyarrow
@pytest.mark.parametrize("output_format", ["torch", "numpy"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_column_keeps_its_dtype_and_shape_from_batch_to_batch(tmp_path, output_format, order):
    """Batches without nulls, with some, with nothing but nulls, and across all of them."""
    lists = pa.list_(pa.float32(), 2)
    for number, values in enumerate(([None] * 10, [1.5] * 10, [None, 2.5] * 5, [float("nan")] * 10, [])):
        table = pa.table(
            {
                "x": pa.array(values, pa.float32()),
                "pair": pa.array([value if value is None else [value, None] for value in values], lists),
                "keep": pa.array([True] * len(values), pa.bool_()),
            }
        )
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=5)
    for batch_size in (1, 3, 7, 40):
        batches = list(open_loader(tmp_path, batch_size=batch_size, output_format=output_format, **ORDERS[order])[0])
        assert {str(batch["x"].dtype).removeprefix("torch.") for batch in batches} == {"float32"}
        assert {str(batch["pair"].dtype).removeprefix("torch.") for batch in batches} == {"float32"}
        assert {tuple(batch["pair"].shape[1:]) for batch in batches} == {(2,)}


@pytest.mark.parametrize("output_format", ["torch", "numpy"])
def test_no_two_batches_or_columns_share_memory(data, output_format):
    """What a training loop writes into one of them shows up in no other."""
    names = [
        name for name in ("int64", "double", "three float", "three float with null lists", "bool") if name in NUMERIC
    ]
    loader, _ = open_loader(data, columns=names, batch_size=5, output_format=output_format)
    running = iter(loader)
    batches = [next(running) for _ in range(6)]
    for batch in batches:
        for name in names:
            batch[name][...] = 1
    fresh, _ = open_loader(data, columns=names, batch_size=5, output_format=output_format)
    for after, (one, other) in enumerate(zip(list(fresh)[6:], running, strict=True)):
        for name in names:
            assert comparable(one[name].tolist()) == comparable(other[name].tolist()), (after, name)
    for number, batch in enumerate(batches):
        for name in names:
            before = copy.deepcopy({key: value for key, value in batch.items() if key != name})
            batch[name][...] = 0
            assert comparable(before.values()) == comparable(batch[key] for key in before), (number, name)
            batch[name][...] = 1
    assert all(bool((batch[name] == 1).all()) for batch in batches for name in names)


# Everything else ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("output_format", ["torch", "numpy"])
def test_lists_hold_the_values_that_pyarrow_gives(data, expected, output_format, order):
    options = {**ORDERS[order], "output_format": output_format, "column_formats": AS_LISTS}
    loader, _ = open_loader(data, columns=list(OTHERS), batch_size=11, **options)
    delivered: dict[str, dict[int, Any]] = {name: {} for name in OTHERS}
    for batch in loader:
        for name in OTHERS:
            assert type(batch[name]) is list
            delivered[name] |= dict(zip(batch["row"].tolist(), batch[name], strict=True))
    for name in OTHERS:
        correct = expected[name].to_pylist()
        assert delivered[name].keys() == wanted_rows(order)
        assert {row: repr(value) for row, value in delivered[name].items()} == {
            row: repr(correct[row]) for row in wanted_rows(order)
        }, name


@pytest.mark.parametrize("order", ORDERS)
def test_dict_gives_lists_of_the_values_that_pyarrow_gives_for_every_type(data, expected, order):
    loader, _ = open_loader(data, output_format="dict", batch_size=11, **ORDERS[order])
    seen = set()
    for batch in loader:
        rows = batch["row"]
        seen |= set(rows)
        for name in expected.column_names:
            assert type(batch[name]) is list
            correct = expected[name].to_pylist()
            assert comparable(batch[name]) == comparable(correct[row] for row in rows), name
    assert seen == wanted_rows(order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch_size", [5, 1000])
def test_arrow_gives_tables_of_the_datasets_schema_and_the_row_ids(data, expected, order, batch_size):
    loader, dataset = open_loader(data, output_format="arrow", batch_size=batch_size, **ORDERS[order])
    assert dataset.schema.names == expected.column_names
    assert dataset.schema.types == expected.schema.types
    correct = expected.to_pydict()
    seen = set()
    for batch in loader:
        assert type(batch) is pa.Table
        assert batch.schema.equals(dataset.schema.append(pa.field("row", pa.int64())))
        batch.validate(full=True)
        rows = batch["row"].to_pylist()
        seen |= set(rows)
        for name in expected.column_names:
            assert comparable(batch[name].to_pylist()) == comparable(correct[name][row] for row in rows), name
    assert seen == wanted_rows(order)


@pytest.mark.parametrize("output_format", ["torch", "numpy", "dict"])
def test_a_value_that_python_cannot_hold_is_an_error_that_names_the_column_and_arrow_delivers_it(
    tmp_path, output_format
):
    """Whether pandas is installed or not: pyarrow alone would then give pandas' timestamps."""
    pq.write_table(pa.table({"when": pa.array([1001, 2002], pa.timestamp("ns"))}), tmp_path / "a.parquet")
    loader, _ = open_loader(tmp_path, output_format="arrow")
    [table] = loader
    assert table["when"].cast(pa.int64()).to_pylist() == [1001, 2002]
    loader, _ = open_loader(tmp_path, output_format=output_format, column_formats={"when": "list"})
    with pytest.raises(ColumnError, match=r"column 'when' of type timestamp\[ns\].*use output_format='arrow'"):
        next(iter(loader))


@pytest.mark.parametrize("kind", [pa.timestamp("ns"), pa.timestamp("ns", "UTC"), pa.duration("ns"), pa.time64("ns")])
@pytest.mark.parametrize("wrap", [None, "list", "struct", "map"])
def test_nanoseconds_become_what_microseconds_become_at_any_depth(tmp_path, kind, wrap):
    coarse = pa.time64("us") if kind == pa.time64("ns") else type_in_microseconds(kind)
    make = {
        None: lambda one: one,
        "list": pa.list_,
        "struct": lambda one: pa.struct([("when", one)]),
        "map": lambda one: pa.map_(pa.string(), one),
    }[wrap]
    value = pa.array([3_600_000_000], pa.int64()).cast(coarse)[0].as_py()
    wrapped = {None: value, "list": [value, None], "struct": {"when": value}, "map": [("key", value)]}[wrap]
    values = [wrapped, None]
    if IS_OLD and not _can_be_stored(pa.array(values, make(coarse)).cast(make(kind))):
        pytest.skip("this pyarrow cannot store such a column at all")
    pq.write_table(pa.table({"x": pa.array(values, make(coarse)).cast(make(kind))}), tmp_path / "a.parquet")
    [batch] = open_loader(tmp_path, column_formats={"x": "list"})[0]
    assert batch["x"] == values
    assert {type(one) for one in innermost(batch["x"])} == {type(value), type(None)}


def type_in_microseconds(kind: pa.DataType) -> pa.DataType:
    return pa.duration("us") if pa.types.is_duration(kind) else pa.timestamp("us", kind.tz)


def innermost(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        yield value
        return
    for one in value:
        yield from (found for found in innermost(one) if not isinstance(found, str))


@pytest.mark.skipif(not _can_be_stored(pa.nulls(1, pa.string_view())), reason="this pyarrow cannot store such a column")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("output_format", ["torch", "arrow"])
def test_views_of_strings_and_bytes_are_delivered_as_plain_ones(tmp_path, order, output_format):
    texts = [None, "a", "longer than what fits into a view", ""] * 5
    as_bytes = [None, b"a", b"longer than what fits into a view", b""] * 5
    table = pa.table(
        {
            "s": pa.array(texts, pa.string_view()),
            "b": pa.array(as_bytes, pa.binary_view()),
            "keep": [row % 3 != 1 for row in range(20)],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=GROUP)
    loader, dataset = open_loader(tmp_path, output_format=output_format, **ORDERS[order])
    assert dataset.schema.types[:2] == [pa.string(), pa.binary()]
    seen = []
    for batch in loader:
        columns = batch.to_pydict() if output_format == "arrow" else {**batch, "row": batch["row"].tolist()}
        assert columns["s"] == [texts[row] for row in columns["row"]]
        assert columns["b"] == [as_bytes[row] for row in columns["row"]]
        seen += columns["row"]
    assert sorted(seen) == [row for row in range(20) if "filtered" not in order or row % 3 != 1]


def test_dictionaries_that_differ_from_file_to_file_are_delivered_by_their_values(tmp_path):
    for number, values in enumerate((["a", "b", "a"], ["c", "a", None], ["b", "b", "c"])):
        pq.write_table(pa.table({"x": pa.array(values).dictionary_encode()}), tmp_path / f"{number}.parquet")
    correct = ["a", "b", "a", "c", "a", None, "b", "b", "c"]
    for options in ({}, MIXED, {"output_format": "dict"}, {"filters": pc.field("x") != "zz"}):
        for batch in open_loader(tmp_path, batch_size=4, **options)[0]:
            assert batch["x"] == [correct[row] for row in batch["row"]]


# Which rows --------------------------------------------------------------------------------------------------------

NAN, LONG = float("nan"), "a" * 99

CHOICES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "f": (pa.float64(), [None, NAN, -0.0, 0.0, 1.5, float("inf")]),
    "h": (pa.float32(), [None, NAN, 0.1, 2.0]),
    "i": (pa.int64(), [None, -1, 0, 3, 2**62]),
    "u": (pa.uint64(), [None, 0, 2**63, 2**64 - 1]),
    "s": (pa.string(), [None, "", "é", LONG + "b", LONG + "c", "\U0001f600"]),
    "b": (pa.bool_(), [None, True, False]),
    "t": (pa.timestamp("ms"), [None, dt.datetime(1969, 1, 1), dt.datetime(2030, 1, 1)]),  # noqa: DTZ001
    "d": (pa.decimal128(6, 2), [None, decimal.Decimal("-0.01"), decimal.Decimal("1.50")]),
}


@st.composite
def comparisons(draw: st.DrawFn) -> pc.Expression:
    """A column compared with a value, looked up in a list of them, or asked for null."""
    name = draw(st.sampled_from(list(CHOICES)))
    kind, values = CHOICES[name]
    column = pc.field(name)
    how = draw(st.sampled_from(["compare", "compare", "compare", "look up", "null", "null or nan"]))
    if how == "look up":
        return column.isin(pa.array(draw(st.lists(st.sampled_from(values), max_size=2)), kind))
    if how != "compare":
        return column.is_null(nan_is_null=how == "null or nan")
    value = pa.scalar(draw(st.sampled_from(values[1:])), kind)
    compare = draw(st.sampled_from([pc.equal, pc.not_equal, pc.less, pc.less_equal, pc.greater, pc.greater_equal]))
    return compare(column, pc.scalar(value))


def combined(parts: st.SearchStrategy[pc.Expression]) -> st.SearchStrategy[pc.Expression]:
    both = st.tuples(parts, parts)
    return st.one_of(
        parts.map(operator.invert), both.map(lambda two: two[0] & two[1]), both.map(lambda two: two[0] | two[1])
    )


@given(st.data())
@examples(200)
def test_a_filter_delivers_the_rows_that_it_keeps_one_by_one_whatever_statistics_say(tmp_path_factory, data_of_test):
    """Statistics rule out row groups, and know neither NaN nor the end of a long text."""
    rows = data_of_test.draw(st.integers(1, 12))
    columns = {
        name: pa.array(data_of_test.draw(st.lists(st.sampled_from(values), min_size=rows, max_size=rows)), kind)
        for name, (kind, values) in CHOICES.items()
    }
    filters = data_of_test.draw(st.recursive(comparisons(), combined, max_leaves=4))
    table = pa.table(columns)
    path = tmp_path_factory.getbasetemp() / "filtered.parquet"
    pq.write_table(table, path, row_group_size=data_of_test.draw(st.sampled_from([1, 2, 5])))
    kept = table.append_column("row", pa.array(range(rows))).filter(filters)["row"].to_pylist()
    loader, _ = open_loader(path, columns=[], filters=filters, output_format="dict")
    assert [row for batch in loader for row in batch["row"]] == kept


@pytest.mark.parametrize(
    "filters",
    [~(pc.field("f") >= 1.5), pc.field("f") != 1.5, pc.field("f").is_null(nan_is_null=True)],
    ids=["not at least", "unequal", "null"],
)
def test_a_row_of_nan_is_not_lost_to_statistics_that_leave_it_out(tmp_path, filters):
    pq.write_table(pa.table({"f": [1.5, NAN]}), tmp_path / "a.parquet")
    loader, _ = open_loader(tmp_path, filters=filters)
    assert [row for batch in loader for row in batch["row"].tolist()] == [1]


# Which columns -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output_format", ["torch", "numpy", "dict", "arrow"])
def test_columns_come_in_the_order_asked_for_and_the_row_ids_last(data, output_format):
    for names in (["string", "int8", "keep"], ["keep", "string", "int8"], ["double"]):
        loader, dataset = open_loader(data, columns=names, output_format=output_format)
        batch = next(iter(loader))
        assert list(batch.column_names if output_format == "arrow" else batch) == [*names, "row"]
        assert dataset.schema.names == names


def test_all_columns_come_in_the_order_of_the_files_and_no_row_ids_unless_asked_for(data, expected):
    batch = next(iter(open_loader(data, row_id_column=None, column_formats=AS_LISTS)[0]))
    assert list(batch) == expected.column_names


@pytest.mark.parametrize("output_format", ["torch", "numpy", "dict", "arrow"])
def test_a_column_of_the_filter_alone_is_not_delivered(data, output_format):
    loader, dataset = open_loader(data, columns=["int64"], filters=pc.field("keep"), output_format=output_format)
    for batch in loader:
        assert list(batch.column_names if output_format == "arrow" else batch) == ["int64", "row"]
    assert dataset.schema.names == ["int64"]


@pytest.mark.parametrize("columns", [None, ["a"], ["b"], ["c"], ["b", "a"], ["c", "b", "a"], []])
def test_a_filter_by_position_means_the_column_at_that_place_in_the_files_or_is_refused(tmp_path, columns):
    pq.write_table(pa.table({"a": [1, 2, 3], "b": [10, 20, 30], "c": [0, 0, 0]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"b": [40, 50], "c": [0, 0], "a": [4, 5]}), tmp_path / "2.parquet")
    try:
        loader, _ = open_loader(tmp_path, columns=columns, filters=pc.field(1) > 25)
    except ColumnError:
        return
    assert [row for batch in loader for row in batch["row"].tolist()] == [2, 3, 4]


@pytest.mark.parametrize("columns", [None, ["a"], ["s"], []])
def test_a_filter_may_look_into_a_struct(tmp_path, columns):
    inner = pa.array([{"u": 1, "v": None}, {"u": 2, "v": "x"}, None])
    pq.write_table(pa.table({"a": [1, 2, 3], "s": inner}), tmp_path / "1.parquet")
    loader, _ = open_loader(tmp_path, columns=columns, filters=pc.field("s", "u") == 2)
    assert [row for batch in loader for row in batch["row"].tolist()] == [1]


@pytest.mark.parametrize("order", ORDERS)
def test_no_columns_at_all_deliver_the_row_ids(data, order):
    loader, _ = open_loader(data, columns=[], **ORDERS[order])
    batches = list(loader)
    assert all(list(batch) == ["row"] for batch in batches)
    assert {row for batch in batches for row in batch["row"].tolist()} == wanted_rows(order)


@pytest.mark.parametrize("order", ORDERS)
def test_the_row_id_is_the_place_in_the_manifest(data, order):
    """The table holds its own place, as the one element of a list."""
    loader, _ = open_loader(data, columns=["one int64"], batch_size=4, **ORDERS[order])
    rows = []
    for batch in loader:
        assert batch["row"].dtype == torch.int64
        assert batch["one int64"][:, 0].tolist() == batch["row"].tolist()
        rows += batch["row"].tolist()
    assert sorted(rows) == sorted(wanted_rows(order))
    assert (rows == sorted(rows)) == ("mixed" not in order)


@pytest.mark.parametrize("filters", [None, pc.field("keep")], ids=["all rows", "filtered"])
@pytest.mark.parametrize("epoch", [0, 3])
def test_shuffled_rows_come_in_the_order_of_their_shards_permutation(data, filters, epoch):
    """The permutation is of the rows that the filter leaves, taken in the order of the shard's row groups."""
    options = {"shuffle": True, "shuffle_seed": 5, "shuffle_buffer_size": 20, "filters": filters}
    loader, dataset = open_loader(data, columns=["one int64"], batch_size=3, **options)
    dataset.set_epoch(epoch)
    plan = make_plan(
        dataset._opened_files.manifest,
        PlanOptions(2**27, shuffle=True, shuffle_seed=5, shuffle_buffer_size=20),
        epoch=epoch,
        num_ranks=1,
        num_workers=0,
    )
    correct = []
    for shard in shards_of(plan):
        rows = [row for row in row_ids(dataset._opened_files.manifest, shard) if filters is None or row % 3 != 1]
        correct += [rows[place] for place in permutation(len(rows), seed=5, epoch=epoch, shard=shard)]
    batches = list(loader)
    assert [row for batch in batches for row in batch["row"].tolist()] == correct
    assert [row for batch in batches for row in batch["one int64"][:, 0].tolist()] == correct


# Collating, and worker processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output_format", "kind"),
    [("torch", torch.Tensor), ("numpy", np.ndarray), ("dict", list), ("arrow", pa.ChunkedArray)],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_collate_fn_is_given_a_batch_in_the_output_format(data, output_format, kind, num_workers):
    def collate(batch: Any) -> tuple[str, str, list[int]]:
        rows = batch["row"].to_pylist() if isinstance(batch, pa.Table) else [int(row) for row in batch["row"]]
        return type(batch).__name__, type(batch["int64"]).__name__, rows

    options = {"columns": ["int64"], "output_format": output_format, "num_workers": num_workers}
    loader, _ = open_loader(data, collate_fn=collate, **options)
    containers, columns, rows = zip(*loader, strict=True)
    assert set(containers) == {"Table" if output_format == "arrow" else "dict"}
    assert set(columns) == {kind.__name__}
    assert [row for batch in rows for row in batch] == list(range(ROWS))


@pairwise(most=4, output_format=["torch", "numpy", "dict", "arrow"], order=ORDERS)
def test_worker_processes_deliver_equal_values_of_equal_types_for_all_types(data, output_format, order):
    options = {**ORDERS[order], "output_format": output_format, "split_rows": GROUP}
    options["column_formats"] = AS_LISTS if output_format in ("torch", "numpy") else None
    alone = by_row(open_loader(data, num_workers=0, batch_size=7, **options)[0])
    together = by_row(open_loader(data, num_workers=2, batch_size=5, **options)[0])
    assert alone.keys() == together.keys() == wanted_rows(order)
    assert alone == together


def by_row(loader: Any) -> dict[int, dict[str, tuple[Any, str]]]:
    """Each row's values as text, beside the type and dtype of what held them."""
    rows = {}
    for batch in loader:
        if isinstance(batch, pa.Table):
            columns = {name: (batch[name].type, batch[name].to_pylist()) for name in batch.column_names}
        else:
            columns = {name: (kind_of(values), list_of(values)) for name, values in batch.items()}
        for place, row in enumerate(columns.pop("row")[1]):
            rows[row] = {name: (kind, repr(values[place])) for name, (kind, values) in columns.items()}
    return rows


def kind_of(values: Any) -> str:
    return f"{type(values).__name__} {getattr(values, 'dtype', '')}"


def list_of(values: Any) -> list[Any]:
    return values if isinstance(values, list) else values.tolist()


def _structs_of_uuids() -> pa.Array:
    uuids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes([row] * 16) for row in range(20)], pa.binary(16)))
    return pa.StructArray.from_arrays([uuids], ["u"])


@pytest.mark.parametrize("kind", ["tensors with a permutation", "structs of UUIDs", "list views"])
def test_columns_of_which_arrow_makes_no_empty_table_are_filtered_and_transformed(tmp_path, kind):
    if kind == "structs of UUIDs" and IS_OLD:
        pytest.skip("this pyarrow cannot store such a column at all")
    values = {
        "tensors with a permutation": lambda: pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((20, 2, 3))),
        "structs of UUIDs": _structs_of_uuids,
        "list views": lambda: pa.array(
            [[row] for row in range(20)], (pa.list_ if IS_OLD else pa.list_view)(pa.int64())
        ),
    }[kind]()
    pq.write_table(pa.table({"value": range(20), "other": values}), tmp_path / "a.parquet", row_group_size=GROUP)
    later = pc.field("value") >= 9
    for filters in (later, later & pc.field("other").is_valid()):
        batches = list(open_loader(tmp_path, output_format="dict", filters=filters)[0])
        assert [row for batch in batches for row in batch["row"]] == list(range(9, 20))
        assert sum(len(batch["other"]) for batch in batches) == 11

    def last_of(table: pa.Table) -> pa.Table:
        return table.slice(max(0, len(table) - 1))

    loader, _ = open_loader(tmp_path, output_format="dict", row_id_column=None, transform=last_of, transform_id="last")
    assert [one for batch in loader for one in batch["value"]] == [6, 13, 19]
