"""The ledger of skipped steps, and of those that are restored after the last one, against real runs."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from pairwise import pairwise
from support import open_loader, rows_of, write_dataset

from torch_dataloader_utils import LedgerUnknownError, RowStep

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

RUNS: dict[str, dict[str, Any]] = {
    "in order": {},
    "shards shuffled": {"num_workers": 2, "shuffle": True},
    "rows shuffled and padded": {"shuffle": True, "shuffle_buffer_size": 60, "uneven_ranks": "pad"},
    "a grid": {"num_workers": 2, "virtual_ranks": 6, "virtual_workers": 2, "uneven_ranks": "drop", "batch_size": 18},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    write_dataset(directory)
    return directory


def ranks(data: Path, num_ranks: int, run: str) -> list[tuple[Any, Any]]:
    return [open_loader(data, **RUNS[run], num_ranks=num_ranks, rank=rank) for rank in range(num_ranks)]


STOPS = {"before the skips": 3, "after them": 7, "among restored ones": 14}


class Delivered:
    """The steps that a dataset says of each row, beside those in which real runs delivered it."""

    def __init__(self, opened: list[tuple[Any, Any]]) -> None:
        self.dataset = opened[-1][1]
        self._loaders = [loader for loader, _ in opened]
        self._steps: dict[int, list[tuple[int, int, int]]] = defaultdict(list)

    def require(self, rank: int, step: int, batch: Any) -> None:
        """Compare a step's rows with its batch."""
        first = self.dataset._opened_files.manifest.first_rows
        assert [first[path] + row for path, row in self.dataset.rows_at(step, rank=rank)] == rows_of(batch)
        assert rows_of(self._loaders[rank].batch_at(step)) == rows_of(batch)
        for place, row in enumerate(rows_of(batch)):
            self._steps[row].append((step, rank, place))

    def unanswered(self) -> tuple[list[int], list[int]]:
        """Compare each row's steps with those it was delivered in; return the rows left out, and those unknown."""
        none, unknown = [], []
        for file in self.dataset._opened_files.manifest.files:
            for row in range(file.rows):
                number = self.dataset._opened_files.manifest.first_rows[file.path] + row
                try:
                    found: RowStep | None = self.dataset.step_of(file.path, row)
                except LedgerUnknownError:
                    unknown.append(number)
                    assert number not in self._steps
                    continue
                answers = [] if found is None else [found, *found.others]
                assert [(at.step, at.rank, at.place) for at in answers] == sorted(self._steps[number])
                none += [number] if found is None else []
        return none, unknown


@pairwise(most=4, run=RUNS, restores=[False, True])
def test_skipped_steps_keep_their_rows_and_restored_ones_come_after_the_last(data, run, restores):
    whole = [list(loader) for loader, _ in ranks(data, 2, run)]
    opened = ranks(data, 2, run)
    for loader, _ in opened:
        loader.skip_steps(2, 5)
        loader.skip_steps(8, 9)
        if restores:
            loader.restore_skipped()
    delivered = Delivered(opened)
    left_out = []
    for rank, (loader, _) in enumerate(opened):
        last = len(whole[rank])
        skipped = [2, 3, 4, 8]
        left_out += [row for step in skipped for row in rows_of(whole[rank][step])]
        steps = [step for step in range(last) if step not in skipped] + list(range(last, last + 4)) * restores
        for step, batch in zip(steps, loader, strict=True):
            delivered.require(rank, step, batch)
    none, unknown = delivered.unanswered()
    assert not unknown
    if not restores:
        repeated = {row for run in whole for row in rows_of(run[-1])}  # so that all ranks have equally many
        assert set(none) >= set(left_out) - repeated
    elif "virtual_ranks" not in RUNS[run]:
        assert not none


@pairwise(most=5, run=RUNS, taken=[1, 3, 4], logged=[False, True])
def test_a_strict_load_between_restored_steps_keeps_what_is_known_of_all_steps(data, tmp_path, run, taken, logged):
    log = {"run_log": str(tmp_path)} if logged else {}
    loader, dataset = open_loader(data, **{**RUNS[run], "num_workers": 0}, num_ranks=2, rank=0, **log)
    own_steps = len(loader)
    loader.skip_steps(2, 5)
    loader.skip_steps(8, 9)
    loader.restore_skipped()
    for _ in itertools.islice(loader, own_steps - 4 + taken):
        state = loader.state_dict()
    loader, dataset = open_loader(data, **{**RUNS[run], "num_workers": 0}, num_ranks=2, rank=0, **log)
    loader.load_state_dict(state)
    first = dataset._opened_files.manifest.first_rows

    def planned(step: int) -> list[int]:
        return [first[path] + row for path, row in dataset.rows_at(step)]

    assert [planned(own_steps + number) for number in range(4)] == [planned(step) for step in (2, 3, 4, 8)]
    left = range(own_steps + taken, own_steps + 4)
    assert list(map(planned, left)) == [rows_of(batch) for batch in loader]


