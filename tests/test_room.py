"""MemoryBudget for what is read ahead: never exceeded, and waited for without a deadlock."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pytest
from jobs.processes import wait_until_none

from torch_dataloader_utils.reading.read_ahead import BudgetClosedError, MemoryBudget, ReadAhead

THREADS = ("read_ahead", "decode", "fetch")


def threads() -> list[str]:
    """Return the names of the threads that read, of this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREADS)]


def test_room_is_refused_where_it_would_be_exceeded_and_given_to_what_is_larger_once_nothing_is_held():
    room = MemoryBudget(10)
    assert room.take(4, wait=False)
    assert room.take(6, wait=False)
    assert not room.take(1, wait=False)
    assert room.take(0, wait=False)
    room.give_back(6)
    assert not room.take(100, wait=False)
    room.give_back(4)
    assert room.take(100, wait=False)
    assert not room.take(1, wait=False)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("size", [0, 5, 50])
def test_a_closed_room_has_none(wait, size):
    room = MemoryBudget(10)
    room.take(7)
    room.close()
    with pytest.raises(BudgetClosedError):
        room.take(size, wait=wait)


def test_closing_wakes_all_who_wait():
    room = MemoryBudget(10)
    room.take(10)
    ended = []

    def wait() -> None:
        with pytest.raises(BudgetClosedError):
            room.take(1)
        ended.append(True)

    waiting = [threading.Thread(target=wait) for _ in range(4)]
    for thread in waiting:
        thread.start()
    while not room.is_short:
        time.sleep(0.001)
    room.close()
    for thread in waiting:
        thread.join(60)
    assert len(ended) == 4


def test_threads_never_hold_more_than_the_limit_but_for_a_single_thing():
    room, lock = MemoryBudget(10), threading.Lock()
    held: list[int] = []
    excesses = []

    def work(sizes: list[int]) -> None:
        for size in sizes:
            room.take(size)
            with lock:
                held.append(size)
                if sum(held) > 10 and len(held) > 1:
                    excesses.append(list(held))
            with lock:
                held.remove(size)
            room.give_back(size)

    workers = [threading.Thread(target=work, args=([1 + (7 * n + i) % 13 for i in range(300)],)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    assert excesses == []
    assert room._held == 0


def test_a_generator_is_run_ahead_as_far_as_there_is_room_and_closed_at_the_end():
    made, ended = [], threading.Event()

    def read(room: MemoryBudget) -> Iterator[int]:
        try:
            for number in itertools.count():
                room.take(3)
                made.append(number)
                yield number
        finally:
            ended.set()

    ahead = ReadAhead(read, 10)
    wait_until_none(lambda: len(made) < 3)
    time.sleep(0.2)
    assert made == [0, 1, 2]
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    ahead.retire(3)
    time.sleep(0.2)
    assert made == [0, 1, 2]
    assert next(ahead) == 3  # what was retired is released for it
    ahead.close()
    assert ended.is_set()
    assert threads() == []
