"""Worker processes that never get to run: found out, started again, and named if it does not help."""

from __future__ import annotations

import os
import pickle
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
import torch
from pairwise import pairwise
from support import all_rows_of, batches_of, open_loader, write_dataset

import torch_dataloader_utils.loader.data_loader as loader_module
import torch_dataloader_utils.workers.torch_iterator as iterator_module
from torch_dataloader_utils import IterationEndedError, StructuredDataset, WorkerError
from torch_dataloader_utils.planning.assignment import Assignment
from torch_dataloader_utils.workers.channel import AssignmentQueue
from torch_dataloader_utils.workers.lifecycle import has_ended
from torch_dataloader_utils.workers.torch_iterator import WorkerIterator

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")


ALLOCATE = pa.allocate_buffer


class HangingForks:
    """Makes forked processes hang before their first line, as one does that waits for a lock whose owner is gone."""

    def __init__(self) -> None:
        self.left = 0
        self.forks = 0
        self.is_used = False
        self.hangs_in_threads = False
        self._hangs = False
        self._latest: deque[bool] = deque(maxlen=2)
        os.register_at_fork(before=self._count, after_in_child=self._hang)

    def _count(self) -> None:
        self.forks += 1
        self._hangs = self.left > 0
        self.left -= self._hangs
        self._latest.append(self._hangs)
        if self.is_used:  # forks that hang are not waited for long, others as long as they need
            loader_module.START_SEC = 0.5 if any(self._latest) else 120

    def _hang(self) -> None:
        if self._hangs and not self.hangs_in_threads:
            time.sleep(3600)

    def allocate(self, size: int, **options: Any) -> Any:
        """Stand for Arrow's allocator, whose lock another thread held at the fork."""
        if self._hangs:
            time.sleep(3600)
        return ALLOCATE(size, **options)


HANGING = HangingForks()


@pytest.fixture
def hanging(monkeypatch):
    monkeypatch.setattr(loader_module, "START_SEC", loader_module.START_SEC)
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)  # how long torch waits for the hung
    HANGING.is_used = True
    HANGING.forks = 0
    yield HANGING
    HANGING.is_used = False
    HANGING.left = 0


@pairwise(most=3, persistent=[False, True], forks=[1, 2, 3])
def test_workers_that_hang_at_their_fork_are_started_again(tmp_path, hanging, persistent, forks):
    rows = write_dataset(tmp_path)
    loader, dataset = open_loader(
        tmp_path, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
    )
    whole = all_rows_of(loader)
    loader, dataset = open_loader(
        tmp_path, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
    )
    hanging.left = forks
    batches = iter(loader)
    first = next(batches)["row"].tolist()
    dataset.load_state_dict(dataset.state_dict())
    assert first + all_rows_of(loader) == whole
    assert sorted(whole) == list(range(rows))
    assert hanging.left == 0


def test_a_worker_whose_new_threads_hang_in_arrows_allocator_is_started_again(tmp_path, hanging, monkeypatch):
    rows = write_dataset(tmp_path)
    monkeypatch.setattr(hanging, "hangs_in_threads", True)
    monkeypatch.setattr(pa, "allocate_buffer", hanging.allocate)
    loader, _ = open_loader(tmp_path, num_workers=2, multiprocessing_context="fork")
    hanging.left = 1
    batches = iter(loader)
    assert hanging.forks == 4  # two workers, of which one hung, and then both again
    assert sorted(all_rows_of(batches)) == list(range(rows))


def hold_for_ever(condition: Any, is_held: Any) -> None:
    with condition:
        is_held.set()
        time.sleep(3600)


def test_a_worker_that_is_killed_while_it_holds_the_lock_of_torchs_event_is_named(tmp_path, monkeypatch):
    """Workers take it for each message. The training process waited for the lock of a killed one without end."""
    monkeypatch.setattr(iterator_module, "END_SEC", 1.0)
    rows = write_dataset(tmp_path)
    loader, dataset = open_loader(tmp_path, num_workers=2, batch_size=3, multiprocessing_context="fork")
    batches = iter(loader)
    seen = next(batches)["row"].tolist()
    answers = loader._answers()
    context = torch.multiprocessing.get_context("fork")
    is_held = context.Event()
    event = answers._workers_done_event
    holder = context.Process(target=hold_for_ever, args=(getattr(event, "_event", event)._cond, is_held))
    holder.start()
    assert is_held.wait(60)
    holder.kill()
    holder.join()
    answers.workers[1].kill()
    with pytest.raises(WorkerError, match="killed by signal 9"):
        seen.extend(row for batch in batches for row in batch["row"].tolist())
    del batches, answers, event
    dataset.load_state_dict(dataset.state_dict())
    assert sorted(seen + all_rows_of(loader)) == list(range(rows))


