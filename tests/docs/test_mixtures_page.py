"""docs/mixtures.md says what its raw results say, and its counts are right."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "mixtures.json"
WEB, CODE = 0, 1


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def measure():
    return importlib.import_module("benchmarks.measure.delivered")


def rank(*steps: list[tuple[int, int]]):
    """Return what a rank delivered: for each step (source, row) pairs."""
    return np.array([(step, *row) for step, rows in enumerate(steps, 1) for row in rows])


def test_the_page_is_what_the_results_say():
    written = importlib.import_module("benchmarks.report.mixtures").page(json.loads(RESULTS.read_text()))
    assert (ROOT / "docs" / "mixtures.md").read_text() == written, "run: python -m benchmarks report"


def test_the_largest_deviation_from_the_shares_is_found_after_a_batch():
    first = rank([(WEB, 0), (WEB, 1)], [(WEB, 2), (CODE, 0)], [(CODE, 1), (CODE, 2)])
    second = rank([(CODE, 3), (CODE, 4)], [(CODE, 5), (WEB, 3)])
    assert measure().deviation([first, second], (0.5, 0.5)) == {"rank": 1.0, "all": 0.0}
    assert measure().deviation([first], (0.5, 0.5)) == {"rank": 1.0, "all": 1.0}


def test_a_resumed_run_is_compared_with_the_uninterrupted_one_by_source():
    whole = [rank([(WEB, 0), (WEB, 1), (CODE, 0)], [(WEB, 2), (CODE, 1)])]
    assert measure().compare(whole, whole) == [{"lost": 0, "repeated": 0, "out_of_order": 0}] * 2
    resumed = [rank([(WEB, 0), (WEB, 2), (CODE, 0)], [(WEB, 2), (CODE, 1)])]
    web, code = measure().compare(whole, resumed)
    assert web == {"lost": 1, "repeated": 1, "out_of_order": 2}
    assert code == {"lost": 0, "repeated": 0, "out_of_order": 0}


@pytest.mark.parametrize(
    ("ends", "web", "code"),
    [
        ("all", {"rows": 3, "lost": 1, "repeated": 0}, {"rows": 3, "lost": 0, "repeated": 1}),
        ("first", {"rows": 3, "lost": 0, "repeated": 0}, {"rows": 3, "lost": 0, "repeated": 1}),
        ("cycles", {"rows": 3, "lost": 0, "repeated": 0}, {"rows": 3, "lost": 0, "repeated": 0}),
    ],
)
def test_rows_are_lost_and_repeated_by_what_ends_an_epoch(ends, web, code):
    whole = [rank([(WEB, 0), (WEB, 1), (WEB, 2), (WEB, 3), (CODE, 0), (CODE, 1)])]
    delivered = [rank([(WEB, 0), (WEB, 1), (WEB, 2), (CODE, 0), (CODE, 1), (CODE, 1)])]
    assert measure().passes(whole, delivered, (4, 2), ends) == [web, code]


def test_with_the_same_weights_all_sources_come_to_their_end():
    whole = [rank([(WEB, 0), (WEB, 1), (WEB, 2), (CODE, 0)])]
    delivered = [rank([(WEB, 0), (CODE, 0)])]
    web, code = measure().passes(whole, delivered, (4, 1), "first", same_weights=True)
    assert web == {"rows": 1, "lost": 2, "repeated": 0}
    assert code == {"rows": 1, "lost": 0, "repeated": 0}


def test_with_the_same_weights_no_source_begins_again():
    whole = [rank([(WEB, 0), (WEB, 1), (CODE, 0)])]
    delivered = [rank([(WEB, 0), (WEB, 1), (WEB, 0), (CODE, 0)])]
    web, _ = measure().passes(whole, delivered, (2, 1), "cycles", same_weights=True)
    assert web == {"rows": 3, "lost": 0, "repeated": 1}
    web, _ = measure().passes(whole, delivered, (2, 1), "cycles")
    assert web == {"rows": 3, "lost": 0, "repeated": 0}


def test_a_row_that_never_came_in_a_pass_that_is_over_is_lost():
    whole = [rank([(WEB, 0), (WEB, 1), (CODE, 0)])]
    delivered = [rank([(WEB, 0), (WEB, 0), (WEB, 0), (CODE, 0)])]
    web, code = measure().passes(whole, delivered, (2, 1), "cycles")
    assert web == {"rows": 3, "lost": 1, "repeated": 1}
    assert code == {"rows": 1, "lost": 0, "repeated": 0}


def test_what_an_uninterrupted_epoch_leaves_out_and_the_share_of_its_first_steps():
    whole = [rank([(WEB, 0), (CODE, 0)], [(WEB, 2), (WEB, 3)]), rank([(WEB, 1), (CODE, 1)])]
    found = measure().uninterrupted(whole, (0.5, 0.5), (5, 2))
    assert found == {"deviation": {"rank": 1.0, "all": 0.0}, "rows": [4, 2], "left_out": [1, 0]}
    assert measure().share(whole, 1) == 0.5
    assert measure().share(whole, 2) == 0.6667
