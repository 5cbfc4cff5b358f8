"""What figures are measured on: the machine, the installed versions, the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.measure.environments import packages_of
from benchmarks.paths import ROOT

__all__ = ["code", "commit", "machine"]


def machine() -> dict[str, Any]:
    """Return what decides the machine's speed, and nothing that identifies it."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    total = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": total * 1024,
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def code(python: str) -> dict[str, Any]:
    """Return which commit is measured, whether the package differs from it, and what an interpreter has installed."""
    return commit(ROOT) | {"packages": packages_of(python)}


def commit(root: Path) -> dict[str, Any]:
    """Return which commit a checkout is at, None outside of git, and whether the package differs from it."""
    changed = _git(root, "status", "--porcelain", "--", "torch_dataloader_utils")
    return {"commit": _git(root, "rev-parse", "HEAD"), "changed": bool(changed)}


def _git(root: Path, *arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)  # noqa: S607
    return done.stdout.strip() if done.returncode == 0 else None


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
