"""Hooks: what they are told, when, and that they cannot lose a batch."""

from __future__ import annotations

import copy
import errno
import itertools
import os
import pickle
import time
from collections import Counter
from dataclasses import FrozenInstanceError
from pathlib import Path

import pyarrow.compute as pc
import pytest
from ranged import RangedFileSystem, ranged
from support import all_rows_of, batches_of, open_loader, rows_of, write_dataset
from torch.utils.data import DataLoader

from torch_dataloader_utils import Event, HookWarning
from torch_dataloader_utils.loader import iteration
from torch_dataloader_utils.workers import message_size

ROWS = 443
SHARDS = {"split_rows": 60}


@pytest.fixture
def data(tmp_path):
    assert write_dataset(tmp_path / "data") == ROWS
    return tmp_path / "data"


def of_kind(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event.kind == kind]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_begins_its_shards_are_done_and_it_ends(data, num_workers):
    events: list[Event] = []
    loader, dataset = open_loader(data, num_workers=num_workers, hooks=[events.append], **SHARDS)
    batches = batches_of(loader)
    assert [events[0].kind, events[-1].kind] == ["epoch_begun", "epoch_done"]
    assert (events[0].step, events[-1].step, events[-1].rows) == (0, len(batches), ROWS)
    done = of_kind(events, "shard_done")
    assert len(events) == 2 + len(done)
    assert sum(event.rows for event in done) == ROWS
    assert {path for event in done for path in event.paths} == {path.name for path in data.iterdir()}
    assert {event.worker for event in done} == ({0, 1} if num_workers else {None})
    assert {(event.epoch, event.rank) for event in events} == {(0, 0)}
    now, then = dataset.get_metrics(), events[-1].metrics
    assert {name for name in then if then[name] != now[name]} <= {"waiting_sec"}  # the loop waited for the end as well
    assert events[-1].seconds >= then["waiting_sec"] > 0


def test_a_shard_is_done_with_the_batch_of_its_last_row(data):
    events: list[Event] = []
    loader, _ = open_loader(data, hooks=[events.append], columns=["value"], **SHARDS)
    delivered = [set(rows_of(batch)) for batch in loader]
    last = itertools.accumulate(event.rows for event in of_kind(events, "shard_done"))
    for event, rows in zip(of_kind(events, "shard_done"), last, strict=True):
        assert rows - 1 in delivered[event.step]


TOPOLOGIES = {
    "shuffled": {"shuffle": True, "shuffle_buffer_size": 60},
    "two workers": {"num_workers": 2},
    "a virtual topology": {"virtual_ranks": 2, "virtual_workers": 2, "uneven_ranks": "pad", "num_workers": 1},
}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_after_a_resume_the_rows_of_shards_are_those_that_were_left(data, topology):
    options = TOPOLOGIES[topology] | SHARDS
    loader, _ = open_loader(data, **options)
    iterator = iter(loader)
    before = sum(len(rows_of(next(iterator))) for _ in range(7))
    events: list[Event] = []
    resumed, _ = open_loader(data, hooks=[events.append], **options)
    resumed.load_state_dict(loader.state_dict())
    left = all_rows_of(resumed)
    assert len(left) == len(all_rows_of(loader)) - before
    assert sum(event.rows for event in of_kind(events, "shard_done")) == len(left)
    assert events[0].step == 7
    assert (events[-1].kind, events[-1].rows) == ("epoch_done", len(left))


def test_rows_of_a_shard_are_not_told_where_only_reading_tells(data):
    events: list[Event] = []
    loader, _ = open_loader(data, hooks=[events.append], filters=pc.field("value").isin(range(0, ROWS, 2)), **SHARDS)
    rows = len(all_rows_of(loader))
    assert {event.rows for event in of_kind(events, "shard_done")} == {None}
    assert events[-1].rows == rows


def test_events_name_the_epoch_and_the_rank(data):
    events: list[Event] = []
    loader, _ = open_loader(data, num_ranks=2, rank=1, uneven_ranks="drop", hooks=[events.append])
    for number in (3, 4):
        loader.set_epoch(number)
        batches_of(loader)
    assert Counter((event.epoch, event.rank) for event in events if event.kind.startswith("epoch")) == {
        (3, 1): 2,
        (4, 1): 2,
    }


def test_an_epoch_that_is_left_is_not_done(data):
    events: list[Event] = []
    loader, _ = open_loader(data, hooks=[events.append])
    for _ in range(2):
        next(iter(loader))
    assert [event.kind for event in events] == ["epoch_begun", "epoch_begun"]


def test_an_event_cannot_be_changed():
    event = Event("stall", 0, 0, 3, seconds=2.0)
    with pytest.raises(FrozenInstanceError):
        event.step = 4
    assert pickle.loads(pickle.dumps(event)) == event


# Stalls -------------------------------------------------------------------------------------------------------------


