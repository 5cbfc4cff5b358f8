"""How many batches travel together: it is for speed alone, and no batch comes earlier or later for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dataloader_utils.workers.message_size import (
    GROWTH,
    LARGE_BYTES,
    MAX_BATCHES,
    QUICK_SEC,
    MessageSizer,
)

MESSAGES = st.tuples(
    st.one_of(st.integers(0, LARGE_BYTES // GROWTH), st.integers(0, 2 * LARGE_BYTES), st.integers(0, 99 * LARGE_BYTES)),
    st.one_of(st.just(0.0), st.floats(0, 2 * QUICK_SEC)),
)
"""The bytes of a message, and how long it took."""


@given(st.integers(1, 8), st.lists(MESSAGES, max_size=50))
def test_messages_grow_in_steps_of_four_as_long_as_they_are_small_and_quick(num_single, messages):
    sizer = MessageSizer(num_single)
    for number, (size, seconds) in enumerate(messages):
        before = sizer.batches
        assert before == 1 or number >= num_single
        sizer.record(size, seconds)
        after = sizer.batches
        assert after in (1, 4, 16, 64)
        if LARGE_BYTES < size * GROWTH <= 2 * GROWTH * LARGE_BYTES or (seconds > QUICK_SEC and size <= 2 * LARGE_BYTES):
            assert after == before
        if size > 2 * LARGE_BYTES:
            assert after <= before
        else:
            assert after in (before, GROWTH * before)


def test_small_and_quick_messages_grow_to_the_most_batches():
    sizer = MessageSizer()
    counts = []
    for _ in range(5):
        counts.append(sizer.batches)
        sizer.record(1000, 0.001)
    assert counts == [1, 4, 16, 64, MAX_BATCHES]


@pytest.mark.parametrize(("size", "count"), [(3, 16), (9, 4), (60, 1), (10_000, 1)])
def test_messages_of_batches_that_have_grown_become_as_small_as_they_should_be(size, count):
    sizer = MessageSizer()
    for _ in range(3):
        sizer.record(1000, 0.001)
    assert sizer.batches == MAX_BATCHES
    sizer.record(size * LARGE_BYTES, 1.0)
    assert sizer.batches == count
