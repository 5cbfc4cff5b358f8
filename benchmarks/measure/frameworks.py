"""The same killed and resumed training under each framework, with this library and in the framework's own ways."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.contenders.frameworks.job import EPOCHS, FILTER, Job
from benchmarks.measure.environments import Environment
from benchmarks.measure.framework_counts import compare, count, peers_differ, trained
from benchmarks.measure.framework_jobs import JobError, Server, run_job
from benchmarks.measure.machine import code, machine
from benchmarks.measure.rounds import timestamp
from benchmarks.paths import CONTENDERS, ROOT

__all__ = ["RESIZED", "WAYS", "Case", "cases", "run"]

BUILD = ROOT / "build" / "frameworks"
FILES = 8
NAMED = ("torch", "pyarrow", "accelerate", "lightning", "transformers", "datasets", "torchdata")
GROUP_ROWS = 2_500
CHECKPOINTS = 10
"""Checkpoints of an epoch. A training is killed half-way between the seventh and the eighth."""

RESIZED_SHARE = 5
"""One row of so many is in the dataset of the trainings that resume on another number of ranks."""

RESIZED = ((2, 1), (2, 3), (3, 1))
"""Numbers of ranks before and after the resume."""

TENSOR_PARALLEL = 2
RESTARTS = 3

Results = dict[str, Any]

WAYS = {
    ("under_accelerate", "ours"): "Accelerate, this library",
    ("under_accelerate", "skip, streamed"): "Accelerate, `skip_first_batches`, datasets streaming",
    ("under_accelerate", "skip, converted"): "Accelerate, `skip_first_batches`, datasets converted to Arrow",
    ("under_accelerate", "stateful"): "Accelerate, `use_stateful_dataloader`, datasets streaming",
    ("under_lightning", "ours"): "Lightning, this library",
    ("under_lightning", "stateful"): "Lightning, StatefulDataLoader, datasets streaming",
    ("under_trainer", "ours"): "Trainer, this library",
    ("under_trainer", "skip, streamed"): "Trainer, its skip, datasets streaming",
    ("under_trainer", "skip, converted"): "Trainer, its skip, datasets converted to Arrow",
    ("under_dcp", "ours"): "DCP, this library, `save`",
    ("under_dcp", "ours, async"): "DCP, this library, `async_save`",
    ("under_dcp", "stateful, streamed"): "DCP, StatefulDataLoader, datasets streaming",
    ("under_dcp", "stateful, converted"): "DCP, StatefulDataLoader, datasets converted to Arrow",
    ("under_torchrun", "ours"): "torchrun's restart, this library",
    ("under_torchrun", "stateful, streamed"): "torchrun's restart, StatefulDataLoader, datasets streaming",
    ("under_torchrun", "stateful, converted"): "torchrun's restart, StatefulDataLoader, datasets converted to Arrow",
    ("under_mesh", "ours"): "Device mesh, this library",
    ("under_mesh", "stateful, converted"): "Device mesh, StatefulDataLoader, datasets converted to Arrow",
    ("under_store", "ours"): "`CheckpointStore`, this library",
    ("under_store", "ours, async"): "`CheckpointStore`, this library, `async_=True`",
    ("under_store", "stateful, converted"): "A file a rank, StatefulDataLoader, datasets converted to Arrow",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A framework, a way to load, and a topology.

    Attributes:
        module: The framework.
        way: How it loads.
        ranks: Data-parallel ranks of the training that is killed.
        resumed: Those of the training that continues it.
        shuffle: Whether rows are shuffled.
        filtered: Whether the rows are filtered, so that the length of an epoch is unknown.
        workers: Worker processes of a rank.
    """

    module: str
    way: str
    ranks: int
    resumed: int
    shuffle: bool = True
    filtered: bool = False
    workers: int = 1

    @property
    def peers(self) -> int:
        """Processes that share a data-parallel rank."""
        return TENSOR_PARALLEL if self.module == "under_mesh" else 1

    @property
    def is_resized(self) -> bool:
        """Whether the number of ranks changes."""
        return self.ranks != self.resumed


def cases() -> Iterator[Case]:
    """Yield every case."""
    for shuffle in (True, False):
        for ranks, resumed in ((2, 2), *RESIZED, (1, 1)) if shuffle else ((2, 2), (1, 1)):
            for module, way in WAYS:
                if module != "under_mesh" or (ranks, resumed) == (2, 2):
                    yield Case(module, way, ranks, resumed, shuffle)
    for module, way in WAYS:
        if way == "ours" and module != "under_mesh":
            yield Case(module, way, 1, 1, filtered=True)


