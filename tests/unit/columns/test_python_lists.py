"""Python lists are those that Arrow's own conversion makes, whichever conversion is faster."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dataloader_utils.columns.python_lists import python_list
from torch_dataloader_utils.errors import ColumnError

DAY = 86_400
LAST = 253_402_300_799  # the last second of the year 9999
FIRST = -62_135_596_800  # the first second of the year 1
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6}
ZONES = (None, "UTC", "Europe/Berlin", "America/New_York", "+05:45")


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
    (pa.string(), st.text(max_size=5)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
]
LISTS = (pa.list_(pa.timestamp("us")), st.lists(st.none() | times("us", FIRST, LAST), max_size=3))
DICTIONARIES = [(pa.dictionary(pa.int32(), dtype), values) for dtype, values in KINDS]


@pytest.mark.parametrize(("dtype", "values"), [*KINDS, *DICTIONARIES, LISTS], ids=str)
def test_objects_are_those_of_arrow(dtype: pa.DataType, values: st.SearchStrategy[Any]) -> None:
    @given(st.lists(st.lists(st.none() | values, max_size=6), max_size=3))
    def check(chunks: list[list[Any]]) -> None:
        if pa.types.is_dictionary(dtype):
            arrays = [pa.array(chunk, dtype.value_type).dictionary_encode() for chunk in chunks]
        else:
            arrays = [pa.array(chunk, dtype) for chunk in chunks]
        column = pa.chunked_array(arrays, dtype)
        found, expected = python_list("a", column), column.to_pylist()
        assert found == expected
        assert list(map(repr, found)) == list(map(repr, expected))  # the type and the time zone, too

    check()


@pytest.mark.parametrize("value", [-(2**62), 2**62])
@pytest.mark.parametrize(
    "dtype", [pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.duration("s")], ids=str
)
def test_a_time_that_python_has_not_is_an_error(dtype: pa.DataType, value: int) -> None:
    column = pa.chunked_array([pa.array([0, None, value, 1], dtype)])
    with pytest.raises(ColumnError, match=r"column 'when' of type .* cannot hold"):
        python_list("when", column)


def test_a_date_that_python_has_not_is_an_error() -> None:
    with pytest.raises(ColumnError, match="column 'when' of type date32"):
        python_list("when", pa.chunked_array([pa.array([0, None, 2**30], pa.date32())]))


def test_a_time_that_its_zone_moves_beyond_the_calendar_is_an_error() -> None:
    with pytest.raises(ColumnError, match="column 'when'"):
        python_list("when", pa.chunked_array([pa.array([FIRST], pa.timestamp("s", "America/New_York"))]))
