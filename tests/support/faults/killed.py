"""Epochs under SIGKILL of the whole job at random moments, with any loader for which there is an adapter."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from faults.outcome import END_SEC, Outcome, Row, rows_in
from faults.trainer import Job, read_checkpoint
from jobs.processes import (
    SHARED_MEMORY,
    inherited,
    mapped_shared_memory,
    processes_of_sessions,
    wait_until_none,
)
from typing_extensions import Self

FILES = ((900, 40), (36, 36), (1100, 50), (700, 25))
"""Rows and row group size of each file. All rows divide by 12, for loaders that share rows in equal parts only."""

KILLED = "SIGKILL of the whole job at random moments"
CHANGED = "A file rewritten with other rows between SIGKILL and resume"
"""The faults, as they are published."""

PAUSE_SEC = 0.004
LONGEST_SEC = 0.3
"""A job lives so long at most after its first batch."""
PATIENCE = 15
"""After each so many kills in a row without a commit, a job lives twice as long."""
HANGS_SEC = 60.0
HANGS = f"TimeoutError: no sign of life for {HANGS_SEC:.0f} s"
VAIN_KILLS = 100
STANDS_STILL = f"TimeoutError: it has not come further between {VAIN_KILLS} kills"
MOST = 0.9
"""A job that must not end the epoch commits about this share of its rows at most."""
BEFORE = 0.2
"""So many of the kills may fall before the first batch."""


def write_files(directory: Path, files: Sequence[tuple[int, int]] = FILES, *, only: int | None = None) -> None:
    """Write Parquet files with row ids, or only one of them, again, with as many rows that are others."""
    directory.mkdir(parents=True, exist_ok=True)
    first = 0
    for number, (rows, group_rows) in enumerate(files):
        ids = range(first, first + rows)
        first += rows
        if only is None or number == only:
            ids = [row + 10**6 * (only is not None) for row in ids]
            scores, names = [row / 7 for row in ids], [f"row {row}" for row in ids]
            path = directory / f"part-{number:03d}.parquet"
            pq.write_table(
                pa.table({"row": ids, "score": scores, "name": names}), f"{path}.new", row_group_size=group_rows
            )
            Path(f"{path}.new").replace(path)


def rows_of_files(directory: Path) -> list[Row]:
    """Return the rows that the files hold, as pyarrow reads them."""
    tables = [pq.read_table(path, partitioning=None) for path in sorted(directory.glob("*.parquet"))]
    return rows_in(pa.concat_tables(tables).to_pydict())


class Trainer:
    """The program that trains with one loader. Use it as a context manager: it ends with it.

    Args:
        adapter: The adapter's name.
        python: The interpreter of the environment that has the loader.
        paths: Where it imports from, besides its environment.
    """

    def __init__(self, adapter: str, python: str = sys.executable, paths: Sequence[str] | None = None) -> None:
        program = Path(__file__).with_name("trainer.py")
        environment = inherited(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", DO_NOT_TRACK="1")
        if paths is not None:
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        self._server = subprocess.Popen(
            [python, str(program), adapter],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._lines: list[bytes] = []
        self._rest = b""

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it, and the job that it may still train."""
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.close()
        self._server.wait(HANGS_SEC)
        self._server.stdout.close()

    def start(self, job: Job) -> int:
        """Start a job and return the id of its session."""
        assert self._server.stdin
        self._server.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        self._server.stdin.flush()
        while True:
            event = self._read(HANGS_SEC)
            if event is None:
                message = f"the trainer does not answer; its exit status is {self._server.poll()}"
                raise RuntimeError(message)
            if "started" in event:  # before that is what an earlier job still had to say
                return int(event["started"])

    def next_event(self) -> dict[str, Any]:
        """Return the next event. Raise JobFailed if it is an error, or if there is none within `HANGS_SEC`."""
        event = self.event(HANGS_SEC)
        if event is None:
            raise JobFailed(HANGS)
        return event

    def event(self, seconds: float) -> dict[str, Any] | None:
        """Return the next event, or None if there is none within some time. Raise JobFailed if it is an error."""
        event = self._read(seconds)
        if event and "error" in event:
            raise JobFailed(event["error"])
        return event

    def _read(self, seconds: float) -> dict[str, Any] | None:
        assert self._server.stdout
        end = time.monotonic() + seconds
        while not self._lines:
            ready, _, _ = select.select([self._server.stdout], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._server.stdout.fileno(), 65536) if ready else b""
            if not data:
                return None
            *self._lines, self._rest = (self._rest + data).split(b"\n")
        found: dict[str, Any] = json.loads(self._lines.pop(0))
        return found


