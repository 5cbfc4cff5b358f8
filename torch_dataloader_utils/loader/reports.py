"""What an iteration tells the hooks: events made of what comes with batches, and of the progress."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.loader.events import Event, EventKind, Hooks
from torch_dataloader_utils.loader.metrics import Metrics
from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.reading.batching import Batch, EmptyStep, StreamEnd
from torch_dataloader_utils.storage.attempts import Retry

STALL_SEC = 1.0
"""How long the training loop waits for a batch, other than the first, until it is a stall."""


class Reports:
    """Tells the hooks of an iteration's events. Each method gets the progress before what it reports.

    Args:
        epoch: The epoch.
        hooks: The hooks.
        metrics: Counts what the iteration delivers.
        workers: Number of workers that read; 0 for this process.
        counts_rows: Whether it is known how many rows a shard delivers.
    """

    def __init__(self, epoch: int, hooks: Hooks, metrics: Metrics, *, workers: int, counts_rows: bool) -> None:
        self._epoch = epoch
        self._hooks = hooks
        self._metrics = metrics
        self._workers = workers
        self._counts_rows = counts_rows
        self._began = time.perf_counter()

    def begun(self, progress: Progress, retries: Iterable[Retry]) -> None:
        """Report the begin of the iteration, and what this process had to ask a storage again for before."""
        self._tell("epoch_begun", progress)
        self._tell_retries(retries, progress, None)

    def content(self, content: Batch | EmptyStep | StreamEnd, receipt: Receipt, progress: Progress) -> None:
        """Report what comes with a step or the end of a stream. The receipt is of the slices of the iteration."""
        worker = self._worker(receipt.stream // progress.streams_per_turn)
        if content.work is not None:
            self._tell_retries(content.work.retries, progress, worker)
        if progress.restored is None:  # shards of restored rows were done before
            self._tell_shards(receipt, progress, worker)

    def stall(self, seconds: float, progress: Progress) -> None:
        """Report that the training loop has waited long for a batch."""
        self._tell("stall", progress, worker=self._worker(progress.next_turn), seconds=seconds)

    def done(self, progress: Progress) -> None:
        """Report the end of the epoch."""
        metrics = self._metrics.read().as_dict()
        seconds = time.perf_counter() - self._began
        self._tell("epoch_done", progress, rows=metrics["rows_delivered"], seconds=seconds, metrics=metrics)

    def _tell_shards(self, receipt: Receipt, progress: Progress, worker: int | None) -> None:
        for part in (receipt, *receipt.others):
            stream = progress.streams[part.stream]
            for done in stream.slices[stream.position : part.position]:
                rows = done.rows if self._counts_rows else None
                paths = tuple(dict.fromkeys(split.path for split in done.shard.present))
                metrics = self._metrics.read().as_dict()
                self._tell("shard_done", progress, worker=worker, rows=rows, paths=paths, metrics=metrics)

    def _tell_retries(self, retries: Iterable[Retry], progress: Progress, worker: int | None) -> None:
        for retry in retries:
            self._tell("retry", progress, worker=worker, seconds=retry.seconds, paths=(retry.name,), cause=retry.cause)

    def _tell(self, kind: EventKind, progress: Progress, **values: Any) -> None:
        self._hooks.call(Event(kind, self._epoch, self._hooks.rank, progress.batches_delivered, **values))

    def _worker(self, turn: int) -> int | None:
        """Return the worker whose turn it is; None for this process."""
        return turn % self._workers if self._workers else None
