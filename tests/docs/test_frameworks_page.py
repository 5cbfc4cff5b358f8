"""docs/frameworks.md says what its raw results say, and nothing else."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "frameworks.json"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def test_the_page_is_what_the_results_say():
    written = importlib.import_module("benchmarks.report.frameworks").page(json.loads(RESULTS.read_text()))
    assert (ROOT / "docs" / "frameworks.md").read_text() == written, "run: python -m benchmarks report"


def test_what_a_resumed_training_lost_repeated_and_moved_is_counted():
    compare = importlib.import_module("benchmarks.measure.frameworks").compare
    whole = [[(0, 0), (0, 1), (0, 2), (0, 3)], [(0, 5), (0, 6), (0, 6)]]
    same = {"lost": 0, "repeated": 0, "out_of_order": 0, "left_out": 2, "extra": 1}
    assert compare(whole, whole, rows=7, epochs=1) == {**same, "left_out": 1}
    trained = [[(0, 0), (0, 1), (0, 3), (0, 2)], [(0, 6), (0, 6), (0, 6), (0, 4)]]
    found = compare(whole, trained, rows=8, epochs=1)
    assert found == {"lost": 1, "repeated": 2, "out_of_order": 4, "left_out": 2, "extra": 1}
