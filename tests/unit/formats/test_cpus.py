"""How many CPUs a process may use: the quotas of containers, in both versions of Linux' control groups."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from torch_dataloader_utils.formats import cpus
from torch_dataloader_utils.formats.cpus import quota_of, usable_cpus

SECOND = "0::/pod/container\n"
FIRST = "9:name=systemd:/\n4:memory:/docker/1\n3:cpu,cpuacct:/docker/1\n0::/\n"


def written(root: Path, files: dict[str, str]) -> Path:
    """Write files of groups."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


QUOTAS = {
    "none": (SECOND, {"cpuset.cpus": "0-7\n"}, math.inf),
    "no limit": (SECOND, {"pod/container/cpu.max": "max 100000\n"}, math.inf),
    "its own": (SECOND, {"pod/container/cpu.max": "250000 100000\n"}, 2.5),
    "of the group above": (SECOND, {"pod/cpu.max": "400000 100000\n", "pod/container/cpu.max": "max 100000\n"}, 4),
    "the least of both": (SECOND, {"pod/cpu.max": "400000 100000\n", "pod/container/cpu.max": "50000 100000\n"}, 0.5),
    "where a container sees the groups": (SECOND, {"cpu.max": "300000 100000\n"}, 3),
    "first version": (
        FIRST,
        {"cpu,cpuacct/docker/1/cpu.cfs_quota_us": "200000\n", "cpu,cpuacct/docker/1/cpu.cfs_period_us": "50000\n"},
        4,
    ),
    "first version, no limit": (
        FIRST,
        {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
        math.inf,
    ),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_the_least_quota_of_a_process_groups_counts(tmp_path, case):
    groups, files, expected = QUOTAS[case]
    assert quota_of(groups, written(tmp_path, files)) == expected


@pytest.mark.parametrize(("quota", "expected"), [(math.inf, 8), (100, 8), (3.9, 3), (0.2, 1)])
def test_a_rank_has_no_more_cpus_than_the_quota_of_its_container(monkeypatch, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(cpus, "cpu_quota", lambda: quota)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert usable_cpus() == expected
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert usable_cpus() == expected // 2
