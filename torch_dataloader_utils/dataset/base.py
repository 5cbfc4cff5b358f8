"""A dataset in whatever process it is: what its loader, its workers and plain loaders ask of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from torch_dataloader_utils.formats.base import OpenedFiles
from torch_dataloader_utils.formats.read_cache import ReadCache
from torch_dataloader_utils.loader.epoch import EpochState
from torch_dataloader_utils.loader.iteration import DeliveringIterator, Iteration, take_turns
from torch_dataloader_utils.planning.assignment import Assignment
from torch_dataloader_utils.reading.batching import Batch, StreamEnd
from torch_dataloader_utils.reading.scan import ReadOptions
from torch_dataloader_utils.workers.channel import WorkerChannel
from torch_dataloader_utils.workers.messages import Message
from torch_dataloader_utils.workers.producer import Stream

__all__ = ["BatchDataset"]


class BatchDataset(IterableDataset[Any]):
    """Batches of one rank, delivered in this process or packed in a worker.

    Args:
        opened_files: The data files.
        epoch_state: Where the rank stands.
        read_options: How rows become batches.
        collate_fn: Called with each batch, or None.
        seed: Seed of the random numbers that it draws.
    """

    def __init__(
        self,
        opened_files: OpenedFiles,
        epoch_state: EpochState,
        read_options: ReadOptions,
        collate_fn: Callable[[Any], Any] | None,
        seed: int,
    ) -> None:
        super().__init__()
        self._opened_files = opened_files
        self._epoch_state = epoch_state
        self._schema = read_options.transform.schema
        cache = ReadCache.of_opened(opened_files.footers)
        self._stream = Stream(opened_files, cache, read_options, collate_fn, seed, epoch_state.topology.rank)
        self._channel: WorkerChannel | None = None
        self._leaves_footers_out = False

    def __iter__(self) -> Iterator[Any]:
        """Begin the epoch anew, or continue from a loaded state, and deliver the batches in this process."""
        if self._channel is not None:
            return self._answer(self._channel, self._channel.assignments.begin())
        worker = get_worker_info()
        if worker is not None:
            return self._deliver_in_plain_worker(worker.id, worker.num_workers, worker.seed - worker.id)
        iteration = self.begin_iteration()
        return DeliveringIterator(iteration, take_turns(map(self.batches, iteration.assignments())))

    # What the loader calls -------------------------------------------------------------------------------------------

    def begin_iteration(self) -> Iteration:
        """Begin an iteration: the epoch anew, or what a state that was loaded since the last one left."""
        return self._epoch_state.begin_iteration()

    def batches(self, assignment: Assignment, *, pin: bool = False) -> Iterator[Batch | StreamEnd]:
        """Read one stream in this process."""
        return self._stream.batches(assignment, pin=pin)

    def attach_channel(self, channel: WorkerChannel) -> None:
        """Make this copy, in a worker, answer the assignments that come by channel."""
        self._channel = channel

    @contextmanager
    def without_footers(self) -> Iterator[None]:
        """Let copies that are sent to processes have nothing that assignments bring along."""
        self._leaves_footers_out = True
        try:
            yield
        finally:
            self._leaves_footers_out = False

    def with_footers(self, assignment: Assignment, known: Collection[str]) -> Assignment:
        """Add to an assignment the footers that a without_footers copy needs for it and does not know."""
        footers = self._opened_files.footers
        slices = [
            shard_slice
            for stream_assignment in assignment.stream_assignments
            for shard_slice in stream_assignment.slices
        ]
        needed = {split.path for shard_slice in slices for split in shard_slice.shard.present}
        new = sorted(needed.difference(known).intersection(footers))
        return replace(assignment, footers={path: footers[path] for path in new})

    # Within ----------------------------------------------------------------------------------------------------------

    def _answer(self, channel: WorkerChannel, number: int) -> Iterator[Message]:
        """Read, in a worker of this package's own loader, what its assignment says."""
        yield from self._stream.messages(channel.assignments.receive(number), channel)

    def _deliver_in_plain_worker(self, worker: int, num_workers: int, loader_seed: int) -> Iterator[Any]:
        """Deliver one stream, in a worker of a plain DataLoader; what is wrong is raised with the first batch."""
        self._epoch_state.join_plain_loader(num_workers, loader_seed)
        iteration = self.begin_iteration()
        own = list(iteration.assignments())[worker]  # by turn: a plain loader asks its first worker first
        yield from DeliveringIterator(
            iteration,
            self.batches(own),
            streams={stream_assignment.stream for stream_assignment in own.stream_assignments},
        )

    def __getstate__(self) -> dict[str, Any]:
        """Let a copy stand on its own, and leave behind, where that is wanted, what assignments bring along."""
        if not self._leaves_footers_out:
            return self.__dict__ | {"_epoch_state": copy.copy(self._epoch_state)}
        stream = self._stream.without_footers()
        return {
            **self.__dict__,
            "_stream": stream,
            "_opened_files": stream.opened_files,
            "_epoch_state": self._epoch_state.without_footers(stream.opened_files),
        }
