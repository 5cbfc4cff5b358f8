"""Mixtures of two sources, killed and resumed, with this library and with others that mix."""

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

from benchmarks.contenders.mixtures.job import Job
from benchmarks.measure.delivered import Rows, compare, passes, share, uninterrupted
from benchmarks.measure.environments import Environment
from benchmarks.measure.ranks import RefusedError, convert, facts, remove_shared_memory, run_ranks
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
    job = Job(
        module=way.module,
        way=way.how,
        data=str(data),
        directory="",
        weights=list(WEIGHTS),
        batch_size=STEP_ROWS // RANKS,
        workers=way.workers,
        save=SAVED,
    )
    found = facts(python, way.package)
    try:
        if way.converts:
            convert(python, job, BUILD)
        whole = run_ranks(python, job, RANKS, BUILD / "whole")
        run_ranks(python, dataclasses.replace(job, die=DIES), RANKS, BUILD / "killed")
    except RefusedError as error:
        return found | {"missing": str(error)}
    found["uninterrupted"] = uninterrupted(whole, WEIGHTS, list(ROWS.values()))
    found["cases"] = {name: _resume(python, job, way, case, whole) for name, case in CASES.items()}
    remove_shared_memory(BUILD)
    return found


def _resume(python: str, job: Job, way: Way, case: Case, whole: Rows) -> Results:
    """Resume the killed run, and return what was delivered before and after."""
    killed = BUILD / "killed"
    job = dataclasses.replace(
        job, weights=list(case.weights), batch_size=STEP_ROWS // case.ranks, states=RANKS, way=_way_of(job, case)
    )
    saved = [np.load(killed / f"saved-{rank}.npy") for rank in range(RANKS)]
    try:
        rest = run_ranks(python, job, case.ranks, BUILD / "resumed", states=killed)
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
