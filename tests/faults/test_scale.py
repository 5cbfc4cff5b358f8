"""Very much of everything: files, row groups, columns, epochs, large rows, a dataset far larger than memory."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs.forked import ONE_ALLOCATOR, start
from jobs.ranks import JOBS
from jobs.scale_job import MB, blob_of

from torch_dataloader_utils.loader.epoch import EpochState
from torch_dataloader_utils.loader.events import Hooks
from torch_dataloader_utils.planning.manifest import DataFile, Manifest, RowGroup
from torch_dataloader_utils.planning.plan import PlanOptions
from torch_dataloader_utils.planning.planner import EpochPlanner
from torch_dataloader_utils.planning.topology import Topology
from torch_dataloader_utils.workers.messages import MAX_HELD

FAULT = "100,000 files, 1,000,000 splits, 10,000 columns, 100 epochs, rows of 1 MB, ten times the memory budget"

STATE_SECONDS = 0.05
"""The promise. Processor time of the fastest of several calls is compared: other processes slow some down."""

pytestmark = pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning")


# Plans and states --------------------------------------------------------------------------------------------------

PLANS = {
    "in order": PlanOptions(2**20),
    "shards shuffled": PlanOptions(2**20, shuffle=True),
    "rows shuffled": PlanOptions(2**27, shuffle=True, shuffle_buffer_size=100_000),
}


def epoch_of(files: int, options: PlanOptions, ranks: int, workers: int) -> EpochState:
    """Return the first rank's epoch of a dataset without files: ten row groups in each, 1,000 rows in each of these."""
    groups = (RowGroup(1000, 2**20),) * 10
    found = (
        DataFile(f"day={n // 1000:04d}/part-{n:06d}.parquet", 10**8 + n, f"{n:016x}", groups, f"etag{n}", 1.7e9 + n)
        for n in range(files)
    )
    opened = SimpleNamespace(
        manifest=Manifest("s3://bucket/data", tuple(found)),
        selection=None,
        unknown_rows=None,
        filter_digest=None,
        filter_binding=None,
        filter_bindings=None,
        format_name="parquet",
        options_digest=None,
        transform=None,
        pin={},
        take_retries=tuple,
    )
    read_options: Any = SimpleNamespace(
        batch_size=1024, drop_last=False, fingerprint=False, batching=None, unknown_batches=None
    )
    return EpochState(
        opened,  # type: ignore[arg-type] # what an epoch asks of the opened files
        EpochPlanner(opened.manifest, options, selection=None, strategy=None),
        read_options,
        topology=Topology(ranks, 0, workers),
        adopts_num_workers=False,
        progress_interval_sec=None,
        hooks=Hooks(),
    )


def reach(epoch: EpochState, share: float) -> None:
    """Let each stream have delivered a share of its slices, and a row of the next one."""
    iteration = epoch.owner.iteration
    assert iteration is not None
    streams = []
    for stream in iteration.progress.streams:
        position = int(share * len(stream.slices))
        left = stream.slices[position:]
        streams.append(stream._replace(position=position, rows_delivered=left[0].start + 1 if left else 0))
    iteration.progress = iteration.progress._replace(streams=tuple(streams), batches_delivered=10)


LONG = [pytest.mark.soak, pytest.mark.timeout(600)]


# The state of one rank that has all 20,000 splits of 2,000 files counts them by row numbers: see `MOST_SPLITS`.
# Each of eight ranks has fewer, and lists them, with 2,000 files as with 500.
@pytest.mark.parametrize(
    ("files", "ranks", "workers"),
    [
        (2000, 1, 0),
        (500, 8, 2),
        (500, 8, 8),
        *(pytest.param(100_000, *topology, marks=LONG) for topology in ((1, 0), (8, 2), (8, 8))),
    ],
)
@pytest.mark.parametrize("how", PLANS)
def test_states_of_many_splits_are_small_and_take_little_time(record, files, ranks, workers, how):
    with record(FAULT, f"{files:,} files, {10 * files:,} splits, {how}, {ranks} ranks, {workers} workers") as outcome:
        began = time.thread_time()
        epoch = epoch_of(files, PLANS[how], ranks, workers)
        digest = epoch.plan.digest
        planned = time.thread_time() - began
        began = time.thread_time()
        epoch.begin_iteration()
        prepared = time.thread_time() - began
        slowest, largest, first = 0.0, 0, 0.0
        for share in (0, 0.001, 0.25, 0.5, 0.75, 1):
            reach(epoch, share)
            seconds = []
            for _ in range(5):
                began = time.thread_time()
                state = epoch.state_dict()
                seconds.append(time.thread_time() - began)
            first, slowest = max(first, seconds[0]), max(slowest, min(seconds))
            ranges = len(state.get("completed_rows", ())) // 2 + len(state["completed_shards"])
            size = len(json.dumps({**state, "files": None}))
            assert size <= 10**6 + 32 * ranges
            largest = max(largest, size)
        assert epoch.plan.digest == digest
        del epoch  # it has a page of shared memory
        outcome.seconds = slowest
        outcome.case += (
            f": planned in {planned:.1f} s, prepared in {prepared:.2f} s; state_dict() {1000 * slowest:.0f} ms, the "
            f"slowest first call {1000 * first:.0f} ms; the largest state {largest / 1e6:.1f} MB"
        )
        if files > 10_000:
            assert slowest < STATE_SECONDS


# Real files --------------------------------------------------------------------------------------------------------


