"""The bound on memory that measured peaks are compared with: what docs/guide/performance.md promises, in numbers."""

from __future__ import annotations

from benchmarks.contenders.harness import Job
from benchmarks.data.dataset import Data

__all__ = ["memory_bound"]

READ_AHEAD_BYTES = 128 << 20
SHARED_BLOCKS = 2 + 3
BLOCK_BYTES = 8 << 20

NUMERIC_ROW_BYTES = 18 * 4 + 2 * 8 + 2 * 8
"""Decoded bytes of a row of the numeric data, which the memory workload reads."""


def memory_bound(data: Data, job: Job) -> int:
    """Return the bytes above the bare import that this library's loader should hold at most.

    That is `read_ahead_bytes` for each process that reads, or two shards of the buffer's rows if rows are shuffled, and
    each worker's shared memory. Measured peaks also have what the bound leaves out: stacks, what allocators keep, pages
    of mapped files.

    Args:
        data: What is read.
        job: How it is read.
    """
    buffer = job.options.get("shuffle_buffer_size")
    held = READ_AHEAD_BYTES
    if buffer is not None:
        held = 2 * max(data.row_group_bytes, buffer * NUMERIC_ROW_BYTES)
    blocks = SHARED_BLOCKS * BLOCK_BYTES if job.workers else 0
    return (held + blocks) * max(1, job.workers)
