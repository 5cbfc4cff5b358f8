"""The command line as users run it: in a process of its own, which must leave no other behind."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

from jobs.processes import inherited, processes_with, wait_until_none

_numbers = itertools.count()


def tdu(*arguments: Any, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a command, with its output as text. Whatever processes it started have ended when this returns."""
    mark = f"TDU_TEST={os.getpid()}-{next(_numbers)}"
    name, _, value = mark.partition("=")
    done = subprocess.run(
        [sys.executable, "-m", "torch_dataloader_utils", *map(str, arguments)],
        env=inherited(**{name: value, "NO_PROXY": "127.0.0.1", "AWS_EC2_METADATA_DISABLED": "true"}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    left = wait_until_none(lambda: processes_with(mark))
    assert not left, f"processes left behind by tdu {arguments}: {left}"
    return done


def fails(*arguments: Any) -> str:
    """Run a command whose input is wrong, and return what it says: at most three lines, and no traceback."""
    done = tdu(*arguments)
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert 1 <= len(done.stderr.splitlines()) <= 3, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr
