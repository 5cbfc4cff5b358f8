"""A training job that is killed: ``trainer.py ADAPTER`` trains with one loader, in whatever environment runs it.

It serves, so that a kill costs a tenth of a second and not an import of torch. It imports the adapter, a module of
``faults.adapters``. Then each line of its input is a job as JSON, for which it forks a process with a session of its
own, and each line of its output is an event as JSON: ``{"started": PID}``, ``{"first": SECONDS}`` when a rank has its
first batch (by the monotonic clock), ``{"ended": true}`` after the last commit, or ``{"error": TEXT}``.

A job commits as a careful trainer does: what all ranks have trained, and the states of their loaders, in one file that
is written under another name, synced and renamed. Ranks commit together, after the same number of steps.

An adapter has ``open(job, saved)``. It returns an iterator of batches, each a list of rows, and what returns the
loader's state. ``saved`` are the states of all ranks of an earlier job, or None. The adapter may have ``prepare(job)``,
which converts or indexes the files before the first job.

Only the standard library and the adapter's loader are needed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.outcome import Row


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        data: The directory of the Parquet files.
        checkpoint: The file that the job commits to. If it is there, the job goes on from it.
        earlier: The checkpoint of an earlier job under another number of ranks, to go on from; empty for none.
        converted: A directory for what the files are converted to.
        num_ranks: Processes that train.
        num_workers: Worker processes of each.
        shuffle: Whether rows are shuffled.
        ahead: How many batches are copied to a device ahead; 0 to copy none.
        batch_size: Rows of a step of all ranks together. It divides evenly.
        every: Steps between two commits.
        pause: Seconds that a step takes.
        limit: When so many rows are committed, the job waits to be killed; 0 to train until the end.
        rank: Which of the ranks this is.
        prepares: Whether the job is to convert or index the files, and trains nothing.
    """

    data: str
    checkpoint: str
    converted: str
    earlier: str = ""
    num_ranks: int = 1
    num_workers: int = 0
    shuffle: bool = False
    ahead: int = 0
    batch_size: int = 12
    every: int = 6
    pause: float = 0.0
    limit: int = 0
    rank: int = 0
    prepares: bool = False


def files_of(job: Job) -> list[str]:
    """Return the paths of the files, sorted."""
    return sorted(map(str, Path(job.data).glob("*.parquet")))


def read_checkpoint(path: str) -> tuple[dict[str, Any], bytes]:
    """Return what a checkpoint says, ``ended`` and ``rows`` of each rank, and its pickled states."""
    record, _, states = Path(path).read_bytes().partition(b"\n")
    return json.loads(record), states


def commit(path: str, ended: list[bool], rows: list[list[Row]], states: list[Any]) -> None:
    """Write a checkpoint at once: whoever is killed leaves the one before or this one."""
    unfinished = f"{path}.unfinished"
    with open(unfinished, "wb") as file:  # noqa: PTH123 - os.fsync wants the file
        file.write(json.dumps({"ended": ended, "rows": rows}).encode() + b"\n" + pickle.dumps(states))
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)  # noqa: PTH105
    directory = os.open(os.path.dirname(path), os.O_RDONLY)  # noqa: PTH120
    os.fsync(directory)
    os.close(directory)


def train_rank(adapter: Any, job: Job, saved: list[Any] | None, leader: Any, tell: Callable[..., None]) -> None:
    """Train one rank, and send what it has trained and its state when it is time to commit."""
    batches: Iterable[list[Row]]
    batches, save = adapter.open(job, saved)
    rows: list[Row] = []
    for step, batch in enumerate(batches, start=1):
        if step == 1:
            tell(first=time.monotonic())
        rows += batch
        time.sleep(job.pause)
        if step % job.every == 0:
            leader.send((rows, save(), False))
            leader.recv()
            rows = []
    leader.send((rows, save(), True))


def train(adapter: Any, job: Job, tell: Callable[..., None]) -> None:
    """Train all ranks, each in a process of its own, from the newest checkpoint on, and commit for all of them."""
    rows: list[list[Row]] = [[] for _ in range(job.num_ranks)]
    states: list[Any] = [None] * job.num_ranks
    ended = [False] * job.num_ranks
    saved = None
    if Path(job.checkpoint).exists():
        record, pickled = read_checkpoint(job.checkpoint)
        rows, ended = record["rows"], record["ended"]
        saved = states = pickle.loads(pickled)
    elif job.earlier:
        saved = pickle.loads(read_checkpoint(job.earlier)[1])
    ranks = {rank: start(adapter, job, rank, saved, tell) for rank in range(job.num_ranks) if not ended[rank]}
    while ranks:
        for rank, connection in ranks.items():
            more, states[rank], ended[rank] = connection.recv()
            rows[rank] += more
        commit(job.checkpoint, ended, rows, states)
        while 0 < job.limit <= sum(map(len, rows)):
            signal.pause()
        ranks = {rank: connection for rank, connection in ranks.items() if not ended[rank]}
        for connection in ranks.values():
            connection.send(None)
    tell(ended=True)


def start(adapter: Any, job: Job, rank: int, saved: list[Any] | None, tell: Callable[..., None]) -> Any:
    """Fork a rank and return the connection to it."""
    ours, theirs = multiprocessing.Pipe()

    def run() -> None:
        ours.close()
        train_rank(adapter, Job(**{**vars(job), "rank": rank}), saved, theirs, tell)

    fork(run, tell)
    theirs.close()
    return ours


def fork(run: Callable[[], None], tell: Callable[..., None]) -> int:
    """Run something in a forked process, which ends its whole group if that fails, and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        run()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the job ends with it
        traceback.print_exc()
        if not isinstance(error, EOFError):  # a rank failed and has told it
            tell(error=f"{type(error).__name__}: {error}"[:1000])
        os.killpg(0, signal.SIGKILL)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def serve(adapter: Any) -> None:
    """Fork a process for each job that is asked for, until the input ends."""
    events = os.dup(1)

    def tell(**event: Any) -> None:
        os.write(events, json.dumps(event).encode() + b"\n")

    def run() -> None:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(f"{job.checkpoint}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        tell(started=os.getpid())
        if job.prepares:
            getattr(adapter, "prepare", lambda _: None)(job)
            tell(ended=True)
        else:
            train(adapter, job, tell)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the dead
    newest = 0
    for line in sys.stdin:
        job = Job(**json.loads(line))
        newest = fork(run, tell)
    if newest:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(newest, signal.SIGKILL)


if __name__ == "__main__":
    serve(importlib.import_module(f"faults.adapters.{sys.argv[1]}"))
