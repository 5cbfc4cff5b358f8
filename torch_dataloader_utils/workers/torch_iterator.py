"""torch's iterator over the messages of workers: it names a worker that died or is silent, and ends every worker."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import connection, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch._C import _remove_worker_pids, _set_worker_pids
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL
from torch.utils.data._utils.worker import _IterableDatasetStopIteration
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from torch_dataloader_utils.errors import SilentWorkerWarning, WorkerError, warn_user
from torch_dataloader_utils.workers.channel import WorkerChannel
from torch_dataloader_utils.workers.direct_queue import DirectContext, LoaderWithContext
from torch_dataloader_utils.workers.lifecycle import has_ended, interrupt_later, is_refused_thread

SILENCE_SEC = 30.0
"""After how long a warning names the worker that is waited for and has sent nothing."""

CHECK_SEC = 1.0
"""How often the training process looks whether all workers are alive while it waits for one."""

END_SEC = 5.0
"""How long all workers together may take to end. Those that are left then are killed."""

EXITED = re.compile(r"DataLoader worker \(pid\(s\) (?P<pids>[\d, ]+)\) exited unexpectedly")
"""torch's message about workers that have ended."""

HINTS = {
    "SIGKILL": "a process that takes too much memory is killed so by the system",
    "SIGBUS": "a mapped file was cut short or its storage failed, or the system has no memory for a shared block",
}
"""What mostly sends a signal that ends a worker, by its name: not every system has both."""

NOT_FOUND = (
    "What a worker needs that is not forked, such as collate_fn, must be defined at the top level of a module that the "
    "worker can import"
)
"""What to do where a worker that was started by spawn or forkserver did not find a function or a class."""

_running: weakref.WeakSet[WorkerIterator] = weakref.WeakSet()

_killed_at_exit: set[int] = set()
"""The processes, this one or those that it was forked from, whose exit kills their workers."""


