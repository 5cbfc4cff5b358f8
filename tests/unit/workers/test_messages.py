"""Messages: strings arrive as they were sent, and are pickled without a note of each one."""

from __future__ import annotations

import pickletools

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dataloader_utils.columns.convert import split, with_lists
from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.reading.batching import Batches
from torch_dataloader_utils.workers.messages import Message

TEXT = st.one_of(st.none(), st.text(max_size=5))
BINARY = st.one_of(st.none(), st.binary(max_size=5))

VALUES = {
    pa.string(): TEXT,
    pa.large_string(): TEXT,
    pa.binary(): BINARY,
    pa.large_binary(): BINARY,
    pa.binary(3): st.one_of(st.none(), st.binary(min_size=3, max_size=3)),
    pa.dictionary(pa.int32(), pa.string()): TEXT,
    pa.list_(pa.string()): st.one_of(st.none(), st.lists(TEXT, max_size=3)),
    pa.list_(pa.large_list(pa.binary()), 2): st.lists(st.lists(BINARY, max_size=3), min_size=2, max_size=2),
    pa.struct({"a": pa.string()}): st.one_of(st.none(), st.fixed_dictionaries({"a": TEXT})),
    pa.decimal128(5, 2): st.one_of(st.none(), st.decimals(-9, 9, allow_nan=False, places=2)),
    pa.timestamp("us"): st.one_of(st.none(), st.datetimes()),
}
WITHOUT_NOTES = list(VALUES)[:-3]
"""Those of strings and binary alone."""


def sent(columns: dict[str, pa.ChunkedArray], sizes: list[int]) -> Message:
    receipts = tuple(Receipt(0, 0, 0, rows) for rows in sizes)
    return Message.pack(0, [Batches(with_lists(columns, sizes), receipts)])


@given(st.data())
def test_lists_arrive_as_they_were_sent(data):
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    rows = sum(sizes)
    columns = {}
    for number, (dtype, values) in enumerate(VALUES.items()):
        drawn = data.draw(st.lists(values, min_size=rows, max_size=rows))
        cut = data.draw(st.integers(0, rows))
        columns[str(number)] = pa.chunked_array([pa.array(drawn[:cut], dtype), pa.array(drawn[cut:], dtype)])
    (batches,) = sent(columns, sizes).unpack()
    assert [list(batch.data.items()) for batch in batches] == [list(batch.items()) for batch in split(columns, sizes)]


@pytest.mark.parametrize("dtype", WITHOUT_NOTES, ids=str)
def test_strings_are_pickled_without_a_note_of_each(dtype):
    value = {True: ["abc"] * 2, False: "abc"}[pa.types.is_list(dtype) or pa.types.is_fixed_size_list(dtype)]
    if pa.types.is_fixed_size_list(dtype):
        value = [["abc"], ["abc"]]
    message = sent({"a": pa.chunked_array([pa.array([value, None, value], dtype)])}, [2, 1])
    content = bytes(message.memory)[: message.lengths[0]]
    found = {operation.name for operation, _, _ in pickletools.genops(content)}
    assert found & {"SHORT_BINUNICODE", "SHORT_BINBYTES"}
    assert not found & {"MEMOIZE", "BINPUT", "PUT"}
