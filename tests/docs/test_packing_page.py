"""docs/packing.md says what its raw results say, and its counts are right."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "packing.json"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def counts():
    return importlib.import_module("benchmarks.measure.token_counts")


def rank(*sequences: list[int]):
    return np.array(sequences)


def test_the_page_is_what_the_results_say():
    written = importlib.import_module("benchmarks.report.packing").page(json.loads(RESULTS.read_text()))
    assert (ROOT / "docs" / "packing.md").read_text() == written, "run: python -m benchmarks report"


def test_tokens_are_lost_and_repeated_wherever_they_lie_in_sequences():
    whole = [rank([1, 2, 3], [4, 5, 0])]
    assert counts().changes(whole, whole, 5) == {"lost": 0, "repeated": 0}
    assert counts().changes(whole, [rank([5, 4, 1]), rank([2, 3, 0])], 5) == {"lost": 0, "repeated": 0}
    assert counts().changes(whole, [rank([1, 2, 2]), rank([2, 4, 0])], 5) == {"lost": 2, "repeated": 2}


def test_a_token_that_no_run_delivers_is_left_out_and_not_lost():
    whole = [rank([1, 2, 3])]
    assert counts().left_out(whole, 5) == 2
    assert counts().changes(whole, whole, 5) == {"lost": 0, "repeated": 0}


def test_a_token_that_an_epoch_delivers_twice_is_repeated_from_the_third_time_on():
    whole = [rank([1, 1, 2])]
    assert counts().changes(whole, [rank([1, 1, 2], [1, 0, 0])], 2) == {"lost": 0, "repeated": 1}


def test_sequences_are_compared_at_their_places():
    whole = [rank([1, 2], [3, 4], [5, 6])]
    assert counts().sequences_changed(whole, whole) == 0
    assert counts().sequences_changed(whole, [rank([1, 2], [5, 6])]) == 2
