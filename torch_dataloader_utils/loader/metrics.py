"""Counters of delivered rows and read bytes, and a line that shows them."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TextIO


@dataclass(slots=True)
class Metrics:
    """What an iteration has delivered and read so far, as the training process counts it.

    Attributes:
        batches_delivered: Batches delivered.
        rows_delivered: Rows in them.
        rows_dropped: Rows left out by ``drop_last`` at the ends of streams.
        bytes_read: Compressed bytes of the row groups read for what was delivered.
        bytes_read_again: Those of them in row groups that have rows which were delivered before a resume.
    """

    batches_delivered: int = 0
    rows_delivered: int = 0
    rows_dropped: int = 0
    bytes_read: int = 0
    bytes_read_again: int = 0


class ProgressLine:
    """Writes a line about an epoch's progress to a stream: at most one in so many seconds, and one at the end.

    `total` is the epoch's number of batches, or None if it is not known.
    """

    def __init__(self, interval: float, total: int | None, stream: TextIO | None = None) -> None:
        self._interval = interval
        self._total = total
        self._stream = stream or sys.stderr
        self._began = self._written = time.monotonic()

    def update(self, epoch: int, batch: int, metrics: Metrics, *, last: bool = False) -> None:
        """Write a line if it is time for one; `last` says that the epoch has ended: then a line is always written.

        `batch` counts the epoch's delivered batches, including those before a resume; `metrics` are the iteration's.
        """
        now = time.monotonic()
        if not last and now - self._written < self._interval:
            return
        self._written = now
        rate = metrics.rows_delivered / max(now - self._began, 1e-9)
        total = "" if self._total is None else f"/{self._total} ({100 * batch / max(1, self._total):.0f} %)"
        self._stream.write(f"epoch {epoch}: batch {batch}{total}, {rate:,.0f} rows/s\n")
        self._stream.flush()
