"""The sentence about the bottleneck: what it says of given figures."""

from __future__ import annotations

import pytest

from torch_dataloader_utils.loader.advice import EARLY_BATCHES, EARLY_SEC, advise
from torch_dataloader_utils.loader.metrics import LoopSeconds, MetricsReading, WorkerMetrics
from torch_dataloader_utils.reading.work import Counters


def reading(waiting: float, working: float, *workers: Counters, batches: int = 100) -> MetricsReading:
    counted = tuple(WorkerMetrics(counters=counters) for counters in workers)
    return MetricsReading({"batches_delivered": batches}, LoopSeconds(3.0, waiting, working), counted)


def test_the_sentence_names_the_stage_and_the_idle_cpus():
    worker = Counters(decoding_sec=71, collating_sec=9, waiting_for_loop_sec=20, cpu_sec=150)
    assert advise(reading(34, 66, worker, worker), num_workers=2, cpus=8, threads=8) == (
        "The loader is the bottleneck: the training loop waited 34 % of the time for batches. Workers spent 71 % of "
        "theirs decoding: more workers would help (num_workers=2, which kept 3.0 of 8 CPUs busy)."
    )


@pytest.mark.parametrize(
    ("stage", "idle", "busy"),
    [
        ("waiting_for_storage_sec", "a larger read_ahead_bytes or more workers", "a larger read_ahead_bytes or fewer"),
        ("decoding_sec", "more workers", "fewer columns or a compression that is faster to decode"),
        ("converting_sec", "more workers", "fewer columns or another output_format"),
        ("collating_sec", "a faster collate_fn or more workers", "a faster collate_fn would"),
        ("packing_sec", "more workers", "fewer columns would"),
    ],
)
def test_more_workers_are_advised_only_where_cpus_are_idle(stage, idle, busy):
    worker = Counters(**{stage: 60}, waiting_for_loop_sec=20, cpu_sec=80)
    assert f": {idle} would help" in advise(reading(50, 50, worker), num_workers=1, cpus=4, threads=4)
    assert f": {busy}" in advise(reading(50, 50, worker), num_workers=1, cpus=1, threads=1)


def test_a_process_that_reads_itself_is_advised_to_start_workers():
    worker = Counters(converting_sec=10, collating_sec=30, waiting_for_loop_sec=60, cpu_sec=100)
    assert advise(reading(40, 60, worker), num_workers=0, cpus=4, threads=4) == (
        "The loader is the bottleneck: the training loop waited 40 % of the time for batches. 75 % of that was spent "
        "in collate_fn: a faster collate_fn or worker processes would help (num_workers=0; the process kept 1.0 of 4 "
        "CPUs busy)."
    )


def test_a_process_whose_arrow_has_fewer_threads_than_cpus_is_advised_to_give_it_more():
    decoding = reading(50, 50, Counters(decoding_sec=60, waiting_for_loop_sec=20, cpu_sec=80))
    expected = "more threads for Arrow (OMP_NUM_THREADS or pyarrow.set_cpu_count; it has 2) or worker processes would"
    assert expected in advise(decoding, num_workers=0, cpus=4, threads=2)
    assert "threads for Arrow" not in advise(decoding, num_workers=0, cpus=4, threads=4)
    assert "threads for Arrow" not in advise(decoding, num_workers=1, cpus=4, threads=1)


def test_a_loop_that_hardly_waits_needs_no_faster_loader():
    worker = Counters(decoding_sec=10, waiting_for_loop_sec=90, cpu_sec=10)
    expected = (
        "The model is the bottleneck: the training loop waited 4 % of the time for batches. A faster loader would "
    )
    assert advise(reading(4, 96, worker), num_workers=1, cpus=4, threads=4) == f"{expected}not help."


def test_workers_that_wait_for_a_waiting_loop_are_not_blamed():
    workers = Counters(decoding_sec=40, waiting_for_loop_sec=60), Counters(decoding_sec=10, waiting_for_loop_sec=90)
    text = advise(reading(50, 50, *workers), num_workers=2, cpus=4, threads=4)
    assert "Workers waited 75 % of theirs for it: batches take long on their way" in text
    assert "larger batches or fewer columns would help" in text


def test_one_worker_that_does_not_wait_for_the_loop_is_enough_to_be_what_it_waits_for():
    workers = Counters(decoding_sec=95, waiting_for_loop_sec=5), Counters(decoding_sec=10, waiting_for_loop_sec=90)
    assert "decoding: more workers would help" in advise(reading(50, 50, *workers), num_workers=2, cpus=4, threads=4)


@pytest.mark.parametrize(
    ("seconds", "batches"), [(EARLY_SEC - 0.1, 1000), (1000.0, EARLY_BATCHES - 1)], ids=["too soon", "too few"]
)
def test_nothing_is_said_too_early(seconds, batches):
    worker = Counters(decoding_sec=100, cpu_sec=100)
    text = advise(reading(seconds / 2, seconds / 2, worker, batches=batches), num_workers=1, cpus=4, threads=4)
    assert text.startswith("Too early to say")
    assert f"{batches} batches, {seconds:.1f} s after the first came" in text


@pytest.mark.parametrize("num_workers", [0, 2])
def test_there_is_a_sentence_before_workers_have_said_anything(num_workers):
    text = advise(reading(50, 50, *[Counters()] * max(1, num_workers)), num_workers=num_workers, cpus=4, threads=4)
    assert text.startswith("The loader is the bottleneck")
