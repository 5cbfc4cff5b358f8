"""What each call means: `iter`, `state_dict`, `load_state_dict`, `set_epoch`, `len`, under every kind of worker."""

from __future__ import annotations

import copy
import functools
import gc
import json
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from pairwise import pairwise
from support import DEFAULT_FILES, batches_of, edited, open_loader, rows_of, write_dataset
from torch.utils.data import SequentialSampler

from torch_dataloader_utils import CheckpointMismatchError, IterationEndedError, UnusedStateWarning

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

ROWS = sum(rows for rows, _ in DEFAULT_FILES)
BATCH = 32
SHUFFLED = {"batch_size": BATCH, "shuffle": True}


@dataclass(frozen=True)
class Workers:
    """How worker processes are used."""

    count: int
    persistent: bool = False
    start: str = "fork"

    def __str__(self) -> str:
        return f"{self.count}-{self.start}{'-persistent' if self.persistent else ''}" if self.count else "0"

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"num_workers": self.count}
        if self.count:
            options |= {"persistent_workers": self.persistent, "multiprocessing_context": self.start}
        return options


SOME_KINDS = [Workers(0), Workers(2, persistent=True), Workers(2)]
KINDS = [*SOME_KINDS, Workers(3, persistent=True), Workers(1), Workers(1, persistent=True), Workers(3)]


def chosen(*kinds: Workers) -> list[Any]:
    """Return all kinds of workers, of which `make test` has these."""
    return [kind if kind in kinds else pytest.param(kind, marks=pytest.mark.soak) for kind in KINDS]


EVERY_KIND = chosen(*SOME_KINDS)
"""None, persistent ones and others; `make soak` has one to three workers both ways."""

STARTED_ONCE = chosen(*SOME_KINDS[:2])
"""Without those that end with their iteration. Workers are sent the same at its start, whether they are new or not."""

PERSISTENT = [
    kind if kind.count == 2 else pytest.param(kind, marks=pytest.mark.soak) for kind in KINDS if kind.persistent
]
SLOW_STARTERS = [
    Workers(2, persistent=False, start="forkserver"),
    Workers(2, persistent=True, start="forkserver"),
    Workers(1, persistent=True, start="spawn"),  # each of them imports torch
    pytest.param(Workers(2, persistent=True, start="spawn"), marks=pytest.mark.soak),
    pytest.param(Workers(2, persistent=False, start="spawn"), marks=pytest.mark.soak),  # imports torch eight times
]

every_kind_of_workers = pytest.mark.parametrize("workers", EVERY_KIND)
workers_started_once = pytest.mark.parametrize("workers", STARTED_ONCE)
persistent_workers = pytest.mark.parametrize("workers", PERSISTENT)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    write_dataset(directory)
    return directory


def open_shuffled(path: Path, workers: Workers, **options: Any) -> Any:
    """Open a loader whose epochs differ from one another."""
    return open_loader(path, **SHUFFLED, **workers.options(), **options)[0]


@functools.cache
def whole_epoch(path: Path, count: int, epoch: int = 0, **options: Any) -> list[list[int]]:
    """Return the epoch's batches as this process reads them when it plans for a number of workers."""
    _, dataset = open_loader(path, **{**SHUFFLED, **options}, num_workers=count)
    dataset.set_epoch(epoch)
    batches = batches_of(dataset)
    assert sorted(chain.from_iterable(batches)) == list(range(ROWS))
    return batches


def take(iterator: Iterator[Any], count: int) -> list[list[int]]:
    return [rows_of(next(iterator)) for _ in range(count)]


# iter -----------------------------------------------------------------------------------------------------------------


@every_kind_of_workers
def test_each_iter_begins_the_epoch_again_and_delivers_each_row_once(path: Path, workers: Workers):
    loader = open_shuffled(path, workers)
    whole = whole_epoch(path, workers.count)

    assert [batches_of(loader), batches_of(loader)] == [whole, whole]


@every_kind_of_workers
def test_iter_after_a_break_begins_the_epoch_again(path: Path, workers: Workers):
    loader = open_shuffled(path, workers)
    whole = whole_epoch(path, workers.count)

    for batch in loader:
        assert rows_of(batch) == whole[0]
        break

    assert batches_of(loader) == whole


@workers_started_once
def test_iter_continues_from_a_loaded_state_once_and_then_begins_again(path: Path, workers: Workers):
    loader = open_shuffled(path, workers)
    whole = whole_epoch(path, workers.count)
    take(iter(loader), 4)

    loader.load_state_dict(loader.state_dict())

    assert batches_of(loader) == whole[4:]
    assert batches_of(loader) == whole


@every_kind_of_workers
def test_a_loaded_state_is_used_up_by_an_iterator_that_was_asked_for_nothing(path: Path, workers: Workers):
    loader = open_shuffled(path, workers)
    whole = whole_epoch(path, workers.count)
    take(iter(loader), 4)
    state = loader.state_dict()
    loader.load_state_dict(state)

    iter(loader)

    assert loader.state_dict() == state
    assert batches_of(loader) == whole