class JobFailed(Exception):  # noqa: N818 - what happened
    """A job raised an error, or gave no sign of life."""


@dataclass(frozen=True)
class Case:
    """How an epoch is trained.

    Attributes:
        num_workers: Worker processes of each rank.
        shuffle: Whether rows are shuffled.
        ranks: The numbers of ranks, one after the other.
        changed: Whether a file is rewritten, with as many other rows, when half of the rows are committed.
        ahead: How many batches are copied to a device ahead, by the adapter of this library.
    """

    num_workers: int = 0
    shuffle: bool = False
    ranks: tuple[int, ...] = (1,)
    changed: bool = False
    ahead: int = 0

    def __str__(self) -> str:
        """Return it in plain words."""
        ranks = ", then ".join(map(str, self.ranks)) + (" rank" if self.ranks == (1,) else " ranks")
        workers = f"{self.num_workers} workers each" if self.num_workers else "no workers"
        return ", ".join([ranks, workers, "rows shuffled" if self.shuffle else "in order"])

    @property
    def stages(self) -> list[tuple[int, float]]:
        """The numbers of ranks by their places, each with the share of the rows at which its stage ends."""
        if self.changed:
            return [(0, 0.5), (0, 1.0)]
        return [(place, (place + 1) / len(self.ranks)) for place in range(len(self.ranks))]


