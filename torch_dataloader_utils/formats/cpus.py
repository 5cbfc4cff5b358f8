"""The CPUs of a rank, and how many threads decode."""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path

import pyarrow as pa
from torch.utils.data import get_worker_info

MOST_DECODERS = 8
"""Row groups that are decoded at once, if the machine has the processors: a row group of few columns keeps few busy."""


CONTROL_GROUPS = Path("/sys/fs/cgroup")
"""Where Linux mounts the limits of groups of processes, such as containers."""


def seen_cpus() -> int:
    """Return the number of CPUs that this process may run on, which a container or a scheduler may restrict."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cpus() -> int:
    """Return the number of CPUs of this rank's share; torchrun says how many ranks share the machine."""
    return max(1, math.floor(min(seen_cpus(), cpu_quota()))) // environment_count("LOCAL_WORLD_SIZE", default="1")


@cache
def cpu_quota() -> float:
    """Return how many CPUs this process and others of its container may keep busy; infinity without a limit.

    Schedulers of containers limit the time of all CPUs in place of their number: Kubernetes does, and Docker's
    ``--cpus``. More threads than that are stopped for a part of each tenth of a second.
    """
    try:
        return quota_of(Path("/proc/self/cgroup").read_text(encoding="utf-8"), CONTROL_GROUPS)
    except (OSError, ValueError):  # the system has no such groups, or others than are known
        return math.inf


def quota_of(groups: str, mounted: Path) -> float:
    """Return the least quota of a process' groups, given as `/proc/self/cgroup` has them, and of those above them.

    Sources: ``cpu.max`` in https://docs.kernel.org/admin-guide/cgroup-v2.html, ``cpu.cfs_quota_us`` in
    https://docs.kernel.org/scheduler/sched-bwc.html. In a container the path may be that of the host: then the limit is
    where the groups are mounted.
    """
    least = math.inf
    for group in groups.splitlines():
        _, controllers, path = group.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = mounted / controllers  # where the second version is alone, it names no controllers
        own = top / path.lstrip("/")
        least = min(least, *map(_quota_at, (own, *(one for one in own.parents if one.is_relative_to(top)))))
    return least


def _quota_at(directory: Path) -> float:
    """Return the quota that a group has by itself."""
    if (directory / "cpu.max").exists():
        quota, period = (directory / "cpu.max").read_text(encoding="ascii").split()
    elif (directory / "cpu.cfs_quota_us").exists():
        quota, period = ((directory / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period"))
    else:
        return math.inf
    return math.inf if quota.strip() in {"max", "-1"} else int(quota) / int(period)


def decoding_threads() -> int:
    """Return how many threads decode in this process, whose CPUs it should keep busy, and no more.

    They are Arrow's if `uses_arrows_threads`, else as many of this package, up to `MOST_DECODERS`.
    """
    return int(pa.cpu_count()) if uses_arrows_threads() else max(1, min(MOST_DECODERS, usable_cpus()))


def uses_arrows_threads() -> bool:
    """Whether Arrow has as many threads as it should: in workers, which set it, and unless nobody has chosen it.

    It has a single one where OMP_NUM_THREADS is 1. torchrun sets it so for each of several ranks on a machine, and many
    scripts do, for other libraries. In the training process that would leave the rank's other CPUs idle. Without that
    variable it has one for each CPU that it sees, however few of them the quota of a container allows.
    """
    if get_worker_info() is not None:
        return True
    variable = os.environ.get("OMP_NUM_THREADS")
    if variable is None:
        return bool(pa.cpu_count() <= max(1, cpu_quota()) or pa.cpu_count() < seen_cpus())
    return variable != "1" or bool(pa.cpu_count() > 1)


def environment_count(name: str, *, least: int = 1, default: str = "") -> int:
    """Return a count from an environment variable, or raise a ValueError."""
    value = os.environ.get(name, default)
    if not value.isdecimal() or int(value) < least:
        raise ValueError(f"the environment variable {name}={value!r} is not an integer of at least {least}")
    return int(value)