@every_kind_of_workers
def test_the_newest_iter_owns_the_progress_and_an_older_iterator_raises_and_changes_nothing(
    path: Path, workers: Workers
):
    loader = open_shuffled(path, workers)
    whole = whole_epoch(path, workers.count)
    older = iter(loader)
    take(older, 5)
    newest = iter(loader)
    assert take(newest, 2) == whole[:2]
    before = loader.state_dict()

    for _ in range(2):
        with pytest.raises(IterationEndedError, match="iter"):
            next(older)

    assert loader.state_dict() == before
    assert batches_of(newest) == whole[2:]


@every_kind_of_workers
def test_an_iterator_raises_after_set_epoch_and_after_load_state_dict(path: Path, workers: Workers):
    loader = open_shuffled(path, workers)
    iterator = iter(loader)
    take(iterator, 1)
    state = loader.state_dict()

    loader.dataset.set_epoch(1)
    with pytest.raises(IterationEndedError, match="set_epoch"):
        next(iterator)
    iterator = iter(loader)
    take(iterator, 3)
    loader.load_state_dict(state)
    with pytest.raises(IterationEndedError, match="load_state_dict"):
        next(iterator)

    assert loader.state_dict() == state
    assert batches_of(loader) == whole_epoch(path, workers.count)[1:]


def test_iterating_over_the_dataset_takes_the_progress_from_the_loader_and_the_other_way_round(path: Path):
    loader, dataset = open_loader(path)
    from_loader = iter(loader)
    take(from_loader, 3)
    from_dataset = iter(dataset)

    with pytest.raises(IterationEndedError):
        next(from_loader)
    take(from_dataset, 2)
    assert loader.state_dict()["batches_delivered"] == 2
    take(iter(loader), 1)
    with pytest.raises(IterationEndedError):
        next(from_dataset)
    assert dataset.state_dict()["batches_delivered"] == 1


def test_two_loaders_of_the_same_files_do_not_touch_each_others_progress(path: Path):
    one, other = (iter(open_shuffled(path, Workers(1))) for _ in range(2))
    whole = whole_epoch(path, 1)

    for batch in whole:
        assert take(one, 1) == [batch]
        assert take(other, 1) == [batch]


@workers_started_once
def test_an_iterator_at_its_end_stays_there(path: Path, workers: Workers):
    iterator = iter(open_shuffled(path, workers))
    batches_of(iterator)

    assert [next(iterator, "end") for _ in range(3)] == ["end"] * 3


@persistent_workers
def test_an_abandoned_iteration_of_persistent_workers_leaks_no_batch_into_the_next(path: Path, workers: Workers):
    loader = open_shuffled(path, workers, collate_fn=sleep_a_little, prefetch_factor=3)
    count = len(whole_epoch(path, workers.count))

    for taken in [0, 0, *range(count), 1, 0]:
        epoch = taken % 3
        loader.dataset.set_epoch(epoch)
        assert take(iter(loader), taken) == whole_epoch(path, workers.count, epoch)[:taken]

    assert batches_of(loader) == whole_epoch(path, workers.count)


@persistent_workers
def test_an_error_met_ahead_in_an_abandoned_iteration_does_not_reach_the_next(
    path: Path, workers: Workers, tmp_path: Path
):
    whole = whole_epoch(path, workers.count)
    broken = tmp_path / "broken"
    broken.touch()
    loader = open_shuffled(path, workers, collate_fn=FailAtRow(whole[5][0], while_exists=broken), prefetch_factor=9)
    take(iter(loader), 1)
    time.sleep(0.1)  # the workers read on

    broken.unlink()

    assert batches_of(loader) == whole


@persistent_workers
def test_persistent_workers_are_the_same_processes_in_every_iteration(path: Path, workers: Workers):
    loader = open_shuffled(path, workers, collate_fn=add_process)

    first = {batch["process"] for batch in loader}
    state = loader.state_dict()
    loader.dataset.set_epoch(1)
    second = {batch["process"] for batch in loader}
    loader.load_state_dict(edited(state, batches_delivered=0, next_worker=0, completed_shards=[]))
    third = {batch["process"] for batch in loader}

    assert len(first) == workers.count
    assert os.getpid() not in first
    assert first == second == third


# state_dict -----------------------------------------------------------------------------------------------------------


@workers_started_once
def test_state_dict_is_pure_at_any_time(path: Path, workers: Workers):
    loader = open_shuffled(path, workers)
    whole = whole_epoch(path, workers.count)
    seen: list[list[int]] = []

    def check(batches: int) -> None:
        state = loader.state_dict()
        kept = copy.deepcopy(state)
        assert state["batches_delivered"] == batches
        assert loader.state_dict() == state == loader.dataset.state_dict()
        assert json.loads(json.dumps(state)) == state
        spoil(state)
        assert loader.state_dict() == kept

    check(0)
    iterator = iter(loader)
    check(0)
    for batch in iterator:
        seen.append(rows_of(batch))
        check(len(seen))
    assert seen == whole
    check(len(whole))

    for _ in loader:
        check(1)
        break
    check(1)

    with pytest.raises(BrokenStepError):
        train(loader, seen := [], fail_after=3)
    check(3)

    loader.dataset.set_epoch(1)
    check(0)
    assert batches_of(loader) == whole_epoch(path, workers.count, 1)


class BrokenStepError(Exception):
    """A training step that failed."""


def train(loader: Any, seen: list[list[int]], *, fail_after: int) -> None:
    for batch in loader:
        seen.append(rows_of(batch))
        if len(seen) == fail_after:
            raise BrokenStepError


