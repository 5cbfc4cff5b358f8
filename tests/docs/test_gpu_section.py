"""docs/benchmarks.md says of a GPU what the raw results say, and its figures are right."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def section(results) -> str:
    return "\n".join(importlib.import_module("benchmarks.report.gpu").section(results))


def way(*seconds: float) -> dict[str, Any]:
    """Return the raw results of a way with epochs of as many rows as 10 batches that took so long."""
    rows = 10 * importlib.import_module("benchmarks.measure.gpu").WORKLOADS["numbers"].batch_size
    epochs = [{"seconds": each, "processor_s": each / 2, "rows": rows} for each in seconds]
    return {"rounds": [{"epochs": epochs, "device": "a GPU"}]}


def test_the_page_is_what_the_results_say():
    written = section(json.loads(RESULTS.read_text()))
    assert written.strip() in (ROOT / "docs" / "benchmarks.md").read_text(), "run: python -m benchmarks report"


def test_steps_are_compared_with_the_step_alone():
    workload: dict[str, Any] = {
        "begun": "2026-01-01T00:00:00Z",
        "machine": {"cores": 2, "cpu": "x", "python": "3.12"},
        "code": {"commit": "c" * 40, "changed": False, "packages": {"torch": "2"}},
        "data": {"rows": 1000, "file_bytes": 5 << 20, "note": "rows"},
        "ways": {
            "alone": way(0.02, 0.01, 0.03),
            "2_pinned": way(0.03, 0.05, 0.04),
            "8_pinned": {"rounds": [], "error": "no result within 60 s, killed"},
            "0_pinned": {"rounds": []},
        },
    }
    page = section({"workloads": {"numbers": workload}})
    assert "| the step alone | 3 | 2.00 [1.00, 3.00] | 1.00 | 1.00 |" in page
    assert "| 2 workers, pinned | 3 | 4.00 [3.00, 5.00] | 2.00 | 2.00 |" in page
    assert "- 8 workers, pinned: `no result within 60 s, killed`" in page
    assert "in process" not in page
    workload["ways"]["alone"] = {"rounds": [], "error": "killed"}
    assert "| 2 workers, pinned | 3 | 4.00 [3.00, 5.00] |  | 2.00 |" in section({"workloads": {"numbers": workload}})
