"""Which rows were trained on: the evidence that `demo.py` counts. Your own training needs no such thing."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

Records = npt.NDArray[np.int64]  # [rows, 2]: the step, counted from 1, and the row id


def ledger_path(run_dir: Path, rank: int, epoch: int = 0) -> Path:
    """Say where a rank keeps the ledger of an epoch."""
    return run_dir / f"ledger-epoch-{epoch}-rank-{rank}.bin"


def read_ledger(path: Path) -> Records:
    """Read a ledger, also one whose writer is at work or was killed: a torn last record is left out."""
    if not path.exists():
        return np.empty((0, 2), dtype=np.int64)
    values = np.fromfile(path, dtype=np.int64)
    return values[: len(values) // 2 * 2].reshape(-1, 2)


def rows_in(path: Path) -> int:
    """Count the rows in a ledger without reading it."""
    return path.stat().st_size // (2 * np.dtype(np.int64).itemsize) if path.exists() else 0


def committed(records: Records, step: int) -> Records:
    """Keep what a checkpoint taken after `step` holds. Later rows are forgotten, by the model as well."""
    return records[records[:, 0] <= step]


class Ledger:
    """The rows one rank has trained on, appended to a file at every step.

    Args:
        path: The file. It may be there from a run before this one.
        step: The step that training goes on from. What was trained after it is struck out.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = committed(read_ledger(path), step)
        path.touch()
        os.truncate(path, kept.nbytes)
        self._file = path.open("ab", buffering=0)  # unbuffered: what is written outlives a killed process

    def append(self, step: int, row_ids: npt.NDArray[np.int64]) -> None:
        """Note the rows of one step."""
        self._file.write(np.column_stack((np.full_like(row_ids, step), row_ids)).tobytes())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
