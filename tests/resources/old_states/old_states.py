"""What the states of this folder were saved of: the data, and the options of each run.

`generate.py` saved the states with the code of its day; `test_states_of_earlier_code.py` loads them with the code of
today. Both open the data by this module, so the options here must stay as they are. The module's own name is part of
the states too, in that of the split strategy.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from fsspec.implementations.memory import MemoryFileSystem
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io.fsspec import FsspecFileIO

from torch_dataloader_utils import DeltaDataset, IcebergDataset, Manifest, Shard, Split, StructuredDataset

HERE = Path(__file__).parent
DATA = HERE / "data"
STATES = HERE / "states"

MODIFIED = 1_700_000_000
"""When every file was modified, in seconds since 1970: states record it, and for text it has to be the same."""

MEMORY = "memory://old_states"
"""Where data is whose states, or metadata, record its full path: the same in every checkout."""

FIRST_EPOCH = 1

MANY_FILES = 10_001
"""One more than the most files that a state lists."""


class OneShardAFile:
    """A split strategy: each file is a shard, the last file first."""

    def shards(self, manifest: Manifest, epoch: int) -> Iterator[Shard]:
        """Return the shards of an epoch; every second epoch begins with another file."""
        files = [file for file in reversed(manifest.files) if file.rows]
        for file in [*files[epoch % 2 :], *files[: epoch % 2]]:
            yield Shard((Split(file.path, 0, file.rows),))


class MemoryFileIO(FsspecFileIO):
    """Lets pyiceberg read and write ``memory://``."""

    def get_fs(self, scheme: str, hostname: str | None = None) -> MemoryFileSystem:  # noqa: ARG002 - pyiceberg's name
        """Return the file system of the one scheme."""
        assert scheme == "memory"
        return MemoryFileSystem()


def catalog_config(folder: Path) -> dict[str, str]:
    """Return what opens the Iceberg catalog of a folder."""
    return {
        "name": "old_states",
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"{MEMORY}/iceberg",
        "py-io-impl": "old_states.MemoryFileIO",
    }


ICEBERG_TABLE = "db.rows"


# Where the data is -------------------------------------------------------------------------------------------------


def copy_data(folder: Path) -> None:
    """Copy the files to a folder, each modified when it was, and open the Iceberg table in a catalog there."""
    shutil.copytree(DATA, folder, dirs_exist_ok=True)
    for path in folder.rglob("*"):
        os.utime(path, (MODIFIED, MODIFIED))
    fill_memory("iceberg", {path.relative_to(DATA / "iceberg").as_posix(): path for path in files_of("iceberg")})
    catalog = SqlCatalog(**catalog_config(folder))
    catalog.create_namespace("db")
    catalog.register_table(ICEBERG_TABLE, f"{MEMORY}/iceberg/{iceberg_metadata()}")
    catalog.close()


def files_of(name: str) -> list[Path]:
    """Return the files of a directory of the data, in depth."""
    return sorted(path for path in (DATA / name).rglob("*") if path.is_file())


def iceberg_metadata() -> str:
    """Return the newest metadata file of the Iceberg table, below its warehouse."""
    return max(f"db/rows/metadata/{path.name}" for path in files_of("iceberg") if path.name.endswith(".metadata.json"))


def second_snapshot() -> int:
    """Return the second of the Iceberg table's three snapshots."""
    metadata = json.loads((DATA / "iceberg" / iceberg_metadata()).read_text())
    return int(metadata["snapshots"][1]["snapshot-id"])


def fill_memory(name: str, files: Mapping[str, Path | bytes]) -> None:
    """Let a directory in memory hold these files and no others."""
    storage = MemoryFileSystem()
    if storage.exists(f"{MEMORY}/{name}"):
        storage.rm(f"{MEMORY}/{name}", recursive=True)
    for path, content in files.items():
        storage.pipe_file(f"{MEMORY}/{name}/{path}", content if isinstance(content, bytes) else content.read_bytes())


def fill_changing(*names: str) -> None:
    """Let the directory whose files change hold these: ``before/a.parquet`` is there as ``a.parquet``."""
    fill_memory("changing", {Path(name).name: DATA / "changing" / name for name in names})


BEFORE = ("before/a.parquet", "before/b.parquet", "before/c.parquet", "before/d.parquet")
AFTER = ("before/a.parquet", "before/c.parquet", "after/d.parquet", "after/e.parquet")
LATER = ("before/a.parquet", "before/b.parquet", "before/c.parquet", "after/d.parquet", "after/e.parquet")
"""The files of the directory that changes: b goes, e is added and d is written anew; then b comes back."""

