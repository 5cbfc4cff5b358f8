"""Start torchrun for a test, and end it so that no process of it is left, however the test ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jobs.processes import inherited, processes_with, wait_until_none

JOBS = Path(__file__).parent


class Job:
    """A script under torchrun, on loopback. Use `running`, which always ends it.

    Every process of the job carries a mark in its environment: that is how those are found whose parent was killed.

    Args:
        script: Name of the script beside this file.
        num_ranks: Number of processes that torchrun starts.
        arguments: What the script gets, as JSON.
        directory: Where its output is kept.
        entry: What the command begins with, to run on another host.
        nodes: torchrun's arguments about hosts.
        port: Where the first host listens; None where there is no other host, and torchrun chooses one.
        interface: The network interface that ranks use.
    """

    def __init__(
        self,
        script: str,
        num_ranks: int,
        arguments: dict[str, Any],
        directory: Path,
        *,
        entry: Sequence[str] = (),
        nodes: Sequence[str] = ("--standalone",),
        port: int | None = None,
        interface: str = "lo",
    ) -> None:
        mark = uuid.uuid4().hex
        self._script = script.encode()
        self.mark = f"TEST_JOB={mark}"
        self._output = directory / f"output-{mark}.txt"
        # A short path: sockets through which workers send shared memory lie in it, and their names are limited.
        self._scratch = tempfile.mkdtemp(prefix="job-")
        command = [*entry, sys.executable, str(JOBS / "launch.py"), str(os.getpid()), f"--nproc-per-node={num_ranks}"]
        command += [*nodes, *([f"--master-port={port}"] if port else []), str(JOBS / script)]
        quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface, "TMPDIR": self._scratch}
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, json.dumps(arguments)],
                env=inherited(**quiet, TEST_JOB=mark),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        """Whether torchrun is still there."""
        return self._process.poll() is None

    def main_processes(self) -> list[int]:
        """Return the ids of torchrun and of all living ranks."""
        return [self._process.pid, *self.ranks()]

    def ranks(self) -> list[int]:
        """Return the ids of all living ranks. Their workers, forked from them, have their command line, too."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                process = Path(f"/proc/{pid}")
                is_worker = (process / "comm").read_text().startswith("pt_data_worker")
                if self._script in (process / "cmdline").read_bytes() and not is_worker and pid != self._process.pid:
                    found.append(pid)
        return found

    def processes(self) -> list[int]:
        """Return the ids of all its living processes."""
        return processes_with(self.mark)

    def output(self) -> str:
        """Return what it has printed so far."""
        return self._output.read_text(errors="replace")

    def wait(self, seconds: float) -> int:
        """Wait until torchrun ends by itself, and return its exit status; fail if that takes too long."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"the job took more than {seconds} seconds:\n{self.output()}") from None

    def finish(self, seconds: float = 240) -> None:
        """Wait until it ends by itself, without an error and without leaving a process behind."""
        status = self.wait(seconds)
        assert status == 0, f"the job ended with status {status}:\n{self.output()}"
        assert not wait_until_none(self.processes), f"the job left processes behind:\n{self.output()}"

    def end(self) -> None:
        """Kill whatever of it is alive."""
        while doomed := self.processes():
            for pid in doomed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)


@contextlib.contextmanager
def running(script: str, num_ranks: int, arguments: dict[str, Any], directory: Path, **elsewhere: Any) -> Iterator[Job]:
    """Start a job, and end it when the block is left, however that comes about."""
    job = Job(script, num_ranks, arguments, directory, **elsewhere)
    try:
        yield job
    finally:
        job.end()


def run_torchrun(script: str, num_ranks: int, arguments: dict[str, Any], directory: Path) -> None:
    """Run a job until it ends by itself."""
    with running(script, num_ranks, arguments, directory) as job:
        job.finish()
