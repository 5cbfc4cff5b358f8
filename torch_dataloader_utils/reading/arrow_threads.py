"""Threads that allocate Arrow memory, and processes that are forked meanwhile.

Arrow's allocator (mimalloc) has a lock that a thread takes when it allocates for the first time. In a process that is
forked at that moment nobody releases it, and every new thread waits for it without end.
"""

from __future__ import annotations

import os
import threading

import pyarrow as pa

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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_beginning.acquire, after_in_parent=_beginning.release, after_in_child=_beginning.release
    )