def read(directory: Path, data: Path, rows: int, epochs: int, **options: Any) -> dict[str, Any]:
    """Read epochs in a process of its own, and return what it found."""
    arguments = {"path": str(data), "rows": rows, "epochs": epochs, "options": {"num_workers": 0, **options}}
    output = directory / "output.txt"
    process = start(JOBS / "scale_job.py", json.dumps(arguments), output=output, environment=ONE_ALLOCATOR)
    process.join(1800)
    process.kill()
    process.join()
    said = output.read_text()
    assert process.exitcode == 0, said
    return dict(json.loads(said.splitlines()[-1]))


def note_rows(outcome: Any, epochs: list[dict[str, Any]]) -> None:
    """Write into the record what became of the rows."""
    outcome.lost = sum(epoch["lost"] for epoch in epochs)
    outcome.repeated = sum(epoch["repeated"] for epoch in epochs)
    outcome.corrupted = sum(epoch["corrupted"] for epoch in epochs)
    outcome.seconds = sum(epoch["seconds"] for epoch in epochs)


@pytest.mark.parametrize(
    ("rows", "limit"), [(48, 16), pytest.param(640, 64, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)
@pytest.mark.parametrize("shuffle_buffer_size", [None, 8])
def test_rows_of_1_mb_of_a_dataset_of_many_times_the_budget(tmp_path, record, rows, limit, shuffle_buffer_size):
    """The budget bounds what Arrow holds; what the process holds beyond it is a few batches."""
    data = tmp_path / "data"
    data.mkdir()
    for number in range(4):
        ids = range(number * rows // 4, (number + 1) * rows // 4)
        with pq.ParquetWriter(data / f"{number}.parquet", pa.schema({"blob": pa.binary()}), compression="none") as file:
            for first in range(ids.start, ids.stop, 4):
                blobs = [blob_of(row) for row in range(first, min(first + 4, ids.stop))]
                file.write_table(pa.table({"blob": pa.array(blobs, pa.binary())}))
    options: dict[str, Any] = {"batch_size": 2, "read_ahead_bytes": limit * MB, "output_format": "dict"}
    if shuffle_buffer_size is not None:
        options |= {"shuffle": True, "shuffle_buffer_size": shuffle_buffer_size}
    how = "in order" if shuffle_buffer_size is None else f"shuffled {shuffle_buffer_size} at a time"
    with record(FAULT, f"{rows} rows of 1 MB, {limit} MB of read-ahead, {how}") as outcome:
        found = read(tmp_path, data, rows, 1, **options)
        note_rows(outcome, found["epochs"])
        grown = found["epochs"][0]["peak"] - found["start"]["resident"]
        outcome.case += f": Arrow held {found['arrow'] / MB:.0f} MB, the process grew by {grown / MB:.0f} MB"
        shard = shuffle_buffer_size or 0  # its rows are copied into their random order
        assert found["arrow"] < 1.25 * limit * MB + (2 * shard + 8) * MB
        assert grown < 2 * limit * MB + 100 * MB


@pytest.mark.parametrize("epochs", [12, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_leave_nothing_behind(tmp_path, record, epochs, num_workers):
    data = tmp_path / "data"
    data.mkdir()
    for number in range(3):
        table = pa.table({"value": np.arange(5000) + number, "name": [f"row {row}" for row in range(5000)]})
        pq.write_table(table, data / f"{number}.parquet", row_group_size=600)
    options = {"num_workers": num_workers, "batch_size": 250, "shuffle": True, "shuffle_buffer_size": 2000}
    with record(FAULT, f"{epochs} epochs, {num_workers} workers") as outcome:
        found = read(tmp_path, data, 15_000, epochs, **options)["epochs"]
        note_rows(outcome, found)
        warm = found[epochs // 3 :]
        slope = np.polyfit(range(len(warm)), [epoch["resident"] for epoch in warm], 1)[0]
        outcome.case += f": {slope / 1024:+.0f} KiB an epoch, {found[-1]['resident'] / MB:.0f} MB at the end"
        for kind in ("processes", "threads", "descriptors"):
            assert found[-1][kind] <= warm[0][kind], kind
        # Each block of shared memory that was ever mapped has one. How many are in use at once is a matter of who waits
        # for whom, so the last of them may be mapped in any epoch.
        most = 2 + MAX_HELD + 1  # blocks of a worker: those in transit, those in use, and one that is made
        assert found[-1]["blocks"] <= 2 + num_workers * (
            most + 4
        )  # a page and its map: the loader's, each worker's, twice
        assert found[-1]["resident"] - warm[0]["resident"] < 64 * MB
        if epochs >= 100:
            assert slope < MB / 4


@pytest.mark.parametrize("columns", [500, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_many_columns(tmp_path, record, columns):
    """Each column costs some kilobytes of footers, schemas and tensors, and no more with more columns."""
    data = tmp_path / "data"
    data.mkdir()
    rows = 300
    for number in range(2):
        values = np.arange(number * rows, (number + 1) * rows, dtype=np.int32)
        table = pa.table({f"c{column}": values + column for column in range(columns)})
        pq.write_table(table, data / f"{number}.parquet", row_group_size=100)
    with record(FAULT, f"{columns:,} columns") as outcome:
        found = read(tmp_path, data, 2 * rows, 1, batch_size=64)
        note_rows(outcome, found["epochs"])
        grown = found["epochs"][0]["peak"] - found["start"]["resident"]
        outcome.case += f": opened in {found['opened']:.1f} s, the process grew by {grown / MB:.0f} MB"
        assert grown < 100 * MB + columns * 100 * 1024
