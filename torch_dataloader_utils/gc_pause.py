"""A pause of Python's garbage collector while many objects are made that stay.

The collector runs whenever so many objects more than before are alive, and looks at all of them. Where files or row
groups are listed by the hundred thousand, that takes as long as making the list, and finds nothing. Later it would find
nothing either. So where many objects were made in a pause, they count as old at its end.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MANY_OBJECTS = 10_000
"""Of so many new ones, the next collections of young objects would take milliseconds."""

_lock = threading.Lock()
_pauses = 0
_was_enabled = False
_hidings = 0
_has_frozen = False


def without_gc(function: Callable[P, T]) -> Callable[P, T]:
    """Let the garbage collector of this process rest while a function runs. Threads and calls within may overlap.

    If many objects are new at the end, all objects of the process count as old then: only a whole collection looks at
    them. Where the program has frozen objects itself, they stay as young as they are.
    """

    @functools.wraps(function)
    def paused(*args: P.args, **kwargs: P.kwargs) -> T:
        _begin()
        try:
            return function(*args, **kwargs)
        finally:
            _end()

    return paused


@contextlib.contextmanager
def hidden_from_forks() -> Iterator[None]:
    """Let the garbage collector of a process that is forked meanwhile leave alone what is there now.

    It would find nothing, and it writes into each object that it looks at: each worker would get a copy of its own of
    all files and row groups (https://docs.python.org/3/library/gc.html#gc.freeze). In this process all of it counts as
    old then. Where the program has frozen objects itself, nothing is done. Threads may overlap.
    """
    global _hidings, _has_frozen  # noqa: PLW0603 - what is frozen is so for the process, too
    with _lock:
        if _hidings == 0:
            _has_frozen = gc.get_freeze_count() == 0
            if _has_frozen:
                gc.freeze()
        _hidings += 1
    try:
        yield
    finally:
        with _lock:
            _hidings -= 1
            if _hidings == 0 and _has_frozen:
                gc.unfreeze()


def _begin() -> None:
    global _pauses, _was_enabled  # noqa: PLW0603 - the collector is one for the process, too
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1


def _end() -> None:
    global _pauses  # noqa: PLW0603
    with _lock:
        if _pauses:  # else a fork has ended it
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                if gc.get_count()[0] >= MANY_OBJECTS and gc.get_freeze_count() == 0:
                    gc.freeze()  # and so all of it counts as old
                    gc.unfreeze()
                gc.enable()


def _end_all() -> None:
    """End the pauses in a forked process, where the threads that began them are gone."""
    global _lock, _pauses, _hidings  # noqa: PLW0603
    _lock = threading.Lock()
    _hidings = 0
    if _pauses and _was_enabled:
        gc.enable()
    _pauses = 0


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_end_all)