def spoil(value: Any) -> None:
    """Change everything in a state that can be changed in place."""
    if isinstance(value, dict):
        for inner in value.values():
            spoil(inner)
        value.clear()
    elif isinstance(value, list):
        for inner in value:
            spoil(inner)
        value.append("spoilt")


@workers_started_once
def test_a_state_that_was_taken_does_not_follow_the_iteration(path: Path, workers: Workers):
    loader = open_shuffled(path, workers)
    iterator = iter(loader)
    states = [loader.state_dict() for _ in iterator]
    kept = copy.deepcopy(states)

    batches_of(loader)

    assert states == kept
    assert [state["batches_delivered"] for state in states] == list(range(1, len(states) + 1))


@workers_started_once
def test_state_dict_after_load_state_dict_is_the_loaded_state_until_a_batch_is_delivered(path: Path, workers: Workers):
    loader = open_shuffled(path, workers)
    iterator = iter(loader)
    states = [loader.state_dict(), *(loader.state_dict() for _ in iterator)]

    for state in states:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
    loader.load_state_dict(states[3])
    iterator = iter(loader)
    assert loader.state_dict() == states[3]
    next(iterator)
    assert loader.state_dict() == states[4]


@workers_started_once
def test_an_error_in_the_training_loop_loses_nothing(path: Path, workers: Workers):
    loader = open_shuffled(path, workers)
    whole = whole_epoch(path, workers.count)
    seen: list[list[int]] = []

    with pytest.raises(BrokenStepError):
        train(loader, seen, fail_after=4)
    loader.load_state_dict(loader.state_dict())

    assert seen + batches_of(loader) == whole


