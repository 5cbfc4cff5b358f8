"""Start torchrun, watch it, and end it together with all its processes. Only `demo.py` needs this."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """Ask the system for a free port."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def descendants(pid: int) -> list[int]:
    """List a process and all that it started. Signalling one process group is not enough: each rank has its own."""
    children: dict[int, list[int]] = {}
    for entry in (path for path in Path("/proc").iterdir() if path.name.isdigit()):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def shared_memory(pid: int) -> set[Path]:
    """List the named shared memory that a process has open, which stays behind when the process is killed.

    Python's semaphores are named where worker processes are not forked, which is the default from Python 3.14 on.
    """
    try:
        mappings = Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # the process has ended meanwhile
        return set()
    return {Path(path) for path in re.findall(r"(/dev/shm/\S+)$", mappings, re.MULTILINE)}


class Job:
    """A script under torchrun, on loopback, whose output is collected. Use `running`, which always ends it.

    Args:
        script: The script to run.
        arguments: Its command line.
        num_ranks: The number of processes that torchrun starts.
        scratch: Folder for temporary files, since killed processes do not clean up.
    """

    def __init__(self, script: Path, arguments: list[str], num_ranks: int, scratch: Path) -> None:
        self._script = script
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]
        rendezvous = [f"--master-addr={LOOPBACK}", f"--master-port={free_port()}"]
        self._process = subprocess.Popen(
            [sys.executable, *launcher, *rendezvous, str(script), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._output: list[str] = []
        self._reader = threading.Thread(target=self._output.extend, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def is_running(self) -> bool:
        """Return whether torchrun is still running."""
        return self._process.poll() is None

    def kill(self) -> int:
        """Kill torchrun, the ranks and their workers with SIGKILL, and return how many processes these were."""
        if not self.is_running():
            return 0
        doomed = descendants(self._process.pid)
        left_behind = set().union(*map(shared_memory, doomed))
        for pid in doomed:  # torchrun first: it must not see its ranks die
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._wait_for_all_processes()
        for path in left_behind:
            path.unlink(missing_ok=True)
        return len(doomed)

    def finish(self, seconds: float) -> None:
        """Wait until the job ends by itself.

        Raises:
            RuntimeError: It failed, took longer, or left a process behind. The message holds its output.
        """
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{self._script.name} takes too long:\n{self.output()}") from error
        if status != 0:
            raise RuntimeError(f"{self._script.name} failed:\n{self.output()}")
        self._wait_for_all_processes()

    def output(self) -> str:
        """Return what the job has printed so far."""
        return "".join(self._output)

    def _wait_for_all_processes(self) -> None:
        # All its processes write to one pipe, which is at its end when the last of them has ended.
        self._reader.join(20)
        if self._reader.is_alive():
            raise RuntimeError(f"{self._script.name} has ended, but left a process behind")


@contextlib.contextmanager
def running(script: Path, arguments: list[str], num_ranks: int, scratch: Path) -> Iterator[Job]:
    """Start a job, and kill it when the block ends, also by an error."""
    job = Job(script, arguments, num_ranks, scratch)
    try:
        yield job
    finally:
        job.kill()
