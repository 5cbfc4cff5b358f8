"""What travels between the training process and its workers: assignments one way, batches the other."""

from __future__ import annotations

import multiprocessing
import queue
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from torch.utils.data._utils.pin_memory import pin_memory

from torch_dataloader_utils.model import Assignment
from torch_dataloader_utils.reading import Batch, StreamEnd

__all__ = ["Inbox", "Message"]

PARENT_CHECK_SEC = 5.0
"""How often a waiting worker looks whether its training process still lives."""


class Inbox:
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

    def receive(self, number: int) -> Assignment | None:
        """Wait for an iteration's assignment; None if the training process is gone."""
        parent = multiprocessing.parent_process()
        while parent is None or parent.is_alive():
            try:
                sent, assignment = self._queue.get(timeout=PARENT_CHECK_SEC)
            except queue.Empty:
                continue
            if sent == number:
                return assignment  # type: ignore[no-any-return]
        return None

    def close(self) -> None:
        """Let go of the queue."""
        self._queue.close()


@dataclass(frozen=True, slots=True)
class Message:
    """A batch or the end of a stream, marked with the iteration that asked for it."""

    iteration: int
    content: Batch | StreamEnd

    def pin_memory(self) -> Message:
        """Return the message with its batch in pinned memory; torch's loader calls this by name."""
        if isinstance(self.content, StreamEnd):
            return self
        return replace(self, content=replace(self.content, data=pin_memory(self.content.data)))  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[Any, ...]:
        """Send Arrow tables as Arrow IPC: pickling a slice of one would send all that it was cut from."""
        if isinstance(self.content, Batch) and isinstance(self.content.data, pa.Table):
            packed = replace(self.content, data=_pack(self.content.data))
            return _unpack_message, (self.iteration, packed)
        return Message, (self.iteration, self.content)


def _pack(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


def _unpack_message(iteration: int, packed: Batch) -> Message:
    with pa.ipc.open_stream(packed.data) as stream:
        return Message(iteration, replace(packed, data=stream.read_all()))