@dataclass
class Epoch:
    """An epoch that is killed until it ends.

    Attributes:
        trainer: What trains.
        case: How.
        data: The files. Next to them is a directory for what they are converted to.
        directory: Where its checkpoints are.
        choice: Decides when it is killed.
        outcome: Gets the number of kills, the slowest recovery, and what was left behind.
    """

    trainer: Trainer
    case: Case
    data: Path
    directory: Path
    choice: random.Random
    outcome: Outcome

    def __post_init__(self) -> None:
        """Begin without a kill."""
        self.outcome.faults = 0
        self.directory.mkdir(parents=True)

    def train(self, most_kills: int) -> None:
        """Train until the epoch ends.

        Args:
            most_kills: After so many kills the last number of ranks is left alone.

        Raises:
            JobFailed: If a job fails.
        """
        rows = len(rows_of_files(self.data))
        for place, share in self.case.stages:
            if self.case.changed and share == 1:
                write_files(self.data, only=2)
                prepare(self.trainer, self.data, self.directory)
            before, killed = self.count(), True
            reached, vain = before, 0  # kills since rows were committed
            while killed and (share == 1 or self.count() < share * rows):
                kill = share < 1 or self.outcome.faults < most_kills
                # However slow the machine is: one kill at least, and rows for each stage.
                ends = share == 1 and (not kill or self.outcome.faults > 0)
                limit = 0 if ends else math.ceil(min(share, MOST) * rows) - before
                killed = self._train(place, kill=kill, limit=limit, longest_sec=LONGEST_SEC * 2 ** (vain // PATIENCE))
                count = self.count()
                reached, vain = max(reached, count), 0 if count > reached else vain + 1
                if vain > VAIN_KILLS:
                    raise JobFailed(STANDS_STILL)

    def committed(self) -> list[list[list[Row]]]:
        """Return the rows that were committed: by the place in `Case.ranks`, by rank."""
        paths = [path for path in map(self._path, range(len(self.case.ranks))) if path.exists()]
        records = [read_checkpoint(str(path))[0] for path in paths]
        return [[[(row, content) for row, content in rows] for rows in record["rows"]] for record in records]

    def rows(self) -> list[Row]:
        """Return all of them."""
        return [row for ranks in self.committed() for rows in ranks for row in rows]

    def count(self) -> int:
        """Return how many rows were committed."""
        return len(self.rows())

    def _path(self, place: int) -> Path:
        return self.directory / f"checkpoint-{place}"

    def _train(self, place: int, *, kill: bool, limit: int = 0, longest_sec: float = LONGEST_SEC) -> bool:
        """Train until the end, or until a random moment. Return whether it was killed."""
        job = Job(
            str(self.data),
            checkpoint=str(self._path(place)),
            converted=str(converted(self.data)),
            earlier=str(self._path(place - 1)) if place else "",
            num_ranks=self.case.ranks[place],
            num_workers=self.case.num_workers,
            shuffle=self.case.shuffle,
            ahead=self.case.ahead,
            pause=PAUSE_SEC if kill else 0.0,
            limit=limit,
        )
        began = time.monotonic()
        session, killed = self.trainer.start(job), True
        try:
            killed = self._killed(began, longest_sec) if kill else self._ended(began)
        finally:
            if not killed:
                wait_until_none(lambda: processes_of_sessions([session]), END_SEC)
            self._end(session)
        return killed

    def _ended(self, began: float) -> bool:
        while "ended" not in (event := self.trainer.next_event()):
            self._see(event, began)
        return False

    def _killed(self, began: float, longest_sec: float) -> bool:
        """Wait for a random moment after the first batch or, now and then, before it."""
        moment = began + (self.choice.uniform(0, longest_sec) if self.choice.random() < BEFORE else HANGS_SEC)
        after = self.choice.uniform(0, longest_sec)
        has_begun = False
        while (event := self.trainer.event(moment - time.monotonic())) is not None:
            if "ended" in event:
                return False
            self._see(event, began)
            if not has_begun:
                moment, has_begun = min(moment, time.monotonic() + after), True
        if moment == began + HANGS_SEC:
            raise JobFailed(HANGS)
        self.outcome.faults += 1
        return True

    def _see(self, event: Mapping[str, Any], began: float) -> None:
        """Note how long a rank took until its first batch."""
        self.outcome.seconds = max(self.outcome.seconds or 0.0, event["first"] - began)

    def _end(self, session: int) -> None:
        """Kill every process of a job, and count what is left of it."""
        files = files_of(processes_of_sessions([session]))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(session, signal.SIGKILL)
        processes = wait_until_none(lambda: processes_of_sessions([session]), END_SEC)
        files = wait_until_none(lambda: [file for file in files if file.exists()], END_SEC)
        semaphores = [file for file in files if file.name.startswith("sem.")]
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for file in files:
            file.unlink(missing_ok=True)
        counts = {"processes": len(processes), "semaphores": len(semaphores)}
        counts["shared memory"] = len(files) - len(semaphores)
        self.outcome.add_left(counts)


def files_of(pids: Collection[int]) -> list[Path]:
    """Return the files in shared memory that processes have mapped or named after themselves."""
    mapped = set().union(*map(mapped_shared_memory, pids))
    found = []
    for path in SHARED_MEMORY.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino in mapped or any(str(pid) in path.name.split("_") for pid in pids):
                found.append(path)
    return found


def whole_epoch(trainer: Trainer, case: Case, data: Path, directory: Path) -> list[list[Row]]:
    """Return the rows of each rank in an epoch that nobody kills, under a case's first number of ranks."""
    alone = Case(case.num_workers, case.shuffle, case.ranks[:1], ahead=case.ahead)
    epoch = Epoch(trainer, alone, data, directory, random.Random(0), Outcome("", ""))
    epoch.train(0)
    return epoch.committed()[0]


def prepare(trainer: Trainer, data: Path, directory: Path) -> None:
    """Convert or index the files, if the loader needs that."""
    trainer.start(Job(str(data), str(directory / "prepared"), converted=str(converted(data)), prepares=True))
    while "ended" not in trainer.next_event():
        pass


def converted(data: Path) -> Path:
    """Return the directory for what files are converted to."""
    return data.with_name(f"{data.name}-converted")
