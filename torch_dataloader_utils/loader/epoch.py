"""A rank's epochs: the plan of each, its progress, and the states that save and load it."""

from __future__ import annotations

import copy
import hashlib
import logging
from dataclasses import replace
from typing import Any

from torch.utils.data import get_worker_info

from torch_dataloader_utils.checkpoint.dump import dump_state
from torch_dataloader_utils.checkpoint.merge import OnChangedFiles
from torch_dataloader_utils.checkpoint.parse import parse_states
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.formats.base import OpenedFiles
from torch_dataloader_utils.loader.iteration import Iteration
from torch_dataloader_utils.loader.metrics import ProgressLine
from torch_dataloader_utils.loader.plain_loader import Copies
from torch_dataloader_utils.loader.progress_owner import ProgressOwner
from torch_dataloader_utils.loader.state_loading import load_elastically, load_strictly
from torch_dataloader_utils.loader.user_warnings import (
    LOG,
    log_uneven_rows,
    warn_of_uneven_ranks,
    warn_of_unknown_lengths,
)
from torch_dataloader_utils.planning.plan import Plan, PlanOptions
from torch_dataloader_utils.planning.planner import EpochPlanner
from torch_dataloader_utils.planning.strategy import SplitStrategy
from torch_dataloader_utils.planning.topology import Topology
from torch_dataloader_utils.reading.scan import ReadOptions

__all__ = ["EpochState"]


