"""Run a script as the ranks of a job, forked from a process that has torch loaded: a torchrun that starts at once."""

from __future__ import annotations

import json
import tempfile
import uuid
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from jobs.forked import start
from torch.distributed import TCPStore

JOBS = Path(__file__).parent
MINUTES = 5


def run_ranks(script: str, num_ranks: int, arguments: dict[str, Any], directory: Path) -> None:
    """Run a script in several ranks until they end, and fail if one of them does.

    Args:
        script: Name of the script beside this file.
        num_ranks: Number of processes.
        arguments: What the script gets, as JSON.
        directory: Where its output is kept.
    """
    # As torchrun does it: whoever starts the ranks has the store, on a port that the system chose.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    output = directory / f"output-{uuid.uuid4().hex}.txt"
    # A short path: sockets through which workers send shared memory lie in it, and their names are limited.
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        environment = {
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TMPDIR": scratch,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(num_ranks),
        }
        ranks: list[ForkServerProcess] = []
        try:
            for rank in range(num_ranks):
                own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(start(JOBS / script, json.dumps(arguments), output=output, environment=own))
            failed = wait_for(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.join()
    assert not failed, f"{failed}:\n{output.read_text(errors='replace')}"


def wait_for(ranks: list[ForkServerProcess]) -> str | None:
    """Wait until all ranks end, or one fails, and return what is wrong, if anything."""
    running: dict[Any, ForkServerProcess] = {rank.sentinel: rank for rank in ranks}
    while running:
        ended = connection.wait(list(running), MINUTES * 60)
        if not ended:
            return f"the ranks took more than {MINUTES} minutes"
        for sentinel in ended:
            rank = running.pop(sentinel)
            rank.join()
            if rank.exitcode != 0:
                return f"rank {ranks.index(rank)} ended with status {rank.exitcode}"
    return None
