"""An iteration over an epoch, or over the rest that a state leaves of it: its assignments, and what was delivered."""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.errors import IterationEndedError
from torch_dataloader_utils.formats.concurrency import hides_interrupt
from torch_dataloader_utils.loader.metrics import Metrics
from torch_dataloader_utils.loader.progress_bar import ProgressBar
from torch_dataloader_utils.loader.reports import STALL_SEC, Reports
from torch_dataloader_utils.planning.assignment import Assignment, StreamAssignment
from torch_dataloader_utils.reading.batching import Batch, StreamEnd


class Iteration:
    """An iteration, in the training process. Every batch goes through `deliver`, which counts it.

    It begins at some progress, has a number that no other iteration of the dataset has, and is read by so many
    processes: the workers, or this one.

    Attributes:
        metrics: Counts what is delivered, and what that takes.
        reports: Tells the hooks of events, if there are any.
        bar: Shows how many batches were delivered, if there is one.
    """

    def __init__(self, number: int, epoch: int, progress: Progress, processes: int) -> None:
        self.number = number
        self.epoch = epoch
        self.progress = progress.rebased()
        self.failed = False
        self._processes = processes
        self.metrics = Metrics(processes, progress.streams_per_turn)
        self.reports: Reports | None = None
        self.bar: ProgressBar | None = None
        self._is_abandoned = False
        self._ended: set[int] = set()
        self._replaced_by: str | None = None

    def assignments(self) -> Iterator[Assignment]:
        """Yield the assignment of each process, in the order of the worker turns."""
        progress = self.progress
        together = progress.streams_per_turn
        streams = [StreamAssignment(index, stream.slices) for index, stream in enumerate(progress.streams)]
        turns = [tuple(streams[turn * together :][:together]) for turn in progress.turns()]
        for number in range(self._processes):
            worker = (progress.next_turn + number) % self._processes
            yield Assignment(self.number, worker, self.epoch, tuple(turns[number :: self._processes]))

    def finished(self, streams: Collection[int] | None = None) -> bool:
        """Whether these streams, or all, have ended."""
        return self._ended.issuperset(range(len(self.progress.streams)) if streams is None else streams)

    @property
    def is_running(self) -> bool:
        """Whether its iterator can deliver more batches, or has yet to find that none is left."""
        return not (self.failed or self._is_abandoned or self._replaced_by or self.finished())

    def replace(self, by: str) -> None:
        """End this iteration because of a call that took its progress over."""
        self._replaced_by = self._replaced_by or by
        self.abandon()

    def fail(self) -> None:
        """End this iteration because of an error."""
        self.failed = True
        self.abandon()

    def abandon(self) -> None:
        """Note that nothing more will be delivered."""
        self._is_abandoned = True
        self.metrics.clock.end_wait()
        if self.bar:
            self.bar.close()

    def require_current(self) -> None:
        """Raise unless this iteration owns the progress."""
        if self._replaced_by is not None:
            msg = f"this iterator was ended by a later {self._replaced_by}: one iterator at a time delivers the rows "
            raise IterationEndedError(msg + "of an epoch; make a new one with iter(loader)")

    def deliver(self, batch: Batch, ends: Iterable[StreamEnd] = ()) -> Any:
        """Count a batch as delivered, and the streams that end with it; return what the user receives."""
        progress = self.progress.advanced(batch.receipt)
        self.metrics.batches_delivered += 1
        self.metrics.count(batch)
        if self.reports is not None:
            self.reports.content(batch, self.progress)
        if self.bar:
            self.bar.update()
        for end in ends:
            progress = self._after(end, progress)
        # Last, with no call after it: if anything before this fails, or Ctrl-C comes, the batch was not delivered.
        self.progress = progress
        return batch.data

    def end_stream(self, end: StreamEnd) -> None:
        """Note that a stream has ended."""
        self.progress = self._after(end, self.progress)

    def note_stall(self, seconds: float) -> None:
        """Count and report that the training loop has waited long for a batch."""
        self.metrics.stalls += 1
        if self.reports is not None:
            self.reports.stall(seconds, self.progress)

    def _after(self, end: StreamEnd, progress: Progress) -> Progress:
        self.metrics.count(end)
        if self.reports is not None:
            self.reports.content(end, progress)
        progress = progress.ended(end.receipt)
        self.metrics.rows_dropped += end.receipt.rows_dropped
        self._ended.update(receipt.stream for receipt in (end.receipt, *end.receipt.others))
        if self.finished():
            if self.bar:
                self.bar.finish()
            if self.reports is not None:
                self.reports.done(progress)
        return progress


class CountedIterator(Iterator[Any]):
    """An iterator of batches that can look ahead: a batch counts as delivered only when `next` returns it."""

    @abstractmethod
    def has_next(self, after: int = 0) -> bool:
        """Wait for the next batch, and return whether there is one.

        `after` is the number of batches before it that wait to be delivered as well.
        """

    @abstractmethod
    def peek(self, after: int = 0) -> Any:
        """Return the batch of which `has_next(after)` says that there is one, without delivering it."""


