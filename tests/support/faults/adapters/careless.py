"""A loader with a defect that the harness has to find: its state is one batch behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow.parquet as pq
from faults.outcome import Row, rows_in
from faults.trainer import Job, files_of


def open(job: Job, saved: list[Any] | None) -> tuple[Iterator[list[Row]], Callable[[], Any]]:  # noqa: A001
    """Open the loader."""
    rows = [row for path in files_of(job) for row in rows_in(pq.read_table(path).to_pydict())]
    position = saved[job.rank] if saved else 0

    def batches() -> Iterator[list[Row]]:
        nonlocal position
        for start in range(position, len(rows), job.batch_size):
            position = start
            yield rows[start : start + job.batch_size]

    return batches(), lambda: position
