"""How a worker is connected with the training process: its assignments arrive here, and its messages leave."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch_dataloader_utils.planning.assignment import Assignment
from torch_dataloader_utils.workers.message_size import MessageSizer
from torch_dataloader_utils.workers.shared_memory import SharedMemoryPool

__all__ = ["AssignmentQueue", "WorkerChannel"]


class AssignmentQueue:
    """Where one worker process finds its assignments.

    A worker that serves several iterations learns nothing from torch but that a new one begins. Each iteration has
    one assignment, in the same order, so both sides count: the n-th iteration of a worker takes the n-th assignment.
    One that was abandoned before the worker came to it is passed over.

    Args:
        context: The multiprocessing context that starts the worker, or a module like it.
    """

    def __init__(self, context: Any) -> None:
        self._queue = context.Queue()
        self._queue.cancel_join_thread()
        self._sent = 0
        self._begun = 0

    def send(self, assignment: Assignment) -> None:
        """Send the assignment of the next iteration."""
        self._sent += 1
        self._queue.put((self._sent, assignment))

    def begin(self) -> int:
        """Count one more iteration in the worker and return its number, to be handed to `receive`."""
        self._begun += 1
        return self._begun

    def receive(self, number: int) -> Assignment:
        """Wait, in the worker, for an iteration's assignment."""
        sent, assignment = self._queue.get()
        while sent != number:
            sent, assignment = self._queue.get()
        return assignment  # type: ignore[no-any-return]

    def close(self) -> None:
        """Let go of the queue."""
        self._queue.close()


@dataclass(frozen=True, slots=True)
class WorkerChannel:
    """How a worker is connected with the training process.

    Attributes:
        assignments: Where it finds its assignments.
        sizer: How many batches it puts into a message.
        pool: Shared memory to pack them into, or None where the system has none.
        known: The files whose footers were sent.
    """

    assignments: AssignmentQueue
    sizer: MessageSizer
    pool: SharedMemoryPool | None
    known: set[str] = field(default_factory=set)

    def send(self, assignment: Assignment) -> None:
        """Send the assignment of the next iteration; whatever the worker sent for another one has arrived by now."""
        self.sizer.reset()
        self.known.update(assignment.footers)
        if self.pool is not None:
            self.pool.free_all_but_held()
        self.assignments.send(assignment)

    def close(self) -> None:
        """Let go of the queue and the memory, in the training process; batches in use keep theirs."""
        self.assignments.close()
        if self.pool is not None:
            self.pool.close()
