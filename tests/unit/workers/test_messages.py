"""Messages: columns that become lists are sent in Arrow, and the lists are the same as without workers."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import examples

from torch_dataloader_utils.columns.convert import sendable, split
from torch_dataloader_utils.errors import ColumnError
from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.reading.batching import Batches
from torch_dataloader_utils.workers.messages import Message
from torch_dataloader_utils.workers.shared_memory import SharedMemoryPool

STRINGS = st.one_of(st.none(), st.text(max_size=5))
BINARY = st.one_of(st.none(), st.binary(max_size=5))

VALUES = {
    pa.string(): STRINGS,
    pa.large_string(): STRINGS,
    pa.binary(): BINARY,
    pa.large_binary(): BINARY,
    pa.binary(3): st.one_of(st.none(), st.binary(min_size=3, max_size=3)),
    pa.dictionary(pa.int32(), pa.string()): STRINGS,
    pa.dictionary(pa.int32(), pa.string_view()): STRINGS,
    pa.list_(pa.dictionary(pa.int8(), pa.string())): st.one_of(st.none(), st.lists(STRINGS, max_size=3)),
    pa.list_(pa.string()): st.one_of(st.none(), st.lists(STRINGS, max_size=3)),
    pa.list_(pa.large_list(pa.binary()), 2): st.lists(st.lists(BINARY, max_size=3), min_size=2, max_size=2),
    pa.struct({"a": pa.string()}): st.one_of(st.none(), st.fixed_dictionaries({"a": STRINGS})),
    pa.decimal128(5, 2): st.one_of(st.none(), st.decimals(-9, 9, allow_nan=False, places=2)),
    pa.timestamp("us"): st.one_of(st.none(), st.datetimes()),
}


def sent(columns: dict[str, pa.ChunkedArray], sizes: list[int], pool: SharedMemoryPool | None = None) -> Message:
    receipts = tuple(Receipt(0, 0, 0, rows) for rows in sizes)
    return Message.pack(0, [Batches(sendable(columns, sizes), receipts)], pool)


def array_of(values: list[Any], dtype: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(dtype):  # pyarrow makes no dictionary of views at once
        return pa.array(values, dtype.value_type).dictionary_encode()
    return pa.array(values, dtype)


@given(st.data())
@examples(100, part=5)
def test_lists_arrive_as_they_were_sent(data):
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    pool = data.draw(st.sampled_from([None, SharedMemoryPool.if_possible(2)]))
    rows = sum(sizes)
    columns = {}
    for number, (dtype, values) in enumerate(VALUES.items()):
        drawn = data.draw(st.lists(values, min_size=rows, max_size=rows))
        cut = data.draw(st.integers(0, rows))
        columns[str(number)] = pa.chunked_array([array_of(part, dtype) for part in (drawn[:cut], drawn[cut:])])
    (batches,) = sent(columns, sizes, pool).unpack()
    assert [list(batch.data.items()) for batch in batches] == [list(batch.items()) for batch in split(columns, sizes)]


def test_rows_are_sent_without_the_others_of_their_column():
    whole = pa.chunked_array([pa.array([f"{number:050}" for number in range(10_000)])])
    message = sent({"a": whole.slice(5_000, 10)}, [4, 6])
    assert message.size < 50_000 / 4
    (batches,) = message.unpack()
    assert [batch.data for batch in batches] == [
        {"a": [f"{number:050}" for number in range(5_000, 5_004)]},
        {"a": [f"{number:050}" for number in range(5_004, 5_010)]},
    ]


def test_of_a_dictionary_the_values_are_sent_that_rows_have():
    dictionary = pa.array([f"{number:050}" for number in range(10_000)])
    column = pa.chunked_array([pa.DictionaryArray.from_arrays(pa.array([7, None, 9_999]), dictionary)])
    message = sent({"a": column}, [3])
    assert message.size < 50_000 / 4
    (batches,) = message.unpack()
    assert [batch.data for batch in batches] == [{"a": [f"{7:050}", None, f"{9_999:050}"]}]


def nested_strings(dtype: pa.DataType) -> dict[str, pa.Array]:
    rows = 10_000
    strings = array_of([f"{number:050}" for number in range(rows)], dtype)
    return {
        "list": pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), strings),
        "struct": pa.StructArray.from_arrays([strings], ["a"]),
    }


@pytest.mark.parametrize("kind", ["list", "struct"])
@pytest.mark.parametrize("dtype", [pa.dictionary(pa.int32(), pa.string()), pa.string_view()], ids=str)
def test_rows_are_sent_without_the_other_values_that_they_could_point_at(dtype: pa.DataType, kind: str):
    column = pa.chunked_array([nested_strings(dtype)[kind]]).slice(5_000, 10)
    message = sent({"a": column}, [4, 6])
    assert message.size < 50_000 / 4
    (batches,) = message.unpack()
    expected = column.to_pylist()
    assert [batch.data for batch in batches] == [{"a": expected[:4]}, {"a": expected[4:]}]


class Degrees(pa.ExtensionType):
    """A type of the user, which is not registered."""

    def __init__(self) -> None:
        super().__init__(pa.int64(), "tests.degrees")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    def __arrow_ext_scalar_class__(self) -> type[pa.ExtensionScalar]:
        return Degree


class Degree(pa.ExtensionScalar):
    """What values of that type are made of."""

    def as_py(self, **_options: object) -> str:
        return f"{self.value.as_py()} °C"


def test_values_of_a_type_that_is_not_registered_are_those_of_the_type():
    degrees = pa.ExtensionArray.from_storage(Degrees(), pa.array([20, 21]))
    columns = {"a": pa.chunked_array([degrees]), "b": pa.chunked_array([pa.StructArray.from_arrays([degrees], ["c"])])}
    (batches,) = sent(columns, [2]).unpack()
    assert [batch.data for batch in batches] == [{"a": ["20 °C", "21 °C"], "b": [{"c": "20 °C"}, {"c": "21 °C"}]}]


def test_a_value_that_python_has_not_is_an_error_where_lists_are_made():
    (batches,) = sent({"when": pa.chunked_array([pa.array([0, 1, 2**62], pa.timestamp("us"))])}, [2, 1]).unpack()
    delivered = iter(batches)
    assert next(delivered).data == {"when": [datetime(1970, 1, 1), datetime(1970, 1, 1, microsecond=1)]}  # noqa: DTZ001
    with pytest.raises(ColumnError, match="column 'when'"):
        next(delivered)
