"""How many files are open, and how many are described, at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pyarrow as pa

from torch_dataloader_utils.storage.filesystem import Storage

T = TypeVar("T")
U = TypeVar("U")

OPEN_FILES = 16
"""How many files a reader keeps open."""

FOOTER_THREADS = 32
"""How many files are described at once if their storage is slow to answer."""

FIRST_FOOTERS = 5
FOOTERS_IN_A_ROW = 50
"""How many footers tell how long one takes: the first ones, and later ones."""

QUICK_SEC = 0.0005
"""If the median of some footers takes longer than this, they wait for their storage."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise the KeyboardInterrupt where Python's own locks raise another error for it.

    A `threading.Condition`, on which the start of a thread and each `Future` wait, releases its lock twice if Ctrl-C
    comes just after it has begun to wait: then it raises "cannot release un-acquired lock".
    """
    try:
        yield
    except RuntimeError as error:
        if hides_interrupt(error):
            raise KeyboardInterrupt from None
        raise


def hides_interrupt(error: BaseException) -> bool:
    """Whether a lock raised an error in place of a KeyboardInterrupt: see `interruptible`."""
    return isinstance(error, RuntimeError) and isinstance(error.__context__, KeyboardInterrupt) and "lock" in str(error)


def read_each(read: Callable[[T], U], files: Sequence[T], storage: Storage) -> Iterator[U]:
    """Read footers one by one as long as a local storage answers at once: threads would only slow one another down."""
    start = 0
    in_a_row = storage.is_local
    while in_a_row and start < len(files):
        seconds = []
        stop = start + (FOOTERS_IN_A_ROW if start else FIRST_FOOTERS)
        for file in files[start:stop]:
            began = time.perf_counter()
            yield read(file)
            seconds.append(time.perf_counter() - began)
        in_a_row = statistics.median(seconds) < QUICK_SEC
        start = stop
    if start < len(files):
        with interruptible(), ThreadPoolExecutor(FOOTER_THREADS, thread_name_prefix="footers") as threads:
            yield from threads.map(read, files[start:])


def read_concurrently(action: Callable[[T], U], items: Sequence[T], storage: Storage) -> Iterator[U]:
    """Do something slow with many files: at once with as many as there are processors, or as a slow storage takes."""
    if len(items) <= 1:
        yield from map(action, items)
        return
    count = min(pa.cpu_count(), FOOTER_THREADS) if storage.is_local else FOOTER_THREADS
    with interruptible(), ThreadPoolExecutor(count, thread_name_prefix="footers") as threads:
        try:
            yield from threads.map(action, items)
        finally:
            threads.shutdown(cancel_futures=True)
