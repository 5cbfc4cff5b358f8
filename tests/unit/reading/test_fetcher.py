"""Parts of one request: received by one thread, in order, and not once the fetcher is closed."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from typing import Any

import pytest

from torch_dataloader_utils.reading.row_groups.fetcher import Fetcher

SECONDS = 60.0
PARTS = 6


class Parts:
    """A storage, and the layout of its only file, whose row groups have 10 bytes each."""

    request_size = None

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self.threads: set[str] = set()
        self.receives, self.goes_on = threading.Event(), threading.Event()
        self.fails_to_begin = False

    def maps(self, _: Any) -> bool:
        return False

    def opened_at_once(self, _: Any) -> object:
        return object()

    def ranges(self, number: int) -> list[tuple[int, int]]:
        return [(10 * number, 10 * number + 10)]

    def stream(self, _: object, start: int, stop: int) -> Parts:
        assert (start, stop) == (0, 10 * PARTS)
        return self

    def begin(self, _: object, start: int, stop: int) -> None:
        self._note("begin", start, stop)
        if self.fails_to_begin:
            raise OSError("no answer")

    def receive(self, _: object, start: int, stop: int, name: Any) -> bytes:
        assert name() == f"row group {start // 10}"
        self.receives.set()
        assert self.goes_on.wait(SECONDS)
        self._note("receive", start, stop)
        return bytes([start])

    def close(self) -> None:
        self.done.append(("close", 0))

    def _note(self, what: str, start: int, stop: int) -> None:
        assert stop == start + 10
        self.done.append((what, start // 10))
        self.threads.add(threading.current_thread().name)


@pytest.fixture
def storage() -> Parts:
    return Parts()


def fetcher_of(storage: Any) -> Fetcher:
    return Fetcher(storage, {"a": storage}, lambda _: storage, lambda _, number: f"row group {number}")


def request_all(fetcher: Fetcher, count: int = PARTS) -> None:
    for number in range(count):
        fetcher.request("a", number, range(number + 1, PARTS))


@pytest.mark.parametrize("prepared", ["not", "begun", "in vain"])
def test_the_parts_of_a_request_are_received_in_order_by_one_thread(storage, prepared):
    fetcher = fetcher_of(storage)
    storage.fails_to_begin = prepared == "in vain"
    if prepared != "not":
        fetcher.prepare("a", range(PARTS))
    request_all(fetcher)
    storage.goes_on.set()
    parts = [list(fetcher.take("a", number)) for number in range(PARTS)]
    fetcher.close()
    assert parts == [[(10 * number, bytes([10 * number]))] for number in range(PARTS)]
    assert storage.done == [("begin", 0)] * (prepared != "not") + [("receive", number) for number in range(PARTS)]
    assert len(storage.threads) == 1


def test_a_fetcher_that_is_closed_receives_no_other_part_and_leaves_nobody_waiting(storage):
    fetcher = fetcher_of(storage)
    request_all(fetcher)
    assert storage.receives.wait(SECONDS)
    closing = threading.Thread(target=fetcher.close)
    closing.start()
    with pytest.raises(CancelledError):
        list(fetcher.take("a", 1))
    storage.goes_on.set()
    closing.join()
    assert list(fetcher.take("a", 0)) == [(0, bytes([0]))]
    for number in range(2, PARTS):
        with pytest.raises(CancelledError):
            list(fetcher.take("a", number))
    assert storage.done == [("receive", 0)]


def test_a_request_that_is_cut_is_closed_once_what_is_requested_of_it_was_received(storage):
    fetcher = fetcher_of(storage)
    request_all(fetcher, 2)
    fetcher.cut("a", 2)
    storage.goes_on.set()
    assert [list(fetcher.take("a", number)) for number in range(2)] == [[(0, bytes([0]))], [(10, bytes([10]))]]
    fetcher.close()
    assert storage.done == [("receive", 0), ("receive", 1), ("close", 0)]