def slow_at_hundred(batch):
    if 100 in rows_of(batch):
        time.sleep(0.8)
    return batch


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_that_is_waited_for_long_is_a_stall(data, num_workers, monkeypatch):
    monkeypatch.setattr(iteration, "STALL_SEC", 0.4)
    monkeypatch.setattr(message_size, "MAX_BATCHES", 1)  # else the first batch of the message is waited for
    events: list[Event] = []
    loader, dataset = open_loader(data, num_workers=num_workers, collate_fn=slow_at_hundred, hooks=[events.append])
    batches_of(loader)
    (stall,) = (event for event in of_kind(events, "stall") if event.step == 100 // 16)
    assert stall.seconds >= 0.4
    assert stall.worker == (0 if num_workers else None)
    assert dataset.get_metrics()["stalls"] == len(of_kind(events, "stall"))


def test_the_first_batch_is_no_stall(data, monkeypatch):
    monkeypatch.setattr(iteration, "STALL_SEC", 1e-9)
    events: list[Event] = []
    loader, dataset = open_loader(data, hooks=[events.append])
    next(iter(loader))
    assert not of_kind(events, "stall")
    assert dataset.get_metrics()["first_batch_sec"] > 0
    assert dataset.get_metrics()["waiting_sec"] == 0


# Retries ------------------------------------------------------------------------------------------------------------


class FailsAtFirst:
    """Lets the first ranges of a process fail, as a storage does that is gone for a moment."""

    def __init__(self, times: int) -> None:
        self.left = dict.fromkeys(range(times))

    def __call__(self, *_: object) -> None:
        if self.left:
            self.left.popitem()
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_worker_asks_the_storage_again_for_is_told(data, num_workers, monkeypatch):
    events: list[Event] = []
    loader, dataset = open_loader(ranged(data), num_workers=num_workers, hooks=[events.append], **SHARDS)
    monkeypatch.setattr(RangedFileSystem, "on_fetch", FailsAtFirst(2))
    assert sorted(all_rows_of(loader)) == list(range(ROWS))
    retries = of_kind(events, "retry")
    assert Counter(event.worker for event in retries) == ({0: 2, 1: 2} if num_workers else {None: 2})
    for event in retries:
        assert event.cause == "OSError: [Errno 5] Input/output error"
        assert event.seconds >= 0
        (name,) = event.paths
        assert "row group" in name
        assert ".parquet" in name
    assert dataset.get_metrics()["retries"] == len(retries)
    assert [worker["retries"] for worker in dataset.get_metrics()["workers"]] == [2] * max(1, num_workers)


def test_what_the_training_process_asked_again_for_before_is_told_once(data, monkeypatch):
    events: list[Event] = []
    monkeypatch.setattr(RangedFileSystem, "on_fetch", FailsAtFirst(1))
    loader, _ = open_loader(ranged(data), num_workers=2, hooks=[events.append])
    for _ in range(2):
        batches_of(loader)
    (retry,) = of_kind(events, "retry")
    assert (retry.worker, retry.step) == (None, 0)


# Hooks that fail, and copies ----------------------------------------------------------------------------------------


class Failing:
    """Fails at every event, after it has noted the event."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def __call__(self, event: Event) -> None:
        self.kinds.append(event.kind)
        raise ValueError(f"no {event.kind}")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_hook_that_fails_loses_no_batch_and_is_named_once(data, num_workers):
    expected = batches_of(open_loader(data, num_workers=num_workers, **SHARDS)[0])
    failing, events = Failing(), []
    loader, _ = open_loader(data, num_workers=num_workers, hooks=[failing, events.append], **SHARDS)
    with pytest.warns(HookWarning) as warned:
        assert [rows_of(batch) for batch in loader] == expected
    (warning,) = (each for each in warned if each.category is HookWarning)
    assert "the hook Failing failed at the event 'epoch_begun': ValueError: no epoch_begun" in str(warning.message)
    assert warning.filename == __file__
    assert failing.kinds == [event.kind for event in events]
    assert {"epoch_begun", "shard_done", "epoch_done"} <= set(failing.kinds)


def test_ctrl_c_in_a_hook_leaves_a_state_that_loses_nothing(data):
    def interrupted(event: Event) -> None:
        if event.kind == "shard_done" and event.step > 10:
            raise KeyboardInterrupt

    loader, _ = open_loader(data, hooks=[interrupted], **SHARDS)
    delivered = []
    with pytest.raises(KeyboardInterrupt):
        delivered.extend(rows_of(batch) for batch in iter(loader))
    resumed, _ = open_loader(data, **SHARDS)
    resumed.load_state_dict(loader.state_dict())
    assert delivered + batches_of(resumed) == batches_of(open_loader(data, **SHARDS)[0])


def test_a_state_that_a_hook_saves_does_not_count_the_batch_to_come(data):
    states = []
    loader, dataset = open_loader(data, hooks=[lambda event: states.append((event, dataset.state_dict()))], **SHARDS)
    delivered = batches_of(loader)
    for event, state in states:
        if event.kind == "shard_done":
            resumed, _ = open_loader(data, **SHARDS)
            resumed.load_state_dict(state)
            assert batches_of(resumed) == delivered[event.step :]


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_of_a_loader_with_hooks_can_be_made_and_have_none(data, copied):
    events: list[Event] = []

    def note(event: Event) -> None:  # cannot be pickled
        events.append(event)

    loader, _ = open_loader(data, hooks=[note])
    assert batches_of(copied(loader)) == batches_of(open_loader(data)[0])
    assert not events
    batches_of(loader)
    assert events


def test_workers_that_are_not_forked_need_no_hook(data):
    events: list[Event] = []

    def note(event: Event) -> None:  # cannot be pickled
        events.append(event)

    options = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    loader, _ = open_loader(data, hooks=[note], **options)
    assert sorted(all_rows_of(loader)) == list(range(ROWS))
    assert [events[0].kind, events[-1].kind] == ["epoch_begun", "epoch_done"]


def test_hooks_run_in_no_worker_of_a_plain_loader(data, tmp_path):
    def note(event: Event) -> None:
        with Path(tmp_path / "called").open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {event.kind}\n")

    _, dataset = open_loader(data, hooks=[note])
    assert sorted(all_rows_of(DataLoader(dataset, batch_size=None, num_workers=2))) == list(range(ROWS))
    assert not (tmp_path / "called").exists()
