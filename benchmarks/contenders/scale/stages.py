"""Seconds and memory of what a process does, one stage after the other."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from benchmarks.contenders.harness import memory_of
from benchmarks.measure.processes import descendants

__all__ = ["Stages"]

T = TypeVar("T")

WATCHED_EVERY_S = 0.2


class Stages:
    """Measures stages.

    Attributes:
        figures: For each stage its seconds and its bytes: the most memory (PSS) that this process and those below it
            had during the stage or right after it, less what this process had at the beginning of all stages.
    """

    def __init__(self) -> None:
        self.figures: dict[str, dict[str, float]] = {}
        self._before = _memory()

    def run(self, name: str, action: Callable[[], T]) -> T:
        """Do something, measure it, and return what it returns."""
        ended, peak = threading.Event(), [0]

        def watch() -> None:
            while not ended.wait(WATCHED_EVERY_S):
                peak[0] = max(peak[0], _memory() - self._before)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        begin = time.perf_counter()
        try:
            result = action()
            seconds = time.perf_counter() - begin
        finally:
            ended.set()
            watcher.join()
        self.figures[name] = {"seconds": seconds, "bytes": max(peak[0], _memory() - self._before)}
        return result


def _memory() -> int:
    """Return the bytes of memory of this process and of those below it, each page counted by its share."""
    total = 0
    for pid in ("self", *descendants(os.getpid())):
        with contextlib.suppress(OSError, KeyError):  # it ends just now
            total += memory_of(pid)[0]
    return total
