"""The DataLoader: torch's worker processes, and the place where batches are handed over and counted."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch.utils.data import DataLoader

from torch_dataloader_utils.loader.arguments import refuse_torch_options
from torch_dataloader_utils.loader.iteration import DeliveringIterator, Iteration, take_turns
from torch_dataloader_utils.planning.assignment import Assignment
from torch_dataloader_utils.reading.batching import Batch, Batches, StreamEnd
from torch_dataloader_utils.workers.channel import AssignmentQueue, WorkerChannel
from torch_dataloader_utils.workers.lifecycle import StartupBarrier, WorkerSetup
from torch_dataloader_utils.workers.message_size import MessageSizer
from torch_dataloader_utils.workers.messages import MOST_HELD, Content, Message
from torch_dataloader_utils.workers.shared_memory import SharedMemoryPool

__all__ = ["IterationSource", "StructuredDataLoader"]


FORK_ATTEMPTS = 3


START_SEC = 20.0
"""How long a forked worker may take to run its first line; it takes milliseconds, or it never will."""


class IterationSource(Protocol):
    """What the loader needs of a dataset."""

    @property
    def num_workers(self) -> int:
        """Number of worker processes."""
        ...

    @property
    def num_batches(self) -> int:
        """The epoch's number of batches; a TypeError where it cannot be known."""
        ...

    def begin_iteration(self) -> Iteration:
        """Begin an iteration, which owns the progress from now on."""
        ...

    def batches(self, assignment: Assignment, *, pin: bool = False) -> Iterator[Batch | StreamEnd]:
        """Read one stream in this process."""
        ...

    def attach_channel(self, channel: WorkerChannel) -> None:
        """Make a worker's copy answer the assignments that come by channel."""
        ...

    def without_footers(self) -> AbstractContextManager[None]:
        """Let copies that are sent to processes have nothing that assignments bring along."""
        ...

    def with_footers(self, assignment: Assignment, known: Collection[str]) -> Assignment:
        """Add to an assignment what such a copy needs for it and does not know."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: Any, *, strict: bool, on_changed_files: Literal["error", "continue"]) -> None:
        """Load a state."""
        ...


class StructuredDataLoader(DataLoader[Any]):
    """A `torch.utils.data.DataLoader` whose progress is exact: what was handed over, to the row.

    Made by `StructuredDataset.create_dataloader`. Batches come ready made from the dataset, so torch's own
    `batch_size` is None here. `state_dict` and `load_state_dict` are the dataset's.
    """

    def __init__(
        self,
        opened_files: IterationSource,
        *,
        worker_init_fn: Callable[[int], None] | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        refuse_torch_options(dataloader_kwargs, opened_files.num_workers)
        # Kept, workers begin an epoch in half the time of new ones that are forked, and a hundredth of spawned ones'.
        dataloader_kwargs.setdefault("persistent_workers", opened_files.num_workers > 0)
        super().__init__(
            opened_files,  # type: ignore[arg-type]
            batch_size=None,
            num_workers=opened_files.num_workers,
            collate_fn=_as_it_is,
            worker_init_fn=worker_init_fn,
            **dataloader_kwargs,
        )
        self._opened_files = opened_files
        self._user_worker_init_fn = worker_init_fn
        self._channels: list[WorkerChannel] = []
        self._answers: weakref.ref[Any] | None = None
        self._handover: weakref.ref[DeliveringIterator] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin the epoch anew, or continue from a state that was loaded since the last call, once.

        Returns:
            An iterator of batches. It ends, with an error when asked for more, as soon as a newer `iter`,
            `set_epoch` or `load_state_dict` takes over the progress.
        """
        if self._handover is not None and (before := self._handover()) is not None:
            before.give_way("iter")
        if self.num_workers != self._opened_files.num_workers:
            self._forget_workers()
            self.num_workers = self._opened_files.num_workers
            self.prefetch_factor = self.prefetch_factor or 2
        handover = self._in_process() if self.num_workers == 0 else self._from_workers()
        self._handover = weakref.ref(handover)
        return handover

    def __len__(self) -> int:
        """Return the number of batches of the whole epoch, also when it is continued from a state.

        Raises:
            TypeError: If a filter makes it unknowable.
        """
        return self._opened_files.num_batches

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's state: see `StructuredDataset.state_dict`."""
        return self._opened_files.state_dict()

    def load_state_dict(
        self, state_dict: Any, *, strict: bool = True, on_changed_files: Literal["error", "continue"] = "error"
    ) -> None:
        """Load a state: see `StructuredDataset.load_state_dict`."""
        self._opened_files.load_state_dict(state_dict, strict=strict, on_changed_files=on_changed_files)

    def _in_process(self) -> DeliveringIterator:
        iteration = self._opened_files.begin_iteration()
        read = partial(self._opened_files.batches, pin=self.pin_memory and _has_accelerator())
        return DeliveringIterator(iteration, take_turns(map(read, iteration.assignments())))

    def _from_workers(self) -> DeliveringIterator:
        try:
            answers = self._ask_workers()
            iteration = self._opened_files.begin_iteration()
            assignments = list(iteration.assignments())
            for channel, assignment in zip(self._channels, assignments, strict=True):
                knows_all = self._context().get_start_method() == "fork"  # it was made of this process
                channel.send(assignment if knows_all else self._opened_files.with_footers(assignment, channel.known))
        except BaseException:
            self._forget_workers()
            raise
        workers = [assignment.worker for assignment in assignments]
        batches = _unpacked(answers, iteration.number, workers, self._channels[0].sizer)
        return DeliveringIterator(iteration, take_turns(batches), on_error=self._forget_workers)

    def _ask_workers(self) -> Iterator[Message]:
        """Let torch start workers, or ask persistent ones anew; start them again where one hangs since its fork."""
        if self.persistent_workers and self._channels:
            return self._torch_iterator()
        context = self._context()
        for _ in range(FORK_ATTEMPTS):
            startup = StartupBarrier(context)
            self._channels = self._new_channels(context)
            self.worker_init_fn = WorkerSetup(startup, self._channels, self._user_worker_init_fn)
            answers = self._torch_iterator()
            workers = getattr(answers, "_workers", [])
            if context.get_start_method() != "fork" or startup.is_complete(workers, START_SEC):
                return answers
            self._forget_workers()  # torch first: it takes the death of a worker that it watches for an error
            for worker in workers:
                worker.kill()
                worker.join()
        msg = (
            f"worker processes hung at their start, {FORK_ATTEMPTS} times: they were forked while another thread of "
            "this process held a lock; start them with multiprocessing_context='forkserver', or before such threads"
        )
        raise RuntimeError(msg)

    def _context(self) -> Any:
        return self.multiprocessing_context or torch.multiprocessing

    def _new_channels(self, context: Any) -> list[WorkerChannel]:
        """Return channels with pool for all that may be on its way to this process or in use in it at a time."""
        ahead = self.prefetch_factor or 1
        sizer = MessageSizer(ahead)
        count = ahead * self.num_workers + MOST_HELD + 1  # all that is on its way may be one worker's
        pool = [SharedMemoryPool.if_possible(count) for _ in range(self.num_workers)]
        return [WorkerChannel(AssignmentQueue(context), sizer, one) for one in pool]

    def _torch_iterator(self) -> Iterator[Message]:
        with self._opened_files.without_footers():
            answers = super().__iter__()
        self._answers = weakref.ref(answers)
        return answers

    def _forget_workers(self) -> None:
        """Let go of worker processes that must not serve another iteration."""
        answers = None if self._answers is None else self._answers()
        self._answers = self._iterator = None
        shut_down = getattr(answers, "_shutdown_workers", None)  # what torch itself calls when its iterator dies
        if shut_down is not None:
            shut_down()
        for channel in self._channels:
            channel.close()
        self._channels = []


def _unpacked(
    answers: Iterator[Message], iteration: int, workers: Sequence[int], sizer: MessageSizer
) -> list[Iterator[Batch | StreamEnd]]:
    """Return, for each worker in its turn, its batches out of what all of them send."""
    arrived: dict[int, deque[Content]] = {worker: deque() for worker in workers}
    numbers = dict.fromkeys(arrived, 0)

    def of_worker(worker: int) -> Iterator[Batch | StreamEnd]:
        waiting = arrived[worker]
        while True:
            while not waiting:
                message = next(answers, None)
                if message is None:
                    return
                if message.iteration == iteration:  # a worker may still answer one that was abandoned
                    sizer.note(numbers[message.worker], message.size, message.seconds)
                    numbers[message.worker] += 1
                    arrived[message.worker].extend(message.unpack())
            content = waiting.popleft()
            if isinstance(content, Batches):
                yield from content
            else:
                yield content
            del content

    return list(map(of_worker, arrived))


def _as_it_is(message: Any) -> Any:
    return message


def _has_accelerator() -> bool:
    accelerator = getattr(torch, "accelerator", None)  # torch 2.6
    return bool(accelerator.is_available() if accelerator else torch.cuda.is_available())
