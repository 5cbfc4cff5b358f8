"""The command line: in processes of its own, which must leave no other behind."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.forked import start
from jobs.processes import processes_of_sessions, wait_until_none

SECRET = "made-up/secret+key/that/must/not/leak"
"""No command may write it: that of the tests' S3 server."""


@dataclass(frozen=True)
class Done:
    """A command that has ended: its exit code, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def value(self) -> Any:
        """What it wrote, as JSON."""
        return json.loads(self.out)


PROGRAM = """
import os, sys
from torch_dataloader_utils.cli.main import main
errors, *arguments = sys.argv[1:]
os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
sys.stdout = open(1, "w", closefd=False)  # which may be a terminal, other than that of the fork server
main(arguments)
"""


class Commands:
    """Runs commands in processes of their own, which are forked from one that has torch loaded.

    Args:
        directory: For what they write to standard output and standard error.
        before: A program that each of these processes runs before the command.
    """

    def __init__(self, directory: Path, before: str = "") -> None:
        self._directory = directory
        (directory / "command.py").write_text(before + PROGRAM, encoding="utf-8")

    def __call__(self, *arguments: Any, **environment: str) -> Done:
        """Run a command. It says at most three lines on standard error, and none is a traceback or a secret."""
        out = self._directory / "stdout"
        out.write_bytes(b"")
        code, err = self.write_to(out, *arguments, **environment)
        done = Done(code, out.read_text(errors="replace"), err)
        lines = done.err.splitlines()
        assert len(lines) <= 3, done
        assert "Traceback" not in done.err, done
        assert all(SECRET not in text for text in (done.out, done.err)), done
        return done

    def write_to(self, out: Path, *arguments: Any, **environment: str) -> tuple[int, str]:
        """Run a command with a file or a terminal as standard output, and return its exit code and standard error."""
        err = self._directory / "stderr"
        words = [str(err), *map(str, arguments)]
        process = start(self._directory / "command.py", *words, output=out, environment=environment)
        process.join(240)
        process.kill()
        process.join()
        left = wait_until_none(lambda: processes_of_sessions({process.pid}))
        assert not left, f"processes left behind by tdu {arguments}: {left}"
        return process.exitcode, err.read_text(errors="replace")

    def fails(self, *arguments: Any, **environment: str) -> str:
        """Run a command that has wrong arguments, or input that cannot be read, and return what it says."""
        done = self(*arguments, **environment)
        assert done.code == 2, done
        assert done.out == "", done
        assert done.err, done
        return done.err
