"""Documents packed into sequences, timed, killed and resumed, with this library and with others that pack."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.contenders.packing.job import Job
from benchmarks.measure.environments import Environment
from benchmarks.measure.machine import machine
from benchmarks.measure.ranks import RefusedError, facts, run_ranks
from benchmarks.measure.token_counts import changes, left_out, sequences_changed
from benchmarks.paths import CONTENDERS, ROOT

__all__ = ["WAYS", "Way", "run"]

BUILD = ROOT / "build" / "packing"
SEED = 17
FILES = 12
GROUP_DOCUMENTS = 500
TIMED_DOCUMENTS = 60_000
KILLED_DOCUMENTS = 12_000
LONGEST = 20_000
BATCH_SIZE = 8
WORKERS = 2
ROUNDS = 3
RANKS, FEWER = 3, 2
SAVED = {1: 100, RANKS: 30}
"""After which step a state is saved, by number of ranks: in the middle of the epoch."""
DIES_AFTER = 5

Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to pack.

    Attributes:
        title: Its name on the page.
        module: The module of its contender.
        how: What the contender tells its module to do.
        environment: The name of its pinned requirements; of this library, none.
        package: The package whose version is told.
        workers: Number of worker processes of a rank in the runs that are killed.
    """

    title: str
    module: str
    how: str
    environment: str | None = None
    package: str = ""
    workers: int = WORKERS


WAYS = {
    "ours_concat": Way('this library, `"concat"`', "ours", "concat"),
    "ours_best_fit": Way('this library, `"best_fit"`', "ours", "best_fit"),
    "grain_concat": Way("Grain, `ConcatThenSplitIterDataset`", "grain", "concat", "grain", "grain"),
    "grain_first_fit": Way("Grain, `FirstFitPackIterDataset`", "grain", "first_fit", "grain", "grain"),
    "grain_best_fit": Way("Grain, `BestFitPackIterDataset`", "grain", "best_fit", "grain", "grain"),
    "torchtitan": Way(
        "torchtitan, `HuggingFaceTextDataLoader`", "torchtitan", "concat", "torchtitan", "torchtitan", workers=0
    ),
    "trl_wrapped": Way('TRL, `pack_dataset(strategy="wrapped")`', "trl", "wrapped", "trl", "trl"),
    "trl_bfd": Way('TRL, `pack_dataset(strategy="bfd_split")`', "trl", "bfd_split", "trl", "trl"),
}


def run(path: Path, names: Iterable[str], rounds: int = ROUNDS) -> Results:
    """Kill and resume each way, then time them in turns.

    Args:
        path: The file of the results, written after each way. What is not run now is kept from it.
        names: The ways, of `WAYS`.
        rounds: How often each is timed; 0 keeps the times of the file.
    """
    results: Results = {"kind": "packing", "ways": {}}
    if path.exists():
        results = json.loads(path.read_text(encoding="utf-8"))
    ready: dict[str, str] = {}
    for name in names:
        print(f"  {WAYS[name].title}", flush=True)
        earlier = results["ways"].get(name, {})
        found = _run_way(WAYS[name])
        if "missing" not in found:
            ready[name] = _python_of(WAYS[name])
            found["rounds"] = earlier.get("rounds", [])
        results["ways"][name] = found
        _write(path, results)
    for number in range(rounds):
        for name, python in ready.items():
            if number == 0:
                results["ways"][name]["rounds"] = []
            print(f"  round {number + 1}: {WAYS[name].title}", flush=True)
            results["ways"][name]["rounds"].append(_time(python, WAYS[name]))
            _write(path, results)
    return results


def _run_way(way: Way) -> Results:
    if way.environment is not None:
        try:
            Environment(_requirements(way)).prepare()
        except (RuntimeError, OSError) as error:
            return {"missing": str(error)}
    python = _python_of(way)
    data, tokens = _write_data(BUILD / "killed-data", KILLED_DOCUMENTS)
    job = Job(
        module=way.module,
        way=way.how,
        data=str(data),
        directory="",
        batch_size=BATCH_SIZE,
        workers=way.workers,
        save=0,
    )
    found = facts(python, way.package) | {"documents": KILLED_DOCUMENTS, "tokens": tokens}
    try:
        found["same"] = _stop(python, job, tokens, 1, 1)
        found["fewer"] = _stop(python, job, tokens, RANKS, FEWER)
    except RefusedError as error:
        return found | {"missing": str(error)}
    return found


def _stop(python: str, job: Job, tokens: int, ranks: int, later: int) -> Results:
    """Run an epoch without an interruption, and another that is killed and goes on with a number of ranks."""
    job = dataclasses.replace(job, save=SAVED[ranks])
    whole = run_ranks(python, job, ranks, BUILD / "whole")
    found: Results = {"left_out": left_out(whole, tokens), "sequences": sum(map(len, whole))}
    killed = BUILD / "killed"
    run_ranks(python, dataclasses.replace(job, die=job.save + DIES_AFTER), ranks, killed)
    saved = [np.load(killed / f"saved-{rank}.npy") for rank in range(ranks)]
    found["saved_tokens"] = sum(int(np.count_nonzero(own)) for own in saved)
    found["state_bytes"] = max((killed / f"state-{rank}.pickle").stat().st_size for rank in range(ranks))
    try:
        rest = run_ranks(python, dataclasses.replace(job, states=ranks), later, BUILD / "resumed", states=killed)
    except RefusedError as error:
        return found | {"error": str(error)}
    found |= {"error": None} | changes(whole, [*saved, *rest], tokens)
    if ranks == later:
        joined = [np.concatenate(parts) for parts in zip(saved, rest, strict=True)]
        found["sequences_changed"] = sequences_changed(whole, joined)
    return found


def _time(python: str, way: Way) -> Results:
    """Time an epoch of one process without workers."""
    data, _ = _write_data(BUILD / "timed-data", TIMED_DOCUMENTS)
    job = Job(
        module=way.module,
        way=way.how,
        data=str(data),
        directory="",
        batch_size=BATCH_SIZE,
        workers=0,
        save=0,
        timed=True,
    )
    try:
        run_ranks(python, job, 1, BUILD / "timed")
    except RefusedError as error:
        return {"error": str(error)}
    found: Results = json.loads((BUILD / "timed" / "timed.json").read_text(encoding="utf-8"))
    return found | {"load_before": machine()["load_before"]}


def _write_data(directory: Path, documents: int) -> tuple[Path, int]:
    """Write the documents, unless they are there, and return their directory and how many tokens they have."""
    lengths = np.clip(np.random.default_rng(SEED).lognormal(5.8, 1.1, documents), 1, LONGEST).astype(np.int64)
    tokens = int(lengths.sum())
    if directory.exists():
        return directory, tokens
    unfinished = directory.with_name("unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    ends = np.append(0, np.cumsum(lengths))
    for number, own in enumerate(np.array_split(np.arange(documents), FILES)):
        offsets = ends[own[0] : own[-1] + 2]
        values = np.arange(offsets[0] + 1, offsets[-1] + 1, dtype=np.int32)
        lists = pa.ListArray.from_arrays((offsets - offsets[0]).astype(np.int32), values)
        pq.write_table(
            pa.table({"tokens": lists}), unfinished / f"part-{number:03d}.parquet", row_group_size=GROUP_DOCUMENTS
        )
    unfinished.rename(directory)
    return directory, tokens


def _requirements(way: Way) -> Path:
    return CONTENDERS / "peers" / f"{way.environment}.txt"


def _python_of(way: Way) -> str:
    return sys.executable if way.environment is None else Environment(_requirements(way)).python


def _write(path: Path, results: Results) -> None:
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
