"""A session of benchmarks that adds to an earlier one keeps its workloads only if the machine is the same."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def session_after(path, **changes: Any):
    """Return a session that adds to a file whose machine differs from this one in what is given."""
    sessions = importlib.import_module("benchmarks.measure.session")
    settings = importlib.import_module("benchmarks.measure.workloads").Settings(3, 1.0)
    before = sessions.Session("peers", path, settings).results
    before["machine"] |= changes
    before["workloads"] = {"wide": {"code": before["code"], "rounds": 1}}
    path.write_text(json.dumps(before))
    return sessions.Session("peers", path, settings, add=True)


def test_a_machine_that_started_again_is_the_same(tmp_path):
    machine = importlib.import_module("benchmarks.measure.machine").machine()
    memory = round(machine["memory_bytes"] / (1 << 30)) << 30
    added = session_after(tmp_path / "peers.json", memory_bytes=memory, load_before=9.0)
    assert added.results["workloads"]["wide"]["rounds"] == 1


@pytest.mark.parametrize("changes", [{"cores": 1000}, {"memory_bytes": 1 << 20}], ids=["cores", "memory"])
def test_another_machine_is_refused(tmp_path, changes):
    with pytest.raises(ValueError, match="of another machine"):
        session_after(tmp_path / "peers.json", **changes)