class WorkerIterator(_MultiProcessingDataLoaderIter):
    """torch's iterator over the messages of a loader's workers.

    torch lets each worker in turn send one message. Here the loader says from which worker it needs the next one, and
    that worker may send one more: so workers may put different numbers of batches into their messages, and none of them
    gets further ahead than `prefetch_factor` messages.

    torch has its handler of SIGCHLD raise an error in whatever line the training process is at when a worker dies:
    between the two halves of an optimizer's step, or while a checkpoint is saved. Here it raises only while the main
    thread waits for a worker; another thread that waits looks every `CHECK_SEC`. So a dead worker is always an error of
    the loader, which names it.

    Args:
        loader: The loader.
        channels: The workers' channels. Where nothing else refers to them, they go with the workers.
    """

    def __init__(self, loader: DataLoader[Any], channels: Sequence[WorkerChannel]) -> None:
        self._channels = channels
        self._owner = os.getpid()
        self._arrived: dict[int, deque[Any]] = {}
        self._awaited: int | None = None
        self._worker_pids_set = False
        self._hear()
        _running.add(self)
        _kill_all_at_exit()
        context = loader.multiprocessing_context or torch.multiprocessing
        self._start_method = context.get_start_method()
        super().__init__(LoaderWithContext(loader, DirectContext(context)))
        self._workers_done_event: Any = _DoneEvent(self._workers_done_event)
        self._unwatch()

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:  # noqa: FBT001, FBT002 - torch's own
        self._hear()
        self._awaited = None
        self._arrived = {number: deque() for number in range(loader.num_workers)}
        super()._reset(loader, first_iter)

    def receive(self, number: int) -> Any:
        """Wait for the next message of a worker, and let it send another one.

        Returns:
            The message; None if the worker has ended.

        Raises:
            Exception: What was raised in the worker in place of the message.
        """
        self._hear()  # that the training loop asked for nothing is no worker's silence
        self._awaited = number
        arrived = self._arrived[number]
        while not arrived:
            if not self._workers_status[number]:
                return None
            self._sort_in(*self._get_data())  # type: ignore[no-untyped-call]
        message = arrived.popleft()
        self._request(number)
        if isinstance(message, ExceptionWrapper):
            message.reraise()  # type: ignore[no-untyped-call]
        return message

    def _sort_in(self, task: int, message: Any) -> None:
        """Keep a message that has arrived until it is asked for, or note that its worker has ended."""
        (number,) = self._task_info.pop(task)
        self._tasks_outstanding -= 1
        if not isinstance(message, _IterableDatasetStopIteration):
            self._arrived[number].append(message)
        elif self._persistent_workers:
            self._workers_status[number] = False
        else:
            self._mark_worker_as_unavailable(number)  # and let its process end

    def _request(self, number: int) -> None:
        """Let a worker send one more message, unless it has ended."""
        self._worker_queue_idx_cycle = itertools.cycle([number])  # in place of torch's turns
        self._try_put_index()

    def _try_get_data(self, timeout: float = MP_STATUS_CHECK_INTERVAL) -> tuple[bool, Any]:
        """Wait for any worker's next message; torch asks again if this returns that there is none.

        Raises:
            WorkerError: If a worker is dead, or the loader's own `timeout` is over.
        """
        until = time.monotonic() + timeout
        while (left := until - time.monotonic()) > 0:
            with self._watched():
                arrived, message = super()._try_get_data(min(left, CHECK_SEC))  # type: ignore[no-untyped-call]
            if arrived:
                self._hear()
                return True, message
            self._warn_of_silence()
        if self._timeout > 0:
            msg = f"the loader timed out: it waited {self._timeout} s for {self._named(self._silent())}"
            raise WorkerError(msg)
        return False, None

    # Workers that are dead ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Raise an error that names the worker if one is dead, or dies meanwhile."""
        try:
            if threading.current_thread() is threading.main_thread():  # any other is not the one that it would raise in
                self._worker_pids_set = True
                _set_worker_pids(id(self), tuple(worker.pid or 0 for worker in self._workers))
            self._require_alive()  # it may have died before torch's handler knew of it
            yield
        except RuntimeError as error:  # torch knows only the process
            if not isinstance(error, WorkerError):
                self._require_alive(error)
            raise
        finally:
            self._unwatch()

    def _unwatch(self) -> None:
        if self._worker_pids_set:
            self._worker_pids_set = False
            with contextlib.suppress(ValueError):  # an interrupt came before they were set
                _remove_worker_pids(id(self))

    def _require_alive(self, cause: BaseException | None = None) -> None:
        """Raise if a worker was killed, failed, or ended before its stream did."""
        found = EXITED.fullmatch(str(cause))
        named = [] if found is None else found["pids"].split(", ")  # torch no longer waits for these
        for number, worker in enumerate(self._workers):
            if not has_ended(worker):
                continue
            if worker.exitcode is None:
                connection.wait([worker.sentinel], CHECK_SEC)  # a fork server says the status a moment later
            status = worker.exitcode
            if not status and not self._workers_status[number] and str(worker.pid) not in named:
                continue
            how = "ended" if status is None else f"exited unexpectedly with status {status}"
            if status is not None and status < 0:
                name = signal.Signals(-status).name
                how = f"was killed by signal {-status} ({name})" + (f": {HINTS[name]}" if name in HINTS else "")
            elif status:
                how += ", and its standard error may say why"
                if self._start_method != "fork" and not self._channels[number].has_read:
                    how += f". {NOT_FOUND}"
            msg = f"{self._named([number])} {how}. The state holds what was delivered: load_state_dict(state_dict()) "
            raise WorkerError(msg + "and a new iter continue from there") from cause

    # Workers that are silent ----------------------------------------------------------------------------------------

    def _hear(self) -> None:
        self._heard, self._has_warned = time.monotonic(), False

    def _warn_of_silence(self) -> None:
        seconds = time.monotonic() - self._heard
        if not self._has_warned and seconds >= SILENCE_SEC:
            self._has_warned = True  # until one is heard
            msg = f"the loader has waited {seconds:.0f} s for {self._named(self._silent())}, and goes on waiting; the "
            warn_user(msg + "loader's timeout=seconds would make this an error", SilentWorkerWarning)

    def _silent(self) -> list[int]:
        """Return the worker whose turn it is and those that are stopped, or all if each has to answer first."""
        awaited = self._awaited
        numbers = range(len(self._workers))
        stopped = [number for number in numbers if _is_stopped(self._workers[number].pid)]
        return sorted({*stopped, *([awaited] if awaited is not None else [] if stopped else numbers)})

    def _named(self, numbers: Sequence[int]) -> str:
        return ", ".join(map(self._name, numbers))

    def _name(self, number: int) -> str:
        pid = self._workers[number].pid
        facts = [f"process {pid}", self._channels[number].reading, "stopped by a signal" if _is_stopped(pid) else ""]
        return f"worker {number} ({'; '.join(filter(None, facts))})"

    # The end --------------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> Sequence[BaseProcess]:
        """The workers' processes."""
        return self._workers

    @property
    def is_inherited(self) -> bool:
        """Whether this is the copy of a process that was forked from the workers' own."""
        return self._owner != os.getpid()

    def end(self) -> None:
        """End the workers, at once if one is broken, else by themselves if they can; and close their channels."""
        if not self.is_inherited:
            for channel in self._channels:
                with _despite_refused_threads():
                    channel.assignments.end()  # a worker that waits for them hears of no other end
        self._shutdown_workers()
        for channel in self._channels:
            channel.close()

    def _shutdown_workers(self) -> None:
        """End the workers. torch calls this at the end of the streams, and when the iterator is deleted."""
        if self.is_inherited:
            return
        if sys.is_finalizing():  # no thread runs any more, and nothing can be imported: to wait would fail
            self._send_kills()
            return
        with interrupt_later():
            if hasattr(self, "_workers") and not self._shutdown:  # else torch had not begun to start them
                with _despite_refused_threads():
                    if not any(_is_broken(worker) for worker in self._workers):
                        self._ask_to_end()
                self.kill()
                self._end_pinning()
            if hasattr(self, "_workers_status"):  # else not all of them could be started
                with _despite_refused_threads():
                    super()._shutdown_workers()

    def _ask_to_end(self) -> None:
        """Let the workers end by themselves, within `END_SEC` for all together."""
        self._stop_pinning()  # first, since workers that end may leave half a message
        self._workers_done_event.set()
        for queue in self._index_queues:
            queue.put(None)
        until = time.monotonic() + END_SEC
        while waiting := [worker for worker in self._workers if not has_ended(worker)]:
            left = until - time.monotonic()
            if left <= 0 or any(_is_stopped(worker.pid) for worker in waiting):
                break
            connection.wait([worker.sentinel for worker in waiting], min(left, CHECK_SEC))

    def _stop_pinning(self) -> bool:
        """Ask torch's thread that pins memory to end, and return whether it does within `END_SEC`."""
        pinning = getattr(self, "_pin_memory_thread", None)
        if pinning is None or not pinning.is_alive():
            return True
        self._pin_memory_thread_done_event.set()
        self._worker_result_queue.put((None, None))
        pinning.join(END_SEC)
        return not pinning.is_alive()

    def _end_pinning(self) -> None:
        """End the thread that pins, once all workers are dead: torch would wait for it without end.

        It may be reading a message of which a killed worker has written a part. That read ends with an error when no
        process has the other end of the pipe any more: this one is the last.
        """
        if not self._stop_pinning():
            queue: Any = self._worker_result_queue
            queue._writer.close()  # noqa: SLF001 - nothing else closes this end alone
            self._pin_memory_thread.join(END_SEC)
            queue.cancel_join_thread()
            queue.close()
            del self._pin_memory_thread

    def kill(self) -> None:
        """Kill every worker that has not ended, stopped ones too, which would not get a milder signal."""
        self._unwatch()  # before they die
        for worker in self._send_kills():
            worker.join(END_SEC)  # not for ever: a process that waits for its disk dies once the disk answers
        self._workers_done_event = threading.Event()  # there is nobody left to tell

    def _send_kills(self) -> Sequence[BaseProcess]:
        """Kill every worker that has not ended, and return all of them."""
        workers: Sequence[BaseProcess] = getattr(self, "_workers", ())
        for worker in workers:
            if worker.is_alive():
                worker.kill()
        return workers


