"""The bound on memory that stands beside the measured peaks: the one place to say what the documentation promises."""

from __future__ import annotations

from benchmarks.contenders.harness import Job
from benchmarks.data.dataset import Data

__all__ = ["memory_bound"]

READ_AHEAD_BYTES = 128 << 20
BLOCKS = 2 + 3
BLOCK_BYTES = 8 << 20

NUMERIC_ROW_BYTES = 18 * 4 + 2 * 8 + 2 * 8
"""Decoded bytes of a row of the numeric data, which the memory workload reads."""


def memory_bound(data: Data, job: Job) -> int:
    """Return the bytes above the bare import that this library's loader should hold at most.

    What the guide to performance says: `read_ahead_bytes` of each stream, or, where rows are mixed, two shards of the
    buffer's rows; and the blocks of shared memory of each worker. What no bound speaks of (stacks, allocators, pages of
    mapped files) is part of the measured peaks all the same.

    Args:
        data: What is read.
        job: How it is read.
    """
    mixed = job.options.get("shuffle_buffer_size")
    held = READ_AHEAD_BYTES
    if mixed is not None:
        held = 2 * max(data.row_group_bytes, mixed * NUMERIC_ROW_BYTES)
    blocks = BLOCKS * BLOCK_BYTES if job.workers else 0
    return (held + blocks) * max(1, job.workers)