@workers_started_once
def test_after_an_error_in_collate_fn_the_iterator_raises_again_and_a_resume_delivers_every_row(
    path: Path, workers: Workers, tmp_path: Path
):
    whole = whole_epoch(path, workers.count)
    broken = tmp_path / "broken"
    broken.touch()
    loader = open_shuffled(path, workers, collate_fn=FailAtRow(whole[5][3], while_exists=broken))
    iterator = iter(loader)

    assert take(iterator, 5) == whole[:5]
    with pytest.raises(BrokenRowError):
        next(iterator)
    for _ in range(2):
        with pytest.raises(IterationEndedError, match="BrokenRowError"):
            next(iterator)
    state = loader.state_dict()
    assert state == loader.state_dict()
    assert state["batches_delivered"] == 5

    loader.load_state_dict(state)
    with pytest.raises(BrokenRowError):
        next(iter(loader))
    assert loader.state_dict() == state

    broken.unlink()
    loader.load_state_dict(state)
    assert batches_of(loader) == whole[5:]
    assert batches_of(loader) == whole


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT interrupt, which it does not in a process that began in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@workers_started_once
def test_an_interrupt_while_a_batch_is_waited_for_loses_nothing(
    path: Path, workers: Workers, tmp_path: Path, interruptible: None
):
    whole = whole_epoch(path, workers.count)
    slow = tmp_path / "slow"
    slow.touch()
    loader = open_shuffled(path, workers, collate_fn=StallAtRow(whole[4][0], while_exists=slow))
    iterator = iter(loader)
    assert take(iterator, 4) == whole[:4]

    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        slow.unlink()

    timer = threading.Timer(0.2, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    timer.join()

    state = loader.state_dict()
    assert state["batches_delivered"] == 4
    with pytest.raises(IterationEndedError, match="KeyboardInterrupt"):
        next(iterator)
    loader.load_state_dict(state)
    assert batches_of(loader) == whole[4:]


@workers_started_once
def test_an_error_in_the_last_batch_is_no_quiet_end_of_the_epoch(path: Path, workers: Workers, tmp_path: Path):
    whole = whole_epoch(path, workers.count)
    loader = open_shuffled(path, workers, collate_fn=FailAtRow(whole[-1][0], while_exists=tmp_path))
    iterator = iter(loader)
    assert take(iterator, len(whole) - 1) == whole[:-1]

    with pytest.raises(BrokenRowError):
        next(iterator)
    with pytest.raises(IterationEndedError):
        next(iterator)

    fresh = open_shuffled(path, workers)
    fresh.load_state_dict(loader.state_dict())
    assert batches_of(fresh) == whole[-1:]


# load_state_dict ------------------------------------------------------------------------------------------------------


@workers_started_once
def test_load_state_dict_sets_the_epoch_and_the_next_iter_continues_in_it(path: Path, workers: Workers):
    loader = open_shuffled(path, workers)
    loader.dataset.set_epoch(2)
    take(iter(loader), 3)
    state = loader.state_dict()

    fresh = open_shuffled(path, workers)
    fresh.load_state_dict(state)

    assert fresh.dataset.epoch == 2
    assert batches_of(fresh) == whole_epoch(path, workers.count, 2)[3:]
    assert batches_of(fresh) == whole_epoch(path, workers.count, 2)


@persistent_workers
def test_load_state_dict_reaches_live_persistent_workers_in_any_order_of_states(path: Path, workers: Workers):
    loader = open_shuffled(path, workers, collate_fn=add_process)
    states = {}
    for epoch in (0, 1):
        loader.dataset.set_epoch(epoch)
        states[epoch] = [loader.state_dict() for _ in loader]
    processes = {batch["process"] for batch in loader}

    for epoch, number in [(1, 2), (0, 7), (1, 5), (0, 0), (0, 6), (1, 0)]:
        loader.load_state_dict(states[epoch][number])
        batches = list(loader)
        assert list(map(rows_of, batches)) == whole_epoch(path, workers.count, epoch)[number + 1 :]
        assert {batch["process"] for batch in batches} <= processes


def changed(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    """Return a function that changes keys of a state; `a__b` is a key of a key."""

    def change(state: dict[str, Any]) -> dict[str, Any]:
        for name, value in changes.items():
            *outer, key = name.split("__") if not name.startswith("_") else [name]
            place = functools.reduce(lambda inner, one: inner[one], outer, state)
            place[key] = value(place[key]) if callable(value) else value
        return state

    return change


OF_ANOTHER_RUN = {
    "another number of workers": changed(_num_workers=7),
    "another seed": changed(_shuffle_seed=1),
    "another rank": changed(num_ranks=2, rank=1),
    "not shuffled": changed(plan__shuffle=False),
    "rows mixed": changed(plan__shuffle_buffer_size=100),
    "another split size": changed(plan__split_bytes=1000),
    "another filter": changed(plan__filter="0123456789abcdef"),
    "other files": changed(plan__fingerprint="0" * 32),
    "a file less": changed(files=lambda files: files[1:]),
    "another algorithm": changed(plan_algorithm=99),
    "a shard that is not": changed(in_progress=[], completed_shards=lambda done: [cut_short(done[0]), *done[1:]]),
}
NO_STATES = {
    "a shard twice": changed(completed_shards=lambda done: [*done, done[0]]),
    "another version": changed(version=2),
    "no progress": lambda state: {key: value for key, value in state.items() if key != "completed_shards"},
    "a wrong type": changed(epoch="one"),
    "nothing": lambda _: None,
    "an empty state": lambda _: {},
    "a list of nothing": lambda _: [],
    "a list of lists": lambda state: [[state]],
    "a string": json.dumps,
}


def refuse_every_wrong_state(loader: Any, state: dict[str, Any]) -> None:
    """Check that no wrong state changes anything."""
    before = loader.state_dict(), loader.dataset.epoch, loader.dataset.num_workers
    for error, wrong in ((CheckpointMismatchError, OF_ANOTHER_RUN), (ValueError, NO_STATES)):
        for name, change in wrong.items():
            with pytest.raises(error, match=r"checkpoint|not a state|version|twice"):
                loader.load_state_dict(change(edited(copy.deepcopy(state))))
            assert (loader.state_dict(), loader.dataset.epoch, loader.dataset.num_workers) == before, name


def cut_short(shard: dict[str, Any]) -> dict[str, Any]:
    first, *others = shard["splits"]
    return {"splits": [{**first, "row_length": first["row_length"] - 1}, *others]}


@workers_started_once
def test_a_refused_load_changes_nothing_and_the_iteration_goes_on(path: Path, workers: Workers):
    loader = open_shuffled(path, workers)
    loader.dataset.set_epoch(1)
    whole = whole_epoch(path, workers.count, 1)
    iterator = iter(loader)
    seen = take(iterator, len(whole) - 3)
    state = loader.state_dict()
    assert state["completed_shards"]

    refuse_every_wrong_state(loader, state)

    assert seen + batches_of(iterator) == whole
    assert batches_of(loader) == whole


@workers_started_once
def test_a_refused_load_leaves_a_waiting_state_waiting(path: Path, workers: Workers):
    loader = open_shuffled(path, workers)
    take(iter(loader), 9)
    state = loader.state_dict()
    loader.load_state_dict(state)

    refuse_every_wrong_state(loader, state)

    assert loader.state_dict() == state
    assert batches_of(loader) == whole_epoch(path, workers.count)[9:]


def test_loading_does_not_change_the_state_that_is_loaded(path: Path):
    loader = open_shuffled(path, Workers(0))
    take(iter(loader), 4)
    state = loader.state_dict()
    kept = copy.deepcopy(state)

    loader.load_state_dict(state)
    batches_of(loader)

    assert state == kept


def test_a_changed_state_does_not_reach_a_loader_that_has_loaded_it(path: Path):
    loader = open_shuffled(path, Workers(0))
    take(iter(loader), 4)
    state = loader.state_dict()

    loader.load_state_dict(state)
    spoil(state)

    assert batches_of(loader) == whole_epoch(path, 0)[4:]


@pytest.fixture
def one_worker_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(os.cpu_count()))


@pytest.mark.parametrize("persistent", [False, True])
def test_num_workers_none_adopts_the_number_of_a_loaded_state_even_while_others_are_alive(
    path: Path, persistent: bool, one_worker_by_default: None
):
    loader = open_loader(path, **SHUFFLED, num_workers=None, persistent_workers=persistent, collate_fn=add_process)[0]
    own = loader.dataset.num_workers
    assert batches_of(loader) == whole_epoch(path, own)

    for count in (3, 0, 2, 2, own):
        saved_by = open_loader(path, **SHUFFLED, num_workers=count)[0].dataset
        take(iter(saved_by), 5)
        loader.load_state_dict(saved_by.state_dict())
        whole = whole_epoch(path, count)

        assert len(loader) == len(whole)
        assert loader.state_dict() == saved_by.state_dict()
        batches = list(loader)
        assert list(map(rows_of, batches)) == whole[5:]
        assert len({batch["process"] for batch in batches} - {os.getpid()}) == count
        loader.dataset.set_epoch(1)
        assert batches_of(loader) == whole_epoch(path, count, 1)


def test_a_refused_load_does_not_change_the_adopted_number_of_workers(path: Path, one_worker_by_default: None):
    loader = open_loader(path, **SHUFFLED, num_workers=None, persistent_workers=True)[0]
    own = loader.dataset.num_workers
    iterator = iter(loader)
    seen = take(iterator, 3)
    other = open_loader(path, **{**SHUFFLED, "shuffle_seed": 1}, num_workers=own + 1)[1]

    with pytest.raises(CheckpointMismatchError, match="shuffle_seed"):
        loader.load_state_dict(other.state_dict())

    assert loader.dataset.num_workers == own
    assert seen + batches_of(iterator) == whole_epoch(path, own)


def test_a_number_of_workers_that_was_asked_for_is_not_given_up(path: Path):
    loader = open_shuffled(path, Workers(2))
    other = open_shuffled(path, Workers(3))

    with pytest.raises(CheckpointMismatchError, match="num_workers changed: checkpoint=3, current=2"):
        loader.load_state_dict(other.state_dict())


def test_the_loader_is_a_stateful_of_distributed_checkpoints(path: Path):
    # Not imported at the top, as spawned workers import this module: that takes half as long as to import torch.
    from torch.distributed.checkpoint.stateful import Stateful  # noqa: PLC0415

    assert isinstance(open_shuffled(path, Workers(0)), Stateful)


# set_epoch ------------------------------------------------------------------------------------------------------------


@workers_started_once
def test_set_epoch_plans_the_epoch_and_clears_progress(path: Path, workers: Workers):
    loader = open_shuffled(path, workers)
    take(iter(loader), 3)

    loader.dataset.set_epoch(1)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batches_delivered"]) == (1, 0)
    assert batches_of(loader) == whole_epoch(path, workers.count, 1) != whole_epoch(path, workers.count)
    take(iter(loader), 3)
    loader.dataset.set_epoch(1)
    assert loader.state_dict()["batches_delivered"] == 0
    assert loader.state_dict()["completed_shards"] == loader.state_dict()["in_progress"] == []
    loader.dataset.set_epoch(0)
    assert batches_of(loader) == whole_epoch(path, workers.count)


@workers_started_once
def test_set_epoch_keeps_a_loaded_state_that_waits_in_the_same_epoch_and_drops_it_in_another(
    path: Path, workers: Workers
):
    loader = open_shuffled(path, workers)
    loader.dataset.set_epoch(1)
    take(iter(loader), 6)
    state = loader.state_dict()

    loader.dataset.set_epoch(0)
    loader.load_state_dict(state)
    loader.dataset.set_epoch(1)
    assert loader.state_dict() == state
    loader.dataset.set_epoch(1)
    assert batches_of(loader) == whole_epoch(path, workers.count, 1)[6:]

    loader.load_state_dict(state)
    with pytest.warns(
        UnusedStateWarning, match=r"set_epoch\(2\) gives up the loaded state, of epoch 1 after 6 batches"
    ):
        loader.dataset.set_epoch(2)
    assert loader.state_dict()["batches_delivered"] == 0
    loader.dataset.set_epoch(1)
    assert batches_of(loader) == whole_epoch(path, workers.count, 1)


def test_set_epoch_warns_of_a_loaded_state_that_no_iter_has_continued_if_rows_are_left_or_come_again(path: Path):
    loader = open_shuffled(path, Workers(0))
    loader.dataset.set_epoch(1)
    iterator = iter(loader)
    take(iterator, 6)
    midway = loader.state_dict()
    rest = list(iterator)
    ended = loader.state_dict()

    loader.load_state_dict(midway)
    with pytest.warns(UnusedStateWarning, match=r"set_epoch\(0\).*begin the loop over epochs at dataset\.epoch"):
        loader.set_epoch(0)
    loader.load_state_dict(ended)
    with pytest.warns(UnusedStateWarning, match=rf"of epoch 1 after {6 + len(rest)} batches"):
        loader.set_epoch(0)
    with warnings.catch_warnings(action="error", category=UnusedStateWarning):
        loader.load_state_dict(ended)
        loader.set_epoch(2)
        loader.load_state_dict(midway)
        take(iter(loader), 1)
        loader.set_epoch(0)


@pytest.mark.parametrize(
    "options",
    [{"drop_last": True}, {"uneven_ranks": "drop", "num_ranks": 2, "rank": 0}],
    ids=["short batches", "rows that do not divide"],
)
def test_set_epoch_gives_up_nothing_where_only_rows_are_left_that_are_dropped(path: Path, options: dict[str, Any]):
    loader, _ = open_loader(path, batch_size=BATCH, shuffle=True, **options)
    iterator = iter(loader)
    batches = take(iterator, len(loader))
    state = loader.state_dict()  # after the last batch, and before the end
    loader, _ = open_loader(path, batch_size=BATCH, shuffle=True, **options)
    loader.load_state_dict(state)
    with warnings.catch_warnings(action="error", category=UnusedStateWarning):
        loader.set_epoch(1)
    assert len(list(loader)) == len(batches)


@workers_started_once
def test_set_epoch_clears_a_loaded_state_that_an_iter_has_used(path: Path, workers: Workers):
    loader = open_shuffled(path, workers)
    take(iter(loader), 6)
    loader.load_state_dict(loader.state_dict())
    take(iter(loader), 1)

    loader.dataset.set_epoch(0)

    assert loader.state_dict()["batches_delivered"] == 0
    assert batches_of(loader) == whole_epoch(path, workers.count)


@workers_started_once
def test_a_training_loop_that_calls_set_epoch_each_time_resumes_where_it_stopped(path: Path, workers: Workers):
    def train(loader: Any, first_epoch: int, stop_after: int | None) -> list[list[int]]:
        seen = []
        for epoch in range(first_epoch, 3):
            loader.dataset.set_epoch(epoch)
            for batch in loader:
                seen.append(rows_of(batch))
                if len(seen) == stop_after:
                    return seen
        return seen

    whole = [batch for epoch in range(3) for batch in whole_epoch(path, workers.count, epoch)]
    stop = len(whole) // 2
    loader = open_shuffled(path, workers)
    before = train(loader, 0, stop)
    resumed = open_shuffled(path, workers)
    resumed.load_state_dict(loader.state_dict())

    assert before + train(resumed, resumed.dataset.epoch, None) == whole


@workers_started_once
def test_the_state_at_the_end_of_an_epoch_yields_nothing_and_the_next_epoch_is_whole(path: Path, workers: Workers):
    loader = open_shuffled(path, workers)
    batches_of(loader)
    state = loader.state_dict()
    assert state["in_progress"] == []

    loader.load_state_dict(state)
    assert batches_of(loader) == []
    assert loader.state_dict() == state
    loader.dataset.set_epoch(1)
    assert batches_of(loader) == whole_epoch(path, workers.count, 1)

    loader.load_state_dict(state)
    loader.dataset.set_epoch(0)
    assert batches_of(loader) == []
    assert batches_of(loader) == whole_epoch(path, workers.count)


@pytest.mark.parametrize("epoch", [-1, "1", 1.0, True, None])
def test_set_epoch_refuses_what_is_no_epoch_and_changes_nothing(path: Path, epoch: Any):
    loader = open_shuffled(path, Workers(0))
    iterator = iter(loader)
    seen = take(iterator, 3)

    with pytest.raises((ValueError, TypeError), match="epoch"):
        loader.dataset.set_epoch(epoch)

    assert seen + batches_of(iterator) == whole_epoch(path, 0)


# Other ways of starting processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", SLOW_STARTERS)
def test_the_calls_mean_the_same_however_workers_are_started(path: Path, workers: Workers):
    loader = open_shuffled(path, workers, collate_fn=add_process)
    whole = whole_epoch(path, workers.count)

    older = iter(loader)
    assert take(older, 5) == whole[:5]
    state = loader.state_dict()
    with pytest.raises(CheckpointMismatchError):
        loader.load_state_dict(edited(state, _shuffle_seed=1))
    assert loader.state_dict() == state
    assert take(older, 1) == whole[5:6]

    loader.load_state_dict(json.loads(json.dumps(state)))
    loader.dataset.set_epoch(0)
    assert batches_of(loader) == whole[5:]
    with pytest.raises(IterationEndedError):
        next(older)
    end = loader.state_dict()

    loader.dataset.set_epoch(1)
    assert batches_of(loader) == whole_epoch(path, workers.count, 1)
    if workers.persistent:
        take(iter(loader), 3)
        assert batches_of(loader) == whole_epoch(path, workers.count, 1)
        loader.load_state_dict(end)
        assert batches_of(loader) == []
        loader.load_state_dict(state)
        assert batches_of(loader) == whole[5:]


@pytest.mark.parametrize("workers", [SLOW_STARTERS[1], SLOW_STARTERS[3]])
def test_an_error_in_a_worker_loses_nothing_however_workers_are_started(path: Path, workers: Workers, tmp_path: Path):
    whole = whole_epoch(path, workers.count)
    broken = tmp_path / "broken"
    broken.touch()
    loader = open_shuffled(path, workers, collate_fn=FailAtRow(whole[4][0], while_exists=broken))
    iterator = iter(loader)
    assert take(iterator, 4) == whole[:4]
    with pytest.raises(BrokenRowError):
        next(iterator)
    with pytest.raises(IterationEndedError):
        next(iterator)

    broken.unlink()
    loader.load_state_dict(loader.state_dict())
    assert batches_of(loader) == whole[4:]


# Workers that are no longer needed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_workers_of_one_iteration_end_with_it(path: Path, count: int):
    loader = open_shuffled(path, Workers(count), collate_fn=add_process)

    assert_gone({batch["process"] for batch in loader})

    iterator = iter(loader)
    processes = {next(iterator)["process"] for _ in range(count)}
    del iterator
    assert_gone(processes)


def test_workers_of_an_iteration_end_when_another_begins_though_its_iterator_is_kept(path: Path):
    loader = open_shuffled(path, Workers(1), collate_fn=add_process)
    older = iter(loader)
    process = next(older)["process"]

    newest = iter(loader)

    assert_gone({process})
    assert next(newest)["process"] != process


@pytest.mark.parametrize("count", [1, 3])
def test_persistent_workers_end_with_their_loader(path: Path, count: int):
    loader = open_shuffled(path, Workers(count, persistent=True), collate_fn=add_process)
    processes = {batch["process"] for batch in loader}

    del loader

    assert_gone(processes)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_error_ends_all_workers_at_once(path: Path, persistent: bool, tmp_path: Path):
    whole = whole_epoch(path, 3)
    loader = open_shuffled(path, Workers(3, persistent), collate_fn=FailAtRow(whole[6][0], while_exists=tmp_path))
    before = {process.pid for process in multiprocessing.active_children()}
    iterator = iter(loader)
    processes = {process.pid for process in multiprocessing.active_children()} - before
    assert len(processes) == 3

    with pytest.raises(BrokenRowError):
        batches_of(iterator)

    assert_gone(processes)


def assert_gone(processes: set[Any]) -> None:
    assert processes
    assert processes.isdisjoint(process.pid for process in multiprocessing.active_children())


# Workers that die -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", EVERY_KIND[1:])
def test_a_worker_that_dies_ends_the_iteration_in_an_error_and_the_state_resumes(
    path: Path, workers: Workers, tmp_path: Path
):
    whole = whole_epoch(path, workers.count)
    count = 3 * workers.count  # workers send the first ones one by one, and do not hold them back for the one that dies
    broken, taken = tmp_path / "broken", tmp_path / "taken"
    broken.touch()
    die = DieAtRow(whole[count][0], while_exists=broken, not_before=taken)
    loader = open_shuffled(path, workers, collate_fn=die)
    iterator = iter(loader)
    assert take(iterator, count) == whole[:count]

    taken.touch()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="worker"):
            next(iterator)
    state = loader.state_dict()
    assert state["batches_delivered"] == count

    broken.unlink()
    loader.load_state_dict(state)
    assert batches_of(loader) == whole[count:]
    fresh = open_shuffled(path, workers)
    fresh.load_state_dict(state)
    assert batches_of(fresh) == whole[count:]


