"""Run the processes of a job, wait until they have ended or one has failed, and end what is left."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.contenders.frameworks.job import Job
from benchmarks.paths import ROOT

__all__ = ["JobError", "Server", "end", "free_port", "message_of", "run_job"]

DEADLINE_S = 600
LEAVE_S = 30
PACKAGE = "benchmarks.contenders.frameworks"
ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?([\w.]*(?<!ChildFailed)(?:Error|Exception)\b.*)")
"""A line that names an error. torchrun's own, after that of a rank, says nothing."""


class JobError(Exception):
    """A job ended with an error, which is the message."""


class Process(Protocol):
    """A process of a job."""

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs."""

    def end(self) -> None:
        """End it and the processes that it has started."""


class Server:
    """A process that has imported a framework, from which those of its jobs are forked. It starts when it is needed.

    Args:
        python: The interpreter.
        module: The framework.
    """

    def __init__(self, python: str, module: str) -> None:
        self.python = python
        self._command = [python, "-m", f"{PACKAGE}.server", module]
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any]) -> Any:
        """Return the answer to a request."""
        if self._process is None:
            environment = {**os.environ, **_environment()}
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(self._command, env=environment, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End it, by the end of its input."""
        if self._process is not None:
            self._process.communicate()


def run_job(server: Server, job: Job, processes: int, *, dies: bool = False, restarts: int | None = None) -> None:
    """Run a job until it ends, and end all of its processes once one has failed.

    Args:
        server: What its processes are forked from.
        job: The job.
        processes: Number of its processes.
        dies: Whether it is to fail.
        restarts: How often torchrun starts its processes again; None to start them without torchrun.

    Raises:
        JobError: If it fails, or does not although it is to fail.
    """
    with contextlib.ExitStack() as stack:
        started = []
        for process, log in _start(server, job, processes, restarts):
            stack.callback(process.end)
            started.append((process, log))
        failed = _failed(started)
    if dies and failed is None:
        raise JobError("no process was killed")
    if failed is not None and not dies:
        message = message_of(failed.read_text(encoding="utf-8", errors="replace"))
        raise JobError(message.replace(f"{job.directory}/", ""))


def message_of(output: str) -> str:
    """Return the error of a process from its output: the last line that names one, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [found[1] for line in lines if (found := ERROR.match(line))]
    return (errors or lines or ["it did not end, and said nothing"])[-1]


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its workers."""
    _kill_group(process.pid)
    process.wait()


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


class _Forked:
    """A process of a job, forked by a server."""

    def __init__(self, server: Server, request: dict[str, Any]) -> None:
        self._server = server
        self._pid: int = server.ask(request)
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            self._status = self._server.ask({"poll": self._pid})
        return self._status

    def end(self) -> None:
        _kill_group(self._pid)
        while self.poll() is None:
            time.sleep(0.01)


class _Torchrun:
    """torchrun, which ends its processes if it is asked to end. They are in groups of their own."""

    def __init__(self, command: list[str], log: Path) -> None:
        with log.open("w", encoding="utf-8") as output:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **_environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stdout=output,
                stderr=output,
                cwd=log.parent,
                process_group=0,
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        if self.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_S)
        end(self._process)


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def _start(server: Server, job: Job, processes: int, restarts: int | None) -> Iterator[tuple[Process, Path]]:
    """Start the processes of a job, or torchrun; yield each, with the file of its output."""
    described = dataclasses.asdict(job)
    if restarts is not None:
        log = Path(job.directory, "log-torchrun.txt")
        torchrun = [server.python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        own = [f"--max-restarts={restarts}", "-m", f"{PACKAGE}.job", json.dumps(described)]
        yield _Torchrun([*torchrun, *own], log), log
        return
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in range(processes):
        log = Path(job.directory, f"log-{rank}.txt")
        environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
        yield _Forked(server, {"job": described, "environment": environment, "log": str(log)}), log


def _failed(started: Sequence[tuple[Process, Path]]) -> Path | None:
    """Wait until all processes have ended or one has failed; return the output of that one, or of one that hangs."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        statuses = [process.poll() for process, _ in started]
        for status, (_, log) in zip(statuses, started, strict=True):
            if status:
                return log
        if None not in statuses:
            return None
        time.sleep(0.02)
    return started[0][1]


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
