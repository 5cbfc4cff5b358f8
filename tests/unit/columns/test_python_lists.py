"""Python lists are those that Arrow's own conversion makes, whichever conversion is faster."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import examples

from torch_dataloader_utils.columns import python_lists
from torch_dataloader_utils.columns.python_lists import list_maker
from torch_dataloader_utils.errors import ColumnError

DAY = 86_400
LAST = 253_402_300_799  # the last second of the year 9999
FIRST = -62_135_596_800  # the first second of the year 1
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6}
ZONES = (None, "UTC", "Europe/Berlin", "America/New_York", "+05:45")


def python_list(column: pa.ChunkedArray) -> list[Any]:
    return list_maker("when", column.type)(column)


def times(unit: str, first: int, last: int) -> st.SearchStrategy[int]:
    return st.integers(first * PER_SECOND[unit], last * PER_SECOND[unit])


KINDS = [
    *(
        (pa.timestamp(unit, zone), times(unit, FIRST + DAY, LAST - DAY))
        for unit in PER_SECOND
        for zone in (ZONES if unit == "us" else ZONES[:3])
    ),
    *((pa.duration(unit), times(unit, -(10**10), 10**10)) for unit in PER_SECOND),
    (pa.date32(), st.integers(FIRST // DAY, LAST // DAY)),
    (pa.time32("s"), st.integers(0, DAY - 1)),
    (pa.time64("us"), times("us", 0, DAY - 1)),
    (pa.decimal128(12, 3), st.decimals(-(10**8), 10**8, places=3)),
    (pa.decimal256(50, 3), st.decimals(-(10**40), 10**40, places=3, allow_nan=False)),
    *((dtype, st.text(max_size=5)) for dtype in (pa.string(), pa.large_string(), pa.string_view())),
    *((dtype, st.binary(max_size=5)) for dtype in (pa.binary(), pa.large_binary())),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.int8(), st.integers(-128, 127)),
    (pa.bool_(), st.booleans()),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats()),
]


def nested(kinds: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw types, each with a strategy for its values, that consist of others."""

    def lists(kind: tuple[pa.DataType, Any]) -> st.SearchStrategy[Any]:
        values = st.lists(st.none() | kind[1], max_size=3)
        fixed = (pa.list_(kind[0], 2), st.lists(st.none() | kind[1], min_size=2, max_size=2))
        return st.sampled_from([(pa.list_(kind[0]), values), (pa.large_list(kind[0]), values), fixed])

    def structs(fields: dict[str, tuple[pa.DataType, Any]]) -> tuple[pa.DataType, Any]:
        dtype = pa.struct([(name, kind[0]) for name, kind in fields.items()])
        return dtype, st.fixed_dictionaries({name: st.none() | kind[1] for name, kind in fields.items()})

    def maps(kind: tuple[pa.DataType, Any]) -> tuple[pa.DataType, Any]:
        entries = st.lists(st.tuples(st.text(max_size=2), st.none() | kind[1]), max_size=2)
        return pa.map_(pa.string(), kind[0]), entries

    of_structs = st.dictionaries(st.text("abc", min_size=1, max_size=2), kinds, max_size=3).map(structs)
    return st.one_of(kinds.flatmap(lists), of_structs, kinds.map(maps))


def require_same(column: pa.ChunkedArray) -> None:
    expected = list(map(repr, column.to_pylist()))  # of the types and the time zones, too; and nan is not nan
    for is_direct in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(python_lists, "IS_DIRECT", is_direct)  # as with releases of pyarrow before 26, and since
            assert list(map(repr, python_list(column))) == expected


@pytest.mark.parametrize(("dtype", "values"), KINDS, ids=str)
def test_objects_are_those_of_arrow(dtype: pa.DataType, values: st.SearchStrategy[Any]) -> None:
    """Those of a column, and those of the same values in dictionaries."""

    @given(st.lists(st.lists(st.none() | values, max_size=6), max_size=3))
    @examples(100, least=12, part=10)
    def check(chunks: list[list[Any]]) -> None:
        arrays = [pa.array(chunk, dtype) for chunk in chunks]
        require_same(pa.chunked_array(arrays, dtype))
        encoded = [array.dictionary_encode() for array in arrays]
        require_same(pa.chunked_array(encoded, pa.dictionary(pa.int32(), dtype)))

    check()


@given(st.data())
def test_nested_objects_are_those_of_arrow(data: st.DataObject) -> None:
    dtype, values = data.draw(st.recursive(st.sampled_from(KINDS), nested, max_leaves=4))
    column = pa.chunked_array([pa.array(data.draw(st.lists(st.none() | values, max_size=6)), dtype)])
    start = data.draw(st.integers(0, len(column)))
    require_same(column.slice(start, data.draw(st.integers(0, len(column) - start))))


