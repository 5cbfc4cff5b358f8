"""docs/benchmarks.md says of scale what the raw results say, and its exponents are right."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "scale.json"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def report():
    return importlib.import_module("benchmarks.report.scale")


def point(files: int, ranks: int, seconds: float):
    """Return raw results of described row groups, of which each stage took so long."""
    names = ("plan", "plan_even", "own_share", "state", "load_elastically")
    stages = {name: {"seconds": seconds, "bytes": (1 << 20) * seconds} for name in names}
    return {"files": files, "ranks": ranks, "stages": stages, "states_bytes": 2048}


MACHINE = {"cores": 2, "cpu": "x", "python": "3.12"}
CODE = {"commit": "c" * 40, "changed": False}


def test_the_page_is_what_the_results_say():
    written = "\n".join(report().section(json.loads(RESULTS.read_text())))
    assert written.strip() in (ROOT / "docs" / "benchmarks.md").read_text(), "run: python -m benchmarks report"


def test_what_grows_with_the_square_of_the_size_shows_it():
    assert report().exponents([10, 100, 1000], [1.0, 10.0, 1000.0]) == pytest.approx([1.0, 2.0])


def test_each_curve_names_its_sizes_and_ends_with_the_exponent_of_the_last_step():
    curves = {
        "row_groups": [point(1000, 64, 1.0), point(10_000, 64, 10.0)],
        "ranks": [point(9, 16, 1.0), point(9, 64, 2.0)],
    }
    page = "\n".join(report().section({"curves": curves, "machine": MACHINE, "code": CODE}))
    assert "| row groups | 10,000 | 100,000 | exponent |" in page
    assert "| plan an epoch, s | 1 | 10.0 | 1.00 |" in page
    assert "| memory, MiB | 1 | 10 | 1.00 |" in page
    assert "| ranks | 16 | 64 | exponent |" in page
    assert "| plan an epoch, s | 1 | 2 | 0.50 |" in page
