"""How many CPUs a rank has, and the worker processes that it starts by default."""

from __future__ import annotations

import os

__all__ = ["default_num_workers", "environment_count", "usable_cpus"]


def default_num_workers() -> int:
    """Return the number of workers where none is asked for: the CPUs of this rank's share, less one for training."""
    return max(1, usable_cpus() - 1)


def usable_cpus() -> int:
    """Return the number of CPUs of this rank's share."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return usable // environment_count("LOCAL_WORLD_SIZE", default="1")


def environment_count(name: str, *, least: int = 1, default: str = "") -> int:
    """Return a count that an environment variable holds."""
    text = os.environ.get(name, default)
    if not text.isdecimal() or int(text) < least:
        msg = f"the environment variable {name}={text!r} is no integer of at least {least}"
        raise ValueError(msg)
    return int(text)