LONG_NAME = "\N{LATIN SMALL LETTER E WITH ACUTE}" * 20_000
"""A directory's name that takes 120 kB in JSON: states of few row groups have to record them by number."""


def fill_long() -> None:
    """Put the Parquet files into the directory with the long name."""
    fill_memory(LONG_NAME, {path.name: path for path in files_of("parts")})


def fill_many() -> None:
    """Put one file of two rows into a directory again and again."""
    content = (DATA / "two_rows.parquet").read_bytes()
    fill_memory("many", {f"{number:05d}.parquet": content for number in range(MANY_FILES)})


# What the runs were -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a loader was opened with.

    Attributes:
        path: The data: below the folder, or a URL.
        ranks: The number of ranks.
        options: What else `create_dataloader` was told.
        table: Which kind of table the data is, if any.
    """

    path: str
    ranks: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    table: str | None = None


def open_rank(run: Run, folder: Path, rank: int = 0, **changed: Any) -> Any:
    """Return the loader and the dataset of a rank of a run.

    Args:
        run: The run.
        folder: Where the data is.
        rank: The rank.
        **changed: Options that are others than the run's.
    """
    options = {"batch_size": 16, "num_workers": 0, "num_ranks": run.ranks, "rank": rank, **run.options, **changed}
    if run.table == "iceberg":
        pinned = {"catalog_config": catalog_config(folder), "snapshot_id": second_snapshot()}
        return IcebergDataset.create_dataloader(run.path, **pinned, **options)
    path = run.path if "://" in run.path else str(folder / run.path)
    if run.table == "delta":
        return DeltaDataset.create_dataloader(path, **options)
    return StructuredDataset.create_dataloader(path, **options)


UNBALANCED = {"uneven_ranks": "allow", "virtual_ranks": None, "virtual_workers": None, "num_workers": 0}
"""Options of a loader that delivers all rows that states left, whatever options those were saved under."""


def ids_of(batch: Any) -> list[int]:
    """Return the ids of a batch's rows."""
    return [int(one) for one in batch["id"]]


SHARDS = {"shuffle": True}
ROWS_SHUFFLED = {"shuffle": True, "shuffle_buffer_size": 100}
IN_ROUNDS = {"shuffle": True, "shuffle_buffer_size": 24, "shuffle_interleave": 3}
WORKERS = {"num_workers": 2}
FILTER = {"filters": (pc.field("id") > 90) & (pc.bit_wise_and(pc.field("id"), 32) == 0)}
CSV = {"format": "csv", "split_bytes": "2KiB"}
JSONL = {"format": "jsonl", "split_bytes": "3KiB"}
TEXT_ROWS_SHUFFLED = {"shuffle": True, "shuffle_buffer_size": 60}

