"""How many batches travel together: it is for speed alone, and no batch comes earlier or later for it."""

from __future__ import annotations

import ctypes
import time
from multiprocessing import sharedctypes
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import batches_of, named, open_loader, rows_of, write_dataset

from torch_dataloader_utils.workers.message_size import (
    GROWTH,
    LARGE_BYTES,
    MAX_BATCHES,
    MAX_CHANGES,
    NUM_SINGLE,
    QUICK_SEC,
    MessageSizer,
)

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

FILES = ((2400, 2400), (10, 10), (1500, 100), (400, 400), (9, 3), (1200, 1200))
"""Row groups that cannot be parted: streams of very different lengths."""

NOTES = st.tuples(
    st.integers(0, 3),
    st.one_of(st.integers(0, LARGE_BYTES // GROWTH), st.integers(0, 2 * LARGE_BYTES), st.integers(0, 99 * LARGE_BYTES)),
    st.one_of(st.just(0.0), st.floats(0, 2 * QUICK_SEC)),
)
"""How many numbers a message is after the one before, its bytes, and how long it took."""


@given(st.integers(1, 8), st.lists(NOTES, max_size=150))
def test_counts_change_in_steps_of_four_after_sixteen_single_ones_and_only_for_parcels_not_begun(most_begun, notes):
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


def test_small_and_quick_parcels_grow_to_the_most_batches_and_a_reset_begins_anew():
    sizer = MessageSizer(2)
    for _ in range(2):
        for number in range(100):
            sizer.record(number, 1000, 0.001)
        assert [sizer.batches(number) for number in (0, 15, 16, 1000)] == [1, 1, GROWTH, MAX_BATCHES]
        sizer.reset()
        assert sizer.batches(1000) == 1


@pytest.mark.parametrize(("size", "count"), [(3, 16), (9, 4), (60, 1), (10_000, 1)])
def test_parcels_of_batches_that_have_grown_become_as_small_as_they_should_be(size, count):
    sizer = MessageSizer(2)
    for number in range(100):
        sizer.record(number, 1000, 0.001)
    assert sizer.batches(100) == MAX_BATCHES
    sizer.record(100, size * LARGE_BYTES, 1.0)
    assert [sizer.batches(number) for number in (103, 104)] == [MAX_BATCHES, count]


def test_the_last_change_of_many_makes_parcels_smaller():
    sizer = MessageSizer(0)
    for number in range(0, 100_000, 4):
        sizer.record(number, 1000 if sizer.batches(number) == 1 else 100 * LARGE_BYTES, 0.0)
    assert len(sizer._changes()) in (MAX_CHANGES, MAX_CHANGES - 1)
    assert sizer.batches(10**6) == 1


def test_a_parcel_made_before_the_last_step_says_nothing_about_the_next():
    sizer = MessageSizer(2)
    sizer.record(0, 1000, 0)
    for number in range(1, 16):
        sizer.record(number, 1000, 0)
    assert sizer.batches(10**6) == GROWTH
    sizer.record(16, 1000, 0)
    assert sizer.batches(10**6) == GROWTH**2


# With worker processes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    directory: Path = tmp_path_factory.mktemp("sizer")
    write_dataset(directory, FILES)
    return directory


def turns(streams: list[list[Any]]) -> list[Any]:
    """Take one from each in turn, as long as it has any."""
    taken = []
    while any(streams):
        taken += [stream.pop(0) for stream in streams if stream]
    return taken


def slow_at_times(batch: Any) -> Any:
    if rows_of(batch)[0] % 1600 == 0:
        time.sleep(0.02)
    return batch


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("options", [{}, {"collate_fn": slow_at_times}, {"prefetch_factor": 5}], ids=named)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_batches_come_in_the_same_order_whatever_travels_together(path, workers, options, monkeypatch):
    loader, _ = open_loader(path, num_workers=workers, batch_size=4, **options)
    grown = [batches_of(loader) for _ in range(2)]
    sizer = loader._channels[0].sizer
    assert sizer.batches(10**6) > 1
    monkeypatch.setattr(MessageSizer, "record", lambda *_: None)
    single = batches_of(loader)
    assert sizer.batches(10**6) == 1
    assert grown == [single, single]


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:ranks make different numbers of steps")
def test_streams_of_very_different_lengths_take_turns_batch_by_batch(path):
    loader, _ = open_loader(path, num_workers=3, batch_size=4)
    ranks = [open_loader(path, num_ranks=3, rank=rank, batch_size=4)[0] for rank in range(3)]  # dealt as workers are
    streams = list(map(batches_of, ranks))
    assert min(map(len, streams)) * 3 < max(map(len, streams))
    assert batches_of(loader) == turns(streams)


class Diary:
    """Notes in shared memory how many batches each message of each worker got."""

    def __init__(self, workers: int, numbers: int) -> None:
        self.counts = [sharedctypes.RawArray(ctypes.c_int64, numbers) for _ in range(workers)]

    def __call__(self, worker: int) -> None:
        """Run in a worker as it starts."""
        counts, batches = self.counts[worker], MessageSizer.batches

        def noted(sizer: MessageSizer, number: int) -> int:
            counts[number] = batches(sizer, number)
            return counts[number]

        MessageSizer.batches = noted  # type: ignore[method-assign]


@pytest.mark.parametrize("sizes", [(6000, 6000), (6000, 20)], ids=["even", "uneven"])
def test_all_workers_put_the_same_number_of_batches_into_parcels_of_the_same_number(tmp_path, sizes):
    write_dataset(tmp_path, tuple((size, size) for size in sizes))
    diary = Diary(2, 6000)
    loader, _ = open_loader(tmp_path, num_workers=2, batch_size=2, prefetch_factor=4, worker_init_fn=diary)
    for number, _ in enumerate(loader):
        if number < 200:
            time.sleep(0.004)  # so that workers come as far ahead as they can
    sizer = loader._channels[0].sizer
    assert sizer.batches(10**6) == MAX_BATCHES
    for counts in diary.counts:
        made = [count for count in counts if count]
        assert len(made) > 5
        assert made == [sizer.batches(number) for number in range(len(made))]
