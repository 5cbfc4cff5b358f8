"""The raw results: one JSON file a session, written anew after each workload."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.machine import code, machine
from benchmarks.measure import timestamp
from benchmarks.workloads import Settings, run_workload

__all__ = ["Session", "read"]

Results = dict[str, Any]


class Session:
    """One session of measuring: what it was taken on, and what each workload gave.

    Args:
        kind: The command.
        path: Where the JSON goes.
        settings: How much to measure.
    """

    def __init__(self, kind: str, path: Path, settings: Settings) -> None:
        self.results: Results = {
            "kind": kind,
            "begun": timestamp(),
            "rounds": settings.rounds,
            "scale": settings.scale,
            "machine": machine(),
            "code": code(sys.executable),
            "workloads": {},
        }
        self._path = path
        self._settings = settings

    def note(self, name: str, value: Any) -> None:
        """Add a fact of the session."""
        self.results[name] = value

    def measure(self, names: Iterable[str], facts: Callable[[], Results] = dict) -> Results:
        """Run workloads and write after each.

        Args:
            names: The workloads.
            facts: Called after each; what it returns joins the workload's facts.
        """
        for name in names:
            began = timestamp()
            found = run_workload(name, self._settings)
            found["facts"] |= facts()
            self.results["workloads"][name] = found | {"begun": began}
            self._write()
        return self.results

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, self._path)  # noqa: PTH105 - replaces in one step


def read(path: Path) -> Results:
    """Return the results of a session."""
    results: Results = json.loads(path.read_text(encoding="utf-8"))
    return results
