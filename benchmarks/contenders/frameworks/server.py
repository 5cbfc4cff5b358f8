"""A process that has imported what jobs need, and forks their processes: to import it takes longer than to train.

Run as ``python -m benchmarks.contenders.frameworks.server MODULE``. It reads requests, one JSON object a line, and
answers each with a line: ``{"job": …, "environment": …, "log": …}`` with the id of the new process, ``{"poll": ID}``
with its exit status, or null while it runs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any

from benchmarks.contenders.frameworks.job import Job, run

MORE = ("benchmarks.contenders.frameworks.stateful", "torch.distributed.checkpoint")


def main() -> None:
    """Serve until the input ends."""
    for module in (f"benchmarks.contenders.frameworks.{sys.argv[1]}", *MORE):
        importlib.import_module(module)
    running: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            answer = _poll(request["poll"])
            if answer is not None:
                running.remove(request["poll"])
        else:
            answer = _fork(request)
            running.add(answer)
        print(json.dumps(answer), flush=True)
    for process in running:  # whoever asked is gone
        os.killpg(process, signal.SIGKILL)


def _poll(process: int) -> int | None:
    found, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _fork(request: dict[str, Any]) -> int:
    process = os.fork()
    if process == 0:
        status = 1
        try:
            _become(request)
            run(Job(**request["job"]))
            status = 0
        except BaseException:  # noqa: BLE001 - the process ends with it
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)
    os.setpgid(process, process)
    return process


def _become(request: dict[str, Any]) -> None:
    """Make this process a rank: a group, an environment and an output of its own."""
    os.setpgid(0, 0)
    os.environ.update(request["environment"])
    os.chdir(request["job"]["directory"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, file in ((0, null), (1, log), (2, log)):
        os.dup2(file, number)


if __name__ == "__main__":
    main()
