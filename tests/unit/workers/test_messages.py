"""Messages: lists arrive as they were sent, and many strings are pickled without a memo of each."""

from __future__ import annotations

import pickletools
from datetime import datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dataloader_utils.columns.convert import MANY_ROWS, split, with_lists
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
    pa.list_(pa.string()): st.one_of(st.none(), st.lists(STRINGS, max_size=3)),
    pa.list_(pa.large_list(pa.binary()), 2): st.lists(st.lists(BINARY, max_size=3), min_size=2, max_size=2),
    pa.struct({"a": pa.string()}): st.one_of(st.none(), st.fixed_dictionaries({"a": STRINGS})),
    pa.decimal128(5, 2): st.one_of(st.none(), st.decimals(-9, 9, allow_nan=False, places=2)),
    pa.timestamp("us"): st.one_of(st.none(), st.datetimes()),
}

WITHOUT_MEMO = {
    pa.string(): "abc",
    pa.large_string(): "abc",
    pa.binary(): b"abc",
    pa.large_binary(): b"abc",
    pa.binary(3): b"abc",
    pa.dictionary(pa.int32(), pa.string()): "abc",
    pa.list_(pa.string()): ["abc", "abc"],
    pa.list_(pa.large_list(pa.binary()), 2): [[b"abc"], [b"abc", b"abc"]],
}
WITH_MEMO = {
    pa.struct({"a": pa.string()}): {"a": "abc"},
    pa.decimal128(5, 2): Decimal("1.25"),
    pa.timestamp("us"): datetime(2026, 1, 2),  # noqa: DTZ001 - Arrow has no zone here
}


def sent(columns: dict[str, pa.ChunkedArray], sizes: list[int], pool: SharedMemoryPool | None = None) -> Message:
    receipts = tuple(Receipt(0, 0, 0, rows) for rows in sizes)
    return Message.pack(0, [Batches(with_lists(columns, sizes), receipts)], pool)


def opcodes(message: Message) -> set[str]:
    """Return the names of the operations of a message's first buffer, a pickle."""
    content = bytes(message.memory)[: message.lengths[0]]
    return {operation.name for operation, _, _ in pickletools.genops(content)}


@given(st.data())
def test_lists_arrive_as_they_were_sent(data):
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    repeated = data.draw(st.sampled_from([1, MANY_ROWS]))  # few rows, or many
    pool = data.draw(st.sampled_from([None, SharedMemoryPool.if_possible(2)]))
    rows = sum(sizes)
    columns = {}
    for number, (dtype, values) in enumerate(VALUES.items()):
        drawn = data.draw(st.lists(values, min_size=rows, max_size=rows))
        cut = data.draw(st.integers(0, rows))
        chunks = [pa.array(drawn[:cut], dtype), pa.array(drawn[cut:], dtype)]
        columns[str(number)] = pa.chunked_array(chunks * repeated)
    sizes = [size * repeated for size in sizes]
    (batches,) = sent(columns, sizes, pool).unpack()
    assert [list(batch.data.items()) for batch in batches] == [list(batch.items()) for batch in split(columns, sizes)]


@pytest.mark.parametrize("dtype", WITHOUT_MEMO, ids=str)
def test_many_strings_are_pickled_without_a_memo(dtype):
    values = [WITHOUT_MEMO[dtype]] * MANY_ROWS
    found = opcodes(sent({"a": pa.chunked_array([pa.array(values, dtype)])}, [1, MANY_ROWS - 1]))
    assert found & {"SHORT_BINUNICODE", "SHORT_BINBYTES"}
    assert not found & {"MEMOIZE", "BINPUT", "PUT"}


@pytest.mark.parametrize("dtype", WITH_MEMO, ids=str)
def test_other_values_are_pickled_with_one(dtype):
    values = [WITH_MEMO[dtype]] * MANY_ROWS
    assert "MEMOIZE" in opcodes(sent({"a": pa.chunked_array([pa.array(values, dtype)])}, [MANY_ROWS]))


def test_few_strings_are_pickled_together():
    columns = {name: pa.chunked_array([pa.array(["abc"] * (MANY_ROWS - 1))]) for name in ("a", "b")}
    assert len(sent(columns, [MANY_ROWS - 1]).lengths) == 1
