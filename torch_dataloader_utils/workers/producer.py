"""One stream in the process that reads it: read ahead, collated, and yielded as batches or packed into messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from torch.utils.data import get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from torch_dataloader_utils.columns.convert import sendable, with_offsets
from torch_dataloader_utils.columns.tensors import pinned
from torch_dataloader_utils.formats.opened_files import Opened
from torch_dataloader_utils.formats.read_cache import ReadCache
from torch_dataloader_utils.planning.assignment import Assignment
from torch_dataloader_utils.reading.batching import PORTION_BYTES, Batch, Batches, EmptyStep, StreamEnd, Transfer
from torch_dataloader_utils.reading.memory_budget import MemoryBudget
from torch_dataloader_utils.reading.read_ahead import ReadAhead
from torch_dataloader_utils.reading.scan import ReadOptions
from torch_dataloader_utils.reading.stream import read_assignment
from torch_dataloader_utils.reading.work import Stage, Stopwatch, Wait, Work
from torch_dataloader_utils.workers.channel import WorkerChannel
from torch_dataloader_utils.workers.collate import (
    BatchBuffer,
    FailedCollate,
    UncopyableError,
    collated_or_failed,
    copy_batch,
)
from torch_dataloader_utils.workers.message_size import NUM_SINGLE, MessageSizer
from torch_dataloader_utils.workers.messages import Content, Message
from torch_dataloader_utils.workers.seeding import Seeding
from torch_dataloader_utils.workers.shared_memory import SharedMemoryPool

Collate: TypeAlias = Callable[[Batch], Batch]

REPORT_SEC = 0.1
"""How often the batches of the training process itself say where its time went."""

LARGE_SHARE = 2
"""Where batches have this part (a half) of the budget or more, the last one is copied, if there are enough of them: the
consumer mostly holds it while it waits for the next one, and nothing else could be read meanwhile."""

ENOUGH_BATCHES = 8
"""Of fewer batches the copy of one would take too much of the time."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Everything that a process needs to make the batches of a stream.

    The cache has what this process has learned of the files. The random numbers that `collate_fn` draws are seeded by
    the seed and the rank.
    """

    opened_files: Opened
    read_cache: ReadCache
    options: ReadOptions
    collate_fn: Callable[[Any], Any] | None
    seed: int
    rank: int

    def without_footers(self) -> Stream:
        """Return the same for a process that gets footers with its assignments."""
        files = self.opened_files.without_footers()
        return replace(self, opened_files=files, read_cache=self.read_cache.without_footers())

    def batches(
        self, assignment: Assignment, *, pin: bool = False, transfer: Transfer | None = None
    ) -> Generator[Batch | EmptyStep | StreamEnd, None, None]:
        """Yield a stream's batches one by one, for this process.

        `pin` copies tensors into pinned memory: in the thread that reads ahead, or after `collate_fn`. The transfer
        comes last.
        """
        collate = self._collate(assignment)
        ahead = self._ahead(assignment, _pinned_together if pin and self.collate_fn is None else None)
        report = _Report(self)
        lap = report.watch.lap
        one_by_one: Callable[[Batches], Iterator[Batch]] = iter
        if transfer is not None and self.collate_fn is None:
            one_by_one = partial(_transferred, transfer, lap, cut=not pin)  # what is pinned comes in portions
        try:
            for content in ahead:
                now = report.received(content)
                if not isinstance(content, Batches):
                    yield report.on(content)
                    lap("waiting_for_loop_sec")
                    continue
                lease = content.lease
                is_large = lease is not None and LARGE_SHARE * lease.size >= ahead.budget.limit
                has_own_last = is_large and not pin and len(content.receipts) >= ENOUGH_BATCHES
                for part in content.with_own_last() if has_own_last else (content,):
                    for batch in one_by_one(part):
                        collated = batch
                        if self.collate_fn is not None:
                            collated = collate(batch)
                            now = lap("collating_sec")
                            if pin or transfer is not None:
                                collated = _collated_elsewhere(collated, transfer, pin=pin)
                                now = lap("packing_sec")
                        yield collated if now < report.due and collated.work is None else report.on(collated)
                        now = lap("waiting_for_loop_sec")
                        ahead.release()
                        del batch, collated  # not to keep its memory while the next is waited for
                    del part
                if lease is not None:
                    ahead.retire(lease)
                del content
                if has_own_last:
                    ahead.release()
        finally:
            ahead.release()
            ahead.close()

    def messages(self, parts: Sequence[Assignment], channel: WorkerChannel) -> Iterator[Message]:
        """Yield a stream's batches packed, for the training process, part after part."""
        self.read_cache.footers.add(parts[0].footers)
        if channel.pool is not None:
            channel.pool.release_unused()
        report = _Report(self)
        sizer = MessageSizer(1 if self.collate_fn is None else NUM_SINGLE)
        outgoing = _Outgoing(parts[0], channel.pool, sizer, report)
        for assignment in parts:
            yield from self._messages_of(assignment, outgoing, report)

    def _messages_of(self, assignment: Assignment, outgoing: _Outgoing, report: _Report) -> Iterator[Message]:
        collate = self._collate(assignment)
        ahead = self._ahead(assignment)
        try:
            for content in ahead:
                outgoing.received(report.received(content))
                rest = replace(content, lease=None) if isinstance(content, Batches) else None  # leases are not sent
                while rest is not None:
                    part, rest = rest.cut(outgoing.space)
                    for packable in self._packable(part, collate, alone=outgoing.size == 1):
                        report.watch.lap(self._making)
                        if isinstance(packable, Alone) and outgoing.contents:  # it may be impossible to pack
                            yield from outgoing.flush()
                        outgoing.add(packable)
                        if outgoing.space <= 0:
                            yield from outgoing.flush()
                            ahead.release()
                    del part, packable
                if not isinstance(content, Batches):
                    outgoing.add(content)
                elif content.lease is not None:
                    ahead.retire(content.lease)
                del content
            yield from outgoing.flush()
        except Exception:
            if outgoing.contents:  # delivered before the error is raised
                yield from outgoing.flush()
            raise
        finally:
            ahead.release()
            ahead.close()

    def _ahead(
        self, assignment: Assignment, prepare: Callable[[Batches], Iterator[Batches]] | None = None
    ) -> ReadAhead[Batches | EmptyStep | StreamEnd]:
        def read(budget: MemoryBudget) -> Iterator[Batches | EmptyStep | StreamEnd]:
            for content in read_assignment(self.opened_files, self.read_cache, assignment, self.options, budget):
                if prepare is not None and isinstance(content, Batches):
                    yield from prepare(content)
                else:
                    yield content
                del content  # not to keep its memory while the next is read

        return ReadAhead(read, self.options.read_ahead_bytes)

    @property
    def _making(self) -> Stage:
        """The stage in which batches are made of what was read."""
        return "converting_sec" if self.collate_fn is None else "collating_sec"

    def _collate(self, assignment: Assignment) -> Collate:
        """Return a function that calls `collate_fn` on a batch of an assignment, with random numbers seeded for it."""
        collate_fn = self.collate_fn
        if collate_fn is None:
            return lambda batch: batch
        seeding = Seeding(self.seed, self.rank, assignment, restores=get_worker_info() is None)

        def collate(batch: Batch) -> Batch:
            with seeding.of(batch.receipt):
                data = collated_or_failed(collate_fn, batch.data) if assignment.may_skip else collate_fn(batch.data)
                return Batch(data, batch.receipt, batch.work)

        return collate

    def _packable(self, batches: Batches, collate: Collate, *, alone: bool) -> Iterator[Batches | Batch | Alone]:
        """Yield what goes into messages; `alone` says that each batch is packed before the next one is made."""
        if self.collate_fn is None:
            yield replace(batches, columns=sendable(batches.columns, batches.sizes))
        else:
            yield from (collate(one) for one in batches) if alone else self._collate_together(batches, collate)

    def _collate_together(self, batches: Batches, collate: Collate) -> Iterator[Batches | Batch | Alone]:
        """Yield collated batches: together as columns if they are alike, and `Alone` if they cannot be copied."""
        buffer = BatchBuffer(batches.sizes)
        done: list[Batch] = []
        try:
            for number, batch in enumerate(batches):
                collated = collate(batch)
                copy = buffer.append(collated.data) if number == buffer.count else None
                try:
                    data = copy_batch(collated.data) if copy is None else copy
                    done.append(Batch(data, batch.receipt, batch.work))
                except UncopyableError:
                    yield from done
                    done.clear()
                    yield Alone(collated)
        except Exception:
            yield from done  # batches made before the error are delivered before it is raised
            raise
        if buffer.is_complete:
            yield replace(batches, columns=buffer.columns)
        else:
            yield from done