class _DoneEvent:
    """torch's event that tells workers to end, for the training process.

    The event has a lock, which workers take for each message. A worker that is killed at that moment never releases it.
    """

    def __init__(self, event: Any) -> None:
        self._event = event
        self._is_set = False

    def is_set(self) -> bool:
        """Whether this process has set it. No other process does."""
        return self._is_set

    def set(self) -> None:
        """Set it, within `END_SEC`: workers that wait for its lock are killed a moment later."""
        if not self._is_set:
            self._is_set = True
            setting = threading.Thread(target=self._event.set, name="end_workers", daemon=True)
            setting.start()
            setting.join(END_SEC)


@contextlib.contextmanager
def _despite_refused_threads() -> Iterator[None]:
    """Go on where the system starts no thread: to ask workers takes one, and to kill them does not."""
    try:
        yield
    except RuntimeError as error:
        if not is_refused_thread(error):
            raise


def _is_broken(worker: BaseProcess) -> bool:
    """Whether a worker died, or was stopped by a signal."""
    return _is_stopped(worker.pid) if not has_ended(worker) else worker.exitcode != 0


def _is_stopped(pid: int | None) -> bool:
    """Whether a process was stopped by a signal, where the system tells."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "Tt"
    return False


def _kill_all_at_exit() -> None:
    """Have the workers of this process killed when it exits, where multiprocessing would wait for them for ever.

    It ends its children by SIGTERM, which no worker of ours heeds, and which a stopped process does not get. Its own
    finalizers run before that, also in a process that multiprocessing has started, where those of `atexit` do not run.
    """
    if os.getpid() not in _killed_at_exit:
        _killed_at_exit.add(os.getpid())
        util.Finalize(None, _kill_all, exitpriority=100)


def _kill_all() -> None:
    with interrupt_later():  # a handler that raises would leave some of them
        for iterator in list(_running):
            if iterator._owner == os.getpid():  # noqa: SLF001 - of this module
                iterator.kill()
