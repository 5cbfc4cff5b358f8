"""docs/benchmarks.md says of coming back within an epoch what the raw results say, and its counts are right."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "resume.json"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def section(results) -> str:
    return "\n".join(importlib.import_module("benchmarks.report.resuming").section(results))


def loader(seconds: float, **cases: Any):
    """Return the raw results of a loader that needs so long at each point, 1 s of it for imports."""
    point = {"first_batch_s": [seconds, seconds + 5, seconds], "imported_s": [1.0, 6.0, 1.0], "bytes": 1 << 20}
    machine = {"cores": 2, "cpu": "x", "system": "Linux", "python": "3.12"}
    return {
        "begun": "2026-01-01T00:00:00Z",
        "machine": machine,
        "code": {"commit": "c" * 40, "changed": False, "packages": {}},
        "version": "1.0",
        "points": {percent: dict(point) for percent in ("0", "1", "50", "99")},
        "cases": cases or {"error": "no state"},
    }


def test_the_page_is_what_the_results_say():
    written = section(json.loads(RESULTS.read_text()))
    assert written in (ROOT / "docs" / "benchmarks.md").read_text(), "run: python -m benchmarks report"


def test_seconds_are_medians_with_and_without_imports():
    page = section({"ways": {"ours": loader(3.0)}})
    assert "| torch_dataloader_utils | 1.0 | 3.0 | 2.00 | 3.0 | 2.00 | 3.0 | 2.00 | 3.0 | 2.00 |" in page


def test_the_load_of_each_round_is_told():
    ours = loader(3.0)
    ours["points"]["0"]["load"] = [0.5, 2.0]
    ours["points"]["50"]["load"] = [1.0, 1.5, 7.0]
    assert "Load average of the machine in each round: 0.5 to 1.0, 1.5 to 2.0, 7.0 to 7.0." in section(
        {"ways": {"ours": ours}}
    )


def test_a_peer_that_comes_back_faster_is_named():
    page = section({"ways": {"ours": loader(3.0), "ours_shuffled": loader(1.5), "grain": loader(2.5)}})
    assert "At 50 %: Grain, Parquet: from the start 0.50 s sooner, after imports 0.50 s sooner." in page
    page = section({"ways": {"ours": loader(3.0), "grain": loader(3.5)}})
    assert "At 50 %: none." in page


def test_refusals_are_told_with_what_was_said():
    ours = loader(3.0)
    ours["points"]["99"] = {"first_batch_s": [], "imported_s": [], "error": "ValueError: not here"}
    page = section({"ways": {"ours": ours}})
    assert "| refused |  |" in page
    assert "- torch_dataloader_utils, at 99 %: `ValueError: not here`" in page


def test_rows_after_a_kill():
    same = {"error": None, "lost": 1, "repeated": 2, "out_of_order": 3}
    more = {"error": None, "rows": 9, "lost": 4000, "repeated": 5}
    page = section({"ways": {"ours": loader(3.0, error=None, left_out=6, same=same, more=more)}})
    assert "| torch_dataloader_utils | 6 | 1 | 2 | 3 | 4,000 | 5 |" in page


def test_what_is_in_memory_of_files_is_counted_in_pages(tmp_path):
    cache = importlib.import_module("benchmarks.contenders.page_cache")
    (tmp_path / "file").write_bytes(bytes(1_000_000))
    pages = -(-1_000_000 // 4096) * 4096
    assert cache.bytes_in_memory(str(tmp_path)) == pages
    cache.forget(str(tmp_path))
    assert cache.bytes_in_memory(str(tmp_path)) in {0, pages}  # a file system in memory forgets nothing