@pairwise(most=3, stop=STOPS, num_ranks=[2, 6])
def test_restored_steps_are_known_when_a_virtual_topology_has_other_real_ranks(data, stop, num_ranks):
    stop = STOPS[stop]
    grid = {
        "virtual_ranks": 6,
        "virtual_workers": 2,
        "uneven_ranks": "drop",
        "shuffle": True,
        "shuffle_buffer_size": 60,
    }

    def opened(num_ranks: int) -> list[tuple[Any, Any]]:
        size = {"batch_size": 36 // num_ranks, "num_ranks": num_ranks}
        return [open_loader(data, **grid, **size, rank=rank) for rank in range(num_ranks)]

    three = opened(3)
    assert len(three[0][0]) == 13
    for loader, _ in three:
        loader.skip_steps(4, 6)
        loader.restore_skipped()
        for _ in itertools.islice(loader, stop - 2 * (stop > 4)):
            pass
    states = [loader.state_dict() for loader, _ in three]
    ranks_now = opened(num_ranks)
    for loader, _ in ranks_now:
        loader.load_state_dict(states)
    delivered = Delivered(ranks_now)
    steps = [step for step in range(states[0]["batches_delivered"], 15) if step not in (4, 5)]
    for rank, (loader, _) in enumerate(ranks_now):
        for step, batch in zip(steps, loader, strict=True):
            delivered.require(rank, step, batch)


def test_restored_steps_that_go_on_with_another_batch_size_are_never_answered_wrongly(data):
    loader, _ = open_loader(data, batch_size=10)
    own_steps = len(loader)
    loader.skip_steps(2, 5)
    loader.restore_skipped()
    for _ in itertools.islice(loader, own_steps - 3 + 1):
        state = loader.state_dict()
    loader, dataset = open_loader(data, batch_size=5)
    loader.load_state_dict(state)
    assert sum(1 for _ in loader) == 4
    for step in (2, own_steps, own_steps + 1, own_steps + 2):
        with pytest.raises(LedgerUnknownError, match="batches of other sizes than it records"):
            dataset.rows_at(step)


def test_behind_a_filter_restored_steps_are_unknown_not_denied(data):
    loader, dataset = open_loader(data, filters=[("value", "<", 200)])
    whole = [rows_of(batch) for batch in loader]
    loader, dataset = open_loader(data, filters=[("value", "<", 200)])
    loader.skip_steps(2, 4)
    loader.restore_skipped()
    batches = iter(loader)
    for _ in range(len(whole) - 2 + 1):
        last = rows_of(next(batches))
    assert last == whole[2]
    step = loader.state_dict()["batches_delivered"] - 1
    for answer in (dataset.rows_at, loader.batch_at):
        with pytest.raises(LedgerUnknownError, match=f"step={step} .*restore_skipped"):
            answer(step, scan=True)
    path, row = next(iter(dataset.rows_at(2, scan=True)))
    with pytest.raises(LedgerUnknownError, match="skipped step 2 of rank 0: restore_skipped"):
        dataset.step_of(path, row, scan=True)
    assert dataset.step_of("part-003.parquet", 94, scan=True) is None


def test_an_epoch_whose_steps_were_skipped_is_answered_after_it_as_well(data):
    [(loader, dataset)] = ranks(data, 1, "in order")
    loader.skip_steps(3, 5)
    list(loader)
    skipped = next(iter(dataset.rows_at(3)))
    loader.set_epoch(1)
    list(loader)
    assert dataset.step_of(*skipped, epoch=0) is None
    assert dataset.step_of(*skipped).step == 3


@pairwise(most=3, run=["in order", "shards shuffled", "rows shuffled and padded"], restores=[False, True])
def test_after_an_elastic_load_rows_that_were_skipped_before_it_have_no_step_or_a_restored_one(data, run, restores):
    opened = ranks(data, 3, run)
    before, skipped = [], []
    for rank, (loader, dataset) in enumerate(opened):
        loader.skip_steps(2, 4)
        before += [row for batch in itertools.islice(loader, 5) for row in rows_of(batch)]
        first = dataset._opened_files.manifest.first_rows
        skipped += [first[path] + row for step in (2, 3) for path, row in dataset.rows_at(step, rank=rank)]
    states = [loader.state_dict() for loader, _ in opened]
    opened = ranks(data, 2, run)
    for loader, _ in opened:
        loader.load_state_dict(states, strict=False)
        loader.skip_steps(9, 10)
        if restores:
            loader.restore_skipped()
    delivered = Delivered(opened)
    for rank, (loader, _) in enumerate(opened):
        for step, batch in zip((step for step in itertools.count(7) if step != 9), loader, strict=False):
            delivered.require(rank, step, batch)
    none, unknown = delivered.unanswered()
    assert sorted(unknown) == sorted(before)
    assert not none if restores else set(none) >= set(skipped)
