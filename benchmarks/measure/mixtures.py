"""Mixtures of two sources, killed and resumed, with this library and with others that mix."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.contenders.mixtures.job import Job
from benchmarks.measure.delivered import Rows, compare, passes, share, uninterrupted
from benchmarks.measure.environments import Environment, packages_of
from benchmarks.measure.framework_jobs import end, free_port
from benchmarks.measure.machine import code, machine
from benchmarks.measure.rounds import timestamp
from benchmarks.paths import CONTENDERS, ROOT

__all__ = ["CASES", "WAYS", "Case", "Way", "run"]

BUILD = ROOT / "build" / "mixtures"
ROWS = {"web": 7_000, "code": 3_000}
WEIGHTS = (0.7, 0.3)
OTHER_WEIGHTS = (0.5, 0.5)
RANKS = 2
WORKERS = 2
FILES = 12
GROUP_ROWS = 100
STEP_ROWS = 120
SAVED, DIES = 40, 50
DEADLINE_S = 180
LEFT_S = 15
NAMED = ("torch", "pyarrow", "numpy")

Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to mix.

    Attributes:
        title: Its name on the page.
        module: The module of its contender.
        how: What the contender tells its module to do.
        environment: The name of its pinned requirements; of this library, none.
        package: The package whose version is told.
        converts: Whether something is made of the files first.
        ends: What ends an epoch: "all" sources have been delivered, each row once; the "first" source is at its end;
            or a number of rows, for which a source may begin again: "cycles".
        workers: Number of worker processes of a rank.
    """

    title: str
    module: str
    how: str = ""
    environment: str | None = None
    package: str = ""
    converts: bool = False
    ends: str = "all"
    workers: int = WORKERS


WAYS = {
    "ours": Way("this library, `MixedDataset`", "ours", ends="cycles"),
    "litdata": Way(
        "LitData, `CombinedStreamingDataset`", "litdata", "", "litdata", "litdata", converts=True, ends="first"
    ),
    "litdata_one": Way(
        "LitData, the same with 1 worker a rank",
        "litdata",
        "",
        "litdata",
        "litdata",
        converts=True,
        ends="first",
        workers=1,
    ),
    "grain_elastic": Way(
        "Grain, `MapDataset.mix` in `ElasticIterator`", "grain", "elastic", "grain", "grain", ends="first"
    ),
    "grain_iter": Way("Grain, `IterDataset.mix`", "grain", "iter", "grain", "grain", ends="first"),
    "nodes": Way("torchdata, `MultiNodeWeightedSampler`", "torchdata_nodes", "", "stateful", "torchdata"),
    "hf": Way("Hugging Face, `interleave_datasets`", "hf_datasets", "", "hf_datasets", "datasets"),
    "hf_shuffled": Way(
        "Hugging Face, `interleave_datasets` of `shuffle`", "hf_datasets", "shuffled", "hf_datasets", "datasets"
    ),
    "mosaic": Way(
        "MosaicML Streaming, `Stream(proportion=)`",
        "mosaic",
        "",
        "mds",
        "mosaicml-streaming",
        converts=True,
        ends="cycles",
    ),
}


@dataclass(frozen=True, slots=True)
class Case:
    """How a killed run goes on.

    Attributes:
        title: Its name on the page.
        ranks: Number of ranks from there on.
        weights: The weights from there on.
    """

    title: str
    ranks: int = RANKS
    weights: tuple[float, float] = WEIGHTS


CASES = {
    "same": Case("the same ranks and weights"),
    "more": Case("3 ranks", ranks=3),
    "fewer": Case("1 rank", ranks=1),
    "weights": Case("weights 0.5 and 0.5", weights=OTHER_WEIGHTS),
    "both": Case("3 ranks and these weights", ranks=3, weights=OTHER_WEIGHTS),
}


def run(path: Path, names: Iterable[str]) -> Results:
    """Run each way without an interruption, killed, and resumed in each case.

    Args:
        path: The file of the results, written after each way. What is not run now is kept from it.
        names: The ways, of `WAYS`.
    """
    results: Results = {"kind": "mixtures", "ways": {}}
    if path.exists():
        results = json.loads(path.read_text(encoding="utf-8"))
    for name in names:
        print(f"  {WAYS[name].title}", flush=True)
        results["ways"][name] = _run_way(WAYS[name])
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


class RefusedError(Exception):
    """A job ended with an error; the message has its last line."""


