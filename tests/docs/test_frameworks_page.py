"""docs/frameworks.md says what its raw results say, and nothing else."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "frameworks.json"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def counts() -> ModuleType:
    return importlib.import_module("benchmarks.measure.framework_counts")


def rank(epoch: int, *rows: int) -> np.ndarray[Any, Any]:
    """Return what a rank trained in an epoch."""
    return np.array([(epoch, row) for row in rows], dtype=np.int64).reshape(-1, 2)


def test_the_page_is_what_the_results_say():
    written = importlib.import_module("benchmarks.report.frameworks").page(json.loads(RESULTS.read_text()))
    assert (ROOT / "docs" / "frameworks.md").read_text() == written, "run: python -m benchmarks report"


def test_what_a_resumed_training_lost_repeated_and_moved_is_counted(counts):
    whole = [rank(0, 0, 1, 2, 3), rank(0, 5, 6, 6)]
    same = {"lost": 0, "repeated": 0, "out_of_order": 0, "left_out": 2, "extra": 1}
    assert counts.compare(whole, whole, np.arange(7), epochs=1) == {**same, "left_out": 1}
    trained = [rank(0, 0, 1, 3, 2), rank(0, 6, 6, 6, 4)]
    found = counts.compare(whole, trained, np.arange(8), epochs=1)
    assert found == {"lost": 1, "repeated": 2, "out_of_order": 4, "left_out": 2, "extra": 1}


def test_a_training_that_goes_on_for_too_many_epochs_has_repeated_their_rows(counts):
    whole = [rank(0, 0, 1)]
    trained = [np.concatenate([rank(0, 0, 1), rank(1, 1)])]
    found = counts.compare(whole, trained, np.arange(2), epochs=1)
    assert found == {"lost": 0, "repeated": 1, "out_of_order": 1, "left_out": 0, "extra": 0}
    assert counts.count(trained, np.arange(2), epochs=1)["next_repeated"] == 1


def test_the_rows_of_other_numbers_of_ranks_are_counted_by_epoch_and_not_in_order(counts):
    killed = [rank(0, 3, 4), rank(0, 1)]
    resumed = [np.concatenate([rank(0, 0, 4), rank(1, 0, 1, 4)])]
    found = counts.count([*killed, *resumed], np.array([0, 1, 3, 4, 6]), epochs=2)
    assert found == {"lost": 1, "repeated": 1, "next_lost": 2, "next_repeated": 0}


def test_what_was_trained_after_the_checkpoint_that_a_later_start_continued_does_not_count(counts):
    names = ["rows-0-70-0.npy", "rows-0-140-0.npy", "rows-0-70-1.npy", "rows-0-140-1.npy", "rows-70-140-0.npy"]
    names += ["rows-70-200-0.npy", "rows-140-210-2.npy"]
    assert counts.committed(reversed(names)) == [
        ["rows-0-70-0.npy", "rows-70-140-0.npy"],
        ["rows-0-70-1.npy"],
        ["rows-140-210-2.npy"],
    ]


def test_processes_that_trained_other_rows_than_their_peers_are_counted(counts):
    ranks = [rank(0, 1, 2), rank(0, 1, 2), rank(0, 3), rank(0, 4)]
    assert counts.peers_differ(ranks, 2) == 1
    assert counts.peers_differ(ranks, 1) == 0


@pytest.mark.parametrize(
    ("output", "message"),
    [
        pytest.param("Traceback\n[rank1]: RuntimeError: no\nW0101 closing\n", "RuntimeError: no", id="of a rank"),
        pytest.param("ValueError: a\nduring\npkg.errors.MismatchError: b\n", "pkg.errors.MismatchError: b", id="last"),
        pytest.param("OSError: a\nerrors.ChildFailedError:\n=====\n", "OSError: a", id="under torchrun"),
        pytest.param("killed\n\n", "killed", id="no error"),
        pytest.param("", "it did not end, and said nothing", id="nothing"),
    ],
)
def test_the_error_of_a_job_is_the_last_one_that_its_output_names(output, message):
    assert importlib.import_module("benchmarks.measure.framework_jobs").message_of(output) == message


def test_every_way_runs_on_one_and_two_ranks_and_resumes_on_other_numbers_but_the_mesh():
    frameworks = importlib.import_module("benchmarks.measure.frameworks")
    found = {(case.module, case.way, case.ranks, case.resumed) for case in frameworks.cases()}
    for module, way in frameworks.WAYS:
        expected = {(2, 2)} if module == "under_mesh" else {(1, 1), (2, 2), *frameworks.RESIZED}
        assert {case[2:] for case in found if case[:2] == (module, way)} == expected
