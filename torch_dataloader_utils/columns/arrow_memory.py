"""Which of Arrow's allocators holds rows: those that are decoded, and copies of them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

CHOICE = "ARROW_DEFAULT_MEMORY_POOL"
"""The environment variable by which a user chooses an allocator for all of Arrow:
https://arrow.apache.org/docs/cpp/env_vars.html."""

ALIGNMENT = 64
"""Where arrays begin that share a buffer, in bytes: as Arrow's own do (https://arrow.apache.org/docs/format/Columnar.html)."""


@cache
def memory_pool() -> pa.MemoryPool | None:
    """Return jemalloc where this build of Arrow has it; None, for Arrow's default, where the user chose an allocator.

    Row groups come and go in threads. In a process's first epoch, mimalloc, the default of recent releases, takes
    memory from the system more slowly: `docs/guide/performance.md` has figures.
    """
    if os.environ.get(CHOICE) or pa.default_memory_pool().backend_name != "mimalloc":
        return None
    return pa.jemalloc_memory_pool() if "jemalloc" in pa.supported_memory_backends() else None


def release_unused() -> None:
    """Give memory that no row takes back to the system."""
    for pool in (pa.default_memory_pool(), memory_pool()):
        if pool is not None:
            pool.release_unused()


def new_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an array in this memory: blocks of rows come and go, and other allocators give their pages back."""
    return new_arrays([(shape, dtype)])[0]


def new_arrays(wanted: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[npt.NDArray[Any]]:
    """Return arrays of these shapes and types in this memory, which stays until the last one is gone.

    All are in one buffer. pyarrow lets go of Python's lock to allocate one, and to get that back for each column takes
    longer than to copy it, where a training loop runs.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in wanted]
    starts = [0, *accumulate(size + -size % ALIGNMENT for size in sizes)]
    if not starts[-1]:
        return [np.empty(shape, dtype) for shape, dtype in wanted]
    memory = np.frombuffer(pa.allocate_buffer(starts[-1], memory_pool=memory_pool()), np.uint8)
    return [
        memory[start : start + size].view(dtype).reshape(shape)
        for (shape, dtype), start, size in zip(wanted, starts, sizes, strict=False)
    ]