def test_workers_that_always_hang_are_an_error_that_says_what_to_do(tmp_path, hanging):
    write_dataset(tmp_path)
    loader, dataset = open_loader(tmp_path, num_workers=1, multiprocessing_context="fork")
    hanging.left = 1000
    with pytest.raises(RuntimeError, match=r"hung at their start, 3 times.*multiprocessing_context='forkserver'"):
        iter(loader)
    assert dataset.state_dict()["batches_delivered"] == 0


def test_an_iterator_that_was_replaced_says_so_though_the_new_one_failed(tmp_path, hanging):
    write_dataset(tmp_path)
    loader, dataset = open_loader(tmp_path, num_workers=1, multiprocessing_context="fork", persistent_workers=False)
    first = iter(loader)
    next(first)
    hanging.left = 1000
    with pytest.raises(RuntimeError, match="hung at their start"):
        iter(loader)
    with pytest.raises(IterationEndedError, match="ended by a later iter"):
        next(first)
    assert dataset.state_dict()["batches_delivered"] == 0  # the pass that was to begin


def test_a_worker_that_dies_at_its_start_is_torchs_error_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(loader_module, "START_SEC", 1e6)  # a wait for it would take too long
    write_dataset(tmp_path)
    loader, _ = open_loader(tmp_path, num_workers=2, multiprocessing_context="fork", worker_init_fn=die)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        all_rows_of(loader)


def die(worker: int) -> None:
    if worker:
        os._exit(3)


@pytest.mark.parametrize("start", ["forkserver", pytest.param("spawn", marks=pytest.mark.soak)])
def test_a_worker_that_is_not_forked_is_sent_the_footers_of_its_own_files_once(tmp_path, monkeypatch, start):
    write_dataset(tmp_path, ((30, 10),) * 12)

    def epochs(start: str) -> list[list[list[int]]]:
        loader, dataset = open_loader(tmp_path, num_workers=2, shuffle=True, multiprocessing_context=start)
        found = []
        for epoch in range(3):
            dataset.set_epoch(epoch)
            found.append(batches_of(loader))
        return found

    expected = epochs("fork")
    sent: list[tuple[int, Sequence[Assignment]]] = []
    send = AssignmentQueue.send
    monkeypatch.setattr(
        AssignmentQueue, "send", lambda assignments, one: (sent.append((id(assignments), one)), send(assignments, one))
    )
    assert epochs(start) == expected
    footers = {file.name: file.read_bytes()[-100:] for file in tmp_path.iterdir()}
    of_worker: dict[int, list[str]] = {}
    for assignments, [assignment] in sent:
        known = of_worker.setdefault(assignments, [])
        known.extend(assignment.footers)
        slices = [
            shard_slice
            for stream_assignment in assignment.stream_assignments
            for shard_slice in stream_assignment.slices
        ]
        assert {split.path for shard_slice in slices for split in shard_slice.shard.splits} <= set(known)
        assert all(content.endswith(footers[path]) for path, content in assignment.footers.items())
    assert len(of_worker) == 2
    assert all(len(known) == len(set(known)) for known in of_worker.values())
    _, dataset = open_loader(tmp_path)
    with dataset.without_footers():
        content = pickle.dumps(dataset)
    assert not any(end in content for end in footers.values())
    assert any(end in pickle.dumps(dataset) for end in footers.values())


@pytest.mark.parametrize("epoch", [0, 1])
def test_workers_that_wait_for_their_assignment_end_by_themselves_on_an_interrupt(tmp_path, monkeypatch, epoch):
    """They were waited for, and killed after `END_SEC`: until then Ctrl-C took no effect."""
    monkeypatch.setattr(iterator_module, "END_SEC", 20.0)
    rows = write_dataset(tmp_path)
    context = torch.multiprocessing.get_context("fork")
    waiting = context.Semaphore(0)
    receive, kill, begin = AssignmentQueue.receive, WorkerIterator.kill, StructuredDataset.begin_iteration
    ended: list[bool] = []

    def receive_late(assignments: AssignmentQueue, number: int) -> Sequence[Assignment]:
        if number > epoch:
            waiting.release()
        return receive(assignments, number)

    def interrupt(_dataset: StructuredDataset) -> Any:
        for _ in range(2):
            assert waiting.acquire(timeout=60)
        raise KeyboardInterrupt

    def note_and_kill(answers: WorkerIterator) -> None:
        ended.extend(map(has_ended, answers.workers))
        kill(answers)

    monkeypatch.setattr(AssignmentQueue, "receive", receive_late)
    monkeypatch.setattr(WorkerIterator, "kill", note_and_kill)
    loader, _ = open_loader(tmp_path, num_workers=2, multiprocessing_context=context)
    for _ in range(epoch):
        all_rows_of(loader)
    monkeypatch.setattr(StructuredDataset, "begin_iteration", interrupt)
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert ended == [True, True]
    monkeypatch.setattr(StructuredDataset, "begin_iteration", begin)
    assert sorted(all_rows_of(loader)) == list(range(rows))
