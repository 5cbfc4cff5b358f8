"""How seconds, memory and states grow with files, row groups and ranks, on one machine: one rank is really planned."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.contenders.harness import MARK
from benchmarks.measure.machine import code, machine
from benchmarks.paths import ROOT

__all__ = ["CURVES", "FILES", "FILES_OF_RANKS", "GROUPS", "RANKS", "WORKERS", "run"]

BUILD = ROOT / "build" / "scale"

FILES = (1_000, 10_000, 100_000, 1_000_000)
RANKS = (16, 64, 256, 1_024, 4_096)
FILES_OF_RANKS = 100_000
"""Files where the number of ranks varies."""

GROUPS = 10
"""Row groups in each file."""

GROUP_ROWS = 64
"""Rows in a row group of the files that are really read."""

WORKERS = 8
"""Workers of each rank."""

LINKS = 10_000
"""Names of one file: file systems allow only so many."""

IN_A_FOLDER = 1_000

CURVES = ("files", "row_groups", "ranks")
"""What grows: real files; files that are only described, with their row groups; ranks."""

Results = dict[str, Any]


def run(path: Path, curves: Iterable[str], most_files: int) -> Results:
    """Measure curves.

    Args:
        path: The file of the results, written after each measurement. Curves that are not measured keep theirs.
        curves: Names, of `CURVES`.
        most_files: The sizes with more files are left out.
    """
    results: Results = json.loads(path.read_text("utf-8")) if path.exists() else {"kind": "scale", "scale": 1}
    results |= {"machine": machine(), "code": code(sys.executable)}
    results.setdefault("curves", {})
    files = [count for count in FILES if count <= most_files]
    ranks = max(RANKS)
    points = {
        "files": [("files", count, ranks) for count in files],
        "row_groups": [("states", count, ranks) for count in files],
        "ranks": [("states", min(FILES_OF_RANKS, most_files), count) for count in RANKS],
    }
    for curve in curves:
        results["curves"][curve] = []
        for contender, count, of_ranks in points[curve]:
            arguments = [count, GROUPS, of_ranks, WORKERS]
            if contender == "files":
                arguments = [_files(count), of_ranks, WORKERS, GROUP_ROWS]
            measured = _measure(contender, arguments)
            results["curves"][curve].append({"files": count, "ranks": of_ranks, **measured})
            print(f"  {curve}: {count:,} files, {of_ranks:,} ranks", flush=True)
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(BUILD, ignore_errors=True)
    return results


def _measure(contender: str, arguments: Sequence[object]) -> Results:
    command = [sys.executable, "-m", f"benchmarks.contenders.scale.{contender}", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not found:
        message = f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        raise SystemExit(message)
    figures: Results = json.loads(found[-1].removeprefix(MARK))
    figures.pop("package")
    return figures


def _files(count: int) -> Path:
    """Return a folder with so many Parquet files.

    They are hard links to a few: opening and reading a file by any of its names costs the same.
    """
    folder = BUILD / str(count)
    shutil.rmtree(folder, ignore_errors=True)
    contents = _contents()
    names = [
        folder / f"{number // IN_A_FOLDER:04d}" / f"part-{number % IN_A_FOLDER:03d}.parquet" for number in range(count)
    ]
    for number, name in enumerate(names):
        if number % IN_A_FOLDER == 0:
            name.parent.mkdir(parents=True)
        if number % LINKS == 0:
            name.write_bytes(contents)
        else:
            os.link(names[number - number % LINKS], name)
    return folder


def _contents() -> bytes:
    rows = GROUPS * GROUP_ROWS
    table = pa.table({"id": np.arange(rows), "value": np.random.default_rng(0).random(rows, dtype=np.float32)})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=GROUP_ROWS)
    return sink.getvalue()
