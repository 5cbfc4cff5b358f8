"""Coming back within an epoch, with this library and with others: time, bytes, and rows after a kill."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.contenders.page_cache import forget
from benchmarks.contenders.resuming.job import Job
from benchmarks.measure.delivered import Rows, compare, passes
from benchmarks.measure.environments import Environment
from benchmarks.measure.ranks import RefusedError, convert, facts, remove_shared_memory, run_ranks
from benchmarks.paths import CONTENDERS, ROOT

__all__ = ["CASES", "POINTS", "WAYS", "Way", "run"]

BUILD = ROOT / "build" / "resuming"
ROWS = 480_000
FILES = 8
GROUP_ROWS = 6_000
VALUES = 15
"""Columns of 4-byte numbers, beside that of the row numbers."""

STEP_ROWS = 600
STEPS = ROWS // STEP_ROWS
WORKERS = 2
POINTS = {"0": 0, "1": STEPS // 100, "50": STEPS // 2, "99": STEPS * 99 // 100}
"""For each share of an epoch, in percent, the steps that were done."""

RANKS = 2
SAVED, DIES = STEPS // 2 - 20, STEPS // 2
CASES = {"same": RANKS, "more": 3}
"""On how many ranks a killed run goes on."""

Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Way:
    """A loader, and how it reads.

    Attributes:
        title: Its name on the page.
        module: The module of its contender.
        how: What the contender tells its module to do.
        environment: The name of its pinned requirements; of this library, none.
        package: The package whose version is told.
        converts: Whether something is made of the files first.
    """

    title: str
    module: str
    how: str = ""
    environment: str | None = None
    package: str = ""
    converts: bool = False


WAYS = {
    "ours": Way("torch_dataloader_utils", "ours"),
    "ours_shuffled": Way("torch_dataloader_utils, rows shuffled", "ours", "shuffled"),
    "published": Way("torch-dataloader-utils 0.2.0 from PyPI", "published", "", "published", "torch-dataloader-utils"),
    "stateful": Way("torchdata StatefulDataLoader on pyarrow", "stateful", "", "stateful", "torchdata"),
    "hf": Way("Hugging Face datasets, streaming", "hf_datasets", "", "hf_datasets", "datasets"),
    "hf_shuffled": Way(
        "Hugging Face datasets, streaming, rows shuffled", "hf_datasets", "shuffled", "hf_datasets", "datasets"
    ),
    "hf_map": Way("Hugging Face datasets, map-style", "hf_datasets", "map", "hf_datasets", "datasets", converts=True),
    "grain": Way("Grain, Parquet", "grain", "", "grain", "grain"),
    "grain_elastic": Way("Grain, `ElasticIterator`, rows shuffled", "grain", "elastic", "grain", "grain"),
    "litdata": Way("LitData, Parquet", "litdata", "", "litdata", "litdata", converts=True),
    "mosaic": Way("MosaicML Streaming, MDS", "mosaic", "", "mds", "mosaicml-streaming", converts=True),
    "lancedb": Way("LanceDB, `StreamingDataset`", "lancedb", "", "lancedb", "lancedb", converts=True),
    "lancedb_shuffled": Way(
        "LanceDB, `StreamingDataset`, rows shuffled", "lancedb", "shuffled", "lancedb", "lancedb", converts=True
    ),
    "lance": Way("Lance, `LanceDataset`", "lance", "", "lance", "pylance", converts=True),
    "ray": Way("Ray Data", "ray_data", "", "ray_data", "ray"),
    "webdataset": Way("WebDataset", "webdataset", "", "webdataset", "webdataset", converts=True),
}


def run(path: Path, names: Iterable[str], rounds: int) -> Results:
    """Come back with each way at each point, in turns, then kill and resume each.

    Args:
        path: The file of the results, written after each round and each way. What is not run now is kept from it.
        names: The ways, of `WAYS`.
        rounds: How often each way comes back at each point.
    """
    results: Results = {"kind": "resume", "ways": {}}
    if path.exists():
        results = json.loads(path.read_text(encoding="utf-8"))
    ready: dict[str, tuple[str, Job]] = {}
    for name in names:
        print(f"  {WAYS[name].title}: saving states", flush=True)
        results["ways"][name], ready[name] = _prepare(name)
    able = [name for name in names if "missing" not in results["ways"][name]]
    for number in range(rounds + 1):
        for name in able:
            print(f"  {WAYS[name].title}: round {number} of {rounds}", flush=True)
            _come_back(*ready[name], name, results["ways"][name]["points"], count=number == 0)
        _write(path, results)
    for name in able:
        print(f"  {WAYS[name].title}: killing", flush=True)
        results["ways"][name]["cases"] = _kill(*ready[name])
        _write(path, results)
    remove_shared_memory(BUILD)
    return results


def _prepare(name: str) -> tuple[Results, tuple[str, Job]]:
    """Write the data, and save a state at each point. The first result says what is missing, if something is."""
    way, python = WAYS[name], sys.executable
    job = Job(module=way.module, way=way.how, data="", directory="", batch_size=STEP_ROWS, workers=WORKERS, save=0)
    if way.environment is not None:
        environment = Environment(CONTENDERS / "peers" / f"{way.environment}.txt")
        try:
            environment.prepare()
        except (RuntimeError, OSError) as error:
            return {"missing": str(error)}, ("", job)
        python = environment.python
    job = dataclasses.replace(job, data=str(_write_data(BUILD / "data" / way.module)))
    found = facts(python, way.package) | {"points": {}}
    try:
        if way.converts:
            convert(python, job, BUILD)
        for point, step in POINTS.items():
            if step:
                saving = dataclasses.replace(job, save=step, stop=step + 1)
                run_ranks(python, saving, 1, _saved(name, point))
    except RefusedError as error:
        return found | {"missing": str(error)}, (python, job)
    return found, (python, job)


def _come_back(python: str, job: Job, name: str, points: Results, *, count: bool) -> None:
    """Load the state of each point in a new process, and add the seconds to the first batch to the results.

    Args:
        python: The interpreter.
        job: The job.
        name: The way.
        points: The results.
        count: Whether the files begin on the disk, and what is read of them counts instead of the seconds.
    """
    for point, step in POINTS.items():
        found = points.setdefault(point, {"first_batch_s": [], "imported_s": []})
        if count:
            forget(job.data)
        states = _saved(name, point) if step else None
        load = os.getloadavg()[0]
        restoring = dataclasses.replace(job, stop=1, states=int(bool(step)), count=count)
        try:
            (rows,) = run_ranks(python, restoring, 1, BUILD / "restored", states=states)
        except RefusedError as error:
            found["error"] = str(error)
            continue
        written = BUILD / "restored" / "first-0.json"
        if not written.exists():
            found |= {"error": "no batch came, the epoch ended at once", "exact": False}
            continue
        first = json.loads(written.read_text(encoding="utf-8"))
        if count:
            found["bytes"] = first["bytes"]
        else:
            found["first_batch_s"].append(round(first["first_batch_s"], 3))
            found["imported_s"].append(round(first["imported_s"], 3))
            found.setdefault("load", []).append(round(load, 2))
        if states is not None:
            found["state_bytes"] = (states / "state-0.pickle").stat().st_size
            expected = np.load(states / "end-0.npy")
            found["exact"] = bool(np.array_equal(rows[:, 2], expected[expected[:, 0] == step + 1, 2]))


def _kill(python: str, job: Job) -> Results:
    """Kill all ranks, resume on as many ranks and on more, and return what became of the rows."""
    job = dataclasses.replace(job, batch_size=STEP_ROWS // RANKS, save=SAVED)
    try:
        whole = run_ranks(python, job, RANKS, BUILD / "whole")
        run_ranks(python, dataclasses.replace(job, die=DIES), RANKS, BUILD / "killed")
    except RefusedError as error:
        return {"error": str(error)}
    left_out = ROWS - len(np.unique(np.concatenate(whole)[:, 2]))
    return {"error": None, "left_out": left_out} | {
        name: _resume(python, job, whole, ranks) for name, ranks in CASES.items()
    }


def _resume(python: str, job: Job, whole: Rows, ranks: int) -> Results:
    killed = BUILD / "killed"
    saved = [np.load(killed / f"saved-{rank}.npy") for rank in range(RANKS)]
    job = dataclasses.replace(job, batch_size=STEP_ROWS // ranks, states=RANKS)
    try:
        rest = run_ranks(python, job, ranks, BUILD / "resumed", states=killed)
    except RefusedError as error:
        return {"error": str(error)}
    if ranks == RANKS:
        (counts,) = compare(whole, [np.concatenate(parts) for parts in zip(saved, rest, strict=True)])
    else:
        (counts,) = passes(whole, [*saved, *rest], [ROWS], "all")
    return {"error": None, **counts}


def _saved(name: str, point: str) -> Path:
    return BUILD / "saved" / f"{name}-{point}"


def _write(path: Path, results: Results) -> None:
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _write_data(directory: Path) -> Path:
    """Write the Parquet files."""
    if directory.exists():
        return directory
    unfinished = directory.with_name("unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    random = np.random.default_rng(0)
    for number, ids in enumerate(np.array_split(np.arange(ROWS), FILES)):
        values = {f"value_{column}": random.random(len(ids), np.float32) for column in range(VALUES)}
        table = pa.table({"row": ids, **values})
        pq.write_table(table, unfinished / f"part-{number:03d}.parquet", row_group_size=GROUP_ROWS)
    unfinished.rename(directory)
    return directory
