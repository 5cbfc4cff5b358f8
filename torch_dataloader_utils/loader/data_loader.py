"""The DataLoader: it runs torch's worker processes, and delivers and counts their batches."""

from __future__ import annotations

import copy
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch.utils.data import DataLoader

from torch_dataloader_utils.formats.concurrency import interruptible
from torch_dataloader_utils.gc_pause import hidden_from_forks
from torch_dataloader_utils.loader.arguments import refuse_torch_options, require_choice
from torch_dataloader_utils.loader.contents import read_here
from torch_dataloader_utils.loader.iteration import BatchIterator, Iteration
from torch_dataloader_utils.loader.progress_bar import PassProgress
from torch_dataloader_utils.loader.skip_requests import SkipRequests
from torch_dataloader_utils.loader.user_warnings import warn_of_slow_transport
from torch_dataloader_utils.planning.assignment import Assignment
from torch_dataloader_utils.reading.batching import Batch, Batches, EmptyStep, StreamEnd, Transfer
from torch_dataloader_utils.workers.channel import AssignmentQueue, WorkerChannel
from torch_dataloader_utils.workers.collate import FailedCollate
from torch_dataloader_utils.workers.lifecycle import StartupBarrier, WorkerSetup, interrupt_later, shortage_explained
from torch_dataloader_utils.workers.messages import MAX_HELD, Content, Message
from torch_dataloader_utils.workers.shared_memory import SharedMemoryPool, SharedPage
from torch_dataloader_utils.workers.torch_iterator import WorkerIterator

FORK_ATTEMPTS = 3

START_SEC = 20.0
"""How long a forked worker may take to run its first line. It takes milliseconds, unless it hangs for ever."""

DIVIDED_AGAIN = """{} would divide this rank's rows among the ranks once more, and leave out all others: use \
ResumableTrainerMixin of torch_dataloader_utils.integrations.transformers for a Trainer, else \
prepare_loader(accelerator, loader) of torch_dataloader_utils.integrations.accelerate"""

LIGHTNING = ("lightning.pytorch.utilities.combined_loader", "pytorch_lightning.utilities.combined_loader")
AHEAD_OF_TRAINING = """Lightning would save rank 0's state alone, in which batches that it has fetched ahead count as \
delivered, and would skip an epoch after a checkpoint at an epoch's end: give it ResumableLoader(loader) of \
torch_dataloader_utils.integrations.lightning, or put its ResumableDataModuleMixin in front of the data module"""


class _Dataset(Protocol):
    """What the loader needs of a dataset: see `BatchDataset` and `StructuredDataset`."""

    @property
    def num_workers(self) -> int: ...
    @property
    def num_batches(self) -> int: ...
    @property
    def batch_size(self) -> int | None: ...
    @property
    def process_group(self) -> Any: ...
    @property
    def loses_rows(self) -> bool: ...
    @property
    def skip_requests(self) -> SkipRequests: ...
    @property
    def leaves_restored(self) -> bool: ...
    @property
    def will_restore(self) -> bool: ...
    def begin_iteration(self) -> Iteration: ...
    def prepare_iteration(self) -> None: ...
    def batches(
        self, assignment: Assignment, *, pin: bool = False, transfer: Transfer | None = None
    ) -> Iterator[Batch | EmptyStep | StreamEnd]: ...
    def attach_channel(self, channel: WorkerChannel) -> None: ...
    def takes_new_files(self) -> bool: ...
    def without_footers(self) -> AbstractContextManager[None]: ...
    def with_footers(self, parts: Sequence[Assignment], known: Collection[str]) -> list[Assignment]: ...
    def set_epoch(self, epoch: int) -> None: ...
    def skip_steps(self, start: int, stop: int) -> None: ...
    def restore_skipped(self) -> None: ...
    def progress(self, uneven: Literal["drop", "pad"] | None) -> PassProgress: ...
    def exclude(self, rows: Any) -> None: ...
    def batch_at(self, step: int, epoch: int | None, *, scan: bool) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(
        self, state_dict: Any, *, strict: bool, on_changed_files: Literal["error", "continue"]
    ) -> None: ...


