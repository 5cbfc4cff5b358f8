"""How many batches travel together: it is for speed alone, and no batch comes earlier or later for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dataloader_utils.workers.message_size import (
    GROWTH,
    LARGE_BYTES,
    LONG_SEC,
    MAX_BATCHES,
    MessageSizer,
)

BATCHES = st.tuples(st.integers(0, 2 * LARGE_BYTES), st.one_of(st.just(0.0), st.floats(0, 2 * LONG_SEC)))
"""The bytes of each batch of a message, and how long one took to make."""


@given(st.integers(1, 8), st.lists(BATCHES, max_size=30))
def test_the_next_message_is_neither_large_nor_long_if_its_batches_are_like_the_last_ones(num_single, messages):
    sizer = MessageSizer(num_single)
    for number, (size, seconds) in enumerate(messages):
        before = sizer.batches
        assert before == 1 or number >= num_single
        sizer.record(before, size * before, seconds * before)
        after = sizer.batches
        assert 1 <= after <= min(MAX_BATCHES, GROWTH * before)
        assert after == 1 or (size * after <= LARGE_BYTES and seconds * after <= LONG_SEC * 1.001)


def test_small_and_quick_messages_grow_to_the_most_batches():
    sizer = MessageSizer()
    counts = []
    for _ in range(4):
        counts.append(sizer.batches)
        sizer.record(sizer.batches, 1000, 0.001)
    assert counts == [1, GROWTH, MAX_BATCHES, MAX_BATCHES]


@pytest.mark.parametrize(("size", "count"), [(3, 21), (9, 7), (60, 1), (10_000, 1)])
def test_messages_of_batches_that_have_grown_become_as_small_as_they_should_be(size, count):
    sizer = MessageSizer()
    for _ in range(2):
        sizer.record(sizer.batches, 1000, 0.001)
    sizer.record(MAX_BATCHES, size * LARGE_BYTES, 0.001)
    assert sizer.batches == count


def test_a_message_without_a_batch_says_nothing():
    sizer = MessageSizer()
    sizer.record(0, 1000, 1.0)
    assert sizer.batches == 1
