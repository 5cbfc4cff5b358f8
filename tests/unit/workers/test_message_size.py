"""How many batches travel together: it is for speed alone, and no batch comes earlier or later for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dataloader_utils.workers.message_size import (
    GROWTH,
    LARGE_BYTES,
    MAX_BATCHES,
    MAX_CHANGES,
    NUM_SINGLE,
    QUICK_SEC,
    MessageSizer,
)

NOTES = st.tuples(
    st.integers(0, 3),
    st.one_of(st.integers(0, LARGE_BYTES // GROWTH), st.integers(0, 2 * LARGE_BYTES), st.integers(0, 99 * LARGE_BYTES)),
    st.one_of(st.just(0.0), st.floats(0, 2 * QUICK_SEC)),
)
"""How many numbers a message is after the one before, its bytes, and how long it took."""


@given(st.integers(1, 8), st.lists(NOTES, max_size=150))
def test_counts_change_in_steps_of_four_after_sixteen_single_ones_and_only_for_messages_not_begun(most_begun, notes):
    sizer = MessageSizer(most_begun)
    number = 0
    for further, size, seconds in notes:
        number += further
        before = [sizer.batches(each) for each in range(number + 200)]
        sizer.record(number, size, seconds)
        after = [sizer.batches(each) for each in range(number + 200)]
        begun = number + most_begun + 1
        assert after[:begun] == before[:begun]
        assert set(after[:NUM_SINGLE]) == {1}
        assert set(after) <= {1, 4, 16, 64}
        if LARGE_BYTES < size * GROWTH <= 2 * GROWTH * LARGE_BYTES or (seconds > QUICK_SEC and size <= 2 * LARGE_BYTES):
            assert after == before
        if size > 2 * LARGE_BYTES:
            assert after[-1] <= before[-1]
        else:
            assert after[-1] in (before[-1], GROWTH * before[-1])


def test_small_and_quick_messages_grow_to_the_most_batches_and_a_reset_begins_again():
    sizer = MessageSizer(2)
    for _ in range(2):
        for number in range(100):
            sizer.record(number, 1000, 0.001)
        assert [sizer.batches(number) for number in (0, 15, 16, 1000)] == [1, 1, GROWTH, MAX_BATCHES]
        sizer.reset()
        assert sizer.batches(1000) == 1


@pytest.mark.parametrize(("size", "count"), [(3, 16), (9, 4), (60, 1), (10_000, 1)])
def test_messages_of_batches_that_have_grown_become_as_small_as_they_should_be(size, count):
    sizer = MessageSizer(2)
    for number in range(100):
        sizer.record(number, 1000, 0.001)
    assert sizer.batches(100) == MAX_BATCHES
    sizer.record(100, size * LARGE_BYTES, 1.0)
    assert [sizer.batches(number) for number in (103, 104)] == [MAX_BATCHES, count]


def test_the_last_change_of_many_makes_messages_smaller():
    sizer = MessageSizer(0)
    for number in range(0, 100_000, 4):
        sizer.record(number, 1000 if sizer.batches(number) == 1 else 100 * LARGE_BYTES, 0.0)
    assert len(sizer._changes()) in (MAX_CHANGES, MAX_CHANGES - 1)
    assert sizer.batches(10**6) == 1


def test_a_message_made_before_the_last_step_says_nothing_about_the_next():
    sizer = MessageSizer(2)
    sizer.record(0, 1000, 0)
    for number in range(1, 16):
        sizer.record(number, 1000, 0)
    assert sizer.batches(10**6) == GROWTH
    sizer.record(16, 1000, 0)
    assert sizer.batches(10**6) == GROWTH**2
