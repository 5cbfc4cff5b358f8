"""Counters of an iteration: what each worker did for what was delivered, and where the training loop's time went."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.reading.batching import Batch, EmptyStep, StreamEnd
from torch_dataloader_utils.reading.work import COUNTERS, Counters, Work

COUNTED = ("batches_delivered", "batches_skipped", "rows_skipped", "rows_excluded", "rows_dropped", "stalls")
"""What is counted for the training process, and not for each worker."""


@dataclass(slots=True)
class WorkerMetrics:
    """What a worker did for what was delivered of it. Without workers, what the training process itself did.

    Attributes:
        batches_delivered: Batches delivered.
        rows_delivered: Rows in the steps that were passed, excluded rows included.
        retries: Attempts of the storage that failed and were followed by others.
        counters: What it read, and where its time went.
    """

    batches_delivered: int = 0
    rows_delivered: int = 0
    retries: int = 0
    counters: Counters = field(default_factory=Counters)

    def count(self, work: Work) -> None:
        """Count what it did."""
        self.retries += len(work.retries)
        self.counters.add(work.counters)

    def add(self, other: WorkerMetrics) -> None:
        """Add what it did in another iteration."""
        self.batches_delivered += other.batches_delivered
        self.rows_delivered += other.rows_delivered
        self.retries += other.retries
        self.counters.add(other.counters)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts by name."""
        counts = {"batches_delivered": self.batches_delivered, "rows_delivered": self.rows_delivered}
        return counts | asdict(self.counters) | {"retries": self.retries}


class LoopSeconds(NamedTuple):
    """Where the training loop's time went, in seconds of the wall clock.

    Attributes:
        first_batch_sec: It waited for the iteration's first batch: until workers have begun and read.
        waiting_sec: It waited for all other batches.
        between_batches_sec: It did its own work, between two batches.
    """

    first_batch_sec: float = 0.0
    waiting_sec: float = 0.0
    between_batches_sec: float = 0.0


class LoopClock:
    """Measures where the training loop's time goes. Other threads may read it at any moment.

    It is asked twice for each batch. So it does little, and takes no lock: each attribute is replaced at once.

    Attributes:
        waits_since: When the loop began to wait the last time, as `time.perf_counter` tells it; 0 if it never did.
    """

    def __init__(self) -> None:
        self.waits_since = 0.0
        # Seconds of the first wait, of the others and between them; and when the last wait ended that is in these.
        self._counted: tuple[float, float, float, float] = 0.0, 0.0, 0.0, 0.0

    def end_wait(self) -> float:
        """Say that the loop waits no more. Return how long it did, or 0 if that was for the first batch."""
        began, (first, waiting, between, ended) = self.waits_since, self._counted
        if began <= ended:
            return 0.0
        now = time.perf_counter()
        if not ended:
            self._counted = now - began, waiting, between, now
            return 0.0
        self._counted = first, waiting + now - began, between + began - ended, now
        return now - began

    def read(self) -> LoopSeconds:
        """Return the seconds until now. A wait that goes on counts."""
        began = self.waits_since  # before the seconds, which may count this wait a moment later
        first, waiting, between, ended = self._counted
        if began <= ended:
            return LoopSeconds(first, waiting, between)
        going_on = time.perf_counter() - began
        if not ended:
            return LoopSeconds(first_batch_sec=going_on)
        return LoopSeconds(first, waiting + going_on, between + began - ended)


class Metrics:
    """What an iteration has delivered and what that took, as the training process counts it.

    It is read by some processes. The streams of a worker turn are neighbours.

    Attributes:
        batches_delivered: Batches delivered.
        batches_skipped: Steps that were skipped.
        rows_skipped: Rows of these steps.
        rows_excluded: Rows that batches lost because they were excluded in this epoch.
        rows_dropped: Rows left out by ``drop_last`` at the ends of streams.
        stalls: Batches that the loop waited for longer than `STALL_SEC`.
        clock: Where the training loop's time goes.
        workers: What each worker did.
    """

    def __init__(self, processes: int, streams_per_turn: int = 1) -> None:
        self._streams_per_turn = streams_per_turn
        self.batches_delivered = 0
        self.batches_skipped = 0
        self.rows_skipped = 0
        self.rows_excluded = 0
        self.rows_dropped = 0
        self.stalls = 0
        self.clock = LoopClock()
        self.workers = [WorkerMetrics() for _ in range(processes)]

    def count(self, content: Batch | EmptyStep | StreamEnd) -> None:
        """Count what a worker did for a step that is passed, or until the end of a stream."""
        receipt = content.receipt
        worker = self._worker(receipt)
        if not isinstance(content, StreamEnd):
            worker.batches_delivered += isinstance(content, Batch)
            worker.rows_delivered += receipt.rows
        if content.work is not None:
            worker.count(content.work)

    def count_thrown_away(self, receipt: Receipt, work: Work | None) -> None:
        """Count what a worker did for a batch of a skipped step."""
        self.rows_skipped += receipt.rows
        if work is not None:
            self._worker(receipt).count(work)

    def _worker(self, receipt: Receipt) -> WorkerMetrics:
        return self.workers[receipt.stream // self._streams_per_turn % len(self.workers)]

    def read(self) -> MetricsReading:
        """Return the counts as they are now; another thread may count meanwhile."""
        counts = {name: getattr(self, name) for name in COUNTED}
        return MetricsReading(counts, self.clock.read(), _summed([self.workers]))


@dataclass(frozen=True, slots=True)
class MetricsReading:
    """What metrics were at a moment: those of an iteration, or of several together. See `Metrics`."""

    counts: Mapping[str, int]
    seconds: LoopSeconds
    workers: tuple[WorkerMetrics, ...]

    def plus(self, other: MetricsReading) -> MetricsReading:
        """Return those of both together."""
        return MetricsReading(
            {name: count + other.counts[name] for name, count in self.counts.items()},
            LoopSeconds(*(mine + others for mine, others in zip(self.seconds, other.seconds, strict=True))),
            _summed([self.workers, other.workers]),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the counts by the names under which `get_metrics` has them."""
        workers = [worker.as_dict() for worker in self.workers]
        read = [name for name in COUNTERS if not name.endswith("_sec")]  # those that can be added up over workers
        return {
            **self.counts,
            "rows_delivered": sum(worker.rows_delivered for worker in self.workers),
            **{name: sum(worker[name] for worker in workers) for name in (*read, "retries")},
            **self.seconds._asdict(),
            "workers": workers,
        }


def _summed(iterations: Iterable[Iterable[WorkerMetrics]]) -> tuple[WorkerMetrics, ...]:
    """Return what each worker did in all iterations, which may have different numbers of workers."""
    total: list[WorkerMetrics] = []
    for workers in iterations:
        for number, worker in enumerate(workers):
            if number == len(total):
                total.append(WorkerMetrics())
            total[number].add(worker)
    return tuple(total)
