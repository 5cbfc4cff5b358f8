"""The CPUs of a rank, and how many threads decode."""

from __future__ import annotations

import os

import pyarrow as pa
from torch.utils.data import get_worker_info

MOST_DECODERS = 8
"""Row groups that are decoded at once, if the machine has the processors: a row group of few columns keeps few busy."""


def usable_cpus() -> int:
    """Return the number of CPUs of this rank's share; torchrun says how many ranks share the machine."""
    # The affinity, where the system has it: a container or a scheduler may allow fewer CPUs than the machine has.
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return usable // environment_count("LOCAL_WORLD_SIZE", default="1")


def decoding_threads() -> int:
    """Return how many threads decode in this process: as many as Arrow has, which workers set to their share.

    Arrow has a single one where OMP_NUM_THREADS is 1. torchrun sets it so for each of several ranks on a machine, and
    many scripts do, for other libraries. In the training process that would leave the rank's other CPUs idle: there as
    many decode as it has CPUs, up to `MOST_DECODERS`.
    """
    is_for_others = os.environ.get("OMP_NUM_THREADS") == "1" and pa.cpu_count() == 1
    if is_for_others and get_worker_info() is None:
        return max(1, min(MOST_DECODERS, usable_cpus()))
    return int(pa.cpu_count())


def environment_count(name: str, *, least: int = 1, default: str = "") -> int:
    """Return a count from an environment variable, or raise a ValueError."""
    value = os.environ.get(name, default)
    if not value.isdecimal() or int(value) < least:
        raise ValueError(f"the environment variable {name}={value!r} is not an integer of at least {least}")
    return int(value)
