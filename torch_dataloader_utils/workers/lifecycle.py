"""Worker processes from their start to their end: how they say that they run, and that none outlives its training."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing import connection, parent_process
from multiprocessing.process import BaseProcess
from typing import Any

import pyarrow as pa
from torch.utils.data import get_worker_info

from torch_dataloader_utils.workers.channel import WorkerChannel
from torch_dataloader_utils.workers.cpus import usable_cpus

__all__ = ["StartupBarrier", "WorkerSetup"]


PARENT_CHECK_SEC = 1.0
"""How often a worker looks whether it has another parent than the one that started it."""


LIFE_CHECK_SEC = 0.1
"""How often the training process looks whether a worker that has not reported yet is still alive."""


class StartupBarrier:
    """Where workers report as soon as they run.

    A process that is forked while another thread holds a lock may wait for that lock for ever, before its first line
    of Python. Forking keeps most locks out of that (``pthread_atfork``), not all: CPython up to 3.11 takes the lock
    of its list of threads in the child before it makes it anew, and threads of torch.distributed's backends take it
    whenever they call back into Python. torch's loader would wait for such a worker for ever.

    Args:
        context: The multiprocessing context that starts the workers, or a module like it.
    """

    def __init__(self, context: Any) -> None:
        self._reports = context.Semaphore(0)

    def report(self) -> None:
        """Say, in a worker, that it runs."""
        self._reports.release()

    def is_complete(self, workers: Sequence[BaseProcess], seconds: float) -> bool:
        """Wait until all workers have reported; a dead one is not waited for, that is another error's business.

        Args:
            workers: The processes.
            seconds: How long to wait for any one of them.
        """
        for _ in workers:
            waited = 0.0
            while not self._reports.acquire(timeout=LIFE_CHECK_SEC):
                waited += LIFE_CHECK_SEC
                if any(not worker.is_alive() for worker in workers):
                    return True
                if waited >= seconds:
                    return False
        return True


class WorkerSetup:
    """Runs in each worker as it starts: reports, and connects its copy of the dataset with the training process.

    Args:
        startup: Where the worker reports.
        channels: For each worker how it is connected with this process.
        user_worker_init_fn: What the user wants to run in each worker, or None.
    """

    def __init__(
        self,
        startup: StartupBarrier,
        channels: list[WorkerChannel],
        user_worker_init_fn: Callable[[int], None] | None,
    ) -> None:
        self._startup = startup
        self._channels = channels
        self._user_worker_init_fn = user_worker_init_fn
        # Workers decode side by side: with a thread for every CPU in each they would be in one another's way.
        self._decoding_threads = max(1, usable_cpus() // len(channels))

    def __call__(self, worker: int) -> None:
        """Run in a worker; torch calls this with its number."""
        self._startup.report()
        pa.set_cpu_count(self._decoding_threads)
        end_with_training_process()
        copy: Any = get_worker_info().dataset  # type: ignore[union-attr]
        copy.attach_channel(self._channels[worker])
        if self._user_worker_init_fn is not None:
            self._user_worker_init_fn(worker)


def end_with_training_process() -> None:
    """Make this worker process end soon after the training process does, whatever it is doing.

    torch's own watch ends the worker's loop, but a large batch that nobody takes out of the queue any more keeps the
    process: it waits at its exit for the queue's thread, which waits for a reader.
    """
    threading.Thread(target=_watch, args=(os.getppid(),), name="end_with_training_process", daemon=True).start()


def _watch(parent: int) -> None:
    """Wait until the training process ends, however it was that it started this one.

    Its end of a pipe closes with it, which tells at once, also under a fork server, which is the parent then. After a
    fork other children may hold that end as well: but then the training process is the parent, and its end gives this
    process another one.
    """
    training_process = parent_process()
    sentinels = [] if training_process is None else [training_process.sentinel]
    while os.getppid() == parent and not connection.wait(sentinels, PARENT_CHECK_SEC):
        pass
    os._exit(1)
