"""How the data and the states of this folder were made: ``python tests/resources/old_states/generate.py FOLDER``.

It was run once, with the code of the commit "The warning of unknown lengths is told whole" of 2026-11-22, before the
package's modules were moved: version 1 of states, plan algorithm 2. FOLDER was ``/srv/old_states``. It is kept because
it shows what each state stands for. Run again, it would replace the states of that code by those of another, so it
stops where there are states.

FOLDER is where the data is copied to and read; states record its name. The tests copy the data to another folder, as
happens when a run moves to another machine.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import old_states as old
import pyarrow as pa
import pyarrow.orc as pa_orc
import pyarrow.parquet as pq
import torch
from deltalake import write_deltalake
from fsspec.implementations.memory import MemoryFileSystem
from moto.server import ThreadedMotoServer
from old_states import DATA, FIRST_EPOCH, MEMORY, STATES, Run, Stage, ids_of, open_rank
from pyiceberg.catalog.sql import SqlCatalog

from torch_dataloader_utils import LostRowsWarning, UnevenRanksWarning
from torch_dataloader_utils.distributed import CheckpointEntry, save_rank_state

FILES = ((130, 50), (7, 50), (211, 40), (95, 30), (160, 160))
"""Rows and row group size of each file: one tiny, one of a single row group, no row group as long as a batch is."""


# The data -----------------------------------------------------------------------------------------------------------


def rows(first: int, count: int) -> pa.Table:
    """Return rows: `id` counts, `value` is a number that depends on it, `name` a text."""
    ids = np.arange(first, first + count)
    names = pa.array([f"row {one}" for one in ids], pa.string())
    return pa.table({"id": ids, "value": ids * 7919 % 1000 / 8, "name": names})


def tables(*counts: int, first: int = 0) -> list[pa.Table]:
    """Return tables of so many rows, whose ids go on from one to the next."""
    starts = itertools.accumulate(counts, initial=first)
    return [rows(start, count) for start, count in zip(starts, counts, strict=False)]


def write_parquet(path: Path, table: pa.Table, group: int) -> None:
    """Write a Parquet file of row groups of so many rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=group)


def jsonl_of(table: pa.Table) -> bytes:
    """Return a table as lines of JSON."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in table.to_pylist())


def csv_of(table: pa.Table, delimiter: str = ",") -> bytes:
    """Return a table as CSV without quotes, so that its files can be cut."""
    lines = [table.column_names, *(row.values() for row in table.to_pylist())]
    return "".join(delimiter.join(map(str, line)) + "\n" for line in lines).encode()


def write_data(folder: Path) -> None:
    """Write all data files."""
    groups = [group for _, group in FILES]
    for number, table in enumerate(tables(*(count for count, _ in FILES))):
        write_parquet(DATA / f"parts/part-{number}.parquet", table, groups[number])
    write_described()
    partitions = [f"region={region}/day=2024-02-{day}" for region in ("eu", "us", "%C3%BC") for day in (28, 29)]
    for partition, table in zip(partitions, tables(40, 25, 60, 33, 51, 20), strict=True):
        write_parquet(DATA / "hive" / partition / "part.parquet", table, 20)
    write_orc()
    write_text()
    for name, table in zip(old.BEFORE, tables(90, 70, 110, 60), strict=True):
        write_parquet(DATA / "changing" / name, table, 20)
    for name, table in zip(old.AFTER[2:], tables(50, 80, first=1000), strict=True):
        write_parquet(DATA / "changing" / name, table, 20)
    pq.write_table(pa.table({"x": [1, 2]}), DATA / "two_rows.parquet")
    write_delta()
    write_iceberg(folder)


def write_described() -> None:
    """Write Parquet files with a file `_metadata` that describes them."""
    collector: list[Any] = []
    for number, table in enumerate(tables(70, 40, 55)):
        write_parquet(DATA / f"described/part-{number}.parquet", table, 15)
        collector.append(pq.read_metadata(DATA / f"described/part-{number}.parquet"))
        collector[-1].set_file_path(f"part-{number}.parquet")
    pq.write_metadata(table.schema, DATA / "described/_metadata", collector)


def write_orc() -> None:
    """Write ORC files of several stripes: the writer closes one after each write."""
    stripes = tables(40, 7, 60, 30, 30)
    (DATA / "orc").mkdir()
    for name, some in (("a", stripes[:3]), ("b", stripes[3:])):
        with pa_orc.ORCWriter(DATA / f"orc/{name}.orc", stripe_size=1, batch_size=1) as writer:
            for table in some:
                writer.write(table)


def write_text() -> None:
    """Write CSV and JSON Lines, plain and in gzip."""
    for name in ("csv", "csv_gz", "jsonl", "jsonl_gz"):
        (DATA / name).mkdir()
    for letter, table in zip("abc", tables(300, 9, 220), strict=True):
        (DATA / f"csv/{letter}.csv").write_bytes(csv_of(table))
        (DATA / f"jsonl/{letter}.jsonl").write_bytes(jsonl_of(table))
        (DATA / f"csv_gz/{letter}.csv.gz").write_bytes(gzip.compress(csv_of(table), mtime=0))
        (DATA / f"jsonl_gz/{letter}.jsonl.gz").write_bytes(gzip.compress(jsonl_of(table), mtime=0))
    (DATA / "semicolons.csv").write_bytes(csv_of(rows(0, 120), ";"))


def write_delta() -> None:
    """Write a Delta table of three versions, partitioned."""
    for count, table in enumerate(tables(120, 60, 80)):
        kinds = pa.array([("a b", "ü", None)[one % 3] for one in range(table.num_rows)], pa.string())
        mode = "append" if count else "error"
        partitioned = {} if count else {"partition_by": ["kind"]}
        write_deltalake(DATA / "delta", table.append_column("kind", kinds), mode=mode, **partitioned)


def write_iceberg(folder: Path) -> None:
    """Write an Iceberg table of three snapshots in memory, and keep its files."""
    catalog = SqlCatalog(**old.catalog_config(folder))
    catalog.create_namespace("db")
    table = catalog.create_table(
        old.ICEBERG_TABLE,
        rows(0, 0).schema,
        location=f"{MEMORY}/iceberg/db/rows",
        properties={"write.parquet.row-group-limit": "20"},
    )
    for some in tables(90, 70, 50):
        table.append(some)
    catalog.close()
    (folder / "catalog.db").unlink()
    storage = MemoryFileSystem()
    for path in storage.find(f"{MEMORY}/iceberg"):
        copy = DATA / path.lstrip("/").removeprefix("old_states/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(storage.cat_file(path))


# The states ---------------------------------------------------------------------------------------------------------


def state_of(loader: Any) -> Any:
    """Return a loader's state as JSON keeps it."""
    return json.loads(json.dumps(loader.state_dict(), allow_nan=False))


