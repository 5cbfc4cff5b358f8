"""TensorBoard: a hook that writes how fast a loader delivers and where time goes, beside the loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from torch_dataloader_utils.loader.events import Event
from torch_dataloader_utils.reading.work import STAGES

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    missing = "TensorBoardHook needs tensorboard: pip install tensorboard"
    raise ImportError(missing) from error

INTERVAL_SEC = 1.0
"""How often scalars are written at most. At an epoch's end they always are."""


class TensorBoardHook:
    """Writes scalars as shards and epochs end: ``create_dataloader(..., hooks=[TensorBoardHook(writer)])``.

    ``loader/rows_per_second``; ``loader/waiting``, the part of the time in which the training loop waited for batches;
    ``loader/workers/decoding`` and so on, the parts of the workers' time; each since the scalars before. And for each
    stall ``loader/stall_seconds``.

    Args:
        writer: The writer.
        global_step: Returns the x axis' value. Without it that is the number of batches that the loader has delivered
            since the hook was made.
    """

    def __init__(self, writer: SummaryWriter, global_step: Callable[[], int] | None = None) -> None:
        self._writer = writer
        self._global_step = global_step
        self._batches = 0
        self._step = 0
        self._begin()

    def __call__(self, event: Event) -> None:
        """Write what an event says."""
        if event.kind == "epoch_begun":
            self._step = event.step
            self._begin()
        self._batches += event.step - self._step
        self._step = event.step
        if event.kind == "stall" and event.seconds is not None:
            self._write("stall_seconds", event.seconds)
        due = time.perf_counter() - self._last >= INTERVAL_SEC
        if event.kind == "epoch_done" or (event.kind == "shard_done" and due):
            self._write_rates(_sums(event.metrics))

    def _begin(self) -> None:
        self._last = time.perf_counter()
        self._before: Mapping[str, float] = {}

    def _write_rates(self, sums: Mapping[str, float]) -> None:
        now = time.perf_counter()
        since = {name: value - self._before.get(name, 0) for name, value in sums.items()}
        self._write("rows_per_second", since["rows_delivered"] / (now - self._last))
        looping = since["waiting_sec"] + since["between_batches_sec"]
        self._write("waiting", since["waiting_sec"] / looping if looping else 0.0)
        working = sum(since[stage] for stage in STAGES)
        for stage in STAGES:
            self._write(f"workers/{stage.removesuffix('_sec')}", since[stage] / working if working else 0.0)
        self._last, self._before = now, sums

    def _write(self, name: str, value: float) -> None:
        step = self._batches if self._global_step is None else self._global_step()
        self._writer.add_scalar(f"loader/{name}", value, step)


def _sums(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the counters that rates are made of; of workers their sums."""
    sums = {name: metrics[name] for name in ("rows_delivered", "waiting_sec", "between_batches_sec")}
    return sums | {stage: sum(worker[stage] for worker in metrics["workers"]) for stage in STAGES}
