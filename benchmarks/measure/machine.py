"""What the figures were taken on: the machine, the versions, the code."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.measure.environments import packages_of
from benchmarks.paths import ROOT

__all__ = ["code", "machine"]


def machine() -> dict[str, Any]:
    """Return what matters of the machine: nothing that names it."""
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
    """Return which commit was measured, whether it was changed, and the packages beside it."""
    changed = _git("status", "--porcelain", "--", "torch_dataloader_utils")
    return {"commit": _git("rev-parse", "HEAD"), "changed": bool(changed), "packages": packages_of(python)}


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S607
    return done.stdout.strip() if done.returncode == 0 else None


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
