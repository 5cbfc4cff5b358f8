"""Where the suite keeps what it reads and writes."""

from __future__ import annotations

from pathlib import Path

__all__ = ["BUILD", "CONTENDERS", "DATA", "ENVS", "HERE", "RESULTS", "ROOT", "SCRATCH"]

HERE = Path(__file__).parent
ROOT = HERE.parent
CONTENDERS = HERE / "contenders"
RESULTS = HERE / "results"
BUILD = ROOT / "build" / "bench"
DATA = BUILD / "data"
ENVS = BUILD / "envs"
SCRATCH = BUILD / "scratch"
