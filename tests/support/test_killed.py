"""The harness that kills training jobs finds what it is there to find."""

from __future__ import annotations

import random

import pytest
from faults import killed
from faults.killed import Case, Epoch, JobFailed, Trainer, rows_of_files, whole_epoch, write_files
from faults.outcome import Outcome
from faults.trainer import commit, read_checkpoint

BATCH_ROWS = 12


@pytest.fixture
def careless(tmp_path):
    write_files(tmp_path / "data")
    with Trainer("careless") as trainer:
        yield trainer


def test_a_loader_whose_state_is_behind_is_found_to_repeat_rows(careless, tmp_path):
    data, outcome = tmp_path / "data", Outcome("", "")
    expected = rows_of_files(data)
    assert whole_epoch(careless, Case(), data, tmp_path / "whole") == [expected]
    epoch = Epoch(careless, Case(changed=True), data, tmp_path / "epoch", random.Random(1), outcome)
    epoch.train(most_kills=0)
    outcome.compare(expected, epoch.rows())
    assert outcome.faults
    assert outcome.repeated >= BATCH_ROWS
    assert outcome.left == {}


def test_each_number_of_ranks_trains_rows_however_late_a_job_is_killed(careless, tmp_path, monkeypatch):
    monkeypatch.setattr(killed, "PAUSE_SEC", 0.0)
    monkeypatch.setattr(killed, "LONGEST_SEC", 1.5)
    outcome = Outcome("", "")
    epoch = Epoch(careless, Case(ranks=(1, 1, 1)), tmp_path / "data", tmp_path / "epoch", random.Random(2), outcome)
    epoch.train(most_kills=0)
    assert len(epoch.committed()) == 3
    assert outcome.faults >= 2


def test_rows_of_a_rewritten_file_are_found_to_be_others(careless, tmp_path):
    data, outcome = tmp_path / "data", Outcome("", "")
    expected = rows_of_files(data)
    write_files(data, only=2)
    (rows,) = whole_epoch(careless, Case(), data, tmp_path / "whole")
    outcome.compare(expected, rows)
    assert (outcome.lost, outcome.repeated, outcome.corrupted) == (1100, 0, 1100)


def test_an_error_of_a_job_is_raised(careless, tmp_path):
    epoch = Epoch(careless, Case(), tmp_path / "data", tmp_path / "epoch", random.Random(1), Outcome("", ""))
    (tmp_path / "data" / "part-001.parquet").write_bytes(b"no Parquet")
    with pytest.raises(JobFailed, match=r"^ArrowInvalid: "):
        epoch._train(0, kill=False)


def test_a_checkpoint_is_read_without_the_classes_of_its_states(tmp_path):
    path = str(tmp_path / "checkpoint")
    commit(path, [False], [[(1, "content")]], ["state"])
    commit(path, [True], [[(1, "content"), (2, "other")]], ["state"])
    assert read_checkpoint(path)[0] == {"ended": [True], "rows": [[[1, "content"], [2, "other"]]]}
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint"]
