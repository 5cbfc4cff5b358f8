"""The directories that the suite reads and writes."""

from __future__ import annotations

from pathlib import Path

__all__ = ["BUILD", "CONTENDERS", "DATA", "ENVS", "RESULTS", "ROOT", "SCRATCH"]

ROOT = Path(__file__).parent.parent
CONTENDERS = ROOT / "benchmarks" / "contenders"
RESULTS = ROOT / "benchmarks" / "results"
BUILD = ROOT / "build" / "bench"
DATA = BUILD / "data"
ENVS = BUILD / "envs"
SCRATCH = BUILD / "scratch"
