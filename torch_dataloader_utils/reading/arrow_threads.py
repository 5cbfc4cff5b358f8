"""Threads that allocate Arrow memory and free it, and processes that are forked, or that end, meanwhile.

Arrow's allocator (mimalloc) has a lock that a thread takes when it allocates for the first time. In a process that is
forked at that moment nobody releases it, and every new thread waits for it without end.

Arrow's own threads free what they have read with after the table is there. To free an object of Python they take
Python's lock. If the interpreter is about to end, Python ends the thread instead, in the middle of a destructor of C++,
and so the process is aborted.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from typing import Any
from weakref import ReferenceType

import pyarrow as pa

RELEASE_SEC = 0.2
"""How long Arrow's threads are waited for, at most. They take less than a millisecond, unless an error refers to the
same objects."""

PAUSE_SEC = 0.0002

_beginning = threading.Lock()
"""Held while a thread of this package allocates for the first time, and by the thread that forks this process."""


def allocate_first() -> None:
    """Allocate Arrow memory for the first time in this thread, at a moment when no other thread forks the process."""
    with _beginning:
        pa.allocate_buffer(1)


def allocate_in_new_thread(seconds: float | None = None) -> bool:
    """Return whether a new thread can allocate within so many seconds; None waits without end.

    It cannot in a process that was forked while another thread, not one of this package, held the allocator's lock.
    """
    thread = threading.Thread(target=pa.allocate_buffer, args=(1,), name="allocate", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def wait_for_release(objects: Iterable[ReferenceType[Any]]) -> None:
    """Wait until Arrow's threads have freed these objects of Python, to which nothing else refers."""
    until = time.monotonic() + RELEASE_SEC
    for reference in objects:
        while reference() is not None and time.monotonic() < until:
            time.sleep(PAUSE_SEC)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_beginning.acquire, after_in_parent=_beginning.release, after_in_child=_beginning.release
    )
