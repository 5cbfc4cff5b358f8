"""What is told of iterations: their counters, their events, and the progress bar."""

from __future__ import annotations

from typing import Any

from torch.utils.data import get_worker_info

from torch_dataloader_utils.formats.cpus import decoding_threads, usable_cpus
from torch_dataloader_utils.formats.opened_files import Opened
from torch_dataloader_utils.loader.advice import advise
from torch_dataloader_utils.loader.events import Hooks
from torch_dataloader_utils.loader.iteration import Iteration
from torch_dataloader_utils.loader.metrics import Metrics, MetricsReading
from torch_dataloader_utils.loader.progress_bar import PassProgress, ProgressBar
from torch_dataloader_utils.loader.reports import Reports
from torch_dataloader_utils.planning.topology import Topology


class IterationMonitor:
    """Tells of a dataset's iterations, one after another.

    Args:
        hooks: The hooks, which are told of events.
        bar_interval_sec: Seconds after which the progress bar is drawn again; None for no bar.
        processes: The processes that read.
    """

    def __init__(self, hooks: Hooks, bar_interval_sec: float | None, processes: int) -> None:
        self._hooks = hooks
        self._bar_interval_sec = bar_interval_sec
        self._counted = _nothing_counted(processes)

    def follow(self, iteration: Iteration, counts: PassProgress, topology: Topology, opened_files: Opened) -> None:
        """Tell of an iteration that begins. `counts` are those of its progress bar."""
        before, newest = self._counted
        self._counted = before.plus(newest.read()), iteration.metrics
        if get_worker_info() is not None:
            return
        if self._bar_interval_sec is not None:
            iteration.bar = ProgressBar(iteration.epoch, counts, self._bar_interval_sec)
        retries = opened_files.take_retries()
        if self._hooks:
            counts_rows, workers = opened_files.unknown_rows is None, topology.num_workers
            reports = Reports(iteration.epoch, self._hooks, iteration.metrics, workers=workers, counts_rows=counts_rows)
            iteration.reports = reports
            reports.begun(iteration.progress, retries)

    def metrics(self, iteration: Iteration | None, topology: Topology) -> dict[str, Any]:
        """Return the counters of an iteration, and what they say of the bottleneck; None for one without batches."""
        reading = (iteration.metrics if iteration else Metrics(topology.processes)).read()
        cpus, threads = max(1, usable_cpus()), decoding_threads()
        advice = advise(reading, num_workers=topology.num_workers, cpus=cpus, threads=threads)
        return reading.as_dict() | {"advice": advice}

    def total_metrics(self) -> dict[str, Any]:
        """Return the counters of all iterations together. Another thread may call it at any moment."""
        before, newest = self._counted
        return before.plus(newest.read()).as_dict()

    def for_copy(self, processes: int) -> IterationMonitor:
        """Return that of a copy of the dataset, which tells no hooks and has counted nothing."""
        return IterationMonitor(Hooks(), self._bar_interval_sec, processes)


def _nothing_counted(processes: int) -> tuple[MetricsReading, Metrics]:
    """Return what was counted before the newest iteration, and what that one counts. Other threads may read both."""
    return Metrics(processes).read(), Metrics(processes)