STRICT: dict[str, Run] = {
    "in order": Run("parts"),
    "one file": Run("parts/part-2.parquet", options={"batch_size": 50}),
    "a glob": Run("parts/part-[12]*", options={"split_rows": 90, "shuffle": True}),
    "in order, two workers": Run("parts", options=WORKERS),
    "in order, three ranks": Run("parts", 3),
    "small shards": Run("parts", 2, {"split_bytes": 1500, "shuffle_seed": -(2**70)}),
    "short batch dropped": Run("parts", options={"drop_last": True, "batch_size": 50}),
    "short batches dropped, two workers": Run("parts", options={"drop_last": True, "batch_size": 50, **WORKERS}),
    "shards shuffled": Run("parts", options=SHARDS),
    "shards shuffled, two workers, three ranks": Run("parts", 3, {**SHARDS, **WORKERS}),
    "rows shuffled": Run("parts", options={**ROWS_SHUFFLED, "row_id_column": "place"}),
    "rows shuffled, two workers, two ranks": Run("parts", 2, {**ROWS_SHUFFLED, **WORKERS}),
    "rows shuffled in rounds": Run("parts", 2, IN_ROUNDS),
    "rows shuffled in rounds, two workers": Run("parts", options={**IN_ROUNDS, **WORKERS}),
    "filtered": Run("parts", 2, FILTER),
    "filtered, shards shuffled": Run("parts", options={**FILTER, **SHARDS}),
    "filtered, rows shuffled": Run("parts", options={**FILTER, **ROWS_SHUFFLED}),
    "filtered, rows shuffled in rounds": Run("parts", options={**FILTER, **IN_ROUNDS}),
    "filtered, rows shuffled, two workers": Run("parts", options={**FILTER, **ROWS_SHUFFLED, **WORKERS}),
    "a strategy": Run("parts", 2, {"split_strategy": OneShardAFile()}),
    "a strategy, rows shuffled": Run("parts", options={"split_strategy": OneShardAFile(), **ROWS_SHUFFLED}),
    "ranks balanced by dropping": Run("parts", 3, {"uneven_ranks": "drop"}),
    "ranks balanced by dropping, rows shuffled": Run("parts", 3, {"uneven_ranks": "drop", **ROWS_SHUFFLED}),
    "ranks balanced by padding": Run("parts", 3, {"uneven_ranks": "pad", **SHARDS}),
    "ranks balanced by padding, rows shuffled in rounds": Run("parts", 2, {"uneven_ranks": "pad", **IN_ROUNDS}),
    "ranks balanced by padding, two workers": Run("parts", 2, {"uneven_ranks": "pad", **ROWS_SHUFFLED, **WORKERS}),
    "described by a metadata file": Run("described", 2, SHARDS),
    "partitions": Run("hive", options={"partitioning": "hive", "filters": pc.field("region") != "eu", **ROWS_SHUFFLED}),
    "orc": Run("orc", 2, {"format": "orc", **ROWS_SHUFFLED}),
    "csv": Run("csv", options=CSV),
    "csv, two workers": Run("csv", options={**CSV, **SHARDS, **WORKERS}),
    "csv, rows shuffled": Run("csv", 2, {**CSV, **TEXT_ROWS_SHUFFLED}),
    "csv, filtered": Run("csv", options={**CSV, **FILTER, **SHARDS}),
    "csv, whole files": Run("csv", 2, {"format": "csv", **SHARDS}),
    "csv, counted": Run("csv", 2, {**CSV, "count_rows": True, "uneven_ranks": "drop", **TEXT_ROWS_SHUFFLED}),
    "csv with options": Run(
        "semicolons.csv",
        options={"format": "csv", "format_options": {"delimiter": ";", "column_types": {"value": pa.float32()}}},
    ),
    "csv in gzip": Run("csv_gz", 2, {"format": "csv"}),
    "jsonl": Run("jsonl", 2, {**JSONL, **SHARDS}),
    "jsonl, counted, two workers": Run("jsonl", options={**JSONL, "count_rows": True, **IN_ROUNDS, **WORKERS}),
    "jsonl in gzip, counted": Run("jsonl_gz", options={"format": "jsonl", "count_rows": True, **IN_ROUNDS}),
    "an Iceberg snapshot": Run(ICEBERG_TABLE, 2, ROWS_SHUFFLED, table="iceberg"),
    "a Delta version": Run("delta", 2, {"version": 1, **ROWS_SHUFFLED}, table="delta"),
    "a Delta version, filtered": Run("delta", options={"version": 2, **FILTER, **SHARDS}, table="delta"),
    "in memory": Run(f"{MEMORY}/changing", options=ROWS_SHUFFLED),
    "row numbers": Run(f"{MEMORY}/{LONG_NAME}", 2, ROWS_SHUFFLED),
    "row numbers, filtered": Run(f"{MEMORY}/{LONG_NAME}", options={**ROWS_SHUFFLED, **FILTER}),
}
"""Runs whose states are loaded by the same run, which delivers exactly the batches that were to come."""

STORED = {
    "Parquet": Run("parts", options=SHARDS),
    "CSV": Run("csv", options={**CSV, **SHARDS}),
}
"""The same, of files on S3, of which states record etags; the bucket stands before their paths."""

MANY = Run(f"{MEMORY}/many", options={"batch_size": 1900, "row_id_column": "id", **SHARDS})
"""The same, of more files than a state lists."""


@dataclass(frozen=True)
class Stage:
    """A part of an epoch, by ranks of its own.

    Attributes:
        run: The run.
        stops: After how many batches the states of each rank were saved.
        files: The files of the directory that changes, if that is what is read.
    """

    run: Run
    stops: tuple[int, ...]
    files: tuple[str, ...] | None = None


def chain(path: str, options: Mapping[str, Any], *stages: tuple[Mapping[str, Any], tuple[int, ...]]) -> list[Stage]:
    """Return stages that read the same data, one rank for each stop."""
    return [Stage(Run(path, len(stops), {**options, **own}), stops) for own, stops in stages]


FEWER = (({}, (5, 2, 0)), ({"batch_size": 7}, (3, 4)), ({}, (6,)))
"""Three ranks, two, one."""