class StructuredDataLoader(DataLoader[Any]):
    """A `torch.utils.data.DataLoader` whose state is exact to the row.

    `StructuredDataset.create_dataloader` makes it. The dataset makes the batches, so torch's own `batch_size` is None
    here. `set_epoch`, `state_dict` and `load_state_dict` are the dataset's.
    """

    def __init__(
        self,
        dataset: _Dataset,
        *,
        worker_init_fn: Callable[[int], None] | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        refuse_torch_options(dataloader_kwargs, dataset.num_workers)
        # Persistent workers begin an epoch in half the time of new forked workers, a hundredth of that of spawned ones.
        dataloader_kwargs.setdefault("persistent_workers", dataset.num_workers > 0)
        super().__init__(
            dataset,  # type: ignore[arg-type]
            batch_size=None,
            num_workers=dataset.num_workers,
            collate_fn=_require_message,
            worker_init_fn=worker_init_fn,
            **dataloader_kwargs,
        )
        self._dataset = dataset
        self._channels: list[WorkerChannel] = []
        self._answers: weakref.ref[WorkerIterator] | None = None
        self._newest: weakref.ref[BatchIterator] | None = None

    def __iter__(self) -> BatchIterator:  # type: ignore[override]
        """Begin the epoch, or continue once from a state that was loaded since the last call.

        Returns:
            An iterator of batches. It ends when a later `iter`, `set_epoch` or `load_state_dict` takes the progress
            over: its next call then raises an `IterationEndedError`. If this call itself fails, the state is that at
            which it was to begin.

        Raises:
            WorkerError: If a worker process died. The next call starts new ones.
        """
        return self.iterate()

    def iterate(self, transfer: Transfer | None = None) -> BatchIterator:
        """Do what ``iter`` does, for `to_device`: a batch is what the transfer makes of it."""
        if self._newest is not None and (before := self._newest()) is not None:
            before.end("iter")
            if before.is_fetching:  # a call in another thread: the workers are left to it, and end with it
                self._answers = self._iterator = None
                self._channels = []
        self._dataset.prepare_iteration()
        if self._dataset.takes_new_files() or self.num_workers != self._dataset.num_workers or self._is_forked():
            self._forget_workers()
            self.num_workers = self._dataset.num_workers
            self.prefetch_factor = self.prefetch_factor or 2
        with interruptible():
            iterator = self._in_process(transfer) if self.num_workers == 0 else self._from_workers(transfer)
        self._newest = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        """Return the number of batches of the whole epoch, also if it continues from a state, without skipped steps.

        Raises:
            TypeError: If it is not known before the rows are read: see `StructuredDataset.num_batches`.
        """
        return self._dataset.num_batches

    def __repr__(self) -> str:
        dataset = repr(self._dataset).removeprefix(f"{type(self._dataset).__name__}(").removesuffix(")")
        return f"{type(self).__name__}({dataset}, batch_size={self._dataset.batch_size})"

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: see `StructuredDataset.set_epoch`.

        If it is the current epoch and no batch of it was delivered since it began, nothing changes: an iterator that
        has begun goes on, and a loaded state still waits for its `iter`.

        Args:
            epoch: The epoch, from 0.
        """
        self._dataset.set_epoch(epoch)

    def skip_steps(self, start: int, stop: int) -> None:
        """Skip steps of the current epoch, with a record: see `StructuredDataset.skip_steps`."""
        self._dataset.skip_steps(start, stop)

    def restore_skipped(self) -> None:
        """Deliver skipped steps after the epoch's last one: see `StructuredDataset.restore_skipped`."""
        self._dataset.restore_skipped()

    @property
    def process_group(self) -> Any:
        """The process group of the ranks that share the rows: see `StructuredDataset.process_group`."""
        return self._dataset.process_group

    @property
    def loses_rows(self) -> bool:
        """Whether a step of the current epoch may have no row left: see `StructuredDataset.loses_rows`."""
        return self._dataset.loses_rows

    @property
    def skip_requests(self) -> SkipRequests:
        """What was requested of steps of the current epoch: to skip them, and to restore them."""
        return self._dataset.skip_requests

    @property
    def leaves_restored(self) -> bool:
        """Whether all steps of the epoch were made but skipped ones, which are to be restored."""
        return self._dataset.leaves_restored

    @property
    def will_restore(self) -> bool:
        """Whether skipped steps are to be delivered after the last one, and none of them was so far."""
        return self._dataset.will_restore

    def progress(self, uneven: Literal["drop", "pad"] | None = None) -> PassProgress:
        """Return what a progress bar over the batches of a pass needs: ``tqdm(loader, **loader.progress())``.

        After an elastic load, what was delivered before counts as the batches of the rank that had delivered most, and
        the rest as the batches that it is cut into for this rank. So the bar ends at 100 %.

        Args:
            uneven: For the steps of `distributed.in_step` with this value of its parameter `uneven`, rather than for
                the batches of this rank. With ``"pad"``, a rank that had run out of batches when its state was saved
                does not count the repeated ones.

        Returns:
            ``initial``, how many batches of the epoch this rank has delivered before the next one; ``total``, how many
            the epoch has, with those, or None if only reading tells. They are those of the newest iterator, as long as
            there is one that can deliver more; else those of the next.
        """
        if uneven is not None:
            require_choice(uneven, "uneven", ("drop", "pad"))
        return self._dataset.progress(uneven)

    def exclude(self, rows: Any) -> None:
        """Exclude bad or withdrawn rows, from the next ``iter`` on: see `StructuredDataset.exclude`."""
        self._dataset.exclude(rows)

    def batch_at(self, step: int, epoch: int | None = None, *, scan: bool = False) -> Any:
        """Return a batch of this rank again, bit for bit, or one that is yet to come, as the loader delivers it.

        It is read in this process, also where workers read the others. Only the row groups that hold its rows are read;
        with row-level shuffle, and with a filter, those of the shards or of their rounds. `collate_fn` is called with
        the same random numbers. Progress, iterators, metrics and random numbers of the process stay as they are.

        Args:
            step: The step: how many batches this rank delivers before it in the epoch.
            epoch: The epoch; None for the current one.
            scan: See `StructuredDataset.rows_at`.

        Returns:
            The batch, without `pin_memory`.

        Raises:
            LedgerUnknownError: As in `StructuredDataset.rows_at`.
            ValueError: If this rank does not make the step.
            UnreadableFileError: If a file cannot be read.
        """
        return self._dataset.batch_at(step, epoch, scan=scan)

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's state: see `StructuredDataset.state_dict`.

        Raises:
            TypeError: If Lightning calls it for a checkpoint: see `ResumableLoader`.
        """
        refuse_lightning()
        return self._dataset.state_dict()

    def load_state_dict(
        self, state_dict: Any, *, strict: bool = True, on_changed_files: Literal["error", "continue"] = "error"
    ) -> None:
        """Load a state: see `StructuredDataset.load_state_dict`."""
        self._dataset.load_state_dict(state_dict, strict=strict, on_changed_files=on_changed_files)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Refuse ``accelerator.prepare(loader)``: it would deal out the batches of rank 0 and leave out all others."""
        raise TypeError(DIVIDED_AGAIN.format("accelerator.prepare()"))

    def __getstate__(self) -> dict[str, Any]:
        """Leave workers and iterators out of a copy.

        A copy continues where this loader stands, as if it had loaded its state. After a finished pass it begins the
        epoch, as this loader does. It can be pickled if what the loader was made with can, as its `collate_fn`.
        """
        own: dict[str, Any] = {"_channels": [], "_answers": None, "_newest": None, "_iterator": None}
        return {**self.__dict__, **own}

    def __copy__(self) -> StructuredDataLoader:
        copied = type(self).__new__(type(self))
        dataset = copy.copy(self._dataset)  # or both loaders would take the progress from one another
        copied.__dict__.update(self.__getstate__(), dataset=dataset, _dataset=dataset)
        return copied

    def _in_process(self, transfer: Transfer | None) -> BatchIterator:
        iteration = self._dataset.begin_iteration()
        pin = self.pin_memory and _has_accelerator()
        make = partial(self._dataset.batches, pin=pin, transfer=transfer)
        return BatchIterator(iteration, iteration.contents(partial(read_here, make)))

    def _from_workers(self, transfer: Transfer | None) -> BatchIterator:
        try:
            asked = [self._ask_workers()]
            iteration = self._dataset.begin_iteration()

            def read(
                assigned: Mapping[int, Sequence[Assignment]],
            ) -> dict[int, Iterator[Batch | EmptyStep | StreamEnd]]:
                with iteration.changing_workers:
                    iteration.require_current()
                    answers = asked.pop() if asked else self._ask_workers()
                    self._send(assigned)
                    if not self.persistent_workers:
                        self._channels = []  # they go with the workers, and so does their shared memory
                return _unpacked(answers, iteration.number, list(assigned), transfer)

            contents = iteration.contents(read)
        except BaseException:
            self._forget_workers()
            raise
        return BatchIterator(iteration, contents, on_error=self._forget_workers)

    def _send(self, assigned: Mapping[int, Sequence[Assignment]]) -> None:
        """Send each worker what it is assigned."""
        knows_all = self._context().get_start_method() == "fork"  # a worker has the memory of this process
        with interrupt_later(), shortage_explained():  # a queue starts a thread
            for worker, channel in enumerate(self._channels):
                parts = assigned[worker]
                channel.send(parts if knows_all else self._dataset.with_footers(parts, channel.known))

    def _ask_workers(self) -> WorkerIterator:
        """Let torch start workers, or use the persistent ones again. If a worker hangs at its start, start new ones."""
        if self.persistent_workers and self._channels:
            return self._torch_iterator()
        context = self._context()
        for _ in range(FORK_ATTEMPTS):
            startup = StartupBarrier(context)
            with shortage_explained():
                self._channels = self._new_channels(context)
            answers = self._start_workers(WorkerSetup(startup, self._channels, self.worker_init_fn))
            if context.get_start_method() != "fork" or startup.wait_for(answers.workers, START_SEC):
                return answers
            answers.kill()
            self._forget_workers()
        msg = f"worker processes hung at their start, {FORK_ATTEMPTS} times: they were forked while another thread of "
        msg += "this process held a lock; start them with multiprocessing_context='forkserver', or before such threads"
        raise RuntimeError(msg)

    def _context(self) -> Any:
        return self.multiprocessing_context or torch.multiprocessing

    def _new_channels(self, context: Any) -> list[WorkerChannel]:
        """Return channels. Their pools have a block for every message that is in transit or in use at the same time."""
        count = (self.prefetch_factor or 1) + MAX_HELD + 1
        pools = [SharedMemoryPool.if_possible(count) for _ in range(self.num_workers)]
        if None in pools:
            warn_of_slow_transport()
        return [WorkerChannel(AssignmentQueue(context), pool, SharedPage.if_possible()) for pool in pools]

    def _start_workers(self, setup: WorkerSetup) -> WorkerIterator:
        """Let torch start workers that run this first, which calls the user's own function."""
        users, self.worker_init_fn = self.worker_init_fn, setup
        try:
            with interrupt_later(), hidden_from_forks():
                return self._torch_iterator()
        finally:
            self.worker_init_fn = users

    def _torch_iterator(self) -> WorkerIterator:
        with self._dataset.without_footers():
            answers: WorkerIterator = super().__iter__()  # type: ignore[assignment]
        self._answers = weakref.ref(answers)
        return answers

    def _get_iterator(self) -> Any:
        """Return what `super().__iter__` returns, or uses again if workers are persistent."""
        self.check_worker_number_rationality()
        with shortage_explained():
            return WorkerIterator(self, self._channels)

    def _is_forked(self) -> bool:
        """Whether the workers serve the process that this one was forked from."""
        answers = None if self._answers is None else self._answers()
        return answers is not None and answers.is_inherited

    def _forget_workers(self) -> None:
        """Shut down worker processes that must not serve another iteration."""
        with interrupt_later():
            answers = None if self._answers is None else self._answers()
            self._answers = self._iterator = None
            if answers is not None:
                answers.end()
            for channel in self._channels:
                channel.close()
            self._channels = []


def _unpacked(
    answers: WorkerIterator, iteration: int, workers: Sequence[int], transfer: Transfer | None
) -> dict[int, Iterator[Batch | EmptyStep | StreamEnd]]:
    """Return for each worker its batches, from its messages."""

    def of_worker(worker: int) -> Iterator[Batch | EmptyStep | StreamEnd]:
        while (message := answers.receive(worker)) is not None:
            if message.iteration != iteration:  # a worker may still answer an abandoned iteration
                continue
            contents: deque[Content] = deque(message.unpack())
            del message
            while contents:
                content = contents.popleft()
                if isinstance(content, Batches):
                    batches = iter(content) if transfer is None else transfer.batches(content)
                    del content  # not to keep its memory where the transfer does not
                    yield from batches
                    del batches
                    continue
                if isinstance(content, Batch) and transfer is not None and not isinstance(content.data, FailedCollate):
                    content = transfer.batch(content)
                yield content
                del content

    return {worker: of_worker(worker) for worker in workers}


def refuse_lightning() -> None:
    """Raise a TypeError if Lightning has called the caller of this function, for its own checkpoint."""
    if sys._getframe(2).f_globals.get("__name__") in LIGHTNING:  # noqa: SLF001
        raise TypeError(AHEAD_OF_TRAINING)


def _require_message(message: Any) -> Any:
    """Pass on what this loader's workers send, and raise for what any other loader makes of the dataset's batches.

    Accelerate's `skip_first_batches` makes one, which a Trainer uses to resume: with this loader's `collate_fn`.
    """
    if isinstance(message, Message):
        return message
    msg = "another DataLoader was made from this one, as skip_first_batches of Accelerate does when a Trainer resumes: "
    msg += "it reads batches to skip them, and does not know the epoch; use load_state_dict, or for a Trainer "
    raise TypeError(msg + "ResumableTrainerMixin of torch_dataloader_utils.integrations.transformers")


def _has_accelerator() -> bool:
    accelerator = getattr(torch, "accelerator", None)  # torch 2.6
    return bool(accelerator.is_available() if accelerator else torch.cuda.is_available())
