"""Where the time of the thread that makes batches goes: every moment to one stage."""

from __future__ import annotations

import time
from dataclasses import asdict

import pytest

from torch_dataloader_utils.reading import work
from torch_dataloader_utils.reading.work import STAGES, Counters, Stopwatch, Wait


class Clock:
    """A clock that a test sets."""

    now = 100.0
    cpu = 7.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.cpu


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(work, "time", clock)
    return clock


def test_laps_are_added_up_and_taken_once(clock):
    watch = Stopwatch()
    for now, stage in [
        (101, "collating_sec"),
        (103, "packing_sec"),
        (106, "waiting_for_loop_sec"),
        (110, "packing_sec"),
    ]:
        clock.now = now
        watch.lap(stage)
    clock.cpu = 9.5
    assert watch.take() == Counters(collating_sec=1, packing_sec=6, waiting_for_loop_sec=3, cpu_sec=2.5)
    assert watch.take() == Counters()


def test_of_the_reading_threads_waits_only_what_is_waited_for_counts(clock):
    watch = Stopwatch()
    clock.now = 110
    watch.lap("collating_sec")
    clock.now = 120
    hidden, begun_before, within = Wait(101, 102, 105), Wait(106, 112, 113), Wait(114, 114, 118)
    watch.lap_reading([hidden, begun_before, within])
    assert watch.take() == Counters(collating_sec=10, waiting_for_storage_sec=2, decoding_sec=5, converting_sec=3)


def test_every_moment_is_counted_once():
    began = time.perf_counter()
    watch = Stopwatch()
    for stage in STAGES:
        watch.lap(stage)
        watch.lap_reading([])
    taken = asdict(watch.take())
    assert 0 < sum(taken[stage] for stage in STAGES) <= time.perf_counter() - began
