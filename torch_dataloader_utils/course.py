"""Where a dataset stands: its epoch, the epoch's plan, and which iteration owns the progress."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from torch.utils.data import get_worker_info

from torch_dataloader_utils.errors import ChangedFilesWarning, UnevenRanksWarning, warn_user
from torch_dataloader_utils.formats.parquet import ParquetSource
from torch_dataloader_utils.iteration import Iteration
from torch_dataloader_utils.metrics import ProgressLine
from torch_dataloader_utils.model import Plan
from torch_dataloader_utils.planning import PlanOptions, make_plan
from torch_dataloader_utils.progress import Progress
from torch_dataloader_utils.reading import ReadOptions
from torch_dataloader_utils.saved import parse_state
from torch_dataloader_utils.sharing import Copies, is_being_sent_to_a_process
from torch_dataloader_utils.state import Run, dump_state, restore_progress, shorten, touched_files

__all__ = ["Course"]


class Course:
    """A rank's way through its epochs.

    Args:
        source: The data files.
        plan_options: What plans depend on.
        read_options: What the number of batches depends on.
        num_workers: Number of worker processes; 0 means this process.
        adopts_num_workers: Whether a loaded state's number of workers is taken over.
        num_ranks: Number of ranks.
        rank: This rank.
        progress_interval_sec: Seconds between two lines about the progress; None for none.
    """

    def __init__(
        self,
        source: ParquetSource,
        plan_options: PlanOptions,
        read_options: ReadOptions,
        *,
        num_workers: int,
        adopts_num_workers: bool,
        num_ranks: int,
        rank: int,
        progress_interval_sec: float | None,
    ) -> None:
        self.num_ranks = num_ranks
        self.rank = rank
        self.num_workers = num_workers
        self.epoch = 0
        self.iteration: Iteration | None = None
        self.copies = Copies()
        self._source = source
        self._plan_options = plan_options
        self._read_options = read_options
        self._adopts_num_workers = adopts_num_workers
        self._progress_interval_sec = progress_interval_sec
        self._plan: Plan | None = None
        self._loaded: Progress | None = None
        self._iterations = 0
        self._warned_of_uneven_ranks = False
        self._warn_of_uneven_ranks()

    @property
    def num_batches(self) -> int:
        """The epoch's number of batches, also when it is continued from a state.

        Raises:
            TypeError: If a filter makes it unknowable.
        """
        if self._source.filter is not None:
            msg = "the number of batches is not known ahead: only reading tells how many rows the filter leaves"
            raise TypeError(msg)
        return self._batches(self.progress)

    @property
    def plan_digest(self) -> str:
        """Digest of this epoch's plan and all that decides its batches."""
        parts = (
            self.plan.digest,
            self._source.manifest.fingerprint,
            self._source.filter_digest,
            self._plan_options,
            self._read_options.batch_size,
            self._read_options.drop_last,
        )
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    @property
    def progress(self) -> Progress:
        """The progress as it stands: of the newest iteration, else loaded, else none."""
        if self.iteration is not None:
            return self.iteration.progress
        return self._loaded if self._loaded is not None else self._fresh()

    def begin_iteration(self) -> Iteration:
        """Begin an iteration: the epoch anew, or what a state that was loaded since the last one left."""
        progress = self._loaded if self._loaded is not None else self._fresh()
        self._take_over("iter", None)
        self._iterations += 1
        line = None
        if self._progress_interval_sec is not None:
            total = None if self._source.filter is not None else self._batches(progress)
            line = ProgressLine(self._progress_interval_sec, total)
        self.iteration = Iteration(self._iterations, self.epoch, progress, line)
        return self.iteration

    def set_epoch(self, epoch: int) -> None:
        """Plan an epoch and forget the progress, but for a loaded state that waits for its iteration in this epoch."""
        if self._loaded is not None and epoch == self.epoch:
            return
        self.epoch = epoch
        self._take_over("set_epoch", None)
        self._warn_of_uneven_ranks()

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as a state."""
        return dump_state(self._run(), self.epoch, self.progress)

    def load_state_dict(self, state: Any) -> None:
        """Take over a state, or raise and change nothing."""
        saved = parse_state(state)
        worker = get_worker_info()
        run = self._run()
        if worker is None and self._adopts_num_workers:
            run = replace(run, num_workers=saved.num_workers)
        progress = restore_progress(saved, run, lambda epoch: self._make_plan(epoch, run.num_workers))
        touched = touched_files(saved, self._source.manifest)
        if touched:
            text = "files have a new modification time since the checkpoint, with the same size and footer"
            advice = "if their rows were changed, begin the epoch without the state"
            warn_user(f"{text}: {shorten(touched)}; {advice}", ChangedFilesWarning)
        if worker is not None:  # a loader that loads states in its workers also knows whose turn it is
            progress = replace(progress, next_stream=0)
        self.num_workers = run.num_workers
        self.epoch = saved.epoch
        self._take_over("load_state_dict", progress)

    def join_plain_loader(self, num_workers: int, loader_seed: int) -> None:
        """Stand, in a worker of a plain loader, where the training process stands."""
        saved = None if self._loaded is None else len(self._loaded.streams)
        self.epoch, continues = self.copies.join(self.epoch, saved, num_workers=num_workers, loader_seed=loader_seed)
        self._loaded = self._loaded if continues else None
        self.num_workers = num_workers

    def lean(self, source: ParquetSource) -> Course:
        """Return the same for a process that is told what to read.

        Args:
            source: The data files, without what that process does not need.
        """
        copy: Course = Course.__new__(Course)
        copy.__dict__.update(self.__dict__, _source=source, _loaded=None)
        return copy

    # Within ----------------------------------------------------------------------------------------------------------

    def _fresh(self) -> Progress:
        return Progress.fresh(self.plan.rank_streams(self.rank))

    def _take_over(self, by: str, loaded: Progress | None) -> None:
        """Let a call take the progress from the iteration that owned it."""
        if self.iteration is not None:
            self.iteration.replace(by)
        self.iteration = None
        self._loaded = loaded
        if get_worker_info() is None:
            self.copies.publish(self.epoch, waiting=loaded is not None)

    def _run(self) -> Run:
        worker = get_worker_info()
        return Run(
            manifest=self._source.manifest,
            options=self._plan_options,
            filter_digest=self._source.filter_digest,
            num_workers=self.num_workers if worker is None else worker.num_workers,
            num_ranks=self.num_ranks,
            rank=self.rank,
        )

    @property
    def plan(self) -> Plan:
        """The plan of the epoch."""
        plan = self._plan
        if plan is None or (plan.epoch, plan.num_workers) != (self.epoch, self.num_workers):
            plan = self._plan = self._make_plan(self.epoch, self.num_workers)
        return plan

    def _make_plan(self, epoch: int, num_workers: int) -> Plan:
        return make_plan(
            self._source.manifest,
            self._plan_options,
            epoch=epoch,
            num_ranks=self.num_ranks,
            num_workers=num_workers,
            selection=self._source.selection,
        )

    def _batches(self, progress: Progress) -> int:
        return progress.batches(self._read_options.batch_size, drop_last=self._read_options.drop_last)

    def _warn_of_uneven_ranks(self) -> None:
        if self._warned_of_uneven_ranks or self.num_ranks == 1:
            return
        if self._source.filter is not None:
            text = "a filter leaves each rank a number of batches that is not known ahead"
        else:
            streams = map(self.plan.rank_streams, range(self.num_ranks))
            ranks = list(map(Progress.fresh, streams))
            batches = [self._batches(rank) for rank in ranks]
            if len(set(batches)) == 1:
                return
            rows = [rank.rows_left for rank in ranks]
            text = f"ranks make different numbers of steps in epoch {self.epoch}: batches {batches}, rows {rows}"
        self._warned_of_uneven_ranks = True
        advice = "a DDP loop needs join(), or ranks that agree on a number of steps; else ranks wait for one another"
        warn_user(f"{text}; {advice}", UnevenRanksWarning)

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what belongs to this process: the iteration, and shared memory unless a process is started."""
        state = {**self.__dict__, "iteration": None, "_plan": None}
        if not is_being_sent_to_a_process():
            del state["copies"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "copies" not in state:
            self.copies = Copies(self.epoch, waiting=self._loaded is not None)