class BatchIterator(CountedIterator):
    """The iterator that users receive: it takes batches from where they are made, and counts each as it delivers it.

    The contents are the batches and ends of some streams, or of all. `on_error` is called once if making or delivering
    a batch fails.
    """

    def __init__(
        self,
        iteration: Iteration,
        contents: Iterator[Batch | StreamEnd],
        *,
        streams: Collection[int] | None = None,
        on_error: Callable[[], None] | None = None,
    ) -> None:
        self._iteration = iteration
        self._contents: Iterator[Batch | StreamEnd] | None = contents
        self._streams = streams
        self._on_error = on_error
        self._error: str | None = None
        self._waiting: deque[Batch | StreamEnd] = deque()
        self._batches = 0  # that wait
        self._clock = iteration.metrics.clock
        weakref.finalize(self, iteration.abandon)

    def __next__(self) -> Any:
        if not self.has_next():
            raise StopIteration
        try:
            batch = self._waiting.popleft()
            assert isinstance(batch, Batch)  # noqa: S101 - has_next() ended the streams before it
            self._batches -= 1
            ends = list(self._ended_streams())  # a state is to show at once that the epoch has ended
            self._before_last = self._iteration.progress
            return self._iteration.deliver(batch, ends)
        except BaseException as error:
            self._fail(error)
            raise

    def has_next(self, after: int = 0) -> bool:
        """Wait for the next batch, and return whether there is one: see `CountedIterator.has_next`."""
        self._iteration.require_current()
        if self._error is not None:
            msg = f"this iterator ended with an error ({self._error}): to continue after it would leave out rows; make "
            msg += "a new iterator, after load_state_dict(state_dict()) to continue where this one stopped"
            raise IterationEndedError(msg)
        try:
            if self._batches <= after and self._contents is not None:
                self._clock.waits_since = time.perf_counter()
                while self._batches <= after and self._contents is not None:
                    self._fetch()
                waited = self._clock.end_wait()
                if waited >= STALL_SEC:
                    self._iteration.note_stall(waited)
            if not self._batches and not self._iteration.finished(self._streams):
                msg = "a worker process ended before its stream did; the state holds what was delivered"
                raise RuntimeError(msg)  # noqa: TRY301 - handled as every other error
        except BaseException as error:
            if hides_interrupt(error):
                self._fail(KeyboardInterrupt())
                raise KeyboardInterrupt from None
            self._fail(error)
            raise
        return self._batches > after

    def peek(self, after: int = 0) -> Any:
        """Return a batch that waits, without delivering it: see `CountedIterator.peek`."""
        waiting = (content for content in self._waiting if isinstance(content, Batch))
        return next(islice(waiting, after, None)).data

    @property
    def delivered(self) -> int:
        """Number of batches that this iteration has delivered."""
        return self._iteration.metrics.batches_delivered

    @contextmanager
    def without_last(self) -> Iterator[None]:
        """Within it, the state is that before the batch which was delivered last."""
        progress, self._iteration.progress = self._iteration.progress, self._before_last
        try:
            yield
        finally:
            self._iteration.progress = progress

    def _fetch(self) -> None:
        """Fetch a batch or the end of a stream, which ends once the batches before it are delivered."""
        content = None if self._contents is None else next(self._contents, None)
        if content is None:
            self._contents = None
            return
        self._waiting.append(content)
        self._batches += isinstance(content, Batch)
        for end in self._ended_streams():
            self._iteration.end_stream(end)

    def _ended_streams(self) -> Iterator[StreamEnd]:
        """Take the ends of the streams whose last batch was delivered."""
        while self._waiting and isinstance(end := self._waiting[0], StreamEnd):
            self._waiting.popleft()
            yield end

    def end(self, by: str) -> None:
        """End because of a call that makes, or tries to make, another iteration."""
        self._iteration.replace(by)
        self.close()

    def close(self) -> None:
        """Release files, and workers that serve only this iteration."""
        self._contents, self._batches = None, 0
        self._waiting.clear()

    def _fail(self, error: BaseException) -> None:
        """Keep the error's message, not the error: its traceback would keep worker processes alive."""
        self._iteration.fail()
        self._error = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        self.close()
        if self._on_error is not None:
            self._on_error()


def with_last(batches: CountedIterator) -> Iterator[tuple[Any, bool]]:
    """Yield each batch with whether it is the last.

    The batch after it is fetched first, so that two are held. If that fails, the error is raised in place of the batch
    before it, which is not counted as delivered.
    """
    while batches.has_next():
        is_last = not batches.has_next(after=1)
        yield next(batches), is_last


def round_robin(streams: Iterable[Iterator[Batch | StreamEnd]]) -> Iterator[Batch | StreamEnd]:
    """Yield a batch of each stream in turn. A stream that has ended is skipped from then on."""
    waiting = deque(streams)
    while waiting:
        stream = waiting.popleft()
        content = next(stream, None)
        if content is None:  # a worker process died
            return
        if isinstance(content, Batch):
            waiting.append(stream)
        yield content
