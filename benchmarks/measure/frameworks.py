"""The same killed and resumed training under each framework, with this library and in the framework's own ways."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.contenders.frameworks.job import EVERY, Job
from benchmarks.measure.environments import Environment
from benchmarks.measure.machine import code, machine
from benchmarks.measure.rounds import timestamp
from benchmarks.paths import CONTENDERS, ROOT

__all__ = ["WAYS", "Case", "cases", "compare", "end", "free_port", "run"]

BUILD = ROOT / "build" / "frameworks"
FILES = 8
NAMED = ("torch", "pyarrow", "accelerate", "lightning", "transformers", "datasets", "torchdata")
GROUP_ROWS = 2_500
DEADLINE_S = 900

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
}


@dataclass(frozen=True, slots=True)
class Case:
    """A framework, a way to load, and a topology."""

    module: str
    way: str
    ranks: int
    shuffle: bool
    workers: int


def cases() -> Iterator[Case]:
    """Yield every case."""
    for ranks in (1, 2):
        for shuffle in (False, True):
            for module, way in WAYS:
                yield Case(module, way, ranks, shuffle, workers=1)


def run(path: Path, *, rows: int, batch_size: int, only: Iterable[str] = ()) -> Results:
    """Run every case three times: without an interruption, killed at 70 % of the first epoch, and resumed.

    Args:
        path: The file of the results, written after each case.
        rows: Rows of the dataset.
        batch_size: Rows of a step, over all ranks.
        only: Modules to run; all if empty.
    """
    environment = Environment(CONTENDERS / "frameworks" / "frameworks.txt")
    environment.prepare()
    data = _write_data(BUILD / "data", rows)
    results: Results = {
        "kind": "frameworks",
        "begun": timestamp(),
        "machine": machine(),
        "code": _named(code(environment.python)),
        "rows": rows,
        "batch_size": batch_size,
        "cases": [],
    }
    for case in cases():
        if only and case.module not in only:
            continue
        print(f"  {case}", flush=True)
        found = _run_case(case, environment.python, data, rows, batch_size)
        results["cases"].append(dataclasses.asdict(case) | found)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def compare(
    expected: list[list[tuple[int, int]]], trained: list[list[tuple[int, int]]], rows: int, epochs: int
) -> dict[str, int]:
    """Compare what ranks trained with what they train without an interruption.

    Args:
        expected: For each rank, (epoch, row) in order, of the uninterrupted run.
        trained: The same of the killed and resumed run.
        rows: Rows of the dataset.
        epochs: Number of epochs.

    Returns:
        Rows ``lost`` and ``repeated`` against the uninterrupted run; ``out_of_order``, rows that follow another row
        than there; ``left_out`` and ``extra``, rows that the uninterrupted run itself leaves out and repeats.
    """
    wanted = Counter(chain.from_iterable(expected))
    got = Counter(chain.from_iterable(trained))
    all_rows = Counter({(epoch, row): 1 for epoch in range(epochs) for row in range(rows)})
    return {
        "lost": (wanted - got).total(),
        "repeated": (got - wanted).total(),
        "out_of_order": sum(
            len(set(pairwise([None, *got])) - set(pairwise([None, *wanted])))
            for got, wanted in zip(trained, expected, strict=True)
        ),
        "left_out": (all_rows - wanted).total(),
        "extra": (wanted - all_rows).total(),
    }


def _run_case(case: Case, python: str, data: Path, rows: int, batch_size: int) -> Results:
    """Run a case, and return what became of the rows, or the error."""
    steps = rows // batch_size
    die = steps * 7 // 10 // EVERY * EVERY + EVERY // 2
    checkpoint = die // EVERY * EVERY
    job = Job(case.module, case.way, str(data), "", batch_size // case.ranks, case.shuffle, case.workers, None, None)
    whole = dataclasses.replace(job, directory=str(_fresh("whole")))
    killed = dataclasses.replace(job, directory=str(_fresh("killed")), die=die)
    resumed = dataclasses.replace(killed, die=None, checkpoint=checkpoint)
    try:
        _run_job(python, whole, case.ranks)
        _run_job(python, killed, case.ranks, dies=True)
        _run_job(python, resumed, case.ranks)
    except JobError as error:
        return {"error": str(error)}
    first = _reports(whole, case.ranks), _reports(resumed, case.ranks)
    return {
        "error": None,
        **compare(_trained(whole, case.ranks), _trained(resumed, case.ranks), rows, epochs=2),
        "begin_s": max(report["first_batch_s"] for report in first[0]),
        "resume_s": max(report["first_batch_s"] for report in first[1]),
    }


class JobError(Exception):
    """A job ended with an error; the message has its last line."""


def _run_job(python: str, job: Job, ranks: int, *, dies: bool = False) -> None:
    """Run the ranks of a job until they end, and end all of them once one has failed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    if ranks > 1:
        environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [python, "-m", "benchmarks.contenders.frameworks.job", json.dumps(dataclasses.asdict(job))]
    logs = [Path(job.directory, f"log-{rank}.txt") for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        with log.open("w", encoding="utf-8") as output:
            processes.append(
                subprocess.Popen(
                    command, env=environment | own, stdout=output, stderr=output, cwd=job.directory, process_group=0
                )
            )
    try:
        status = processes[0].wait(DEADLINE_S)
        if not dies and not status:
            status = max(abs(process.wait(DEADLINE_S)) for process in processes)
    except subprocess.TimeoutExpired:
        status = 1
    finally:
        for process in processes:
            end(process)
    if bool(status) != dies:
        said = [line for line in logs[0].read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        raise JobError(said[-1] if said else f"status {status}")


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a rank and its workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def _trained(job: Job, ranks: int) -> list[list[tuple[int, int]]]:
    found = [np.load(Path(job.directory, f"rows-end-{rank}.npy")) for rank in range(ranks)]
    return [list(map(tuple, rows.tolist())) for rows in found]


def _reports(job: Job, ranks: int) -> list[Results]:
    paths = [Path(job.directory, f"report-{rank}.json") for rank in range(ranks)]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _fresh(name: str) -> Path:
    directory = BUILD / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


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
