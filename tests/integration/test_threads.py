"""A thread that waits for a batch of an iterator while another one takes the progress over, or asks it as well."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs.processes import wait_until_none
from support import DEFAULT_FILES, all_rows_of, open_loader, rows_of, write_dataset
from typing_extensions import Self

from torch_dataloader_utils import IterationEndedError, StructuredDataLoader, to_device
from torch_dataloader_utils.loader.iteration import Iteration
from torch_dataloader_utils.workers.lifecycle import has_ended

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

ROWS = sum(rows for rows, _ in DEFAULT_FILES)

WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {"num_workers": 0},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
    "new workers": {"num_workers": 2, "persistent_workers": False},
}
CALLS: dict[str, Callable[[StructuredDataLoader], Any]] = {
    "iter": iter,
    "set_epoch": lambda loader: loader.set_epoch(1),
    "load_state_dict": lambda loader: loader.load_state_dict(loader.state_dict()),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    write_dataset(directory)
    return directory


class Waiting:
    """A thread that takes batches, and is held where it fetches one until it is let go.

    Attributes:
        rows: The rows of the batches that it has got.
        error: What it got in place of a batch.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self.rows: list[int] = []
        self.error: Exception | None = None
        self.fails = False
        self._batches = batches
        self._is_held, self._may_go = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._take, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_held.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def let_go(self) -> None:
        """Let the thread go on, and wait until it has ended."""
        self._may_go.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def hold(self) -> None:
        """Hold this thread if it is the one that waits."""
        if threading.current_thread() is self._thread:
            self._is_held.set()
            self._may_go.wait(60)
            if self.fails:
                raise OSError("made up")

    def _take(self) -> None:
        try:
            for batch in self._batches:
                self.rows += rows_of(batch)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.error = error
        del self._batches


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterator[Any]], Waiting]:
    """Return what makes a thread that takes the batches of an iterator and is held in its first call."""
    threads: list[Waiting] = []
    contents = Iteration.contents

    def held_contents(iteration: Iteration, read: Any) -> Iterator[Any]:
        return each(contents(iteration, read))

    def each(made: Iterator[Any]) -> Iterator[Any]:
        while True:
            for thread in threads:
                thread.hold()
            content = next(made, None)
            if content is None:
                return
            yield content

    def hold(batches: Iterator[Any]) -> Waiting:
        threads.append(Waiting(batches))
        return threads[-1]

    monkeypatch.setattr(Iteration, "contents", held_contents)
    return hold


def workers_of(loader: StructuredDataLoader) -> list[Any]:
    answers = None if loader._answers is None else loader._answers()
    return [] if answers is None else list(answers.workers)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_new_iterator_delivers_every_row_while_a_thread_still_waits_in_the_old_one(path, held, workers):
    """They shared the workers: the thread took messages of the new iterator, which waited for them without end."""
    loader, _ = open_loader(path, **WORKERS[workers])
    with held(iter(loader)) as thread:
        before = workers_of(loader)
        batches = iter(loader)
        assert not {worker.pid for worker in before} & {worker.pid for worker in workers_of(loader)}
        rows = rows_of(next(batches))
        thread.let_go()
        rows += all_rows_of(batches)
    assert sorted(rows) == list(range(ROWS))
    assert isinstance(thread.error, IterationEndedError)
    assert not thread.rows
    assert not wait_until_none(lambda: [worker.pid for worker in before if not has_ended(worker)])
    pids = [worker.pid for worker in workers_of(loader)]
    assert sorted(all_rows_of(loader)) == list(range(ROWS))
    assert workers != "persistent workers" or pids == [worker.pid for worker in workers_of(loader)]


@pytest.mark.parametrize("workers", WORKERS)
def test_an_error_in_a_thread_that_waits_in_an_old_iterator_does_not_touch_the_new_one(path, held, workers):
    """It ended the workers of the new one, which told that one had exited unexpectedly."""
    loader, _ = open_loader(path, **WORKERS[workers])
    with held(iter(loader)) as thread:
        batches = iter(loader)
        rows = rows_of(next(batches))
        thread.fails = True
        thread.let_go()
        rows += all_rows_of(batches)
    assert sorted(rows) == list(range(ROWS))
    assert isinstance(thread.error, IterationEndedError)


@pytest.mark.parametrize("workers", ["no workers", "persistent workers"])
@pytest.mark.parametrize("call", CALLS)
def test_a_thread_gets_no_batch_that_arrives_after_a_call_took_the_progress_over(path, held, call, workers):
    loader, _ = open_loader(path, **WORKERS[workers])
    with held(iter(loader)) as thread:
        kept = CALLS[call](loader)
        thread.let_go()
        assert isinstance(thread.error, IterationEndedError)
        assert f"ended by a later {call}:" in str(thread.error)
        assert not thread.rows
        assert sorted(all_rows_of(kept or loader)) == list(range(ROWS))


@pytest.mark.parametrize("workers", ["no workers", "persistent workers"])
def test_a_second_thread_that_asks_an_iterator_gets_an_error_and_the_first_one_every_row(path, held, workers):
    """The second thread's error, `generator already executing`, ended the iterator."""
    loader, _ = open_loader(path, **WORKERS[workers])
    batches = iter(loader)
    with held(batches) as thread, pytest.raises(RuntimeError, match="one thread at a time"):
        next(batches)
    assert thread.error is None
    assert sorted(thread.rows) == list(range(ROWS))


def test_a_thread_whose_iterator_was_ended_starts_no_workers_for_restored_rows(path, monkeypatch):
    threads: list[Waiting] = []
    starts: list[threading.Thread] = []
    begin_restoring, start = Iteration._begin_restoring, StructuredDataLoader._ask_workers

    def held_restoring(iteration: Iteration) -> bool:
        restores = begin_restoring(iteration)
        for thread in threads:
            thread.hold()
        return restores

    def noted_start(loader: StructuredDataLoader) -> Any:
        starts.append(threading.current_thread())
        return start(loader)

    monkeypatch.setattr(Iteration, "_begin_restoring", held_restoring)
    monkeypatch.setattr(StructuredDataLoader, "_ask_workers", noted_start)
    loader, _ = open_loader(path, **WORKERS["new workers"])
    loader.skip_steps(1, 3)
    loader.restore_skipped()
    threads.append(Waiting(iter(loader)))
    with threads[0] as thread:
        loader.set_epoch(1)
        batches = iter(loader)
        thread.let_go()
        assert sorted(all_rows_of(batches)) == list(range(ROWS))
    assert 0 < len(thread.rows) < ROWS
    assert isinstance(thread.error, IterationEndedError)
    assert set(starts) == {threading.current_thread()}


def test_an_iterator_that_was_copied_ahead_to_a_device_does_not_end_as_if_the_epoch_had(path, held):
    loader, _ = open_loader(path, num_workers=2)
    with held(iter(to_device(loader, "cpu"))) as thread:
        rows = all_rows_of(to_device(loader, "cpu"))
    assert sorted(rows) == list(range(ROWS))
    assert isinstance(thread.error, IterationEndedError)
