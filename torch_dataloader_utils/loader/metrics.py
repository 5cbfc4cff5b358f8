"""Counters of delivered rows and read bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Metrics:
    """What an iteration has delivered and read so far, as the training process counts it.

    Attributes:
        batches_delivered: Batches delivered.
        rows_delivered: Rows in the steps that were passed, excluded rows included.
        rows_excluded: Rows of these steps that batches lost because they were excluded in this epoch.
        batches_skipped: Steps that were skipped.
        rows_skipped: Rows of these steps.
        rows_dropped: Rows left out by ``drop_last`` at the ends of streams.
        bytes_read: Compressed bytes of the row groups read for what was delivered.
        bytes_read_again: Those of them in row groups that have rows which were delivered before a resume.
    """

    batches_delivered: int = 0
    rows_delivered: int = 0
    batches_skipped: int = 0
    rows_skipped: int = 0
    rows_excluded: int = 0
    rows_dropped: int = 0
    bytes_read: int = 0
    bytes_read_again: int = 0
