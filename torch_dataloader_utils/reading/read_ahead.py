"""A generator that runs ahead of its consumer, in a thread of its own, as far as a memory budget allows."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

from torch_dataloader_utils.formats.concurrency import interruptible
from torch_dataloader_utils.reading.arrow_threads import allocate_first
from torch_dataloader_utils.reading.memory_budget import BudgetClosedError, MemoryBudget, MemoryLease

T = TypeVar("T")

READING_THREADS = ("read_ahead", "decode", "shuffle", "fetch", "storage", "fsspecIO")
"""Names of the reading thread and of the threads that it waits for. A garbage collection may run in any of them, and
close an iterator there. None of them may then wait for the reading thread: it would wait for itself."""

JOIN_SEC = 5.0
"""How long to wait for the thread's end. Mostly it ends at once. It does not where a storage does not answer, or where
the thread needs something that the waiting thread holds."""


class ReadAhead(Iterator[T], Generic[T]):
    """Runs a generator in a thread, as far ahead as its memory budget allows.

    The thread ends with the generator, at `close`, when this object is dropped, or before the interpreter ends. In each
    case its end is waited for, but not forever.

    Args:
        read: Makes the generator, which takes memory leases before it reads. `__next__` raises what it raises.
        limit: Bytes that may be leased at once.
    """

    def __init__(self, read: Callable[[MemoryBudget], Iterator[T]], limit: int) -> None:
        self.budget = MemoryBudget(limit)
        self._queue: _Queue[T] = _Queue(self.budget)
        self._retired: list[MemoryLease] = []
        thread = threading.Thread(target=_fill, args=(self._queue, read), name="read_ahead", daemon=True)
        self.close = weakref.finalize(self, _stop, self.budget, thread, os.getpid())
        with interruptible():
            thread.start()

    def __next__(self) -> T:
        return self._queue.get(when_short=self.release)

    def retire(self, lease: MemoryLease) -> None:
        """Note the lease of batches that were delivered, to be released once the consumer asks for something else.

        Until then the consumer may still work with the last of them. It is released sooner where nothing else could be
        read otherwise.
        """
        self._retired.append(lease)

    def release(self) -> None:
        """Release the leases that are retired."""
        while self._retired:
            self._retired.pop().release()


class _Queue(Generic[T]):
    """What the thread has read and the consumer has not taken. It does not refer to the consumer, who may be dropped.

    The consumer waits for an item or for a shortage of memory, whichever comes first, so both come by one queue. Its
    `get` is one call that an interrupt (Ctrl-C) ends cleanly, which the wait for a `threading.Condition` is not.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget
        self._entries: SimpleQueue[_Item[T] | _End | None] = SimpleQueue()
        self._has_ended = False
        budget.on_short = partial(self._entries.put, None)

    def put(self, item: T) -> None:
        self._entries.put(_Item(item))

    def end(self, error: BaseException | None = None) -> None:
        self._entries.put(_End(error))

    def get(self, when_short: Callable[[], None]) -> T:
        """Wait for the next item; call `when_short` if the thread cannot read it for lack of memory."""
        while not self._has_ended:
            if self.budget.is_short and self._entries.empty():
                when_short()
            entry = self._entries.get()
            if isinstance(entry, _Item):
                return entry.item
            if isinstance(entry, _End):
                self._has_ended = True
                if entry.error is not None:
                    try:
                        raise entry.error
                    finally:
                        del entry  # the error's traceback has this frame: a cycle would keep what was read
        raise StopIteration


@dataclass(frozen=True, slots=True)
class _Item(Generic[T]):
    item: T


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


def _fill(queue: _Queue[T], read: Callable[[MemoryBudget], Iterator[T]]) -> None:
    try:
        allocate_first()
        for item in read(queue.budget):
            queue.put(item)
            del item
    except BudgetClosedError:
        queue.end(None)
    except BaseException as error:  # noqa: BLE001 - raised again in the consumer's thread
        queue.end(error)
    else:
        queue.end(None)


def _stop(budget: MemoryBudget, thread: threading.Thread, owner: int) -> None:
    if os.getpid() != owner:  # a forked copy has no thread to stop
        return
    budget.close()
    if thread.is_alive() and not threading.current_thread().name.startswith(READING_THREADS):
        thread.join(JOIN_SEC)
