"""The memory that a stream may fill: a budget in bytes, and leases on parts of it.

A reader takes a lease before it reads. The lease travels with the rows that it pays for: with a chunk, then with
the batches that the chunk ends in. Who delivers those batches releases it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class BudgetClosedError(Exception):
    """The budget was closed: nothing more is to be read."""


class MemoryBudget:
    """Bytes that a stream may hold in memory, read and not yet delivered. Threads may share it.

    Args:
        limit: How many. A lease that is larger is granted once nothing else is leased.

    The thread that delivers, mostly the main one, only releases leases and never waits. For it the lock is taken by
    itself: an interrupt (Ctrl-C) in the Python code of a `threading.Condition` may leave its lock taken, or released
    twice.

    Attributes:
        changed: Notified when the budget changes, for the threads that wait for leases.
        is_short: Whether a thread waits for a lease.
        on_short: Called when a thread begins to wait for a lease.
        leased: Bytes of all leases that are not released.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self.is_short = False
        self.on_short: Callable[[], None] = lambda: None
        self.leased = 0
        self._kept = 0
        self._closed = False

    def take(self, size: int) -> MemoryLease:
        """Lease some bytes; wait until the budget has them. If it is closed meanwhile, raise a BudgetClosedError."""
        with self._lock:
            while (lease := self.try_take(size)) is None:
                if not self.is_short:
                    self.is_short = True
                    self.changed.notify_all()
                    self.on_short()
                self.changed.wait()
            return lease

    def try_take(self, size: int) -> MemoryLease | None:
        """Lease some bytes, or return None where the budget does not have them. Raises as `take` does."""
        with self._lock:
            if self._closed:
                raise BudgetClosedError
            # What is kept is released only after more was read: to wait for it would be a deadlock.
            if size and self.leased > self._kept and self.leased + size > self.limit:
                return None
            self._account(size, 0)
            return MemoryLease(self, size)

    def close(self) -> None:
        """Let each thread that takes a lease, now or later, end with a BudgetClosedError.

        Leases on a closed budget need not be released.
        """
        with self._lock:
            self._closed = True
            self.changed.notify_all()

    def _account(self, leased: int, kept: int) -> None:
        """Add to what is leased and kept."""
        with self._lock:
            self.leased += leased
            self._kept += kept
            if self.is_short:
                self.is_short = False  # a thread that must still wait says so again
                self.changed.notify_all()


class MemoryLease:
    """Bytes of a budget. Its holder releases it once, or merges it into another lease; `MemoryBudget` makes it.

    A lease has one holder at a time, so it has no lock of its own.
    """

    __slots__ = ("_budget", "_is_kept", "_is_released", "size")

    def __init__(self, budget: MemoryBudget, size: int) -> None:
        self._budget = budget
        self.size = size
        self._is_kept = False
        self._is_released = False

    def resize(self, size: int) -> None:
        """Correct an estimate once the real size is known. A larger one is granted at once: it is in memory already."""
        self._require_held()
        change = size - self.size
        self.size = size
        self._budget._account(change, change if self._is_kept else 0)  # noqa: SLF001 - a lease is part of its budget

    def split(self, size: int) -> MemoryLease:
        """Return a lease of a part of the bytes, all of them at most, which this one then no longer has."""
        self._require_held()
        part = MemoryLease(self._budget, min(size, self.size))
        part._is_kept = self._is_kept
        self.size -= part.size
        return part

    def merge(self, other: MemoryLease) -> None:
        """Take over another lease's bytes, which counts as released then."""
        self._require_held()
        if other._budget is not self._budget:
            raise ValueError("leases of two budgets cannot be merged")
        other._end()
        self.size += other.size
        kept = other.size * (self._is_kept - other._is_kept)
        if kept:
            self._budget._account(0, kept)  # noqa: SLF001

    def keep(self) -> None:
        """Say that the holder reads more before it releases this lease, so that nothing waits for it."""
        self._set_kept(is_kept=True)

    def pass_on(self) -> MemoryLease:
        """Return the lease for a holder that releases it without more being read."""
        self._set_kept(is_kept=False)
        return self

    def release(self) -> None:
        """Give the bytes back. A lease that was released or merged before raises a RuntimeError."""
        self._end()
        self._budget._account(-self.size, -self.size if self._is_kept else 0)  # noqa: SLF001

    def _set_kept(self, *, is_kept: bool) -> None:
        self._require_held()
        if is_kept != self._is_kept:
            self._is_kept = is_kept
            self._budget._account(0, self.size if is_kept else -self.size)  # noqa: SLF001

    def _end(self) -> None:
        self._require_held()
        self._is_released = True

    def _require_held(self) -> None:
        if self._is_released:
            raise RuntimeError("a memory lease was used after it was released")
