"""Records which rows were trained on, so that `demo.py` can count them. Your own training does not need this."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

Records = npt.NDArray[np.int64]  # [rows, 2]: the step, counted from 1, and the row id


def ledger_path(run_dir: Path, rank: int, epoch: int = 0) -> Path:
    """Return the path of a rank's ledger of an epoch."""
    return run_dir / f"ledger-epoch-{epoch}-rank-{rank}.bin"


def read_ledger(path: Path) -> Records:
    """Read a ledger, even while it is written or after its writer was killed: an incomplete last record is left out."""
    if not path.exists():
        return np.empty((0, 2), dtype=np.int64)
    values = np.fromfile(path, dtype=np.int64)
    return values[: len(values) // 2 * 2].reshape(-1, 2)


def rows_in(path: Path) -> int:
    """Count the rows in a ledger without reading it."""
    return path.stat().st_size // (2 * np.dtype(np.int64).itemsize) if path.exists() else 0


def committed(records: Records, step: int) -> Records:
    """Return the records up to the step of a checkpoint. Later rows are rolled back, in the model as well."""
    return records[records[:, 0] <= step]


class Ledger:
    """The rows one rank has trained on, appended to a file at every step.

    Args:
        path: The file. It may exist from an earlier run.
        step: The step that training continues from. Records of later steps are removed.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = committed(read_ledger(path), step)
        path.touch()
        os.truncate(path, kept.nbytes)
        self._file = path.open("ab", buffering=0)  # unbuffered: records must survive a SIGKILL

    def append(self, step: int, row_ids: npt.NDArray[np.int64]) -> None:
        """Record the rows of one step."""
        self._file.write(np.column_stack((np.full_like(row_ids, step), row_ids)).tobytes())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
