"""A session of measuring, and its raw results: one JSON file, replaced after each workload."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.measure.machine import code, machine
from benchmarks.measure.rounds import timestamp
from benchmarks.measure.workloads import Settings, run_workload

__all__ = ["Session", "read"]

Results = dict[str, Any]


class Session:
    """A session of measuring: the machine, the code, and the results of each workload.

    Args:
        kind: The command.
        path: The JSON file.
        settings: How much to measure.
        add: Whether to keep the other workloads of the file that is there.
    """

    def __init__(self, kind: str, path: Path, settings: Settings, *, add: bool = False) -> None:
        self.results: Results = {
            "kind": kind,
            "begun": timestamp(),
            "rounds": settings.rounds,
            "scale": settings.scale,
            "machine": machine(),
            "code": code(sys.executable),
            "workloads": {},
        }
        if add and path.exists():
            self._keep(read(path))
        self._path = path
        self._settings = settings

    def note(self, name: str, value: Any) -> None:
        """Add a fact about the session."""
        self.results[name] = value

    def measure(self, names: Iterable[str], facts: Callable[[], Results] = dict) -> Results:
        """Run workloads and write after each.

        Args:
            names: The workloads.
            facts: Called after each workload; what it returns is added to the workload's facts.
        """
        for name in names:
            began = timestamp()
            found = run_workload(name, self._settings)
            found["facts"] |= facts()
            rounds = found.get("rounds", self._settings.rounds)  # some workloads have a number of their own
            found |= {"begun": began, "code": self.results["code"], "rounds": rounds}
            self.results["workloads"][name] = found
            self._write()
        return self.results

    def _keep(self, before: Results) -> None:
        """Keep an earlier session's workloads, each with the code that was measured."""
        if _same(self.results) != _same(before):
            message = "the results there are of another machine or scale: measure all workloads again, without --add"
            raise ValueError(message)
        origin = {"code": before["code"], "rounds": before["rounds"]}
        self.results["workloads"] = {name: origin | found for name, found in before["workloads"].items()}

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, self._path)  # noqa: PTH105 - replaces in one step


def _same(results: Results) -> Results:
    """Return what has to be the same of two sessions: a machine that starts again has some pages more or less."""
    machine = results["machine"]
    memory = round(machine["memory_bytes"] / (1 << 30))
    return {**machine, "load_before": None, "memory_bytes": memory, "scale": results["scale"]}


def read(path: Path) -> Results:
    """Return the results of a session."""
    results: Results = json.loads(path.read_text(encoding="utf-8"))
    return results
