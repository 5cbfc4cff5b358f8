"""Processes: their tree, their memory, and their end. Linux only, by /proc."""

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

__all__ = ["Memory", "MemorySampler", "adopt_orphans", "descendants", "end_all", "memory_of"]

PR_SET_CHILD_SUBREAPER = 36
KIB = 1024


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory, each page counted by its share among the processes that map it.

    Attributes:
        pss: All of it, the pages of mapped files included.
        anonymous: What is no file's: the heap and shared memory.
    """

    pss: int = 0
    anonymous: int = 0

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.pss + other.pss, self.anonymous + other.anonymous)

    def peak(self, other: Memory) -> Memory:
        """Return the greater of both, figure by figure."""
        return Memory(max(self.pss, other.pss), max(self.anonymous, other.anonymous))


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none gets lost."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def descendants(pid: int) -> list[int]:
    """Return the processes below one, itself left out."""
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
    """Return what a process takes now; nothing if it has ended."""
    figures: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
            name, value, *_ = line.split()
            figures[name] = int(value) * KIB
    return Memory(figures.get("Pss:", 0), figures.get("Pss_Anon:", 0) + figures.get("Pss_Shmem:", 0))


def end_all(keep: frozenset[int] = frozenset()) -> None:
    """Kill every process below this one, by its id, but those to keep and what is below them."""
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
    """Watches the peak memory of a process and all below it, from a thread, until it is left.

    Reading smaps_rollup halts a process for a moment, so runs that are timed are not watched.
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
