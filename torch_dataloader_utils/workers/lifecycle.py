"""Worker processes from their start to their end.

1. torch starts a process with a copy of the dataset: by fork, forkserver or spawn.
2. `WorkerSetup` is the first that runs in it. It reports to the `StartupBarrier`, leaves signals to the training
   process, limits Arrow's threads, connects the copy with its channel, and calls the user's `worker_init_fn`.
3. The worker reads one assignment after the other, until the training process ends it: see `torch_iterator`.
4. If the training process dies, the worker ends at once: the system kills it, or a thread in it notices.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, parent_process
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import pyarrow as pa
from torch.utils.data import get_worker_info

from torch_dataloader_utils.formats.cpus import usable_cpus
from torch_dataloader_utils.reading.arrow_threads import allocate_in_new_thread
from torch_dataloader_utils.workers.channel import WorkerChannel

PARENT_CHECK_SEC = 1.0
"""How often a worker checks that its parent is still the process that started it."""

PR_SET_PDEATHSIG = 1
"""The number of Linux' prctl(2) that sets a process's "parent death signal"."""

ALIVE_CHECK_SEC = 0.1
"""How often the training process checks that a worker which has not reported yet is still alive."""

DEFERRED = (signal.SIGINT, signal.SIGTERM)
"""Signals by which people and schedulers interrupt a job."""

SHORTAGES = {
    errno.ENOSPC: "the shared memory is full, which has their semaphores and batches: make /dev/shm larger",
    errno.EMFILE: "the process may open no more files: raise its limit (ulimit -n)",
    errno.ENFILE: "the system may open no more files",
    errno.EAGAIN: "no more processes and threads may be started: raise the limit (ulimit -u; pids.max of a container)",
    errno.ENOMEM: "there is no memory left",
}
"""What the system lacks where it does not start a worker, and what to do."""


@contextlib.contextmanager
def shortage_explained() -> Iterator[None]:
    """Say of an error what workers need that the system lacks."""
    try:
        yield
    except OSError as error:
        if error.errno not in SHORTAGES:
            raise
        msg = f"workers cannot be started: {error.strerror}; {SHORTAGES[error.errno]}, or use fewer workers"
        raise OSError(error.errno, msg) from error
    except RuntimeError as error:
        if not is_refused_thread(error):
            raise
        msg = f"workers cannot be started: {error}; {SHORTAGES[errno.EAGAIN]}, or use fewer workers"
        raise OSError(errno.EAGAIN, msg) from error


def is_refused_thread(error: RuntimeError) -> bool:
    """Whether an error is Python's about a thread that the system did not start. It has no class of its own."""
    return "can't start new thread" in str(error)


class StartupBarrier:
    """Workers report here as soon as they can read, and the training process waits until all have.

    A process that is forked while another thread holds a lock may wait for that lock forever, before its first line of
    Python. ``pthread_atfork`` protects most locks, but not all: CPython up to 3.11 takes the lock of its list of
    threads in the child before it resets it, and threads of torch.distributed's backends take it whenever they call
    back into Python. torch's loader would wait for such a worker forever.

    Arrow's allocator (mimalloc) has such a lock, too, and takes it when a thread allocates for the first time. A worker
    would hang there once it decodes. So it tries that, in a thread of its own, before it reports.
    """

    def __init__(self, context: Any) -> None:
        try:
            self._reports = context.Semaphore(0)
        except OSError as error:  # the first semaphore of several: torch's queues have some, too
            advice = "they are files in /dev/shm; mount it with the right to write"
            advice = SHORTAGES.get(error.errno or 0, advice)
            msg = f"worker processes need semaphores, which the system refuses ({error.strerror}): {advice}, "
            raise OSError(error.errno, f"{msg}or use num_workers=0") from error

    def report(self) -> None:
        """Report, in a worker, that it can read."""
        self._reports.release()

    def wait_for(self, workers: Sequence[BaseProcess], seconds: float) -> bool:
        """Wait so many seconds for each next report, and return whether none of the workers hangs.

        A worker that died does not hang: torch raises an error about it.
        """
        for _ in workers:
            waited = 0.0
            while not self._reports.acquire(timeout=ALIVE_CHECK_SEC):
                waited += ALIVE_CHECK_SEC
                if any(map(has_ended, workers)):
                    return True
                if waited >= seconds:
                    return False
        return True


