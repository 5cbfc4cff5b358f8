"""What a test leaves behind: processes, and files in shared memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written to

PARENT_NOTICED_SEC = 90.0
"""Within this time every worker must have noticed that its training process is gone: it looks every second or so."""

ASK_SEC = 0.05
"""How long tests pause before they ask again what is left."""


def inherited(**more: str) -> dict[str, str]:
    """Return the environment of a process that tests start: it imports what this one does, from where this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), **more}


def _pids() -> list[str]:
    """Return the id of each process, as a text."""
    with os.scandir("/proc") as entries:
        return [entry.name for entry in entries if entry.name.isdigit()]


def _parents() -> dict[int, int]:
    """Return the parent of every living process."""
    parents = {}
    for pid in _pids():
        with contextlib.suppress(OSError):
            state, parent = _content(f"/proc/{pid}/stat").rpartition(b")")[2].split(maxsplit=2)[:2]
            if state != b"Z":
                parents[int(pid)] = int(parent)
    return parents


def _content(path: str) -> bytes:
    """Return the beginning of a file of /proc, 4 KiB at most: in a fraction of the time that a file object takes.

    Many tests look at all processes of the machine, some again and again.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


def living() -> set[int]:
    """Return the ids of all processes but those that are dead and only wait to be buried."""
    return set(_parents())


def descendants(pid: int) -> set[int]:
    """Return the ids of all living processes that a process started, and those that they did, to any depth."""
    parents = _parents()
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return set(found[1:])


def processes_with(mark: str) -> list[int]:
    """Return the ids of all living processes whose environment holds a text, also of those whose parent is gone."""
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(int(pid))
    return found


def processes_of_sessions(sessions: Collection[int | None]) -> list[int]:
    """Return the ids of all living processes of some sessions, also of those whose parent is gone."""
    found = []
    for pid in living():
        with contextlib.suppress(OSError):
            if os.getsid(pid) in sessions:
                found.append(pid)
    return found


def own_children() -> set[int]:
    """Return the processes that this one started, without multiprocessing's own servers: they stay to the end."""
    tracker: Any = resource_tracker._resource_tracker
    server: Any = forkserver._forkserver
    return descendants(os.getpid()) - {tracker._pid, server._forkserver_pid}


def mark_semaphores(tests: int) -> None:
    """Have this process and those that it forks put the tests' process id into the random names of their semaphores."""
    config: Any = multiprocessing.current_process()._config
    config["semprefix"] = f"/mp-{tests}"


def shared_memory() -> set[str]:
    """Return the names of all files in shared memory, but for semaphores that this process did not mark."""
    names = {path.name for path in SHARED_MEMORY.iterdir()}
    return {name for name in names if not name.startswith("sem.") or name.startswith(f"sem.mp-{os.getpid()}-")}


def ownerless(names: set[str]) -> set[str]:
    """Return those files in shared memory that no process outside the tests has mapped."""
    inodes = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            inodes[name] = (SHARED_MEMORY / name).stat().st_ino
    ours = {os.getpid(), *own_children()}
    held = set().union(*(mapped_shared_memory(pid) for pid in living() if pid not in ours)) if inodes else set()
    return {name for name, inode in inodes.items() if inode not in held}


def mapped_shared_memory(pid: int) -> set[int]:
    """Return the inodes: a semaphore's file is mapped under another name than the one it gets afterwards."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split()[4]) for line in lines if f"{SHARED_MEMORY}/" in line}


def wait_until_asleep(pids: Collection[int]) -> None:
    """Wait until no thread of some processes runs or wants to run, but for the thread that calls this."""

    def awake() -> list[Path]:
        found = []
        for pid in pids:
            for entry in Path(f"/proc/{pid}/task").glob("[0-9]*/stat"):
                with contextlib.suppress(OSError):
                    state = entry.read_text().rpartition(")")[2].split()[0]
                    if state != "S" and int(entry.parent.name) != threading.get_native_id():
                        found.append(entry)
        return found

    for _ in range(10):  # between two times, a thread that waits for this one has its turn
        assert not wait_until_none(awake)
        time.sleep(0.02)


def collect_garbage() -> None:
    """Run a whole garbage collection in this thread.

    `gc.collect` does nothing while another thread is at a collection, which lasts as long as the finalizers it calls.
    """
    done: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            done.append(threading.get_ident())

    gc.callbacks.append(note)
    try:
        while threading.get_ident() not in done:
            gc.collect()
            time.sleep(0.01)  # for the other thread
    finally:
        gc.callbacks.remove(note)


def wait_until_none(left: Callable[[], Any], seconds: float = PARENT_NOTICED_SEC) -> Any:
    """Ask what is left until nothing is, and return what there is after so many seconds of pauses.

    Asking takes time as well, and more on a busy machine, where all that is waited for is as slow.
    """
    for _ in range(round(seconds / ASK_SEC)):
        if not (found := left()):
            return found
        time.sleep(ASK_SEC)
    return left()


HUGE_PAGE = 2 << 20
MADV_COLLAPSE = 25
"""Not in the module mmap. Linux knows it since 6.1; an older one refuses it, which does no harm."""


def use_huge_pages() -> None:
    """Move this process's memory into huge pages, where the system can: a fork then takes a third of the time.

    A fork copies an entry for every page, and tests fork thousands of workers from processes of hundreds of MB.
    """
    advise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, *_, name = f"{line} -".split(maxsplit=5)
        first, end = (int(address, 16) for address in addresses.split("-"))
        first, end = -(-first // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if rights == "rw-p" and name.split()[0] in ("-", "[heap]") and first < end:
            advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_COLLAPSE)