def test_a_worker_that_stalls_ends_the_iteration_after_the_timeout_and_the_state_resumes(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torch_dataloader_utils.workers.torch_iterator.END_SEC", 0.1)  # then the stalled one is killed
    workers = Workers(2, persistent=True)
    whole = whole_epoch(path, workers.count)
    broken = tmp_path / "broken"
    broken.touch()
    loader = open_shuffled(path, workers, collate_fn=StallAtRow(whole[3][0], while_exists=broken), timeout=60)
    iterator = iter(loader)
    assert take(iterator, 3) == whole[:3]

    answers = loader._answers()
    assert answers._timeout == 60
    answers._timeout = 1  # from here on nothing comes, however long the test waits
    with pytest.raises(RuntimeError, match="timed out"):
        next(iterator)

    broken.unlink()
    loader.load_state_dict(loader.state_dict())
    assert batches_of(loader) == whole[3:]


# Batches --------------------------------------------------------------------------------------------------------------


@pairwise(most=4, workers=KINDS, drop_last=[False, True])
def test_batches_are_full_across_row_groups_shards_and_files_but_for_the_last_of_a_stream(
    path: Path, workers: Workers, drop_last: bool
):
    size = 37
    loader, dataset = open_loader(path, batch_size=size, drop_last=drop_last, **workers.options())

    expected, dropped = batches_of_plan(dataset, size, drop_last=drop_last)

    assert batches_of(loader) == expected
    assert len(loader) == len(expected)
    assert dataset.get_metrics()["rows_dropped"] == dropped
    assert dataset.get_metrics()["rows_delivered"] == ROWS - dropped
    assert (dropped > 0) == drop_last


def batches_of_plan(dataset: Any, size: int, *, drop_last: bool) -> tuple[list[list[int]], int]:
    """Return the batches, by hand, that a dataset's streams give in turn, and how many rows are left over."""
    first = dataset._opened_files.manifest.first_rows
    streams = []
    dropped = 0
    for slices in dataset._epoch_state.plan.rank_streams(dataset.rank):
        splits = [split for shard_slice in slices for split in shard_slice.shard.splits]
        rows = [first[one.path] + one.row_offset + row for one in splits for row in range(one.row_length)]
        stop = len(rows) // size * size if drop_last else len(rows)
        dropped += len(rows) - stop
        streams.append([rows[start : min(stop, start + size)] for start in range(0, stop, size)])
    turns = range(max(map(len, streams)))
    return [stream[turn] for turn in turns for stream in streams if turn < len(stream)], dropped


@pairwise(most=5, workers=KINDS, rows=[20, 0, 1])
def test_fewer_shards_than_workers_and_no_rows_at_all(tmp_path: Path, workers: Workers, rows: int):
    write_dataset(tmp_path, ((rows, 10), (0, 1)))
    loader = open_shuffled(tmp_path, workers)
    states = [loader.state_dict()]

    delivered = []
    for batch in loader:
        delivered.append(rows_of(batch))
        states.append(loader.state_dict())
    states.append(loader.state_dict())

    assert sorted(chain.from_iterable(delivered)) == list(range(rows))
    assert len(loader) == len(delivered)
    for number, state in enumerate(states):
        loader.load_state_dict(state)
        assert batches_of(loader) == delivered[number:]


@pairwise(
    most=5,
    ranks_and_size=[(1, 16), (2, 7), (2, ROWS), (3, 30), (3, 1)],
    num_workers=[0, 1, 2, 3],
    drop_last=[False, True],
    shuffle=[{}, {"shuffle": True}, {"shuffle": True, "shuffle_buffer_size": 60}],
)
def test_len_is_the_number_of_batches_of_the_whole_epoch_also_when_resumed(
    path: Path, ranks_and_size: tuple[int, int], num_workers: int, drop_last: bool, shuffle: dict[str, Any]
):
    num_ranks, size = ranks_and_size
    for rank in range(num_ranks):
        loader, dataset = open_loader(
            path,
            batch_size=size,
            drop_last=drop_last,
            num_workers=num_workers,
            num_ranks=num_ranks,
            rank=rank,
            **shuffle,
        )
        expected = len(loader)
        iterator = iter(dataset)
        delivered = 0
        states = [dataset.state_dict()]
        for _ in iterator:
            delivered += 1
            assert len(loader) == expected
            states.append(dataset.state_dict())
        assert (delivered, len(loader)) == (expected, expected)

        for state in states[:: max(1, len(states) // 3)]:
            loader.load_state_dict(state)
            assert len(loader) == expected
            left = sum(1 for _ in dataset)
            assert state["batches_delivered"] + left == len(loader) == expected


def test_len_is_a_type_error_where_a_filter_makes_it_unknowable(path: Path):
    loader, dataset = open_loader(path, filters=pc.field("value") > 100)

    with pytest.raises(TypeError, match="filter"):
        len(loader)
    assert len(list(loader)) > 0
    with pytest.raises(TypeError, match="filter"):
        _ = dataset.num_batches


@pairwise(most=4, workers=KINDS, output_format=["torch", "numpy"], shuffle_buffer_size=[None, 100])
def test_batches_belong_to_the_user(path: Path, workers: Workers, output_format: Any, shuffle_buffer_size: int | None):
    loader, dataset = open_loader(
        path,
        batch_size=20,
        shuffle=True,
        shuffle_buffer_size=shuffle_buffer_size,
        output_format=output_format,
        **workers.options(),
    )
    batches = []
    for number, batch in enumerate(loader):
        batches.append(batch)
        if number % 2:
            overwrite(batch)
    rest = [batches[number] for number in range(0, len(batches), 2)]
    overwritten = [batches[number] for number in range(1, len(batches), 2)]
    dataset.set_epoch(1)
    kept = list(loader)
    del loader, dataset
    gc.collect()

    assert all((batch[name] == -1).all() for batch in overwritten for name in ("row", "value", "score"))
    assert sorted(chain.from_iterable(map(rows_of, kept))) == list(range(ROWS))
    for batch in rest + kept:
        rows = rows_of(batch)
        assert [int(value) for value in batch["value"]] == rows
        assert [float(score) for score in batch["score"]] == [row / 7 for row in rows]
        assert batch["name"] == [f"row {row}" for row in rows]
    for number, batch in enumerate(kept):
        overwrite(batch)
        for other in kept[number + 1 :]:
            assert (other["value"] == other["row"]).all()
            assert (other["value"] >= 0).all()


def overwrite(batch: dict[str, Any]) -> None:
    for values in batch.values():
        if isinstance(values, torch.Tensor):
            values.fill_(-1)
        elif isinstance(values, np.ndarray):
            values.fill(-1)
        else:
            values.clear()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("sampler", SequentialSampler([1])),
        ("batch_sampler", [[0]]),
        ("sampler", []),
        ("in_order", False),
        ("prefetch_factor", 0),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_arguments_that_would_change_the_order_are_refused_by_name(
    path: Path, argument: str, value: Any, num_workers: int
):
    with pytest.raises((ValueError, TypeError), match=argument):
        open_loader(path, num_workers=num_workers, **{argument: value})


# What workers run: found by name, for processes that begin from nothing ----------------------------------------------


class BrokenRowError(Exception):
    """A row that a `collate_fn` cannot stand."""


@dataclass(frozen=True)
class FailAtRow:
    """A `collate_fn` that fails at a row, as long as a file exists."""

    row: int
    while_exists: Path

    def __call__(self, batch: Any) -> Any:
        if self.row in rows_of(batch) and self.while_exists.exists():
            raise BrokenRowError
        return batch


@dataclass(frozen=True)
class DieAtRow:
    """A `collate_fn` that kills its process at a row, as long as a file exists, and not before another does."""

    row: int
    while_exists: Path
    not_before: Path

    def __call__(self, batch: Any) -> Any:
        if self.row in rows_of(batch) and self.while_exists.exists():
            while not self.not_before.exists():
                time.sleep(0.02)
            time.sleep(0.1)  # until the training process waits for this batch
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


@dataclass(frozen=True)
class StallAtRow:
    """A `collate_fn` that does not return from a row, as long as a file exists."""

    row: int
    while_exists: Path

    def __call__(self, batch: Any) -> Any:
        while self.row in rows_of(batch) and self.while_exists.exists():
            time.sleep(0.05)
        return batch


def sleep_a_little(batch: Any) -> Any:
    time.sleep(0.004)
    return batch


def add_process(batch: Any) -> Any:
    return {**batch, "process": os.getpid()}
