"""Run scripts in processes that are forked from one that has torch loaded, as programs of their own."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from jobs.processes import inherited, mark_semaphores

PRELOADED = (
    "torch.distributed.checkpoint",
    "torch._dynamo",  # imported by the first step of an optimizer
    "torch_dataloader_utils.distributed",
    "torch_dataloader_utils.distributed.audit",
    "torch_dataloader_utils.distributed.store",
    "torch_dataloader_utils.dataset.mixed",  # the package imports what it exports when it is asked for
    "torch_dataloader_utils.dataset.structured",
    "torch_dataloader_utils.cli.main",
    "torch_dataloader_utils.cli.checkpoint_dataset",
    "torch_dataloader_utils.cli.commands.diff",
    "torch_dataloader_utils.cli.commands.plan",
    "torch_dataloader_utils.cli.commands.rows",
    "torch_dataloader_utils.cli.commands.step",
    "torch_dataloader_utils.cli.commands.verify",
    "pyarrow.parquet",
    "s3fs",
    "jobs.forked",  # each process that it forks begins with this module, which needs pytest
    "support",  # as do most modules of tests, which are imported for the functions in them that workers call
)

ONE_ALLOCATOR = {"ARROW_DEFAULT_MEMORY_POOL": "mimalloc"}
"""The environment of a job in which Arrow's default allocator holds, and counts, all that is decoded."""


def preload_in_fork_server(*modules: str) -> None:
    """Let processes that multiprocessing's fork server forks find slow imports done: those of all tests, and others.

    A server that runs without them is ended. Nothing that it forked may run.
    """
    server: Any = forkserver._forkserver
    server._stop()
    multiprocessing.set_forkserver_preload(["jobs.uncollected", *PRELOADED, *modules, "jobs.frozen"])


def start(script: Path, *arguments: str, output: Path, environment: dict[str, str]) -> ForkServerProcess:
    """Start a script. It finds in its environment what the fork server did, which is not what tests patch.

    Args:
        script: Its path.
        *arguments: Its arguments.
        output: The file that gets all it prints.
        environment: What is added to the environment.
    """
    given = {
        "argv": [str(script), *arguments],
        "output": output,
        "environment": environment,
        "directory": Path.cwd(),
        "tests": os.getpid(),
        "start_method": multiprocessing.get_start_method(),
    }
    process = multiprocessing.get_context("forkserver").Process(target=_be, kwargs=given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", inherited()["PYTHONPATH"])  # the server begins now, if it has not, and imports
        process.start()
    return process


def run_forked(program: str, directory: Path, *arguments: str, seconds: float = 240) -> str:
    """Run a program until it ends, and return all that it printed.

    Args:
        program: Its source.
        directory: Where the source and the output are kept.
        *arguments: Its arguments.
        seconds: After this time it is ended.
    """
    script, output = directory / "program.py", directory / "output.txt"
    script.write_text(program, encoding="utf-8")
    process = start(script, *arguments, output=output, environment={})
    process.join(seconds)
    process.kill()
    process.join()
    printed = output.read_text(encoding="utf-8", errors="replace")
    assert process.exitcode == 0, f"status {process.exitcode}:\n{printed}"
    return printed


def _be(
    *,
    argv: Sequence[str],
    output: Path,
    environment: dict[str, str],
    directory: Path,
    tests: int,
    start_method: str,
) -> None:
    """Be the script's process, in a session of its own: with all that it starts, it can be found by that."""
    import torch  # noqa: PLC0415 - the fork server has it, and the process that deals tests out does not need it

    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY)  # a terminal is not to be its own
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(directory)
    os.environ.update(environment)
    tempfile.tempdir = None  # asked for again, in the new environment
    mark_semaphores(tests)
    multiprocessing.set_start_method(start_method, force=True)  # its workers are not the fork server's business
    torch.set_num_threads(1)
    sys.argv = list(argv)
    runpy.run_path(argv[0], run_name="__main__")