def test_structs_have_each_field_by_its_name_and_are_none_where_they_are_null() -> None:
    dtype = pa.struct(
        {"when": pa.timestamp("us", "UTC"), "what": pa.string(), "cost": pa.struct({"sum": pa.decimal128(9, 2)})}
    )
    rows = [
        {"when": None if row == 4 else row, "what": f"row {row}", "cost": None if row == 3 else {"sum": Decimal(row)}}
        for row in range(8)
    ]
    structs = pa.array([None if row == 2 else value for row, value in enumerate(rows)], dtype)
    hidden = pa.StructArray.from_arrays(structs.flatten(), fields=list(dtype), mask=pa.array([False, True] * 4))
    lists = pa.ListArray.from_arrays(pa.array([0, 3, 3, 8]), structs)
    for column in (structs, structs[1:6], hidden, lists, lists[1:]):
        require_same(pa.chunked_array([column]))


@pytest.mark.parametrize("value", [-(2**62), 2**62])
@pytest.mark.parametrize(
    "dtype", [pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.duration("s")], ids=str
)
def test_a_time_that_python_has_not_is_an_error(dtype: pa.DataType, value: int) -> None:
    column = pa.chunked_array([pa.array([0, None, value, 1], dtype)])
    with pytest.raises(ColumnError, match=r"column 'when' of type .* cannot hold"):
        python_list(column)


def test_a_date_that_python_has_not_is_an_error() -> None:
    with pytest.raises(ColumnError, match="column 'when' of type date32"):
        python_list(pa.chunked_array([pa.array([0, None, 2**30], pa.date32())]))


def test_a_time_that_its_zone_moves_beyond_the_calendar_is_an_error() -> None:
    with pytest.raises(ColumnError, match="column 'when'"):
        python_list(pa.chunked_array([pa.array([FIRST], pa.timestamp("s", "America/New_York"))]))


@given(st.lists(st.none() | st.floats(width=16)))
def test_floats_of_16_bits_are_floats(values: list[float | None]) -> None:
    shorts = [None if value is None else np.float16(value) for value in values]  # pyarrow 17 takes no others
    assert list(map(repr, python_list(pa.chunked_array([pa.array(shorts, pa.float16())])))) == list(map(repr, values))


def test_what_nulls_hide_is_in_no_list() -> None:
    values = pa.array(range(6))
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 4, 6]), values, mask=pa.array([False, True, False]))
    structs = pa.StructArray.from_arrays([values], ["a"], mask=pa.array([False, True] * 3))
    assert python_list(pa.chunked_array([lists])) == [[0, 1], None, [4, 5]]
    assert python_list(pa.chunked_array([structs])) == [{"a": 0}, None, {"a": 2}, None, {"a": 4}, None]


@pytest.mark.parametrize("dtype", [pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("us", "UTC")], ids=str)
def test_the_least_time_is_an_error_and_not_null(dtype: pa.DataType) -> None:
    column = pa.chunked_array([pa.array([0, None, -(2**63)]).cast(dtype)])
    with pytest.raises(ColumnError, match=r"column 'when' of type .* cannot hold"):
        python_list(column)


def test_the_least_duration_is_no_null() -> None:
    column = pa.chunked_array([pa.array([0, None, -(2**63)]).cast(pa.duration("us"))])
    assert python_list(column) == [timedelta(0), None, timedelta(microseconds=-(2**63))]


def test_nulls_need_no_zone() -> None:
    require_same(pa.chunked_array([pa.nulls(2, pa.timestamp("us", "Nowhere/Land"))]))


UNIONS = pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])])


@pytest.mark.parametrize(
    "values",
    [
        pa.array([[1], None]),
        pa.array([{"a": 1}, None]),
        pa.array([[("a", 1)], None], pa.map_("string", "int64")),
        UNIONS,
    ],
    ids=lambda values: str(values.type),
)
def test_dictionaries_may_have_values_of_any_type(values: pa.Array) -> None:
    dictionary = pa.DictionaryArray.from_arrays(pa.array([0, 1, None]), values)
    require_same(pa.chunked_array([pa.StructArray.from_arrays([dictionary], ["a"])]))


def test_a_union_may_be_in_a_null_struct() -> None:
    fields = [UNIONS, pa.array([0, 1], pa.timestamp("us"))]
    require_same(pa.chunked_array([pa.StructArray.from_arrays(fields, ["a", "b"], mask=pa.array([False, True]))]))
