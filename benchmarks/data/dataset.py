"""Data sets on disk: written once into build/bench/data, with the same content on every machine."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv, orc

from benchmarks.data.recipes import RECIPES
from benchmarks.paths import DATA

__all__ = ["Data", "make"]

VERSION = 1
"""Raised whenever what is written changes: data sets on disk are then written again."""


@dataclass(frozen=True, slots=True)
class Data:
    """A dataset on disk.

    Attributes:
        name: Its name.
        directory: Its directory.
        files: Its files, in order.
        rows: Its rows.
        verify: The column whose sum shows that each row was delivered once.
        checksum: That sum.
        file_bytes: Bytes of all files.
        row_group_bytes: Bytes of its largest row group in memory, decoded.
        note: A description for the report.
    """

    name: str
    directory: str
    files: tuple[str, ...]
    rows: int
    verify: str
    checksum: int
    file_bytes: int
    row_group_bytes: int
    note: str


def make(name: str, scale: float = 1.0) -> Data:
    """Return a data set, and write it first unless it is on disk.

    Args:
        name: One of `RECIPES`.
        scale: The share of its rows to write; less than 1 for a trial run.
    """
    recipe = RECIPES[name]
    directory = DATA / f"{name}-{scale:g}"
    described = DATA / f"{name}-{scale:g}.json"
    if described.exists():
        known = json.loads(described.read_text(encoding="utf-8"))
        if known.pop("version") == VERSION:
            files = tuple(known["files"])
            assert sorted(map(str, directory.iterdir())) == sorted(files), f"{directory} is not as it was written"
            return Data(**known | {"files": files})
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    rows = checksum = largest = 0
    written = []
    for file_name, tables in recipe.write(scale):
        path = directory / file_name
        WRITERS[path.suffix](path, tables)
        for table in tables:
            rows += table.num_rows
            checksum += _sum(table.column(recipe.verify))
            largest = max(largest, table.nbytes)
        written.append(str(path))
    size = sum(Path(path).stat().st_size for path in written)
    data = Data(name, str(directory), tuple(written), rows, recipe.verify, checksum, size, largest, recipe.note)
    described.write_text(json.dumps(asdict(data) | {"version": VERSION}), encoding="utf-8")
    return data


def _write_parquet(path: Path, tables: list[pa.Table]) -> None:
    with pq.ParquetWriter(path, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=table.num_rows)


def _write_orc(path: Path, tables: list[pa.Table]) -> None:
    with orc.ORCWriter(path, compression="zstd") as writer:
        for table in tables:
            writer.write(table)


def _write_csv(path: Path, tables: list[pa.Table]) -> None:
    with csv.CSVWriter(path, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)


def _write_json_lines(path: Path, tables: list[pa.Table]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for table in tables:
            file.writelines(f"{json.dumps(row)}\n" for row in table.to_pylist())


WRITERS = {".parquet": _write_parquet, ".orc": _write_orc, ".csv": _write_csv, ".jsonl": _write_json_lines}


def _sum(column: pa.ChunkedArray) -> int:
    if pa.types.is_nested(column.type):
        return sum(int(chunk.flatten().to_numpy().sum(dtype=np.int64)) for chunk in column.chunks)
    return int(column.to_numpy().sum())