class EpochState:
    """A rank's current epoch: its plan and its progress.

    Args:
        opened_files: The data files.
        plan_options: What plans depend on.
        read_options: What the number of batches depends on.
        strategy: The user's split strategy, or None.
        topology: The ranks and workers.
        adopts_num_workers: Whether a loaded state's number of workers replaces the topology's.
        progress_interval_sec: Seconds between two lines about the progress; None for no lines.
    """

    def __init__(
        self,
        opened_files: OpenedFiles,
        plan_options: PlanOptions,
        read_options: ReadOptions,
        *,
        strategy: SplitStrategy | None,
        topology: Topology,
        adopts_num_workers: bool,
        progress_interval_sec: float | None,
    ) -> None:
        self.topology = topology
        self._opened_files = opened_files
        self._read_options = read_options
        self._planner = EpochPlanner(opened_files.manifest, plan_options, opened_files.selection, strategy)
        self._owner = ProgressOwner()
        self._adopts_num_workers = adopts_num_workers
        self._progress_interval_sec = progress_interval_sec
        self._warned_of_uneven_ranks = False
        self._check_epoch()

    # What is known of the epoch --------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration delivers, or continues."""
        return self._owner.epoch

    @property
    def iteration(self) -> Iteration | None:
        """The iteration that owns the progress, or None."""
        return self._owner.iteration

    @property
    def copies(self) -> Copies:
        """What is known of the dataset's copies in workers of plain loaders."""
        return self._owner.copies

    @property
    def batch_size(self) -> int:
        """Rows in a batch."""
        return self._read_options.batch_size

    @property
    def plan(self) -> Plan:
        """The plan of the whole epoch."""
        return self._planner.plan(self.epoch, self.topology)

    @property
    def progress(self) -> Progress:
        """The progress: that of the newest iteration, else that of a loaded state, else none."""
        return self._owner.progress or self._fresh()

    @property
    def num_batches(self) -> int:
        """The epoch's number of batches, also when it is continued from a state.

        Raises:
            TypeError: If it is known only once the rows are read.
        """
        if self._opened_files.unknown_rows is not None:
            msg = f"the number of batches is not known ahead: {self._opened_files.unknown_rows}"
            raise TypeError(msg)
        return self._batches(self.progress)

    @property
    def plan_digest(self) -> str:
        """Digest of this epoch's plan and of everything else that determines its batches."""
        parts = (
            self._current_plan().digest,
            self._opened_files.manifest.fingerprint,
            self._opened_files.filter_digest,
            self._opened_files.format.options_digest,
            self._planner.options,
            self._read_options.batch_size,
            self._read_options.drop_last,
        )
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def balanced_rows(self) -> dict[str, list[tuple[str, int]]]:
        """Return the rows that are dropped or repeated in this epoch: see `EpochPlanner.uneven_rows`."""
        return self._planner.uneven_rows(self._current_plan())

    # What changes it -------------------------------------------------------------------------------------------------

    def begin_iteration(self) -> Iteration:
        """Begin an iteration: of the whole epoch, or of the rows that a state left which was loaded since the last."""
        progress = self._owner.loaded or self._fresh()
        line = None
        if self._progress_interval_sec is not None:
            total = None if self._opened_files.unknown_rows is not None else self._batches(progress)
            line = ProgressLine(self._progress_interval_sec, total)
        iteration = self._owner.begin(progress, self.topology.processes, line)
        if LOG.isEnabledFor(logging.INFO):
            log_uneven_rows(self.epoch, self.balanced_rows())
        return iteration

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Changes nothing if it is the current one and no batch of it was delivered since it began."""
        if epoch == self.epoch and self._owner.is_untouched:
            return
        self._owner.take_over("set_epoch", epoch)
        self._check_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as a state."""
        return dump_state(self._run(self.epoch), self.epoch, self.progress)

    def load_state_dict(self, states: Any, *, strict: bool, on_changed_files: OnChangedFiles) -> None:
        """Load a state, or those of all ranks. If this raises, nothing has changed."""
        saved = parse_states(states)
        epoch = saved[0].epoch
        run = self._run(epoch)
        if not strict:
            progress = load_elastically(saved, run, self._planner, on_changed_files)
        elif on_changed_files != "error":
            msg = f"on_changed_files={on_changed_files!r} needs strict=False: what is left has to be planned again"
            raise ValueError(msg)
        elif get_worker_info() is not None:  # a loader that loads states in its workers restores their turns as well
            progress = load_strictly(saved, run, self._planner).with_turn_restored(run.topology.processes)
        else:
            if self._adopts_num_workers and run.topology.virtual_workers is None:
                run = replace(run, topology=replace(run.topology, num_workers=saved[0].num_workers))
            progress = load_strictly(saved, run, self._planner)
        self.topology = run.topology
        self._owner.take_over("load_state_dict", epoch, progress)

    def join_plain_loader(self, num_workers: int, loader_seed: int) -> None:
        """Take over, in a worker of a plain loader, the epoch and the loaded state of the training process."""
        virtual = self.topology.virtual_workers
        if virtual is not None and virtual % num_workers:
            msg = f"virtual_workers={virtual} is not a multiple of the plain DataLoader's num_workers={num_workers}"
            raise ValueError(msg)
        workers_of_state = self.topology.processes if virtual is None else num_workers
        self._owner.join_plain_loader(workers_of_state, num_workers, loader_seed)
        self.topology = replace(self.topology, num_workers=num_workers)

    # Copies ----------------------------------------------------------------------------------------------------------

    def without_footers(self, opened_files: OpenedFiles) -> EpochState:
        """Return a copy for a worker that receives its assignments from the loader.

        Args:
            opened_files: The data files, without what the assignments contain.
        """
        copied = copy.copy(self)
        copied._opened_files, copied._owner.loaded = opened_files, None  # noqa: SLF001 - of this class
        return copied

    def __copy__(self) -> EpochState:
        copied = EpochState.__new__(EpochState)
        copied.__dict__.update(self.__dict__, _owner=copy.copy(self._owner), _planner=copy.copy(self._planner))
        return copied

    # Within ----------------------------------------------------------------------------------------------------------

    def _fresh(self) -> Progress:
        """Return the progress at the beginning of the epoch."""
        return Progress.fresh(self.topology.own_streams(self.plan), self.topology.streams_per_turn)

    def _current_plan(self) -> Plan:
        """Return the plan of the epoch, or of the rows that an elastic load left of it."""
        progress = self._owner.progress
        return self._planner.plan(self.epoch, self.topology, None if progress is None else progress.baseline)

    def _run(self, epoch: int) -> Run:
        """Return what a state of an epoch is compared with."""
        worker = get_worker_info()
        topology = self.topology if worker is None else replace(self.topology, num_workers=worker.num_workers)
        return Run(
            manifest=self._opened_files.manifest,
            options=self._planner.options,
            filter_digest=self._opened_files.filter_digest,
            topology=topology,
            format=self._opened_files.format.name,
            format_options=self._opened_files.format.options_digest,
            **self._opened_files.pin,
            split_strategy=self._planner.strategy_digest(epoch),
        )

    def _batches(self, progress: Progress) -> int:
        return progress.batches(self._read_options.batch_size, drop_last=self._read_options.drop_last)

    def _check_epoch(self) -> None:
        """Warn once if ranks make different numbers of steps, and run a split strategy now, which may be wrong."""
        if self._planner.strategy is not None:
            self._planner.plan(self.epoch, self.topology)
        allowed = self.topology.num_ranks > 1 and self._planner.options.uneven_ranks == "allow"
        if self._warned_of_uneven_ranks or not allowed:
            return
        if self._opened_files.unknown_rows is not None:
            self._warned_of_uneven_ranks = True
            warn_of_unknown_lengths(self._opened_files.unknown_rows)
            return
        ranks = [Progress.fresh(self.plan.rank_streams(rank)) for rank in range(self.topology.num_ranks)]
        batches = list(map(self._batches, ranks))
        if len(set(batches)) > 1:
            self._warned_of_uneven_ranks = True
            warn_of_uneven_ranks(self.epoch, batches, [rank.rows_left for rank in ranks])
