"""docs/reliability.md says what its raw results say, and nothing else."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from faults.killed import CHANGED, KILLED

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "reliability.json"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def outcome(**changes: object) -> str:
    values = {"fault": "a fault", "case": "a case", "lost": 0, "repeated": 0, "corrupted": 0, "error": None}
    values |= {"seconds": None, "faults": 1, "left": {}, "in_order": None}
    return json.dumps(values | changes)


def test_the_page_is_what_the_results_say():
    written = importlib.import_module("benchmarks.report.reliability").page(json.loads(RESULTS.read_text()))
    assert (ROOT / "docs" / "reliability.md").read_text() == written, "run: python -m benchmarks report"


def test_the_page_finds_its_faults_by_the_names_that_the_tests_record():
    reliability = importlib.import_module("benchmarks.report.reliability")
    assert (reliability.KILLED, reliability.REWRITTEN) == (KILLED, CHANGED)


def test_outcomes_are_added_up_by_fault_and_case_without_the_paths_of_the_machine():
    grouped = importlib.import_module("benchmarks.measure.reliability").grouped
    first, second, other = grouped(
        [
            outcome(lost=1, faults=3, seconds=0.5, left={"processes": 1}, in_order=True),
            outcome(case="another case", error="OSError: /made/up/folder/part.parquet: cut\nwhat to do", seconds=2.0),
            outcome(fault="another fault"),
            outcome(lost=2, repeated=4, seconds=0.25, left={"processes": 2}, in_order=False),
        ]
    )
    assert (first["fault"], first["lost"], first["repeated"], first["corrupted"]) == ("a fault", 3, 4, 0)
    assert (first["outcomes"], first["faults"], first["not_exact"], first["seconds"]) == (2, 4, 2, 0.5)
    assert (first["in_order"], first["in_another_order"], first["left"]) == (1, 1, {"processes": 3})
    assert (second["errors"], second["example"]) == ({"OSError": 1}, "OSError: part.parquet: cut")
    (elsewhere,) = grouped([outcome(error="OSError: file:///made/up/part.parquet and s3://bucket/part.parquet: cut")])
    assert elsewhere["example"] == "OSError: part.parquet and s3://bucket/part.parquet: cut"
    assert (other["fault"], other["errors"], other["example"]) == ("another fault", {}, None)
