"""The bound on memory that stands beside the measured peaks: the one place to say what the documentation promises."""

from __future__ import annotations

from benchmarks.contenders.harness import Job
from benchmarks.data import Data

__all__ = ["memory_bound"]

NUMERIC_ROW_BYTES = 18 * 4 + 2 * 8 + 2 * 8
"""Decoded bytes of a row of the numeric data, which the memory workload reads."""


def memory_bound(data: Data, job: Job) -> int:
    """Return the bytes above the bare import that this library's loader should hold at most.

    The decoded data alone: one row group for each stream, or, where rows are mixed, two shards of the buffer's rows.
    Compressed bytes and batches on their way come on top, and are part of the measured peaks.

    Args:
        data: What is read.
        job: How it is read.
    """
    mixed = job.options.get("shuffle_buffer_size")
    held = data.row_group_bytes
    if mixed is not None:
        held = 2 * max(data.row_group_bytes, mixed * NUMERIC_ROW_BYTES)
    return held * max(1, job.workers)
