"""Which of Arrow's allocators holds rows: those that are decoded, and copies of them."""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

CHOICE = "ARROW_DEFAULT_MEMORY_POOL"
"""The environment variable by which a user chooses an allocator for all of Arrow:
https://arrow.apache.org/docs/cpp/env_vars.html."""


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
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    return np.frombuffer(pa.allocate_buffer(size, memory_pool=memory_pool()), np.uint8).view(dtype).reshape(shape)