def run(path: Path, *, rows: int, batch_size: int, only: Collection[str]) -> Results:
    """Run every case: without an interruption, killed in the first epoch, and resumed.

    Args:
        path: The file of the results, written after each case. Results of other modules in it stay.
        rows: Rows of the dataset.
        batch_size: Rows of a step, over all ranks.
        only: Modules to run.
    """
    environment = Environment(CONTENDERS / "frameworks" / "frameworks.txt")
    environment.prepare()
    source = _named(code(environment.python))
    results: Results = {
        "kind": "frameworks",
        "begun": timestamp(),
        "machine": machine(),
        "code": source,
        "batch_size": batch_size,
        "cases": [case for case in _earlier(path) if case["module"] not in only],
    }
    origin = {"commit": source["commit"], "changed": source["changed"]}
    data = {share: _write_data(BUILD / "data", rows // share) for share in (1, RESIZED_SHARE)}
    with contextlib.ExitStack() as stack:
        servers = {module: Server(environment.python, module) for module in only}
        for server in servers.values():
            stack.callback(server.close)
        for case in cases():
            if case.module in only:
                print(f"  {timestamp()} {case}", flush=True)
                share = RESIZED_SHARE if case.is_resized else 1
                found = _run_case(case, servers[case.module], data[share], batch_size)
                results["cases"].append(dataclasses.asdict(case) | {"rows": rows // share} | found | origin)
                path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def _earlier(path: Path) -> list[Results]:
    """Return the cases that a file of results has."""
    if not path.exists():
        return []
    found: list[Results] = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return found


def _run_case(case: Case, server: Server, data: Path, batch_size: int) -> Results:
    """Run a case, and return what became of the rows, or the error."""
    wanted, steps = _wanted(data, case.filtered), _rows(data) // batch_size
    every = steps // CHECKPOINTS
    if case.filtered:
        every = len(wanted) // batch_size // CHECKPOINTS
    job = Job(
        case.module,
        case.way,
        str(data),
        str(_fresh("killed")),
        batch_size // case.ranks,
        case.shuffle,
        case.filtered,
        case.workers,
        every,
        die=None,
        checkpoint=None,
    )
    killed = dataclasses.replace(job, die=every * 7 + every // 2)
    try:
        if case.is_resized:
            _kill_and_resume(server, case, killed, batch_size)
            return {"error": None, **count(trained(killed.directory), wanted, EPOCHS), **_times(killed)}
        whole = dataclasses.replace(job, directory=str(_fresh("whole")))
        run_job(server, whole, case.ranks * case.peers, restarts=_restarts(case))
        _kill_and_resume(server, case, killed, batch_size)
    except JobError as error:
        return {"error": str(error)}
    expected, got = trained(whole.directory), trained(killed.directory)
    return {
        "error": None,
        **compare(expected[:: case.peers], got[:: case.peers], wanted, EPOCHS),
        "peers_differ": peers_differ(expected, case.peers) + peers_differ(got, case.peers),
        "begin_s": _times(whole)["resume_s"],
        **_times(killed),
    }


def _kill_and_resume(server: Server, case: Case, killed: Job, batch_size: int) -> None:
    """Run a job until it is killed, and continue it; torchrun does both itself, on the same number of ranks."""
    if _restarts(case) and not case.is_resized:
        run_job(server, killed, case.ranks, restarts=RESTARTS)
        return
    restarts = None if _restarts(case) is None else 0
    run_job(server, killed, case.ranks * case.peers, dies=True, restarts=restarts)
    resumed = dataclasses.replace(killed, batch_size=batch_size // case.resumed, die=None, checkpoint=killed.every * 7)
    run_job(server, resumed, case.resumed * case.peers, restarts=restarts)


def _restarts(case: Case) -> int | None:
    return RESTARTS if case.module == "under_torchrun" else None


def _times(job: Job) -> dict[str, float]:
    """Return how long the last start of a job waited for its first batch, on the slowest rank."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in Path(job.directory).glob("report-*.json")]
    last = max(report["start"] for report in reports)
    return {"resume_s": max(report["first_batch_s"] for report in reports if report["start"] == last)}


def _fresh(name: str) -> Path:
    directory = BUILD / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def _rows(data: Path) -> int:
    return sum(pq.read_metadata(path).num_rows for path in data.glob("*.parquet"))


def _wanted(data: Path, filtered: bool) -> np.ndarray[Any, Any]:  # noqa: FBT001 - which rows
    """Return the numbers of the rows to train on."""
    table = pq.read_table(data, columns=["row"], filters=[FILTER] if filtered else None)
    return table.column("row").to_numpy()


def _write_data(directory: Path, rows: int) -> Path:
    """Write the Parquet files."""
    directory = directory / str(rows)
    if directory.exists():
        return directory
    unfinished = directory.with_name("unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    random = np.random.default_rng(7)
    for number, ids in enumerate(np.array_split(np.arange(rows), FILES)):
        columns = {f"x{column}": random.random(len(ids), dtype=np.float32) for column in range(4)}
        table = pa.table({"row": ids, **columns, "y": random.random(len(ids), dtype=np.float32)})
        pq.write_table(table, unfinished / f"part-{number:03d}.parquet", row_group_size=GROUP_ROWS)
    unfinished.rename(directory)
    return directory


def _named(found: Results) -> Results:
    packages = {name: found["packages"][name] for name in NAMED if name in found["packages"]}
    return found | {"packages": packages}
