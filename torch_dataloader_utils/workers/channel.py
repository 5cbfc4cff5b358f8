"""How a worker is connected with the training process: assignments one way, batches in shared memory the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_dataloader_utils.planning.assignment import Assignment
from torch_dataloader_utils.workers.shared_memory import SharedMemoryPool, SharedPage


class AssignmentQueue:
    """Sends one worker process the assignment of each iteration.

    All that torch tells a persistent worker is that a new iteration starts, not which one. So both sides count: the
    n-th iteration of a worker belongs to the n-th assignment. If an iteration is abandoned before the worker gets to
    it, the worker skips its assignment. The context is that of multiprocessing, or a module with the same functions.
    """

    def __init__(self, context: Any) -> None:
        self._queue = context.Queue()
        # The training process must not wait at its exit for a worker that died before it read its assignment.
        self._queue.cancel_join_thread()
        self._sent = 0
        self._started = 0

    def send(self, parts: Sequence[Assignment]) -> None:
        """Send the assignments of the next iteration, one for each part of it."""
        self._sent += 1
        self._queue.put((self._sent, parts))

    def start_iteration(self) -> int:
        """Count one more iteration, in the worker, and return its number for `receive`.

        This is not a part of `receive`, because torch starts iterations that it never reads from: they count, too.
        """
        self._started += 1
        return self._started

    def receive(self, number: int) -> Sequence[Assignment]:
        """Wait, in the worker, for the assignments of an iteration. There are none if the worker is to end."""
        while True:
            sent, parts = self._queue.get()
            if sent == number:
                return parts  # type: ignore[no-any-return]

    def end(self) -> None:
        """Let the worker end if it waits for the assignments of an iteration for which none were sent."""
        self.send(())

    def close(self) -> None:
        """Close the queue."""
        self._queue.close()


@dataclass(frozen=True, slots=True)
class WorkerChannel:
    """Everything that connects a worker with the training process.

    The pool is None if the system has no such shared memory, and so is the page, on which the worker notes what it
    reads. `known` has the paths of the files whose footers the
    worker was sent.
    """

    assignments: AssignmentQueue
    pool: SharedMemoryPool | None
    page: SharedPage | None
    known: set[str] = field(default_factory=set)

    def send(self, parts: Sequence[Assignment]) -> None:
        """Send the assignments of the next iteration, once every message of the one before has arrived."""
        self.known.update(parts[0].footers)
        if self.pool is not None:
            self.pool.free_unheld()
        self.assignments.send(parts)

    @property
    def reading(self) -> str:
        """What the worker reads or has read, as it noted."""
        return "" if self.page is None else self.page.read_text() or "nothing read yet"

    @property
    def has_read(self) -> bool:
        """Whether the worker has noted that it read something."""
        return self.page is not None and bool(self.page.read_text())

    def close(self) -> None:
        """Close the queue and the shared memory, in the training process; batches in use keep their memory."""
        self.assignments.close()
        if self.pool is not None:
            self.pool.close()
