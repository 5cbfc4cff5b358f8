"""Run a script as the ranks of a job, forked from a process that has torch loaded: a torchrun that starts at once."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from jobs.forked import start
from jobs.processes import processes_of_sessions, wait_until_none
from torch.distributed import TCPStore

JOBS = Path(__file__).parent
MINUTES = 5


class RanksJob:
    """A script in several ranks, on loopback. Use `running_ranks`, which always ends it.

    As torchrun does, it ends all ranks once one of them has failed; it sees that when it is asked whether they run.
    Each rank begins a session: that is how those of its processes are found whose parent was killed.

    Args:
        script: Name of the script beside this file.
        num_ranks: Number of processes.
        arguments: What the script gets, as JSON.
        directory: Where its output is kept.
    """

    def __init__(self, script: str, num_ranks: int, arguments: dict[str, Any], directory: Path) -> None:
        # As torchrun does it: the process that starts the ranks has the store, on a port that the system chose.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._output = directory / f"output-{uuid.uuid4().hex}.txt"
        # A short path: sockets through which workers send shared memory lie in it, and their names are limited.
        self._scratch = tempfile.mkdtemp(prefix="ranks-")
        self._script, self._arguments, self._num_ranks = JOBS / script, json.dumps(arguments), num_ranks
        self._ranks: list[ForkServerProcess] = []

    def start(self) -> None:
        """Start all ranks."""
        environment = {
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TMPDIR": self._scratch,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(self._num_ranks),
        }
        for rank in range(self._num_ranks):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._ranks.append(start(self._script, self._arguments, output=self._output, environment=own))

    @property
    def is_running(self) -> bool:
        """Whether any rank is still there."""
        if any(rank.exitcode for rank in self._ranks):
            for rank in self._ranks:
                rank.kill()
        return any(rank.exitcode is None for rank in self._ranks)

    def main_processes(self) -> list[int]:
        """Return the ids of all living ranks."""
        return [rank.pid for rank in self._ranks if rank.exitcode is None and rank.pid is not None]

    ranks = main_processes

    def processes(self) -> list[int]:
        """Return the ids of all its living processes."""
        return processes_of_sessions({rank.pid for rank in self._ranks})

    def output(self) -> str:
        """Return what it has printed so far."""
        return self._output.read_text(errors="replace")

    def wait(self, seconds: float) -> int:
        """Wait until all ranks end, and return the first status that is not 0; fail if that takes longer."""
        end = time.monotonic() + seconds
        while self.is_running:
            if time.monotonic() > end:
                self.end()
                message = f"the ranks took more than {seconds} seconds:\n{self.output()}"
                raise AssertionError(message)
            connection.wait([rank.sentinel for rank in self._ranks if rank.exitcode is None], 1)
        return next((rank.exitcode for rank in self._ranks if rank.exitcode), 0)

    def finish(self, seconds: float = MINUTES * 60) -> None:
        """Wait until it ends by itself, without an error and without leaving a process behind."""
        status = self.wait(seconds)
        assert status == 0, f"a rank ended with status {status}:\n{self.output()}"
        assert not wait_until_none(self.processes), f"the ranks left processes behind:\n{self.output()}"

    def end(self) -> None:
        """Kill whatever of it is alive."""
        while doomed := self.processes():
            for pid in doomed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for rank in self._ranks:
            rank.join()
        shutil.rmtree(self._scratch, ignore_errors=True)


@contextlib.contextmanager
def running_ranks(script: str, num_ranks: int, arguments: dict[str, Any], directory: Path) -> Iterator[RanksJob]:
    """Start the ranks of a job, and end them when the block is left, however that comes about."""
    job = RanksJob(script, num_ranks, arguments, directory)
    try:
        job.start()
        yield job
    finally:
        job.end()


def run_ranks(script: str, num_ranks: int, arguments: dict[str, Any], directory: Path) -> None:
    """Run the ranks of a job until they end by themselves."""
    with running_ranks(script, num_ranks, arguments, directory) as job:
        job.finish()
