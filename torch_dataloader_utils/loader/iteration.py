"""An iteration over an epoch, or over the rest that a state leaves of it: its assignments, and what was delivered."""

from __future__ import annotations

import os
import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.errors import IterationEndedError
from torch_dataloader_utils.formats.concurrency import hides_interrupt
from torch_dataloader_utils.loader.contents import Content, PartBegin, PartsOfPass, Read, ThrownAway
from torch_dataloader_utils.loader.metrics import Metrics
from torch_dataloader_utils.loader.progress_bar import ProgressBar
from torch_dataloader_utils.loader.reports import STALL_SEC, Reports
from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.planning.excluded import EpochExclusions
from torch_dataloader_utils.planning.quotas import Quotas
from torch_dataloader_utils.reading.batching import Batch, EmptyStep, StreamEnd


class Iteration:
    """An iteration, in the training process. Every batch goes through `deliver`, which counts it.

    It begins at some progress, has a number that no other iteration of the dataset has, and is read by so many
    processes: the workers, or this one. What is excluded in its epoch does not change while it runs. The quotas say how
    many rows each source of a mixture gives to each step.

    Attributes:
        metrics: Counts what is delivered, and what that takes.
        reports: Tells the hooks of events, if there are any.
        bar: Shows how many batches were delivered, if there is one.
        replaced_by: The call that took the progress over, if one did.
        changing_workers: Held while a thread starts workers for this iteration or ends them because of an error in it.
    """

    def __init__(
        self,
        number: int,
        epoch: int,
        progress: Progress,
        processes: int,
        excluded: EpochExclusions,
        *,
        quotas: Quotas | None = None,
    ) -> None:
        self.number = number
        self.epoch = epoch
        self.progress = progress.rebased()
        self.parts = PartsOfPass(number, epoch, self.progress, processes, excluded, quotas=quotas)
        self.metrics = Metrics(processes, progress.streams_per_turn)
        self.reports: Reports | None = None
        self.failed = False
        self._part = self.parts.first[0]
        self._has_all_parts = False
        self._has_restored_parts = False
        self.bar: ProgressBar | None = None
        self._is_abandoned = False
        self._ended: set[int] = set()
        self.replaced_by: str | None = None
        self.changing_workers = threading.RLock()  # a handler of a signal may end this iteration meanwhile

    def contents(self, read: Read) -> Iterator[Content]:
        """Let the processes read, and return what they make: see `PartsOfPass`."""
        return self.parts.contents(read, self._begin_restoring)

    def _begin_restoring(self) -> bool:
        self._has_all_parts = True
        self._has_restored_parts = self.progress.restores
        return self.progress.restores

    @property
    def read_past_restored(self) -> bool:
        """Whether skipped rows are to be delivered, and all else had been read ahead when that was asked for."""
        is_late = self._has_all_parts and not self._has_restored_parts
        return is_late and self.progress.restores and self.progress.restored is None

    def finished(self, streams: Collection[int] | None = None) -> bool:
        """Whether these streams, or all, have ended, and no other part follows."""
        if not self._part.is_last or (self.progress.will_restore and not self._has_all_parts):
            return False
        return self._ended.issuperset(range(len(self.progress.streams)) if streams is None else streams)

    @property
    def is_running(self) -> bool:
        """Whether its iterator can deliver more batches, or has yet to find that none is left."""
        return not (self.failed or self._is_abandoned or self.replaced_by or self.finished())

    def replace(self, by: str) -> None:
        """End this iteration because of a call that took its progress over."""
        self.replaced_by = self.replaced_by or by
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
        if self.replaced_by is not None:
            msg = f"this iterator was ended by a later {self.replaced_by}: one iterator at a time delivers the rows "
            raise IterationEndedError(msg + "of an epoch; make a new one with iter(loader)") from None

    def deliver(self, batch: Batch, following: Iterable[EmptyStep | StreamEnd] = ()) -> Any:
        """Count a batch as delivered, and the steps and ends that follow it; return what the user receives."""
        progress = self._advanced(batch, self.progress)
        self.metrics.batches_delivered += 1
        for content in following:
            progress = self._after(content, progress)
        # Last, with no call after it: if anything before this fails, or Ctrl-C comes, the batch was not delivered.
        self.progress = progress
        return batch.data

    def pass_over(self, content: EmptyStep | StreamEnd | PartBegin | ThrownAway) -> None:
        """Note that a step has no batch, that a stream has ended, or that steps are skipped."""
        if isinstance(content, EmptyStep | StreamEnd):
            self.progress = self._after(content, self.progress)
            return
        before = self.progress
        if isinstance(content, ThrownAway):
            self.progress = before.thrown_away(self._part.placed(content.receipt))
            self.metrics.count_thrown_away(content.receipt, content.work)
        else:
            self._part = content.part
            self._ended.clear()
            self.progress = content.part.begun(before)
            self.metrics.rows_skipped += before.rows_until(self.progress)
        self.metrics.batches_skipped += self.progress.batches_delivered - before.batches_delivered

    def note_stall(self, seconds: float) -> None:
        """Count and report that the training loop has waited long for a batch."""
        self.metrics.stalls += 1
        if self.reports is not None:
            self.reports.stall(seconds, self.progress)

    def _advanced(self, step: Batch | EmptyStep, progress: Progress) -> Progress:
        """Count the rows of a step, and return the progress after it."""
        receipt = self._counted(step, progress)
        self.metrics.rows_excluded += receipt.rows_excluded
        if self.bar:
            self.bar.update()
        return progress.advanced(receipt)

    def _after(self, end: EmptyStep | StreamEnd, progress: Progress) -> Progress:
        if isinstance(end, EmptyStep):
            return self._advanced(end, progress)
        progress = progress.ended(self._counted(end, progress))
        self.metrics.rows_dropped += end.receipt.rows_dropped
        self._ended.update(receipt.stream for receipt in (end.receipt, *end.receipt.others))
        if self.finished():
            if self.bar:
                self.bar.finish()
            if self.reports is not None:
                self.reports.done(progress)
        return progress

    def _counted(self, content: Batch | EmptyStep | StreamEnd, progress: Progress) -> Receipt:
        """Count and report what comes with a step or a stream's end, and return its receipt as one of the iteration."""
        receipt = self._part.placed(content.receipt)
        self.metrics.count(content)
        if self.reports is not None:
            self.reports.content(content, receipt, progress)
        return receipt


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

    The contents are those of some streams, or of all. `on_error` is called once if making or delivering
    a batch fails.

    One thread at a time may ask for batches. While it does, any other may take the progress over: then the thread gets
    an error in place of the batch that it waits for.

    Attributes:
        is_fetching: Whether a thread is where batches are made, or on its way in or out.
    """

    def __init__(
        self,
        iteration: Iteration,
        contents: Iterator[Content],
        *,
        streams: Collection[int] | None = None,
        on_error: Callable[[], None] | None = None,
    ) -> None:
        self._iteration = iteration
        self._owner = os.getpid()
        self._contents: Iterator[Content] | None = contents
        self._streams = streams
        self._on_error = on_error
        self._error: str | None = None
        self._before_last = iteration.progress
        self._waiting: deque[Content] = deque()
        self._batches = 0  # that wait
        self.is_fetching = False
        self._clock = iteration.metrics.clock
        weakref.finalize(self, iteration.abandon)

    def __next__(self) -> Any:
        if not self.has_next():
            raise StopIteration
        try:
            batch = self._waiting.popleft()
            assert isinstance(batch, Batch)  # noqa: S101 - has_next() passed over what was before it
            self._batches -= 1
            following = list(self._passed())  # a state is to show at once that the epoch has ended
            self._before_last = self._iteration.progress
            return self._iteration.deliver(batch, following)
        except BaseException as error:
            self._fail(error)
            if isinstance(error, Exception):
                self._iteration.require_current()
            raise

    def has_next(self, after: int = 0) -> bool:
        """Wait for the next batch, and return whether there is one: see `CountedIterator.has_next`."""
        self._require_usable()
        try:
            if self._batches <= after and self._contents is not None:
                self._wait(after)
            self._pass_over()
            if not self._batches and not self._iteration.finished(self._streams):
                msg = "a worker process ended before its stream did; the state holds what was delivered"
                raise RuntimeError(msg)  # noqa: TRY301 - handled as every other error
        except BaseException as error:
            if hides_interrupt(error):
                self._fail(KeyboardInterrupt())
                raise KeyboardInterrupt from None
            self._fail(error)
            if self._iteration.replaced_by is None or not isinstance(error, Exception):
                raise
        finally:
            self.is_fetching = False
        has_batch = self._batches > after
        if self._iteration.replaced_by is not None:  # by another thread, meanwhile
            self.close()
            self._iteration.require_current()
        return has_batch

    def _require_usable(self) -> None:
        """Raise unless a batch may be asked for: in this process, by this thread, and after no error."""
        if self._iteration.replaced_by is not None:
            self._iteration.require_current()
        if self._owner != os.getpid():  # its thread is not here, and what its workers send here would be missing there
            msg = f"this process was forked from process {self._owner}, to which this iterator belongs: make a new one "
            raise IterationEndedError(msg + "with iter(loader)")
        if self._error is not None:
            msg = f"this iterator ended with an error ({self._error}): to continue after it would leave out rows; make "
            msg += "a new iterator, after load_state_dict(state_dict()) to continue where this one stopped"
            raise IterationEndedError(msg)
        if self.is_fetching:
            msg = "this iterator is being asked for a batch: only one thread at a time may ask it"
            raise RuntimeError(msg)

    def peek(self, after: int = 0) -> Any:
        """Return a batch that waits, without delivering it: see `CountedIterator.peek`."""
        waiting = [content for content in list(self._waiting) if isinstance(content, Batch)]
        if len(waiting) <= after:  # another thread has taken the progress over since then
            self._iteration.require_current()
        return waiting[after].data

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

    def _wait(self, after: int) -> None:
        """Fetch until so many batches wait and one more, or none is left."""
        self.is_fetching = True  # before it is looked whether another thread has taken the progress over
        self._clock.waits_since = time.perf_counter()
        while self._batches <= after and self._contents is not None:
            if self._iteration.replaced_by is not None:
                return
            self._fetch()
        waited = self._clock.end_wait()
        if waited >= STALL_SEC:
            self._iteration.note_stall(waited)

    def _fetch(self) -> None:
        """Fetch a batch, or what is passed once the batches before it are delivered: an empty step, a stream's end."""
        content = next(self._contents or iter(()), None)  # another thread may have closed this
        if content is None:
            self._contents = None
            return
        self._waiting.append(content)
        self._batches += isinstance(content, Batch)
        self._pass_over()

    def _pass_over(self) -> None:
        """Take what waits before the next batch."""
        while self._waiting and not isinstance(content := self._waiting[0], Batch):
            self._waiting.popleft()
            self._iteration.pass_over(content)

    def _passed(self) -> Iterator[EmptyStep | StreamEnd]:
        """Take the steps without a batch, and the ends of streams, before which every batch was delivered."""
        while self._waiting and isinstance(content := self._waiting[0], EmptyStep | StreamEnd):
            self._waiting.popleft()
            yield content

    def end(self, by: str) -> None:
        """End because of a call that makes, or tries to make, another iteration.

        From then on, no thread starts workers for this iteration, or ends any.
        """
        self._iteration.replace(by)
        if self._owner == os.getpid():  # else a thread that is not here may hold the lock
            with self._iteration.changing_workers:
                self._on_error = None
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
        with self._iteration.changing_workers:
            if self._on_error is not None:
                self._on_error()


def with_last(batches: CountedIterator, agreed: Callable[[bool], bool] = bool) -> Iterator[tuple[Any, bool]]:
    """Yield each batch with whether it is the last.

    The batch after it is fetched first, so that two are held. If that fails, the error is raised in place of the batch
    before it, which is not counted as delivered. `agreed` says what follows for this process from whether it has a
    batch: the other ranks may have none.
    """
    goes_on = agreed(batches.has_next())
    while goes_on:
        goes_on = agreed(batches.has_next(after=1))
        yield next(batches), not goes_on
