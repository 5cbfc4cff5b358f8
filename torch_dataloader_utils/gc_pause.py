"""A pause of Python's garbage collector while many objects are made that stay.

The collector runs whenever so many objects more than before are alive, and looks at all of them. Where files or row
groups are listed by the hundred thousand, that takes as long as making the list, and finds next to nothing.
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
"""To look through fewer takes a millisecond."""

FEW_FROZEN = 5_000
"""Python 3.12 freezes some hundred immortal objects by itself. A program that freezes what it has imported freezes tens
of thousands."""

_lock = threading.RLock()  # a handler of a signal may come to a pause within `_begin` or `_end`
_pauses = 0
_was_enabled = False
_hidings = 0


def without_gc(function: Callable[P, T]) -> Callable[P, T]:
    """Let the garbage collector of this process rest while a function runs. Threads and calls within may overlap.

    If it was enabled before the first of them, it is enabled after the last, whatever they do themselves.
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
    """Let the garbage collector of each process that is forked meanwhile leave alone what is there at its fork.

    It would find next to nothing, and it writes into each object that it looks at: each worker would get a copy of its
    own of all files and row groups (https://docs.python.org/3/library/gc.html#gc.freeze). It is the new process that
    freezes them. In this one nothing changes. Threads may overlap.
    """
    global _hidings  # noqa: PLW0603 - every thread may fork
    with _lock:
        _hidings += 1
    try:
        yield
    finally:
        with _lock:
            if _hidings:  # else a fork has ended it
                _hidings -= 1


def count_new_as_old() -> None:
    """Have only a whole collection look at what there is, if there are many more objects than at the last collection.

    This takes no time: lists are joined. It is for once, not for each epoch. Garbage counts as old, too, and a whole
    collection comes after so many smaller ones, which are counted from 0 again. Nothing is done where the program has
    frozen objects itself.
    """
    if gc.get_count()[0] >= MANY_OBJECTS and gc.get_freeze_count() < FEW_FROZEN:
        try:
            gc.freeze()
        finally:
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
                gc.enable()


def _begin_fork() -> None:
    """In a forked process, end the pauses, whose threads are gone, and freeze what is hidden from it."""
    global _lock, _pauses, _hidings  # noqa: PLW0603
    _lock = threading.RLock()
    if _hidings:
        gc.freeze()
    _hidings = 0
    if _pauses and _was_enabled:
        gc.enable()
    _pauses = 0


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_begin_fork)
