"""The raw results: one JSON file a session, written anew after each workload."""

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
    """One session of measuring: what it was taken on, and what each workload gave.

    Args:
        kind: The command.
        path: Where the JSON goes.
        settings: How much to measure.
        add: Whether to keep the workloads of an earlier session that are not measured anew.
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
            found |= {"begun": began, "code": self.results["code"], "rounds": self._settings.rounds}
            self.results["workloads"][name] = found
            self._write()
        return self.results

    def _keep(self, before: Results) -> None:
        """Keep an earlier session's workloads, each with what it was measured on."""
        here, there = ({**one["machine"], "load_before": None, "scale": one["scale"]} for one in (self.results, before))
        if here != there:
            message = "results of another machine, or of another scale, are not added to: measure all anew"
            raise ValueError(message)
        said = {"code": before["code"], "rounds": before["rounds"]}
        self.results["workloads"] = {name: said | found for name, found in before["workloads"].items()}

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, self._path)  # noqa: PTH105 - replaces in one step


def read(path: Path) -> Results:
    """Return the results of a session."""
    results: Results = json.loads(path.read_text(encoding="utf-8"))
    return results