def _run_way(way: Way) -> Results:
    python = sys.executable
    if way.environment is not None:
        environment = Environment(CONTENDERS / "peers" / f"{way.environment}.txt")
        try:
            environment.prepare()
        except (RuntimeError, OSError) as error:
            return {"missing": str(error)}
        python = environment.python
    data = _write_data(BUILD / "data" / way.module)
    job = Job(way.module, way.how, str(data), "", list(WEIGHTS), STEP_ROWS // RANKS, way.workers, SAVED)
    found = _facts(python, way)
    try:
        if way.converts:
            _convert(python, job)
        whole = _run_job(python, job, RANKS, "whole")
        _run_job(python, dataclasses.replace(job, die=DIES), RANKS, "killed")
    except RefusedError as error:
        return found | {"missing": str(error)}
    found["uninterrupted"] = uninterrupted(whole, WEIGHTS, list(ROWS.values()))
    found["cases"] = {name: _resume(python, job, way, case, whole) for name, case in CASES.items()}
    _remove_shared_memory()
    return found


def _resume(python: str, job: Job, way: Way, case: Case, whole: Rows) -> Results:
    """Resume the killed run, and return what was delivered before and after."""
    killed = BUILD / "killed"
    job = dataclasses.replace(
        job, weights=list(case.weights), batch_size=STEP_ROWS // case.ranks, states=RANKS, way=_way_of(job, case)
    )
    saved = [np.load(killed / f"saved-{rank}.npy") for rank in range(RANKS)]
    try:
        rest = _run_job(python, job, case.ranks, "resumed", states=killed)
    except RefusedError as error:
        return {"error": str(error)}
    if case == CASES["same"]:
        joined = [np.concatenate(parts) for parts in zip(saved, rest, strict=True)]
        sources = compare(whole, joined)
    else:
        same = case.weights == WEIGHTS
        sources = passes(whole, [*saved, *rest], list(ROWS.values()), way.ends, same_weights=same)
    return {"error": None, "sources": sources, "share": share(rest)}


def _way_of(job: Job, case: Case) -> str:
    """Return how to load: this library has a strict load and an elastic one."""
    if job.module != "ours":
        return job.way
    return "strict" if case == CASES["same"] else "elastic"


def _run_job(python: str, job: Job, ranks: int, name: str, *, states: Path | None = None) -> Rows:
    """Run the ranks of a job until they end, and return what they delivered, which is nothing of a job that dies."""
    directory = _fresh(name)
    for path in states.glob("state-*") if states else ():
        shutil.copy(path, directory)
    job = dataclasses.replace(job, directory=str(directory))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(free_port()), "HF_HOME": str(BUILD / "hf"), "OMP_NUM_THREADS": "1"}
    command = [python, "-m", "benchmarks.contenders.mixtures.job", json.dumps(dataclasses.asdict(job))]
    logs = [directory / f"log-{rank}.txt" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOBAL_RANK": str(rank)}
        with log.open("w", encoding="utf-8") as output:
            processes.append(
                subprocess.Popen(
                    command, env=environment | own, stdout=output, stderr=output, cwd=directory, process_group=0
                )
            )
    try:
        status = _wait(processes, dies=job.die is not None)
        if job.die is not None:
            _wait_for_groups([process.pid for process in processes])
    finally:
        for process in processes:
            end(process)
    if job.die is not None:
        missing = [rank for rank in range(ranks) if not (directory / f"saved-{rank}.npy").exists()]
        if missing:
            raise RefusedError(_said(logs) or f"ranks {missing} saved no state")
        return []
    if status:
        raise RefusedError(_said(logs) or f"status {status}")
    return [np.load(directory / f"end-{rank}.npy") for rank in range(ranks)]


def _wait(processes: list[subprocess.Popen[bytes]], *, dies: bool) -> int:
    """Wait for all ranks, and return the status of one that failed, or 0."""
    try:
        statuses = [process.wait(DEADLINE_S) for process in processes]
    except subprocess.TimeoutExpired:
        return 0 if dies else 124
    return next((status for status in statuses if status), 0)


def _wait_for_groups(groups: list[int]) -> None:
    """Let what a killed rank started end by itself: it takes away the shared memory that the rank left."""
    deadline = time.monotonic() + LEFT_S
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(group, 0)
                time.sleep(0.1)


def _remove_shared_memory() -> None:
    """Take away what Streaming left of killed ranks: nothing else does, and it knows its files by their directory."""
    for known in Path("/dev/shm").glob("*_locals"):  # noqa: S108 - where Linux has shared memory
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if str(BUILD).encode() in known.read_bytes():
                for path in known.parent.glob(known.name.replace("_locals", "_*")):
                    path.unlink()


def _said(logs: Iterable[Path]) -> str:
    """Return the last error of a log, without paths."""
    for log in logs:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        lines = [re.sub(r"^\[rank\d+\]:\s*", "", line) for line in lines]
        errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b", line)]
        if errors:
            return re.sub(r"(?<![\w:/])/(?:[^\s/'\"\]]+/)+", "", errors[-1])
    return ""


def _convert(python: str, job: Job) -> None:
    """Make of the files what the contender reads."""
    script = (
        "import importlib, json, sys; from benchmarks.contenders.mixtures.job import Job; job = Job(**json.loads("
        "sys.argv[1])); importlib.import_module('benchmarks.contenders.mixtures.' + job.module).convert(job)"
    )
    done = subprocess.run(
        [python, "-c", script, json.dumps(dataclasses.asdict(job))],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=BUILD,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    if done.returncode:
        raise RefusedError(done.stderr.splitlines()[-1])


def _write_data(directory: Path) -> Path:
    """Write the Parquet files of each source."""
    if directory.exists():
        return directory
    unfinished = directory.with_name("unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for source, (name, rows) in enumerate(ROWS.items()):
        (unfinished / name).mkdir(parents=True)
        for number, ids in enumerate(np.array_split(np.arange(rows), FILES)):
            table = pa.table({"source": np.full(len(ids), source), "row": ids})
            pq.write_table(table, unfinished / name / f"part-{number:03d}.parquet", row_group_size=GROUP_ROWS)
    unfinished.rename(directory)
    return directory


def _facts(python: str, way: Way) -> Results:
    source = code(python)
    packages = {name: source["packages"][name] for name in NAMED if name in source["packages"]}
    version = packages_of(python).get(way.package, "")
    return {"begun": timestamp(), "machine": machine(), "code": source | {"packages": packages}, "version": version}


def _fresh(name: str) -> Path:
    directory = BUILD / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory
