"""Processes: finding those below one, sampling their memory, ending them. Linux only, through /proc."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Self

from benchmarks.contenders import harness

__all__ = ["Memory", "MemorySampler", "adopt_orphans", "descendants", "end_all", "memory_of"]

PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory; a page that several processes map counts in equal parts for each of them.

    Attributes:
        pss: All of it, including pages of mapped files.
        anonymous: Without pages of files: the heap and shared memory.
    """

    pss: int = 0
    anonymous: int = 0

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.pss + other.pss, self.anonymous + other.anonymous)

    def peak(self, other: Memory) -> Memory:
        """Return the greater of each figure."""
        return Memory(max(self.pss, other.pss), max(self.anonymous, other.anonymous))


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, so that `end_all` finds them."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def descendants(pid: int) -> list[int]:
    """Return the processes below a process, without itself."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                status = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
                children.setdefault(int(status.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def memory_of(pid: int) -> Memory:
    """Return the memory of a process; zero if it has ended."""
    try:
        return Memory(*harness.memory_of(pid))
    except (OSError, KeyError):  # a process that is ending may have a file without lines
        return Memory()


def end_all(keep: frozenset[int] = frozenset()) -> None:
    """Kill every process below this one, except those to keep and the processes below them."""
    kept = set(keep).union(*(descendants(pid) for pid in keep))
    for _ in range(50):
        left = [pid for pid in descendants(os.getpid()) if pid not in kept]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


class MemorySampler:
    """Context manager that samples, in a thread, the peak memory of a process and all below it.

    Reading smaps_rollup stops a process for a moment, so timed runs are not sampled.
    """

    def __init__(self, pid: int, interval_s: float = 0.02) -> None:
        self.peak = Memory()
        self._pid = pid
        self._interval_s = interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.is_set():
            now = sum(map(memory_of, [self._pid, *descendants(self._pid)]), Memory())
            self.peak = self.peak.peak(now)
            self._over.wait(self._interval_s)