def _collated_elsewhere(batch: Batch, transfer: Transfer | None, *, pin: bool) -> Batch:
    """Return a collated batch in pinned memory, or where the transfer copies it, or from the one to the other."""
    if isinstance(batch.data, FailedCollate):  # it is looked for before a batch is delivered
        return batch
    if pin:
        batch = batch._replace(data=pin_memory(batch.data))  # type: ignore[no-untyped-call]
    return batch if transfer is None else transfer.batch(batch)


def _transferred(transfer: Transfer, lap: Callable[[Stage], float], batches: Batches, *, cut: bool) -> Iterator[Batch]:
    """Yield batches that were transferred, one by one; if they are to be cut, some at a time."""
    for portion in batches.portions(PORTION_BYTES) if cut else (batches,):
        for batch in transfer.batches(portion):
            lap("packing_sec")
            yield batch


def _pinned_together(batches: Batches) -> Iterator[Batches]:
    for portion in batches.portions(PORTION_BYTES):
        yield replace(portion, columns=pinned(with_offsets(portion.columns, portion.sizes)))


@dataclass(frozen=True, slots=True)
class Alone:
    """A batch that has to be packed before the next one is made, which may reuse its memory."""

    batch: Batch


class _Report:
    """Tells the training process, with the batches of a stream, what was done for them and where time went.

    Attributes:
        watch: Measures where time goes.
        due: When the next report is due, if nothing is read before.
    """

    def __init__(self, stream: Stream) -> None:
        self._opened = stream.opened_files
        self.due = 0.0
        self.watch = Stopwatch()

    def received(self, content: Batches | EmptyStep | StreamEnd) -> float:
        """Note where the time went in which the content was waited for, and return the time."""
        waits: tuple[Wait, ...] = ()
        if content.work is not None:
            waits, content.work.waits = content.work.waits, ()
        return self.watch.lap_reading(waits)

    def on(self, content: Any) -> Any:
        """Return batches, or the end of a stream, with the times and the failed attempts since the last report."""
        self.due = time.perf_counter() + REPORT_SEC
        work = content.work or Work()
        work.counters.add(self.watch.take())
        work.retries = self._opened.take_retries()
        if content.work is work:
            return content
        return replace(content, work=work) if isinstance(content, Batches) else content._replace(work=work)


