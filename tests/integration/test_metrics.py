"""Counters."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from ranged import RangedFileSystem, ranged
from support import batches_of, open_loader, write_dataset

from torch_dataloader_utils import to_device
from torch_dataloader_utils.loader import advice, monitor
from torch_dataloader_utils.reading.work import STAGES

ROW_GROUPS = 3 + 1 + 6 + 4
"""Of the files that `write_dataset` writes."""

LOOP_TIMES = ("first_batch_sec", "waiting_sec", "between_batches_sec")


@pytest.fixture
def data(tmp_path):
    write_dataset(tmp_path / "data")
    return tmp_path / "data"


def compressed_bytes(directory, columns):
    """Bytes of the column chunks of all files, from their footers."""
    total = 0
    for path in directory.iterdir():
        footer = pq.read_metadata(path)
        for group in range(footer.num_row_groups):
            chunks = map(footer.row_group(group).column, range(footer.num_columns))
            total += sum(chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema in columns)
    return total


@pytest.mark.parametrize("num_workers", [0, 2])
def test_metrics_count_the_batches_rows_and_bytes_of_an_epoch(data, num_workers):
    loader, dataset = open_loader(data, num_workers=num_workers, columns=["score"])
    assert dataset.get_metrics()["rows_delivered"] == 0
    batches = batches_of(loader)
    metrics = dataset.get_metrics()
    counted = {
        "batches_delivered": len(batches),
        "rows_delivered": sum(map(len, batches)),
        "bytes_read": compressed_bytes(data, {"score"}),
        "bytes_read_again": 0,
        "row_groups_read": ROW_GROUPS,
        "row_groups_read_again": 0,
        "retries": 0,
    }
    assert {name: metrics[name] for name in counted} == counted
    none = (
        "epoch",
        "batches_skipped",
        "rows_skipped",
        "rows_excluded",
        "rows_dropped",
        "row_groups_pruned",
        "bytes_pruned",
    )
    assert not any(metrics[name] for name in none)
    assert len(metrics["workers"]) == max(1, num_workers)
    assert {name: sum(worker[name] for worker in metrics["workers"]) for name in counted} == counted
    assert all(worker["rows_delivered"] > 0 for worker in metrics["workers"])


def test_columns_that_only_the_filter_needs_count_as_read(data):
    loader, dataset = open_loader(data, columns=["score"], filters=pc.field("value") >= 0)
    batches_of(loader)
    assert dataset.get_metrics()["bytes_read"] == compressed_bytes(data, {"score", "value"})


def test_only_the_row_group_that_holds_delivered_rows_is_counted_as_read_again(data):
    loader, _ = open_loader(data, batch_size=60)
    next(iter(loader))
    resumed, dataset = open_loader(data, batch_size=60)
    resumed.load_state_dict(loader.state_dict())
    batches_of(resumed)
    group = pq.read_metadata(data / "part-000.parquet").row_group(1)  # rows 50 to 100 hold row 60
    expected = sum(group.column(number).total_compressed_size for number in range(group.num_columns))
    metrics = dataset.get_metrics()
    assert metrics["bytes_read_again"] == expected
    assert (metrics["row_groups_read_again"], metrics["row_groups_read"]) == (1, ROW_GROUPS - 1)


def test_a_resume_at_a_row_group_reads_nothing_again(data):
    loader, _ = open_loader(data, batch_size=50)
    next(iter(loader))
    resumed, dataset = open_loader(data, batch_size=50)
    resumed.load_state_dict(loader.state_dict())
    batches_of(resumed)
    assert dataset.get_metrics()["bytes_read_again"] == 0


def test_rows_that_drop_last_leaves_out_are_counted(data):
    loader, dataset = open_loader(data, num_workers=2, batch_size=64, drop_last=True)
    rows = sum(map(len, batches_of(loader)))
    metrics = dataset.get_metrics()
    assert metrics["rows_delivered"] == rows
    assert metrics["rows_dropped"] == 443 - rows > 0


def test_what_a_filter_rules_out_before_anything_is_read_is_counted(data):
    _, dataset = open_loader(data, filters=pc.field("value") < 137)  # of the third file one row group of six may match
    footers = [pq.read_metadata(path) for path in sorted(data.iterdir())]
    groups = [footer.row_group(number) for footer in footers for number in range(footer.num_row_groups)]
    pruned = [group for group in groups if group.column(0).statistics.min >= 137]
    assert dataset.get_metrics()["row_groups_pruned"] == len(pruned) > 0
    assert dataset.get_metrics()["bytes_pruned"] == sum(group.total_byte_size for group in pruned)


# Where time goes ----------------------------------------------------------------------------------------------------


def slowly(sign, seconds, batch):
    """Collate a batch: slowly once the sign is there."""
    if sign.exists():
        time.sleep(seconds)
    return batch


def run(loader, seconds=0.0):
    """Deliver an epoch in a loop whose own work takes so long a batch; return the seconds of all of it."""
    began = time.perf_counter()
    for _ in loader:
        if seconds:
            time.sleep(seconds)
    return time.perf_counter() - began


def stages_of(metrics):
    """Seconds of all workers, by stage."""
    return {stage: sum(worker[stage] for worker in metrics["workers"]) for stage in STAGES}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [{}, {"shuffle": True, "shuffle_buffer_size": 60}], ids=["in order", "shuffled"])
def test_seconds_of_the_loop_and_of_each_worker_are_no_more_than_passed(data, num_workers, shuffle):
    loader, dataset = open_loader(data, num_workers=num_workers, **shuffle)
    passed = run(loader)
    metrics = dataset.get_metrics()
    assert 0 < sum(metrics[name] for name in LOOP_TIMES) <= passed
    assert all(0 < sum(worker[stage] for stage in STAGES) <= passed for worker in metrics["workers"])
    assert all(worker["cpu_sec"] > 0 for worker in metrics["workers"])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_slow_loop_is_counted_as_such_and_the_advice_is_to_leave_the_loader_alone(data, num_workers, monkeypatch):
    monkeypatch.setattr(advice, "EARLY_SEC", 0.5)
    # All batches may be made ahead: a worker that a busy machine lets wait has time for it.
    ahead = {"prefetch_factor": 100} if num_workers else {}
    loader, dataset = open_loader(data, num_workers=num_workers, batch_size=40, **ahead)
    run(loader, 0.3 if num_workers else 0.1)
    metrics = dataset.get_metrics()
    assert metrics["between_batches_sec"] >= 0.1 * (metrics["batches_delivered"] - 1)
    if not num_workers:  # others may have made all batches before the loop has worked
        assert stages_of(metrics)["waiting_for_loop_sec"] >= 0.1 * (metrics["batches_delivered"] - 1)
    assert metrics["advice"].startswith("The model is the bottleneck: the training loop waited ")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_slow_collate_fn_is_named(data, num_workers, monkeypatch):
    monkeypatch.setattr(advice, "EARLY_SEC", 0.5)
    sign = data.parent / "slow"
    loader, dataset = open_loader(data, num_workers=num_workers, batch_size=32, collate_fn=partial(slowly, sign, 0.06))
    run(loader)  # what begins takes time, too, on a busy machine
    sign.touch()
    run(loader)
    metrics = dataset.get_metrics()
    assert stages_of(metrics)["collating_sec"] >= 0.06 * metrics["batches_delivered"]
    assert metrics["advice"].startswith("The loader is the bottleneck: the training loop waited ")
    assert "in collate_fn: a faster collate_fn or " in metrics["advice"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_slow_storage_is_named(data, num_workers, monkeypatch):
    monkeypatch.setattr(advice, "EARLY_SEC", 0.5)
    sign = data.parent / "slow"
    monkeypatch.setattr(RangedFileSystem, "on_fetch", lambda *_: slowly(sign, 0.1, None))
    # A budget for one or two row groups: others are requested once these were delivered.
    options = {"columns": ["value", "score"], "read_ahead_bytes": 4096, "batch_size": 32}
    loader, dataset = open_loader(ranged(data), num_workers=num_workers, **options)
    run(loader)
    sign.touch()
    run(loader)
    metrics = dataset.get_metrics()
    assert max(STAGES, key=stages_of(metrics).__getitem__) == "waiting_for_storage_sec"
    assert "waiting for the storage: a larger read_ahead_bytes or " in metrics["advice"]


def test_more_workers_are_advised_where_one_decodes_and_cpus_are_idle(tmp_path, monkeypatch):
    monkeypatch.setattr(advice, "EARLY_SEC", 0.0)
    monkeypatch.setattr(monitor, "usable_cpus", lambda: 64)
    values = pa.table({"x": np.random.default_rng(3).integers(0, 1 << 20, 500_000)})
    pq.write_table(values, tmp_path / "0.parquet", compression="brotli", use_dictionary=False)
    for number in range(1, 10):
        shutil.copy(tmp_path / "0.parquet", tmp_path / f"{number}.parquet")
    # Most of what is decoded is filtered out, so that little is left to do for what comes after it; and all batches may
    # be made ahead, so that the worker never waits for a training loop to which a busy machine gives no time.
    options = {"filters": pc.field("x") < 10_000, "row_id_column": None, "batch_size": 1000, "prefetch_factor": 100}
    loader, dataset = open_loader(tmp_path, num_workers=1, **options)
    run(loader)
    run(loader)
    text = dataset.get_metrics()["advice"]
    assert "of theirs decoding: more workers would help (num_workers=1, which kept " in text, text
    assert text.endswith(" of 64 CPUs busy).")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_in_the_first_seconds_nothing_is_advised(data, num_workers):
    loader, dataset = open_loader(data, num_workers=num_workers)
    assert dataset.get_metrics()["advice"].startswith("Too early to say")
    batches_of(loader)
    assert dataset.get_metrics()["advice"].startswith("Too early to say")


def test_the_loop_of_a_device_loader_is_counted_as_well(data):
    loader, dataset = open_loader(data, num_workers=1)
    assert run(to_device(loader, "cpu"), 0.01) >= sum(dataset.get_metrics()[name] for name in LOOP_TIMES) > 0
    assert dataset.get_metrics()["between_batches_sec"] >= 0.01 * 20


# All iterations together --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_totals_count_all_iterations_also_those_that_were_left(data, num_workers):
    loader, dataset = open_loader(data, num_workers=num_workers)
    batches = len(batches_of(loader))
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    loader.load_state_dict(loader.state_dict())
    assert dataset.get_metrics()["batches_delivered"] == 0
    batches_of(loader)
    total = dataset.get_total_metrics()
    assert (total["batches_delivered"], total["rows_delivered"]) == (2 * batches, 2 * 443)
    assert sum(worker["rows_delivered"] for worker in total["workers"]) == 2 * 443
    assert total["row_groups_read"] >= 2 * ROW_GROUPS
    assert dataset.get_metrics()["batches_delivered"] == batches - 3


def numbers_of(metrics):
    return [
        value for one in (metrics, *metrics["workers"]) for value in one.values() if isinstance(value, (int, float))
    ]


def test_totals_that_another_thread_reads_never_get_smaller(data):
    loader, dataset = open_loader(data, num_workers=1, collate_fn=partial(slowly, data, 0.001))
    seen, is_over = [], threading.Event()

    def look():
        while not is_over.is_set():
            seen.append(numbers_of(dataset.get_total_metrics()))

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(3):
        run(loader)
    is_over.set()
    thread.join()
    seen.append(numbers_of(dataset.get_total_metrics()))
    assert all(all(old <= new for old, new in zip(*pair, strict=True)) for pair in itertools.pairwise(seen))
    assert dataset.get_total_metrics()["rows_delivered"] == 3 * 443
