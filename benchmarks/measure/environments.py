"""Virtual environments: one for each peer, from its pinned requirements, so that none decides another's versions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.paths import ENVS, HERE

__all__ = ["exists", "packages_of", "prepare", "python_of"]

REQUIREMENTS = HERE / "peers"
INSTALL_S = 1_200
LIST = "import importlib.metadata as m, json; print(json.dumps({d.name.lower(): d.version for d in m.distributions()}))"


def python_of(name: str) -> str:
    """Return the interpreter of an environment."""
    return str(ENVS / name / "bin" / "python")


def exists(name: str) -> bool:
    """Whether an environment is there, complete, and made from the requirements as they are now."""
    stamp = _stamp(name)
    return stamp.exists() and stamp.read_text(encoding="utf-8") == _requirements(name).read_text(encoding="utf-8")


def prepare(name: str, tell: Callable[[str], None] = print) -> None:
    """Make an environment unless it is there.

    torch comes first, by its pinned version: no peer's own wish can then bring another build of it.

    Raises:
        RuntimeError: If a package cannot be had here; it says why.
    """
    if exists(name):
        return
    tell(f"  making the environment of {name}")
    requirements = _requirements(name)
    pinned = [line for line in requirements.read_text(encoding="utf-8").splitlines() if line.startswith("torch==")]
    _call([sys.executable, "-m", "venv", "--clear", str(ENVS / name)])
    pip = [python_of(name), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if pinned:
        _call([*pip, *pinned])
    _call([*pip, "--requirement", str(requirements)])
    _stamp(name).write_text(requirements.read_text(encoding="utf-8"), encoding="utf-8")


def packages_of(python: str) -> dict[str, str]:
    """Return what an interpreter's environment has installed."""
    found = subprocess.run([python, "-c", LIST], capture_output=True, text=True, check=True, timeout=60)
    packages: dict[str, str] = json.loads(found.stdout)
    return dict(sorted(packages.items()))


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_S)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        said = " ".join(errors[-2:]) or done.stderr[-300:]
        raise RuntimeError("cannot be installed here: " + re.sub(r"\w+://\S+", "(address)", said))


def _requirements(name: str) -> Path:
    return REQUIREMENTS / f"{name}.txt"


def _stamp(name: str) -> Path:
    return ENVS / name / "installed.txt"
