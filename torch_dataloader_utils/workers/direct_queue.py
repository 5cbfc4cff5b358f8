"""A queue between processes whose small messages are written by the thread that puts them."""

from __future__ import annotations

import copy
import select
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch._utils import ExceptionWrapper

from torch_dataloader_utils.workers.lifecycle import interrupt_later

HEADER_BYTES = 4
"""What `multiprocessing` writes before each message: its length."""

LOCK_SEC = 1.0
"""How long to wait for the other processes that write. A write takes microseconds, unless it was killed halfway."""


class DirectQueue(Queue):  # type: ignore[type-arg]
    """A queue of `multiprocessing` without its thread, as long as messages are small and the pipe has room.

    The thread of a queue needs Python's lock just when the thread that has put something goes on. Where all processors
    are busy, each message made the training process, and each worker, wait for half a millisecond.

    A small message is written at once, whole, and without a wait: a write of up to ``PIPE_BUF`` bytes is atomic
    (pipe(7)). What is larger, or finds the pipe full, goes through the thread, and so does everything after it: the
    order stays.
    """

    # What the base has, which its types leave out.
    _thread: Any
    _wlock: Any
    _sem: Any
    _writer: Any

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:  # noqa: FBT001, FBT002 - its base's
        """Put a message, as the base does."""
        obj = _sendable(obj)
        with interrupt_later():  # a Ctrl-C that comes while the lock is taken would leave it taken
            is_written = self._is_written(obj)
        if not is_written:
            super().put(obj, block, timeout)

    def _is_written(self, obj: Any) -> bool:
        """Write a message unless the thread has to do it, and return whether it was written."""
        if self._thread is not None or not hasattr(select, "poll"):
            return False
        content = ForkingPickler.dumps(obj)
        if HEADER_BYTES + len(content) > select.PIPE_BUF or not self._wlock.acquire(timeout=LOCK_SEC):
            return False
        try:
            if not _has_room(self._writer.fileno()) or not self._sem.acquire(block=False):
                return False
            self._writer.send_bytes(content)
        finally:
            self._wlock.release()
        return True


def _sendable(message: Any) -> Any:
    """Return a message, with an error in it that can be pickled."""
    if isinstance(message, tuple) and isinstance(error := message[-1], ExceptionWrapper):
        return (*message[:-1], sendable(error))
    return message


def sendable(error: ExceptionWrapper) -> ExceptionWrapper:
    """Return an error; one whose class cannot be pickled as a RuntimeError of the same text.

    Libraries make classes of errors at run time, and functions have local ones. To pickle one ended the worker, and
    nothing told what had been raised.
    """
    try:
        ForkingPickler.dumps(error)
    except Exception:  # noqa: BLE001 - pickling calls code of the class
        known = copy.copy(error)
        known.exc_type = RuntimeError
        return known
    return error


def _has_room(pipe: int) -> bool:
    """Whether a pipe takes a small message at once."""
    poll = select.poll()
    poll.register(pipe, select.POLLOUT)
    return any(event & select.POLLOUT for _, event in poll.poll(0))


class DirectContext:
    """A context of multiprocessing, or a module with the same functions, whose queues are direct."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Queue(self) -> DirectQueue:  # noqa: N802 - multiprocessing's name
        """Return a new queue."""
        return DirectQueue(ctx=self._context.get_context())


class LoaderWithContext:
    """A loader as torch is to see it while it starts workers: with another context of multiprocessing."""

    def __init__(self, loader: Any, context: DirectContext) -> None:
        self._loader = loader
        self.multiprocessing_context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
