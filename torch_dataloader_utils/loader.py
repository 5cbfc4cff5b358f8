"""The DataLoader: torch's worker processes, and the place where batches are handed over and counted."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from torch_dataloader_utils.iteration import Handover, Iteration, take_turns
from torch_dataloader_utils.model import Assignment
from torch_dataloader_utils.reading import Batch, StreamEnd
from torch_dataloader_utils.transport import Inbox, Parcel, pinned
from torch_dataloader_utils.workers import RollCall, WorkerSetup

__all__ = ["IterationSource", "StructuredDataLoader"]

REFUSED = ("sampler", "batch_sampler")

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

    def walk(self, assignment: Assignment) -> Iterator[Batch | StreamEnd]:
        """Read one stream."""
        ...

    def attach_inbox(self, inbox: Inbox) -> None:
        """Make a worker's copy answer the assignments that it finds there."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Load a state."""
        ...


class StructuredDataLoader(DataLoader[Any]):
    """A `torch.utils.data.DataLoader` whose progress is exact: what was handed over, to the row.

    Made by `StructuredDataset.create_dataloader`. Batches come ready made from the dataset, so torch's own
    `batch_size` is None here. `state_dict` and `load_state_dict` are the dataset's.
    """

    def __init__(
        self,
        source: IterationSource,
        *,
        worker_init_fn: Callable[[int], None] | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        for name in REFUSED:
            if dataloader_kwargs.get(name) is not None:
                msg = f"{name} is refused: the dataset itself decides which rows come in which order"
                raise ValueError(msg)
        if not dataloader_kwargs.get("in_order", True):
            msg = "in_order=False is refused: a resumed run delivers the very batches in the very order"
            raise ValueError(msg)
        if source.num_workers == 0 and dataloader_kwargs.get("timeout"):
            msg = "timeout needs worker processes: num_workers is 0"
            raise ValueError(msg)
        super().__init__(
            source,  # type: ignore[arg-type]
            batch_size=None,
            num_workers=source.num_workers,
            collate_fn=_as_it_is,
            worker_init_fn=worker_init_fn,
            **dataloader_kwargs,
        )
        self._source = source
        self._user_worker_init_fn = worker_init_fn
        self._inboxes: list[Inbox] = []
        self._answers: weakref.ref[Any] | None = None
        self._handover: weakref.ref[Handover] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin the epoch anew, or continue from a state that was loaded since the last call, once.

        Returns:
            An iterator of batches. It ends, with an error when asked for more, as soon as a newer `iter`,
            `set_epoch` or `load_state_dict` takes over the progress.
        """
        if self._handover is not None and (before := self._handover()) is not None:
            before.give_way("iter")
        if self.num_workers != self._source.num_workers:
            self._forget_workers()
            self.num_workers = self._source.num_workers
            self.prefetch_factor = self.prefetch_factor or 2
        handover = self._in_process() if self.num_workers == 0 else self._from_workers()
        self._handover = weakref.ref(handover)
        return handover

    def __len__(self) -> int:
        """Return the number of batches of the whole epoch, also when it is continued from a state.

        Raises:
            TypeError: If a filter makes it unknowable.
        """
        return self._source.num_batches

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's state: see `StructuredDataset.state_dict`."""
        return self._source.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state: see `StructuredDataset.load_state_dict`."""
        self._source.load_state_dict(state_dict)

    def _in_process(self) -> Handover:
        iteration = self._source.begin_iteration()
        contents = take_turns(map(self._source.walk, iteration.assignments()))
        return Handover(iteration, self._pinned(contents))

    def _from_workers(self) -> Handover:
        try:
            answers = self._ask_workers()
            iteration = self._source.begin_iteration()
            for inbox, assignment in zip(self._inboxes, iteration.assignments(), strict=True):
                inbox.send(assignment)
        except BaseException:
            self._forget_workers()
            raise
        contents = self._pinned(_unpack(answers, iteration.number))
        return Handover(iteration, contents, on_error=self._forget_workers)

    def _pinned(self, contents: Iterator[Batch | StreamEnd]) -> Iterator[Batch | StreamEnd]:
        return pinned(contents) if self.pin_memory and _has_accelerator() else contents

    def _ask_workers(self) -> Iterator[Parcel]:
        """Let torch start workers, or ask persistent ones anew; start them again where one hangs since its fork."""
        if self.persistent_workers and self._inboxes:
            return self._torch_iterator()
        context: Any = self.multiprocessing_context or torch.multiprocessing
        for _ in range(FORK_ATTEMPTS):
            roll_call = RollCall(context)
            self._inboxes = [Inbox(context) for _ in range(self.num_workers)]
            self.worker_init_fn = WorkerSetup(roll_call, self._inboxes, self._user_worker_init_fn)
            answers = self._torch_iterator()
            workers = getattr(answers, "_workers", [])
            if context.get_start_method() != "fork" or roll_call.is_complete(workers, START_SEC):
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

    def _torch_iterator(self) -> Iterator[Parcel]:
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
        for inbox in self._inboxes:
            inbox.close()
        self._inboxes = []


def _unpack(answers: Iterator[Parcel], number: int) -> Iterator[Batch | StreamEnd]:
    """Pass on what belongs to an iteration; a worker may still answer one that was abandoned."""
    for parcel in answers:
        if parcel.iteration == number:
            yield parcel.unpack()


def _as_it_is(parcel: Any) -> Any:
    return parcel


def _has_accelerator() -> bool:
    accelerator = getattr(torch, "accelerator", None)  # torch 2.6
    return bool(accelerator.is_available() if accelerator else torch.cuda.is_available())