def saved_in(run: Run, folder: Path, rank: int, **changed: Any) -> dict[str, Any]:
    """Deliver two epochs of a rank and keep every batch, and the states at some of them.

    Each state comes with its epoch and the number of batches that were delivered of it.
    """
    loader, dataset = open_rank(run, folder, rank, **changed)
    dataset.set_epoch(FIRST_EPOCH)
    states = [state_of(loader)]
    batches = []
    for batch in loader:
        batches.append(ids_of(batch))
        states.append(state_of(loader))
    last = len(batches)
    stops = sorted({0, 1, last // 2, last - 1, last})
    saved = [(FIRST_EPOCH, stop, states[stop]) for stop in stops]
    saved.append((FIRST_EPOCH, last, state_of(loader)))  # the iterator has said that it is over
    dataset.set_epoch(FIRST_EPOCH + 1)
    saved.append((FIRST_EPOCH + 1, 0, state_of(loader)))
    second = [ids_of(batch) for batch in loader]
    resumed, _ = open_rank(run, folder, rank, **changed)
    resumed.load_state_dict(states[last // 2])
    again = [ids_of(batch) for batch in itertools.islice(resumed, 1)]
    assert again == batches[last // 2 : last // 2 + 1]
    saved.append((FIRST_EPOCH, last // 2 + 1, state_of(resumed)))
    return {"epochs": {FIRST_EPOCH: batches, FIRST_EPOCH + 1: second}, "saved": saved}


def save_strict(folder: Path) -> None:
    """Save states that continue the run that saved them."""
    old.prepare_memory(old.STRICT.values())
    for name, run in old.STRICT.items():
        ranks = [saved_in(run, folder, rank) for rank in range(run.ranks)]
        if "filters" not in run.options and "uneven_ranks" not in run.options and "drop_last" not in run.options:
            require_each_once([rank["epochs"][FIRST_EPOCH] for rank in ranks])
        old.write_states("strict", name, ranks)
    manifest = open_rank(old.STRICT["in memory"], folder)[1].dump_manifest()
    old.write_states("other", "manifest", base64.b64encode(manifest).decode())


def require_each_once(ranks: Sequence[Sequence[Sequence[int]]]) -> None:
    """Raise unless the ranks' batches hold no row twice, and none is missing between the first and the last."""
    ids = sorted(one for rank in ranks for batch in rank for one in batch)
    assert ids == list(range(ids[0], ids[-1] + 1))


def save_stored(folder: Path) -> None:
    """Save states of files on S3."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    secrets = {"key": "made-up", "secret": "made-up"}
    options = {**secrets, "client_kwargs": {"endpoint_url": url, "region_name": "us-east-1"}}
    keys = {"aws_access_key_id": secrets["key"], "aws_secret_access_key": secrets["secret"]}
    client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
    client.create_bucket(Bucket="bucket")
    for path in [*old.files_of("parts"), *old.files_of("csv")]:
        client.upload_file(str(path), "bucket", path.relative_to(DATA).as_posix())
    for name, run in old.STORED.items():
        stored = Run(f"s3://bucket/{run.path}", options=run.options)
        old.write_states("stored", name, saved_in(stored, folder, 0, storage_options=options))
    server.stop()


def save_many(folder: Path) -> None:
    """Save a state of more files than a state lists, near the end of an epoch, as little is read after it then."""
    old.fill_many()
    loader, _ = open_rank(old.MANY, folder)
    batches, states = [], []
    for batch in loader:
        states.append(state_of(loader))
        batches.append(ids_of(batch))
    require_each_once([batches])
    old.write_states("other", "many files", {"state": states[-2], "last": batches[-1]})


def deliver(stage: Stage, folder: Path, before: list[Any] | None, **how: Any) -> dict[str, Any]:
    """Let the ranks of a stage go on from the states of the one before; keep their states and the batches after."""
    kept: dict[str, Any] = {"states": [], "delivered": [], "later": [], "lost": None}
    for rank, stop in enumerate(stage.stops):
        loader, _ = open_rank(stage.run, folder, rank)
        if before is not None:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loader.load_state_dict(before, strict=False, **how)
            kept["lost"] = next((str(one.message) for one in caught if one.category is LostRowsWarning), None)
        batches = iter(loader)
        kept["delivered"].append([ids_of(batch) for batch in itertools.islice(batches, stop)])
        kept["states"].append(state_of(loader))
        kept["later"].append([ids_of(batch) for batch in batches])
    return kept | {"left": left_by(stage.run, folder, kept["states"])}


def left_by(run: Run, folder: Path, states: list[Any]) -> list[int]:
    """Return the ids that one rank delivers of what states left."""
    loader, _ = open_rank(run, folder, **old.UNBALANCED, num_ranks=1)
    loader.load_state_dict(states, strict=False)
    return sorted(one for batch in loader for one in ids_of(batch))


def save_elastic(folder: Path) -> None:
    """Save states of runs of which each continues what another began, with other ranks."""
    old.prepare_memory(stage.run for stages in old.ELASTIC.values() for stage in stages)
    for kind, chains in (("elastic", old.ELASTIC), ("changing", old.CHANGING)):
        for name, stages in chains.items():
            kept: list[dict[str, Any]] = []
            delivered: list[list[int]] = []
            for stage in stages:
                how = {}
                if stage.files is not None:
                    old.fill_changing(*stage.files)
                    how = {"on_changed_files": "continue"}
                kept.append(deliver(stage, folder, kept[-1]["states"] if kept else None, **how))
                delivered += [batch for rank in kept[-1]["delivered"] for batch in rank]
                options = stage.run.options
                if kind == "elastic" and not {"filters", "uneven_ranks"} & set(options):
                    require_each_once([delivered, [kept[-1]["left"]]])
            old.write_states(kind, name, kept)


def save_grids(folder: Path) -> None:
    """Save states of grids: of all ranks at one step."""
    for name, run in old.GRIDS.items():
        loaders = [open_rank(run, folder, rank)[0] for rank in range(run.ranks)]
        states = [[state_of(loader) for loader in loaders]]
        steps = []
        for batches in zip(*loaders, strict=True):
            steps.append([one for batch in batches for one in ids_of(batch)])
            states.append([state_of(loader) for loader in loaders])
        stops = (0, len(steps) // 2, len(steps))
        saved = [(stop, states[stop], left_by(run, folder, states[stop])) for stop in stops]
        old.write_states("grids", name, {"steps": steps, "saved": saved})


def save_gathered(folder: Path) -> None:
    """Save the states of three ranks together: by torch, in a file for each rank, and as entries of a checkpoint."""
    entries, states, later = {}, [], []
    for rank, stop in enumerate(old.GATHERED_STOPS):
        loader, _ = open_rank(old.GATHERED, folder, rank)
        batches = iter(loader)
        list(itertools.islice(batches, stop))
        states.append(loader.state_dict())
        entries |= CheckpointEntry(loader).state_dict()
        save_rank_state(loader, STATES / "rank_files")
        later.append([ids_of(batch) for batch in batches])
    torch.save({"weight": torch.arange(3.0), "loaders": states}, STATES / "gathered.pt")
    old.write_states("other", "entries", entries)
    old.write_states("other", "gathered", {"later": later, "left": left_by(old.GATHERED, folder, states)})


def main() -> None:
    """Make everything."""
    if STATES.exists():
        sys.exit(f"there are states in {STATES}: they are to be loaded, not replaced")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    warnings.simplefilter("ignore", UnevenRanksWarning)
    write_data(folder)
    old.copy_data(folder)
    save_strict(folder)
    save_stored(folder)
    save_many(folder)
    save_elastic(folder)
    save_grids(folder)
    save_gathered(folder)


if __name__ == "__main__":
    main()
