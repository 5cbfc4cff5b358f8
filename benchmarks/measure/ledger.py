"""How long the ledger takes to answer, on a plan of 100,000,000 rows in 100,000 row groups. No data is read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch_dataloader_utils.planning.ledger.lookup import SegmentLedger
from torch_dataloader_utils.planning.ledger.segment import Segment
from torch_dataloader_utils.planning.manifest import DataFile, Manifest, RowGroup
from torch_dataloader_utils.planning.plan import PlanOptions
from torch_dataloader_utils.planning.planner import EpochPlanner, newest_algorithm
from torch_dataloader_utils.planning.topology import Topology

SHARD_BYTES = 2**27

ORDERS: dict[str, PlanOptions] = {
    "files in order": PlanOptions(SHARD_BYTES),
    "shards shuffled": PlanOptions(SHARD_BYTES, shuffle=True),
    "rows shuffled": PlanOptions(SHARD_BYTES, shuffle=True, shuffle_buffer_size=100_000),
    "rows shuffled in rounds": PlanOptions(SHARD_BYTES, shuffle=True, shuffle_buffer_size=500),
}

FILES, ROW_GROUPS, ROWS = 1000, 100, 1000
"""Files, row groups in each, and rows in each of these."""

RANKS, WORKERS, BATCH_SIZE = 8, 4, 512

ASKED = 100
"""How many further answers are measured."""


def table() -> Iterator[str]:
    """Measure each order, and yield the lines of a table of seconds."""
    groups = tuple(RowGroup(ROWS, 100_000) for _ in range(ROW_GROUPS))
    files = tuple(DataFile(f"part-{number:04d}.parquet", 10**7, "", groups) for number in range(FILES))
    manifest = Manifest("/data", files)
    measured = {order: dict(_seconds(manifest, options)) for order, options in ORDERS.items()}
    yield f"| seconds | {' | '.join(measured)} |"
    yield f"| --- |{' --- |' * len(measured)}"
    for what in next(iter(measured.values())):
        yield f"| {what} | {' | '.join(f'{seconds[what]:.4f}' for seconds in measured.values())} |"


def _seconds(manifest: Manifest, options: PlanOptions) -> Iterator[tuple[str, float]]:
    topology = Topology(RANKS, 0, WORKERS)
    seconds, plan = _timed(lambda: EpochPlanner(manifest, options, None, None).plan(0, topology))
    yield "planning the epoch, once", seconds
    segment = Segment(0, newest_algorithm(), options, topology, BATCH_SIZE, drop_last=False)
    ledger = SegmentLedger(segment, plan, manifest)
    last = len(ledger.steps(0)) - 1
    yield "the first `rows_at`", _timed(lambda: ledger.rows_at(0, last))[0]
    steps = [number * last // ASKED for number in range(ASKED)]
    yield "each further one", statistics.median(_timed(lambda step=step: ledger.rows_at(0, step))[0] for step in steps)
    rows = [number * (manifest.rows // ASKED) for number in range(ASKED)]
    found = [(f"part-{row // (ROW_GROUPS * ROWS):04d}.parquet", row % (ROW_GROUPS * ROWS)) for row in rows]
    yield "the first `step_of`, which makes an index", _timed(lambda: ledger.steps_of(*found[-1]))[0]
    yield "each further `step_of`", statistics.median(_timed(lambda row=row: ledger.steps_of(*row))[0] for row in found)


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    answer = call()
    return time.perf_counter() - begin, answer
