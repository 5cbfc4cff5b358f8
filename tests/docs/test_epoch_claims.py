"""What is promised of many epochs is judged by all runs, and a run that failed is a promise that is not kept."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
WAYS = ("in process", "2 persistent workers", "2 new workers each epoch")
EPOCHS = 20


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def run(rise: float, files: int = 0) -> dict[str, Any]:
    """Return a run whose memory rises by so many percent of its mean an epoch, and that has more files at its end."""
    middle = (5 + EPOCHS - 1) / 2  # of the settled epochs
    return {
        "pss_by_epoch": [100 + rise * (epoch - middle) for epoch in range(EPOCHS)],
        "files_by_epoch": [*[6] * (EPOCHS - 1), 6 + files],
        "threads_by_epoch": [2] * EPOCHS,
        "gap_s": 0.01,
        "greatest_gap_s": 0.02,
    }


def judged(runs: list[dict[str, Any]], error: str | None = None) -> dict[str, Any]:
    """Return the verdicts on 20 epochs, by the claims' names."""
    claims = importlib.import_module("benchmarks.report.claims")
    workload = {"contenders": {way: {"runs": runs, "error": error} for way in WAYS}, "facts": {}}
    verdicts = claims.judge({"workloads": {"epochs": workload}})
    return {verdict.claim.name: verdict for verdict in verdicts if verdict.claim.workload == "epochs"}


@pytest.mark.parametrize(("rises", "passed"), [([0.3, -0.3, 0.1], True), ([0.0, 0.0, 0.3], False)])
def test_the_slope_is_the_mean_of_all_runs(rises, passed):
    verdict = judged([run(rise) for rise in rises])["20 epochs, in process: memory's slope"]
    assert verdict.value == pytest.approx(sum(rises) / len(rises))
    assert verdict.passed is passed


def test_counts_are_those_of_the_run_that_grew_most():
    verdicts = judged([run(0), run(0, files=2), run(0)])
    assert (
        verdicts["20 epochs, in process: open files more"].value,
        verdicts["20 epochs, in process: threads more"].value,
    ) == (2, 0)


@pytest.mark.parametrize("runs", [0, 2])
def test_a_failed_run_is_a_promise_that_is_not_kept(runs):
    verdicts = judged([run(0)] * runs, "Traceback | RuntimeError: made up")
    assert {(verdict.passed, verdict.why) for verdict in verdicts.values()} == {(False, "RuntimeError: made up")}
