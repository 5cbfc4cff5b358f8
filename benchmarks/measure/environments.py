"""Virtual environments, each made from pinned requirements, so that no loader decides another's versions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paths import ENVS

__all__ = ["Environment", "packages_of"]

INSTALL_S = 1_200
LIST = "import importlib.metadata as m, json; print(json.dumps({d.name.lower(): d.version for d in m.distributions()}))"


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment.

    Attributes:
        requirements: The file of its pinned requirements, by whose name it is called.
    """

    requirements: Path

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self._directory / "bin" / "python")

    @property
    def is_ready(self) -> bool:
        """Whether it is complete, and made from the requirements as they are now."""
        return self._stamp.exists() and self._stamp.read_text(encoding="utf-8") == self._wanted()

    def prepare(self, tell: Callable[[str], None] = print) -> None:
        """Make it, unless it is ready.

        torch is installed first, by its pinned version: no requirement of a loader can then bring another build of it.

        Raises:
            RuntimeError: If a package cannot be installed; the message has pip's reason.
        """
        if self.is_ready:
            return
        tell(f"  making the environment of {self.requirements.stem}")
        pinned = [line for line in self._wanted().splitlines() if line.startswith("torch==")]
        _call([sys.executable, "-m", "venv", "--clear", str(self._directory)])
        pip = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if pinned:
            _call([*pip, *pinned])
        _call([*pip, "--requirement", str(self.requirements)])
        self._stamp.write_text(self._wanted(), encoding="utf-8")

    @property
    def _directory(self) -> Path:
        return ENVS / self.requirements.stem

    @property
    def _stamp(self) -> Path:
        return self._directory / "installed.txt"

    def _wanted(self) -> str:
        return self.requirements.read_text(encoding="utf-8")


def packages_of(python: str) -> dict[str, str]:
    """Return the packages that an interpreter's environment has, with their versions."""
    found = subprocess.run([python, "-c", LIST], capture_output=True, text=True, check=True, timeout=60)
    packages: dict[str, str] = json.loads(found.stdout)
    return dict(sorted(packages.items()))


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_S)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = " ".join(errors[-2:]) or done.stderr[-300:]
        raise RuntimeError("cannot be installed here: " + re.sub(r"\w+://\S+", "(address)", reason))