def has_ended(worker: BaseProcess) -> bool:
    """Whether a worker has ended, also where the program itself has waited for it, so that no status is left."""
    if worker.exitcode is None and worker.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, 0)
            return False
    return True


class WorkerSetup:
    """Runs in each worker as it starts, as torch's `worker_init_fn`, and then calls the user's, if there is one."""

    def __init__(
        self, startup: StartupBarrier, channels: list[WorkerChannel], user_worker_init_fn: Callable[[int], None] | None
    ) -> None:
        self._startup = startup
        self._channels = channels
        self._user_worker_init_fn = user_worker_init_fn
        # All workers decode at the same time: with a thread for each CPU in each of them they would compete for CPUs.
        self._decoding_threads = max(1, usable_cpus() // len(channels))
        self._is_started_in_main_thread = threading.current_thread() is threading.main_thread()

    def __call__(self, worker: int) -> None:
        """Set up the worker with this number."""
        try:
            allocate_in_new_thread()
        finally:
            self._startup.report()  # an error, too, which torch sends with the first message
        leave_signals_to_training_process()
        pa.set_cpu_count(self._decoding_threads)
        end_with_training_process(is_started_in_main_thread=self._is_started_in_main_thread)
        dataset: Any = get_worker_info().dataset  # type: ignore[union-attr]
        dataset.attach_channel(self._channels[worker])
        if self._user_worker_init_fn is not None:
            self._user_worker_init_fn(worker)


@contextlib.contextmanager
def interrupt_later() -> Iterator[None]:
    """Let signals that come meanwhile, such as a Ctrl-C, call their handlers only afterwards.

    Workers are started and ended within this. Halfway, a process that nobody knows of would be left.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: handler for number in DEFERRED if callable(handler := signal.getsignal(number))}
    came: dict[int, FrameType | None] = {}
    for number in before:
        signal.signal(number, came.setdefault)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        with contextlib.ExitStack() as calls:  # each is called, also if one before it raises
            for arrived, frame in reversed(came.items()):
                calls.callback(before[signal.Signals(arrived)], arrived, frame)


def leave_signals_to_training_process() -> None:
    """Let Ctrl-C and SIGTERM, which schedulers send to every process of a job, do nothing in this worker.

    The training process handles them, and may need batches until it has ended. A forked worker would even run the
    handler that the training process has: one that saves would write the state as it was at the fork. These are
    functions, not SIG_IGN, which programs that a `collate_fn` starts would inherit.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _do_nothing)


def _do_nothing(_number: int, _frame: Any) -> None:
    pass


def end_with_training_process(*, is_started_in_main_thread: bool) -> None:
    """Make this worker end soon after the training process does, whatever it is doing at that moment.

    torch ends the worker's loop by itself. But with a large batch in a queue that no process reads any more, the worker
    would wait at its exit for the queue's thread, which waits for a reader.

    A worker that is stopped runs no thread, so the system is asked, too, to kill it when its parent dies. Linux takes
    the end of the thread that started it for that. So it is asked only if that is the main thread, which others outlive
    in no process.
    """
    if is_started_in_main_thread and sys.platform == "linux":  # others have no prctl
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, args=(os.getppid(),), name="end_with_training_process", daemon=True).start()


def _watch(parent: int) -> None:
    """Wait until the training process ends, by whichever method it started this process, and exit.

    The sentinel is a pipe of which the training process holds the other end. It tells at once, also under forkserver,
    where the parent is the server. After a fork, other children may hold that end open, too. But then the training
    process is the parent, and its death gives this process another parent.
    """
    training_process = parent_process()
    sentinels = [] if training_process is None else [training_process.sentinel]
    while os.getppid() == parent and not connection.wait(sentinels, PARENT_CHECK_SEC):
        pass
    os._exit(1)  # not sys.exit, which ends this thread alone