class _Outgoing:
    """Collects what goes into the next message of a stream."""

    def __init__(
        self, assignment: Assignment, pool: SharedMemoryPool | None, sizer: MessageSizer, report: _Report
    ) -> None:
        self._assignment = assignment
        self._pool = pool
        self._sizer = sizer
        self._report = report
        self.contents: list[Content] = []
        self._begin()

    def _begin(self) -> None:
        self._began = time.perf_counter()
        self.size = self.space = self._sizer.batches

    def received(self, now: float) -> None:
        """Note that there is more to make batches of. The wait for it was no part of a message that is still empty."""
        if not self.contents:
            self._began = now

    def add(self, content: Content | Alone) -> None:
        """Add batches, a step without a batch, or the stream's end to the message."""
        self.contents.append(content.batch if isinstance(content, Alone) else content)
        if isinstance(content, Alone):
            self.size = self.space = 1  # the message is sent at once
        if not isinstance(content, (EmptyStep, StreamEnd)):
            self.space -= len(content.receipts) if isinstance(content, Batches) else 1

    def flush(self) -> Iterator[Message]:
        """Yield the message with everything that was added; the next one begins once more is requested."""
        yield self._pack()
        self._report.watch.lap("waiting_for_loop_sec")
        self._begin()

    def _pack(self) -> Message:
        contents, self.contents = self.contents, []
        contents[0] = self._report.on(contents[0])
        seconds = time.perf_counter() - self._began
        message = Message.pack(self._assignment.iteration, contents, self._pool)
        self._sizer.record(self.size - self.space, message.size, seconds)
        self._report.watch.lap("packing_sec")
        return message
