"""Reading ahead of need: a thread that reads while others work, and the budget that it may fill."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["MemoryBudget", "ReadAhead"]


T = TypeVar("T")


READING_THREADS = ("read_ahead", "decode", "mix", "fetch", "fsspecIO")
"""Threads that the reading thread is, or waits for: none of them may wait for it, when it collects garbage."""


JOIN_SEC = 5.0
"""How long to wait for the thread. As a rule it ends at once; but it may be waiting for a storage that does not answer,
or for something that whoever waits here holds."""


class MemoryBudget:
    """Bytes that a stream may hold in memory, read and not yet handed over.

    Args:
        limit: How many. Something larger finds budget once nothing else is held.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.changed = threading.Condition()
        self.is_short = False  # whether somebody waits for budget
        self._held = 0
        self._kept = 0
        self._closed = False

    def take(self, size: int, *, wait: bool = True) -> bool:
        """Take budget for some bytes.

        Args:
            size: How many.
            wait: Whether to wait until there is budget.

        Returns:
            Whether there was budget; True after waiting.

        Raises:
            BudgetClosedError: If nobody wants to read any more.
        """
        with self.changed:
            while not self._closed and size and self._held > self._kept and self._held + size > self.limit:
                if not wait:
                    return False
                self.is_short = True
                self.changed.notify_all()
                self.changed.wait()
            self.is_short = False
            if self._closed:
                raise BudgetClosedError
            self._held += size
            return True

    def give_back(self, size: int) -> None:
        """Give back budget; a negative size corrects what was taken upwards."""
        with self.changed:
            self._held -= size
            self.is_short = False  # whoever waits will say so again if this is not enough
            self.changed.notify_all()

    def keep(self, size: int) -> None:
        """Say how much of what is held nobody can give back before more is read: nobody waits for that."""
        with self.changed:
            self._kept = size

    def close(self) -> None:
        """Let whoever reads, or waits for budget, come to an end."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()


class BudgetClosedError(Exception):
    """Nobody waits for what is read any more."""


class ReadAhead(Iterator[T], Generic[T]):
    """Runs a generator in a thread, as far ahead as its budget allows.

    The thread ends, and is waited for a while, when the generator does, at `close`, when this object is dropped, and
    before the interpreter ends.

    Args:
        read: Makes the generator; it takes budget before it reads. What it raises is raised by `__next__`.
        limit: Bytes that may be held at once.
    """

    def __init__(self, read: Callable[[MemoryBudget], Iterator[T]], limit: int) -> None:
        self._shelf: _Shelf[T] = _Shelf(MemoryBudget(limit))
        self._retired = 0
        thread = threading.Thread(target=_fill, args=(self._shelf, read), name="read_ahead", daemon=True)
        self.close = weakref.finalize(self, _stop, self._shelf.budget, thread, os.getpid())
        thread.start()

    def __next__(self) -> T:
        return self._shelf.take(when_short=self.release)

    def retire(self, size: int) -> None:
        """Note bytes that nobody needs once something else has been handed over."""
        self._retired += size

    def release(self) -> None:
        """Give back the budget of what was retired."""
        if self._retired:
            self._shelf.budget.give_back(self._retired)
            self._retired = 0


class _Shelf(Generic[T]):
    """What the thread has read and nobody has taken yet. It does not know who takes it, so that he may be dropped."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget
        self.items: deque[T] = deque()
        self._ended = False
        self._error: BaseException | None = None

    def put(self, item: T) -> None:
        with self.budget.changed:
            self.items.append(item)
            self.budget.changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        with self.budget.changed:
            self._ended, self._error = True, error
            self.budget.changed.notify_all()

    def take(self, when_short: Callable[[], None]) -> T:
        """Wait for the next item; call `when_short` where it is not read because there is no budget for it."""
        with self.budget.changed:
            while not self.items:
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                if self._ended:
                    raise StopIteration
                if self.budget.is_short:
                    when_short()
                self.budget.changed.wait()
            return self.items.popleft()


def _fill(shelf: _Shelf[T], read: Callable[[MemoryBudget], Iterator[T]]) -> None:
    error: BaseException | None = None
    try:
        for item in read(shelf.budget):
            shelf.put(item)
            del item
    except BudgetClosedError:
        pass
    except BaseException as raised:  # noqa: BLE001 - raised again where the batches are taken
        error = raised
    shelf.end(error)


def _stop(budget: MemoryBudget, thread: threading.Thread, owner: int) -> None:
    if os.getpid() != owner:  # a forked copy has no thread to stop
        return
    budget.close()
    if not threading.current_thread().name.startswith(READING_THREADS):  # where a garbage collection may happen to run
        thread.join(JOIN_SEC)
