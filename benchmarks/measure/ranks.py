"""Run the ranks of a job, each a process, until they have ended or were killed, and return what they delivered."""

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
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders.rank import RankJob
from benchmarks.measure.delivered import Rows
from benchmarks.measure.framework_jobs import end, free_port
from benchmarks.measure.machine import code, machine
from benchmarks.measure.rounds import timestamp
from benchmarks.paths import ROOT

__all__ = ["RefusedError", "convert", "facts", "import_path", "remove_shared_memory", "run_ranks"]

DEADLINE_S = 180
LEFT_S = 15
NAMED = ("torch", "pyarrow", "numpy")


class RefusedError(Exception):
    """A job ended with an error; the message has its last line."""


def run_ranks(python: str, job: RankJob, ranks: int, directory: Path, *, states: Path | None = None) -> Rows:
    """Run the ranks of a job until they end, and return what they delivered, which is nothing of a job that dies.

    Args:
        python: The interpreter.
        job: The job; its program is the module of its class.
        ranks: Number of ranks.
        directory: What the job writes. What is there is taken away.
        states: The directory of the job whose states are there to be loaded.

    Raises:
        RefusedError: If a rank fails, does not end in time, or dies without having saved its state.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for path in states.glob("state-*") if states else ():
        shutil.copy(path, directory)
    job = dataclasses.replace(job, directory=str(directory), began=time.monotonic())
    environment = {**os.environ, "PYTHONPATH": import_path(python), "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(free_port()), "HF_HOME": str(directory.parent / "hf"), "OMP_NUM_THREADS": "1"}
    command = [python, "-m", type(job).__module__, json.dumps(dataclasses.asdict(job))]
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


def convert(python: str, job: RankJob, directory: Path) -> None:
    """Make of the files what the contender reads.

    Raises:
        RefusedError: If this fails.
    """
    package = type(job).__module__
    script = (
        f"import importlib, json, sys; from {package} import Job; job = Job(**json.loads(sys.argv[1])); "
        f"importlib.import_module('{package.rpartition('.')[0]}.' + job.module).convert(job)"
    )
    done = subprocess.run(
        [python, "-c", script, json.dumps(dataclasses.asdict(job))],
        env={**os.environ, "PYTHONPATH": import_path(python)},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    if done.returncode:
        raise RefusedError(done.stderr.splitlines()[-1])


def import_path(python: str) -> str:
    """Return where an interpreter finds the benchmarks: without this library, unless it is this interpreter.

    Another environment may have another package of the same name, which is to be measured.
    """
    if python == sys.executable:
        return str(ROOT)
    alone = ROOT / "build" / "bench" / "benchmarks_alone"
    alone.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (alone / "benchmarks").symlink_to(ROOT / "benchmarks", target_is_directory=True)
    return str(alone)


def facts(python: str, package: str) -> dict[str, Any]:
    """Return when and where something is run, and the version of a package."""
    source = code(python)
    packages = {name: source["packages"][name] for name in NAMED if name in source["packages"]}
    version = source["packages"].get(package, "")
    return {"begun": timestamp(), "machine": machine(), "code": source | {"packages": packages}, "version": version}


def remove_shared_memory(build: Path) -> None:
    """Take away what Streaming left of killed ranks: nothing else does, and it knows its files by their directory."""
    for known in Path("/dev/shm").glob("*_locals"):  # noqa: S108 - where Linux has shared memory
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if str(build).encode() in known.read_bytes():
                for path in known.parent.glob(known.name.replace("_locals", "_*")):
                    path.unlink()


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


def _said(logs: Iterable[Path]) -> str:
    """Return the last error of a log, without paths."""
    for log in logs:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        lines = [re.sub(r"^\[rank\d+\]:\s*", "", line) for line in lines]
        errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b", line)]
        if errors:
            return re.sub(r"(?<![\w:/])/(?:[^\s/'\"\]]+/)+", "", errors[-1])
    return ""