ELASTIC: dict[str, list[Stage]] = {
    "in order": chain("parts", {}, *FEWER),
    "shards shuffled": chain("parts", SHARDS, *FEWER),
    "rows shuffled": chain("parts", ROWS_SHUFFLED, *FEWER),
    "rows shuffled in rounds": chain("parts", IN_ROUNDS, *FEWER),
    "filtered": chain("parts", {**ROWS_SHUFFLED, **FILTER}, ({}, (4, 1, 0)), ({"batch_size": 7}, (3, 2)), ({}, (2,))),
    "workers come and go": chain("parts", ROWS_SHUFFLED, (WORKERS, (6, 5)), ({}, (3,)), (WORKERS, (4,))),
    "ranks balanced": chain(
        "parts",
        ROWS_SHUFFLED,
        ({"uneven_ranks": "drop", "batch_size": 11}, (4, 4, 4)),
        ({"uneven_ranks": "pad", "batch_size": 9}, (5, 3)),
        ({"uneven_ranks": "drop"}, (4, 4, 5)),
    ),
    "ranks padded to the end": chain("parts", SHARDS, ({"uneven_ranks": "pad"}, (12, 12, 12)), ({}, (0,))),
    "a strategy": chain("parts", {"split_strategy": OneShardAFile()}, ({}, (4, 7)), ({}, (3,))),
    "partitions": chain("hive", {"partitioning": "hive", **ROWS_SHUFFLED}, ({}, (2, 3)), ({}, (3,))),
    "csv": chain("csv", {**CSV, **TEXT_ROWS_SHUFFLED}, *FEWER),
    "csv, in order": chain("csv", CSV, *FEWER),
    "jsonl, counted": chain("jsonl", {**JSONL, **IN_ROUNDS, "count_rows": True}, *FEWER),
    "row numbers": chain(f"{MEMORY}/{LONG_NAME}", ROWS_SHUFFLED, ({}, (15, 4, 9)), ({}, (3, 1)), ({}, (2,))),
}
"""Runs that follow one another in an epoch, each over what the one before left."""

CHANGING: dict[str, list[Stage]] = {
    name: [
        Stage(Run(f"{MEMORY}/changing", 2, options), (5, 3), BEFORE),
        Stage(Run(f"{MEMORY}/changing", 3, options), (2, 1, 0), AFTER),
        Stage(Run(f"{MEMORY}/changing", 1, options), (4,), LATER),
    ]
    for name, options in {"in order": {}, "rows shuffled": ROWS_SHUFFLED, "rows shuffled in rounds": IN_ROUNDS}.items()
}
"""The same over files that change between one run and the next."""

GRID = {"virtual_ranks": 4, "virtual_workers": 2, "batch_size": 16}
GRIDS: dict[str, Run] = {
    "dropping": Run("parts", 2, {**GRID, "uneven_ranks": "drop"}),
    "padding": Run("parts", 2, {**GRID, "uneven_ranks": "pad", **SHARDS}),
    "dropping, rows shuffled": Run("parts", 2, {**GRID, "uneven_ranks": "drop", **ROWS_SHUFFLED}),
    "padding, rows shuffled in rounds": Run("parts", 2, {**GRID, "uneven_ranks": "pad", **IN_ROUNDS}),
    "padding, csv": Run("csv", 2, {**GRID, "uneven_ranks": "pad", **CSV, **TEXT_ROWS_SHUFFLED, "count_rows": True}),
}
"""Runs planned for a grid, whose states are loaded under other numbers of ranks."""

GATHERED = Run("parts", 3, ROWS_SHUFFLED)
"""A run whose ranks' states are in one file that torch saved, and in a file for each rank."""

GATHERED_STOPS = (4, 0, 6)


# Files of states ----------------------------------------------------------------------------------------------------


def write_states(kind: str, name: str, content: Any) -> None:
    """Write what is kept of a run."""
    path = states_path(kind, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0))


def read_states(kind: str, name: str) -> Any:
    """Return what is kept of a run."""
    return json.loads(gzip.decompress(states_path(kind, name).read_bytes()))


def states_path(kind: str, name: str) -> Path:
    """Return the file that is kept of a run."""
    return STATES / kind / f"{name.replace(',', '').replace(' ', '_')}.json.gz"


def prepare_memory(runs: Iterable[Run]) -> None:
    """Put what these runs read into memory, if it is there."""
    paths = {run.path for run in runs}
    if f"{MEMORY}/changing" in paths:
        fill_changing(*BEFORE)
    if f"{MEMORY}/{LONG_NAME}" in paths:
        fill_long()
    if MANY.path in paths:
        fill_many()
