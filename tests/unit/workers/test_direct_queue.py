"""Small messages are written by the thread that puts them; all arrive once, in the order in which they were put."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select

import pytest

from torch_dataloader_utils.workers.direct_queue import DirectContext, DirectQueue

pytestmark = pytest.mark.skipif(not hasattr(select, "poll"), reason="the system has no poll")

LARGE = b"." * select.PIPE_BUF


@pytest.fixture
def queue() -> DirectQueue:
    return DirectContext(multiprocessing).Queue()


def test_small_messages_need_no_thread(queue):
    for number in range(100):
        queue.put((number, None))
    assert queue._thread is None
    assert [queue.get(timeout=5)[0] for _ in range(100)] == list(range(100))
    assert queue.empty()


@pytest.mark.parametrize("first_large", [0, 1, 50])
def test_a_large_message_and_those_after_it_go_through_the_thread_in_order(queue, first_large):
    messages = [(number, LARGE if number >= first_large and number % 3 == 0 else b"") for number in range(100)]
    for message in messages:
        queue.put(message)
    assert queue._thread is not None
    assert [queue.get(timeout=5) for _ in messages] == messages


def test_a_full_pipe_makes_nobody_wait(queue):
    for number in range(20_000):
        queue.put(number)
    assert queue._thread is not None
    assert [queue.get(timeout=5) for _ in range(20_000)] == list(range(20_000))


def test_a_writer_that_was_killed_halfway_makes_nobody_wait_without_end(queue, monkeypatch):
    monkeypatch.setattr("torch_dataloader_utils.workers.direct_queue.LOCK_SEC", 0.01)
    queue._wlock.acquire()
    queue.put("message")
    assert queue.empty()
    queue._wlock.release()
    assert queue.get(timeout=5) == "message"


def _put(queue: DirectQueue, first: int) -> None:
    for number in range(first, first + 500):
        queue.put((os.getpid(), number))


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.soak)])
def test_several_processes_write_each_in_order(method):
    context = multiprocessing.get_context(method)
    queue = DirectContext(context).Queue()
    writers = [context.Process(target=_put, args=(queue, 1000 * number)) for number in range(2)]
    for writer in writers:
        writer.start()
    arrived = [queue.get(timeout=60) for _ in range(1000)]
    for number, writer in enumerate(writers):
        writer.join()
        assert [value for pid, value in arrived if pid == writer.pid] == list(range(1000 * number, 1000 * number + 500))


def test_what_cannot_be_pickled_is_an_error_of_put(queue):
    with pytest.raises((pickle.PicklingError, AttributeError)):
        queue.put(lambda: None)
