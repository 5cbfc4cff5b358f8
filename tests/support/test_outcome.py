"""The oracle itself: it sees each row that is lost, repeated or corrupted, and what is left behind."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import threading

import faults.outcome
import pytest
from faults.outcome import Outcome, left_behind, present, recorded, rows_in

WHOLE = [(0, "a"), (1, "b"), (2, "c")]


@pytest.mark.parametrize(
    ("committed", "counts"),
    [
        pytest.param(WHOLE, (0, 0, 0), id="all rows once"),
        pytest.param(WHOLE[::-1], (0, 0, 0), id="another order"),
        pytest.param(WHOLE[:2], (1, 0, 0), id="a row lost"),
        pytest.param([*WHOLE, WHOLE[1]], (0, 1, 0), id="a row repeated"),
        pytest.param([*WHOLE[:2], (2, "d")], (0, 0, 1), id="another value"),
        pytest.param([*WHOLE, (3, "d")], (0, 0, 1), id="a row of no file"),
        pytest.param([WHOLE[0], WHOLE[0], (1, "x")], (1, 1, 1), id="all at once"),
    ],
)
def test_rows_are_counted(committed, counts):
    outcome = Outcome("fault", "case")
    outcome.compare(WHOLE, committed)
    assert (outcome.lost, outcome.repeated, outcome.corrupted) == counts
    assert outcome.is_exact == (counts == (0, 0, 0))


def test_a_row_s_hash_is_that_of_all_its_other_values():
    one, two = rows_in({"row": [4, 5], "text": ["a", "b"], "number": [1.5, 2.5]})
    assert (one[0], two[0]) == (4, 5)
    assert rows_in({"number": [1.5], "text": ["a"], "row": [9]}) == [(9, one[1])]
    assert rows_in({"number": [1.5], "text": ["b"], "row": [4]}) != [one]


@pytest.fixture
def soon(monkeypatch):
    """Do not wait long for what is known to stay."""
    monkeypatch.setattr(faults.outcome, "END_SEC", 0.2)


def test_what_is_left_behind_is_seen(soon):
    before = present()
    assert left_behind(before) == {}
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with tempfile.TemporaryFile():
        assert left_behind(before) == {"processes": 1, "threads": 1, "descriptors": 1}
    stop.set()
    thread.join()
    process.communicate()
    assert left_behind(before) == {}


def test_a_case_is_published_as_a_line(tmp_path):
    path = tmp_path / "folder" / "outcomes.jsonl"
    outcome = Outcome("fault", "case", error="ValueError: made up\nsecond line", seconds=1.25)
    outcome.append_to(path)
    outcome.append_to(path)
    first, second = path.read_text().splitlines()
    assert first == second
    assert Outcome(**json.loads(first)) == outcome
    assert outcome.line() == (
        "fault: case: lost 0, repeated 0, corrupted 0, 1.2 s; ValueError: made up; left behind: nothing"
    )


def test_a_case_that_lost_a_row_fails():
    with pytest.raises(AssertionError, match="lost 1"), recorded("fault", "case") as outcome:
        outcome.compare(WHOLE, WHOLE[:2])


def test_files_of_others_that_come_and_go_are_not_left_behind(soon, monkeypatch):
    numbers = itertools.count()
    monkeypatch.setattr(faults.outcome, "present", lambda: {"processes": {"ours", next(numbers)}})
    assert left_behind({"processes": {"ours"}}) == {}
    assert left_behind({"processes": set()}) == {"processes": 1}
