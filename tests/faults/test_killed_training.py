"""SIGKILL of a whole training job at random moments: no row is lost or repeated, and nothing is left behind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from faults.killed import CHANGED, KILLED, Case, Epoch, JobFailed, Trainer, rows_of_files, whole_epoch, write_files

CASES = {
    f"{'-then-'.join(map(str, ranks))}-ranks-{num_workers}-workers-{'shuffled' if shuffle else 'in-order'}": Case(
        num_workers, shuffle, ranks
    )
    for ranks in ((1,), (2,), (2, 3, 1))
    for num_workers in (0, 2)
    for shuffle in (False, True)
}
KILLS = 84
"""Of each case in the long form: about 1,000 in all."""

SMALL = ((450, 40), (36, 36), (550, 50), (332, 25))
"""Half the rows that the long forms have: an epoch still takes several times as long as a job that is killed."""


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    with Trainer("ours") as started:
        yield started


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_files(tmp_path / "data")
    return tmp_path


@pytest.fixture
def small_directory(tmp_path: Path) -> Path:
    write_files(tmp_path / "data", SMALL)
    return tmp_path


def check_epoch(epoch: Epoch, most_kills: int) -> None:
    """Train an epoch under fire, and compare what was committed with the files and with an undisturbed epoch."""
    expected = rows_of_files(epoch.data)
    whole = whole_epoch(epoch.trainer, epoch.case, epoch.data, epoch.directory / "whole")
    assert sorted(row for rows in whole for row in rows) == sorted(expected)
    epoch.train(most_kills)
    epoch.outcome.compare(expected, epoch.rows())
    if len(epoch.case.ranks) == 1:
        epoch.outcome.in_order = epoch.committed() == [whole]
        assert epoch.outcome.in_order


@pytest.mark.parametrize(
    "name", ["1-ranks-2-workers-shuffled", "2-ranks-0-workers-in-order", "2-then-3-then-1-ranks-0-workers-shuffled"]
)
def test_an_epoch_killed_at_random_moments_commits_each_row_once(trainer, small_directory, record, name):
    case = CASES[name]
    with record(KILLED, str(case)) as outcome:
        epoch = Epoch(trainer, case, small_directory / "data", small_directory / "epoch", random.Random(3), outcome)
        check_epoch(epoch, most_kills=3)
        assert outcome.faults


@pytest.mark.parametrize(
    "name",
    [
        "1-ranks-2-workers-shuffled",
        pytest.param("2-then-3-then-1-ranks-0-workers-shuffled", marks=pytest.mark.soak),
    ],
)
def test_an_epoch_whose_batches_are_copied_ahead_commits_each_row_once_when_killed(
    trainer, small_directory, record, name
):
    case = replace(CASES[name], ahead=4)
    with record(KILLED, f"{case}, four batches copied ahead") as outcome:
        epoch = Epoch(trainer, case, small_directory / "data", small_directory / "epoch", random.Random(5), outcome)
        check_epoch(epoch, most_kills=3)
        assert outcome.faults


def test_a_file_rewritten_with_other_rows_between_kill_and_resume_is_refused(trainer, directory, record):
    case = Case(shuffle=True, changed=True)
    with record(CHANGED, str(case)) as outcome:
        epoch = Epoch(trainer, case, directory / "data", directory / "epoch", random.Random(1), outcome)
        with pytest.raises(JobFailed, match=r"(?s)CheckpointMismatchError.*part-002\.parquet") as refused:
            epoch.train(0)
        outcome.error = str(refused.value)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(CASES))
def test_many_epochs_killed_at_random_moments_commit_each_row_once(trainer, directory, record, seeds, name):
    case, kills = CASES[name], 0
    for seed in seeds(KILLS):
        with record(KILLED, str(case)) as outcome:
            epoch = Epoch(trainer, case, directory / "data", directory / str(seed), random.Random(seed), outcome)
            check_epoch(epoch, most_kills=KILLS - kills)
        kills += outcome.faults
        if kills >= KILLS:
            break
    assert kills
