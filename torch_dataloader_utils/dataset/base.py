"""A dataset's batches, in any process: in the training process, in its loader's workers, in a plain loader's."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any, Literal

from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils.fetch import _IterableDatasetFetcher

from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.dataset.ranks import require_one_process
from torch_dataloader_utils.formats.opened_files import Opened
from torch_dataloader_utils.formats.read_cache import CurrentReads
from torch_dataloader_utils.loader.contents import read_here
from torch_dataloader_utils.loader.epoch import EpochState
from torch_dataloader_utils.loader.iteration import BatchIterator, Iteration
from torch_dataloader_utils.loader.plain_loader import require_allocator
from torch_dataloader_utils.loader.progress_bar import PassProgress
from torch_dataloader_utils.loader.skip_requests import SkipRequests
from torch_dataloader_utils.planning.assignment import Assignment
from torch_dataloader_utils.planning.planner import Selection
from torch_dataloader_utils.reading.batching import Batch, EmptyStep, StreamEnd, Transfer
from torch_dataloader_utils.reading.scan import ReadOptions
from torch_dataloader_utils.workers.channel import WorkerChannel
from torch_dataloader_utils.workers.messages import Message
from torch_dataloader_utils.workers.producer import Stream


class BatchDataset(IterableDataset[Any]):
    """Batches of one rank, delivered in this process or packed in a worker.

    The seed is that of the random numbers that `collate_fn` draws. Copies have no process group.

    Attributes:
        ranks_are_assumed: Whether this is the only rank because nothing said how many there are.
    """

    def __init__(
        self,
        opened_files: Opened,
        epoch_state: EpochState,
        read_options: ReadOptions,
        collate_fn: Callable[[Any], Any] | None,
        seed: int,
        *,
        process_group: Any,
        ranks_are_assumed: bool,
    ) -> None:
        super().__init__()
        self._process_group = process_group
        self.ranks_are_assumed = ranks_are_assumed
        self._opened_files = opened_files
        self._epoch_state = epoch_state
        self._schema = read_options.transform.schema
        cache = opened_files.new_cache()
        self._stream = Stream(opened_files, cache, read_options, collate_fn, seed, epoch_state.topology.rank)
        self._channel: WorkerChannel | None = None
        self._leaves_footers_out = False
        self._has_new_files = False

    def __iter__(self) -> Iterator[Any]:
        """Start the epoch, or continue from a loaded state, and deliver the batches in this process.

        Raises:
            TypeError: If torch's DataLoader asks for batches of these batches, by its default `collate_fn`.
            RankMismatchError: As of `begin_iteration`.
        """
        # torch passes nothing about its loader.
        _refuse_batches_of_batches(sys._getframe(1).f_locals.get("self"))  # noqa: SLF001
        if self._channel is not None:
            return self._answer(self._channel, self._channel.assignments.start_iteration())
        worker = get_worker_info()
        if worker is not None:
            return self._deliver_in_plain_worker(worker.id, worker.num_workers, worker.seed - worker.id)
        iteration = self.begin_iteration()
        return BatchIterator(iteration, iteration.contents(partial(read_here, self.batches)))

    def __len__(self) -> int:
        """Return the epoch's number of batches for this rank, also when it is continued from a state.

        In a plain ``DataLoader(dataset, batch_size=None, num_workers=n)`` that is the number for its n workers, on
        which it depends: each worker's stream may end with a short batch.

        Raises:
            TypeError: If it is not known before the rows are read: see `StructuredDataset.num_batches`.
            ProgressUnknownError: If a loaded state does not fit the plain loader's workers.
        """
        # torch's DataLoader.__len__ calls len(dataset), and passes nothing about its workers.
        loader = sys._getframe(1).f_locals.get("self")  # noqa: SLF001
        epoch_state = self._epoch_state
        if isinstance(loader, DataLoader) and loader.dataset is self and loader.num_workers:
            epoch_state = copy.copy(epoch_state)  # does what each worker's copy will do
            epoch_state.join_plain_loader(loader.num_workers, loader_seed=1)
        return epoch_state.num_batches

    def __bool__(self) -> bool:
        """Return True, also for a dataset without batches or of unknown length: ``if dataset`` means "if not None"."""
        return True

    def run_and_selection(self, epoch: int | None) -> tuple[Run, Selection]:
        """Return what a state of an epoch, or of the current one, is compared with, and the row groups to read."""
        return self._epoch_state.run(self._epoch_state.epoch if epoch is None else epoch), self._opened_files.selection

    # What the loader calls -------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int | None:
        """Rows in a batch; None where a token budget decides how many these are."""
        options = self._stream.options
        return options.batch_size if options.batching is None else None

    @property
    def skip_requests(self) -> SkipRequests:
        """What was requested of steps of the current epoch: to skip them, and to restore them."""
        return self._epoch_state.skip_requests

    @property
    def leaves_restored(self) -> bool:
        """Whether all steps of the epoch were made but skipped ones, which are to be restored."""
        return self._epoch_state.leaves_restored

    @property
    def will_restore(self) -> bool:
        """Whether skipped rows are to be delivered after the last step, and none of them was so far."""
        return self._epoch_state.will_restore

    def prepare_iteration(self) -> None:
        """End the newest iteration. From now on the state is that at which the next one begins.

        Raises:
            RankMismatchError: If ranks are assumed, and there are several processes.
        """
        if self.ranks_are_assumed:
            require_one_process()  # before workers are started
        self._epoch_state.prepare_iteration()

    def begin_iteration(self) -> Iteration:
        """Begin an iteration: of the whole epoch, or of the rest that a state loaded since the last one left.

        Raises:
            RankMismatchError: If ranks are assumed, and there are several processes.
        """
        if self.ranks_are_assumed:
            require_one_process()
        return self._epoch_state.begin_iteration()

    def progress(self, uneven: Literal["drop", "pad"] | None = None) -> PassProgress:
        """Return what a progress bar needs: see `StructuredDataLoader.progress`."""
        return self._epoch_state.pass_progress(uneven)

    def batches(
        self, assignment: Assignment, *, pin: bool = False, transfer: Transfer | None = None
    ) -> Iterator[Batch | EmptyStep | StreamEnd]:
        """Read one stream in this process."""
        return self._stream.batches(assignment, pin=pin, transfer=transfer)

    def use_files(self, opened_files: Opened) -> None:
        """Read the same files in another way from the next iteration on. Workers that have been started cannot."""
        self._opened_files = opened_files
        cache = opened_files.new_cache()
        self._stream = replace(self._stream, opened_files=opened_files, read_cache=cache)
        self._has_new_files = True

    def takes_new_files(self) -> bool:
        """Return whether `use_files` was called since this was asked last: workers that run read as before."""
        takes, self._has_new_files = self._has_new_files, False
        return takes

    def attach_channel(self, channel: WorkerChannel) -> None:
        """Make this copy, in a worker, answer the assignments that arrive by channel."""
        self._channel = channel
        self._opened_files.take_retries()  # those of the training process, which it reports itself
        if channel.page is not None:
            reads = CurrentReads(channel.page.write_text)
            self._stream = replace(self._stream, read_cache=replace(self._stream.read_cache, reads=reads))

    @contextmanager
    def without_footers(self) -> Iterator[None]:
        """Leave out of copies that are sent to workers the footers that assignments will bring."""
        self._leaves_footers_out = True
        try:
            yield
        finally:
            self._leaves_footers_out = False

    def with_footers(self, parts: Sequence[Assignment], known: Collection[str]) -> list[Assignment]:
        """Add to the first of a worker's assignments the footers that a copy without footers needs for all of them.

        Those of files that it knows are left out.
        """
        footers = self._opened_files.footers
        slices = (part for one in parts for stream in one.stream_assignments for part in stream.slices)
        needed = {split.path for part in slices for split in part.shard.present}
        new = sorted(needed.difference(known).intersection(footers))
        return [replace(parts[0], footers={path: footers[path] for path in new}), *parts[1:]]

    def _answer(self, channel: WorkerChannel, number: int) -> Iterator[Message]:
        """Read, in a worker of this package's own loader, what its assignment names."""
        parts = channel.assignments.receive(number)
        if parts:
            yield from self._stream.messages(parts, channel)

    def _deliver_in_plain_worker(self, worker: int, num_workers: int, loader_seed: int) -> Iterator[Any]:
        """Deliver one stream, in a worker of a plain DataLoader. Errors are raised with the first batch."""
        require_allocator()
        self._epoch_state.join_plain_loader(num_workers, loader_seed)
        iteration = self.begin_iteration()
        # Assignments are in the order of worker turns, and a plain loader takes its first batch from worker 0.
        [assignment] = list(iteration.parts.assigned(iteration.parts.first).values())[worker]
        streams = {stream.stream for stream in assignment.stream_assignments}
        yield from BatchIterator(iteration, self.batches(assignment), streams=streams)

    def __getstate__(self) -> dict[str, Any]:
        """Give a copy progress of its own, and within `without_footers` no footers.

        A worker that is not forked does not know of the process group: so ranks that are assumed are looked into here.

        A user's copy continues where this dataset stands. One in a plain loader's worker begins what the next iteration
        of this dataset would.
        """
        if self.ranks_are_assumed and get_spawning_popen() is not None:
            require_one_process()
        if not self._leaves_footers_out:
            is_users = get_spawning_popen() is None
            epoch_state = self._epoch_state.for_user() if is_users else copy.copy(self._epoch_state)
            return self.__dict__ | {"_epoch_state": epoch_state, "_process_group": None}
        stream = self._stream.without_footers()
        return {
            **self.__dict__,
            "_process_group": None,
            "_stream": stream,
            "_opened_files": stream.opened_files,
            "_epoch_state": self._epoch_state.without_footers(stream.opened_files),
        }


def _refuse_batches_of_batches(caller: object) -> None:
    """Raise a TypeError if torch's DataLoader, whose part this is, stacks batches by its default `collate_fn`."""
    if not isinstance(caller, _IterableDatasetFetcher):
        return
    if caller.auto_collation and caller.collate_fn is default_collate:
        msg = "the dataset makes batches of its own batch_size, and DataLoader would make batches of these: pass "
        raise TypeError(f"{msg}batch_size=None to it, or use the loader that create_dataloader returns")
