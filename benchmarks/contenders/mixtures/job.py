"""One rank of a job that reads a mixture.

Run as ``python -m benchmarks.contenders.mixtures.job JSON``, in the environment of a rank as torchrun makes it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path

from benchmarks.contenders.rank import RankJob, own_state, read

__all__ = ["BUFFER_ROWS", "SEED", "SOURCES", "Job", "directories", "files", "own_state"]

SOURCES = ("web", "code")
SEED = 7
BUFFER_ROWS = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(RankJob):
    """What to read, and where. ``data`` has a directory of Parquet files for each source.

    Attributes:
        weights: The share of each of `SOURCES`.
    """

    weights: list[float]


def directories(job: Job) -> dict[str, str]:
    """Return the directory of each source."""
    return {name: str(Path(job.data, name)) for name in SOURCES}


def files(job: Job) -> dict[str, list[str]]:
    """Return the Parquet files of each source, in order."""
    return {name: sorted(map(str, Path(path).glob("*.parquet"))) for name, path in directories(job).items()}


def main() -> None:
    """Read."""
    job = Job(**json.loads(sys.argv[1]))
    module = importlib.import_module(f"benchmarks.contenders.mixtures.{job.module}")
    read(job, lambda: module.make(job))


if __name__ == "__main__":
    main()
