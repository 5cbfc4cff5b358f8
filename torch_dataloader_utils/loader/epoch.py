"""A rank's epochs: the plan of each, its progress, and the states that save and load it."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal

from torch.utils.data import get_worker_info

from torch_dataloader_utils.checkpoint.dump import dump_hashes, dump_state
from torch_dataloader_utils.checkpoint.epoch_record import EpochRecord
from torch_dataloader_utils.checkpoint.merge.states import OnChangedFiles
from torch_dataloader_utils.checkpoint.parse.states import parse_states
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.run_segments import Began, Loaded
from torch_dataloader_utils.formats.opened_files import Opened
from torch_dataloader_utils.gc_pause import without_gc
from torch_dataloader_utils.loader.epoch_plans import EpochPlans
from torch_dataloader_utils.loader.events import Hooks
from torch_dataloader_utils.loader.iteration import Iteration
from torch_dataloader_utils.loader.load_states import load_elastically, load_strictly
from torch_dataloader_utils.loader.logged_segments import LoggedSegments
from torch_dataloader_utils.loader.mixture import (
    check_weights,
    require_no_schedule,
    source_metrics,
    with_sources,
)
from torch_dataloader_utils.loader.monitor import IterationMonitor
from torch_dataloader_utils.loader.progress_bar import PassProgress
from torch_dataloader_utils.loader.progress_owner import ProgressOwner
from torch_dataloader_utils.loader.run_log import RunLogFiles, RunLogWriter
from torch_dataloader_utils.loader.segments import Segments
from torch_dataloader_utils.loader.skip_requests import SkipRequests, require_steps
from torch_dataloader_utils.loader.user_warnings import (
    LOG,
    log_uneven_rows,
    warn_of_forgotten_skips,
    warn_of_uneven_ranks,
    warn_of_unknown_lengths,
    warn_of_unused_state,
)
from torch_dataloader_utils.planning.excluded import (
    EpochExclusions,
    ExcludedExpression,
    ExcludedRows,
)
from torch_dataloader_utils.planning.ledger.segment import Segment
from torch_dataloader_utils.planning.plan import Plan
from torch_dataloader_utils.planning.planner import EpochPlanner
from torch_dataloader_utils.planning.topology import Topology
from torch_dataloader_utils.reading.scan import ReadOptions


class EpochState:
    """A rank's current epoch: its plan and its progress.

    `adopts_num_workers` says that a loaded state's number of workers replaces the topology's. A bar shows
    the progress, drawn again every `progress_interval_sec` seconds; None for no bar. A run log tells of earlier
    segments of the run; one process writes it. The hooks are told of events.

    Attributes:
        owner: The epoch, and the iteration or the loaded state that has its progress.
        segments: What the ledger knows of epochs.
        monitor: What is told of iterations.
    """

    def __init__(
        self,
        opened_files: Opened,
        planner: EpochPlanner,
        read_options: ReadOptions,
        *,
        topology: Topology,
        adopts_num_workers: bool,
        progress_interval_sec: float | None,
        hooks: Hooks,
        run_log: RunLogFiles | None = None,
        writes_run_log: bool = False,
    ) -> None:
        self._plans = EpochPlans(opened_files, planner, read_options, topology)
        self._skips = SkipRequests()
        self.owner = ProgressOwner()
        counts_rows = opened_files.unknown_rows is None and read_options.batching is None
        self.segments = Segments(planner, counts_rows=counts_rows)
        self.monitor = IterationMonitor(hooks, progress_interval_sec, topology.processes)
        self._adopts_num_workers = adopts_num_workers
        self._warned_of_uneven_ranks = False
        self._record: EpochRecord | None = None
        self._loaded: tuple[Began, Loaded] | None = None  # how the next iteration begins, if a state was loaded
        self._loaded_before: tuple[Loaded, int] | None = None  # what a state says of the steps before it, and its step
        self._run_log = None if run_log is None or not writes_run_log else RunLogWriter(run_log)
        if run_log is not None:
            self.segments.run_log = LoggedSegments(run_log, opened_files)
        self._check_epoch()

    # What is known of the epoch --------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration delivers, or continues."""
        return self.owner.epoch

    @property
    def topology(self) -> Topology:
        """The ranks and workers, and which rank this is."""
        return self._plans.topology

    @property
    def plan(self) -> Plan:
        """The plan of the whole epoch."""
        return self._plans.plan(self.epoch)

    @property
    def progress(self) -> Progress:
        """The progress: that of the newest iteration, else that of a loaded state, else none."""
        progress = self.owner.progress
        progress = self._fresh() if progress is None else self._skipping(progress)
        return self._plans.removing(progress, self.epoch)

    @property
    def skip_requests(self) -> SkipRequests:
        """The steps of the epoch that are to be skipped, and whether they are restored."""
        return self._skips

    @property
    def leaves_restored(self) -> bool:
        """Whether all steps were made but skipped ones, which are to be restored."""
        progress = self.progress
        return progress.restores and bool(progress.rows_left) and not progress._replace(restores=False).rows_left

    @property
    def will_restore(self) -> bool:
        """Whether skipped rows are to be delivered after the last step, and none of them was so far."""
        return self.progress.will_restore

    def run(self, epoch: int) -> Run:
        """Return what a state of an epoch is compared with."""
        return self._plans.run(epoch)

    def excluded_in(self, epoch: int) -> EpochExclusions:
        """Return what is excluded in an epoch."""
        return self._plans.excluded_in(epoch)

    def segment(self, epoch: int) -> Segment:
        """Return the segment of an epoch that begins now."""
        if epoch == self.epoch:
            return self._plans.segment(epoch, self._skips)
        return self._plans_of(epoch).segment(epoch, SkipRequests())

    def _plans_of(self, epoch: int) -> EpochPlans:
        """Return what an epoch that `set_epoch` begins is planned from."""
        baseline = None if self.owner.progress is None else self.owner.progress.baseline
        return self._plans.moved_to(epoch, self.epoch, baseline)

    @property
    def num_batches(self) -> int:
        """The epoch's number of batches, also when it is continued from a state.

        Raises:
            TypeError: If it is known only once the rows are read.
        """
        unknown = self._plans.unknown_steps(self.epoch)
        if unknown is not None:
            raise TypeError(f"the number of batches is not known ahead: {unknown}")
        return self._plans.batches(self.progress)

    @property
    def plan_digest(self) -> str:
        """Digest of this epoch's plan and of everything else that determines its batches."""
        return self._plans.digest(self._current_plan(), self._skips)

    def pass_progress(self, uneven: Literal["drop", "pad"] | None = None) -> PassProgress:
        """Return how many batches were delivered before the next one, and how many there are: see the loader's."""
        is_going_on = self.owner.upcoming is not None and self.owner.iteration is not None
        progress = self._fresh() if self.owner.upcoming is None else self.owner.upcoming
        progress = progress if is_going_on else self._skipping(progress)
        total = self._plans.batches_in(progress, self.epoch, uneven)
        return {"initial": progress.batches_delivered - progress.steps_skipped, "total": total}

    def delivered_hash(self) -> dict[str, list[dict[str, Any]] | None]:
        """Return the metric of the delivered rows' hashes, None if they are not known; nothing if not asked for."""
        if not self._plans.read_options.fingerprint:
            return {}
        hashes = self.progress.hashes
        if hashes is None:
            return {"delivered_hash": None}
        known = dump_hashes(zip(self.topology.own_ranks, hashes, strict=True))
        return {"delivered_hash": with_sources(self._plans.planner, known)}

    def balanced_rows(self) -> dict[str, list[tuple[str, int]]]:
        """Return the rows that are dropped or repeated in this epoch: see `EpochPlanner.uneven_rows`."""
        return self._plans.planner.uneven_rows(self._current_plan(), self._restored_plan())

    def balanced_sequences(self) -> dict[str, int]:
        """Return how many sequences are dropped or repeated in this epoch."""
        return self._plans.planner.uneven_sequences(self._current_plan(), self._restored_plan())

    def _restored_plan(self) -> Plan | None:
        """Return the plan of rows that were skipped before an elastic load and are restored."""
        progress = self.progress
        if not progress.restores or progress.baseline is None:
            return None
        return self._plans.plan_skipped(self.epoch, progress.baseline)

    def metrics(self) -> dict[str, Any]:
        """Return the counters of the newest iteration, and what they say of the bottleneck."""
        return self.monitor.metrics(self.owner.iteration, self.topology)

    def source_metrics(self) -> dict[str, dict[str, Any]]:
        """Return what was delivered of each source of a mixture in this epoch."""
        return source_metrics(self._plans.planner, self.progress, self.epoch, self.topology)

    @without_gc
    def state_dict(self) -> dict[str, Any]:
        """Return the progress as a state."""
        progress, run = self.progress, self.run(self.epoch)
        before, step = self._loaded_before or (None, 0)
        is_new = step == progress.batches_delivered and not progress.skip_requests
        if is_new and before is not None and run.batch_size is not None:
            run = replace(run, batch_size=before.batch_size, drop_last=before.drop_last)  # of the batches until now
        return dump_state(run, self.epoch, progress, self._shared_digest, self._recorded(progress))

    @property
    def _shared_digest(self) -> str | None:
        """The digest by which the states of several ranks are compared; None on a single rank."""
        return self._plans.rows_digest(self._current_plan(), self._skips) if self.topology.num_ranks > 1 else None

    # What changes it -------------------------------------------------------------------------------------------------

    def prepare_iteration(self) -> None:
        """End the newest iteration, since another is about to begin: see `ProgressOwner.prepare`."""
        self._keep_restorable()
        self.owner.prepare()

    @without_gc
    def begin_iteration(self) -> Iteration:
        """Begin an iteration: of the whole epoch, or of the rows that a state left which was loaded since the last."""
        self._keep_restorable()
        if self.owner.loaded is None:
            self._loaded_before = None
            self._plans = replace(self._plans, algorithm=None)
            self.segments.begin(self.segment(self.epoch))
            progress = self._fresh()
        else:
            self._note_removals(self.owner.loaded.batches_delivered)
            progress = self._skipping(self.owner.loaded)
        progress = self._plans.removing(progress, self.epoch)
        counts = self.pass_progress()
        self._log_segment(progress)
        quotas = self._plans.quotas(self.epoch, progress.baseline)
        iteration = self.owner.begin(progress, self.topology.processes, self.excluded_in(self.epoch), quotas)
        self._loaded = None
        if self._run_log is not None:
            self._run_log.follow(iteration)
        self.monitor.follow(iteration, counts, self.topology, self._plans.opened_files)
        self._prepare_states(progress)
        if LOG.isEnabledFor(logging.INFO):
            log_uneven_rows(self.epoch, self.balanced_rows())
        return iteration

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Changes nothing if it is the current one and no batch of it was delivered since it began."""
        has_new_weights = self._plans.next_weights is not None and self.owner.loaded is None
        if epoch == self.epoch and self.owner.is_untouched and not has_new_weights:
            return
        self._plans.planner.require_epoch(epoch, self.topology)
        gives_up = self._loaded is not None and epoch != self.epoch and self.owner.is_untouched
        if gives_up and (epoch < self.epoch or self._has_batches_left()):
            warn_of_unused_state(self.epoch, self.progress.batches_delivered, epoch)
        self._plans = self._plans_of(epoch)
        if epoch != self.epoch:
            self._skips = SkipRequests()  # steps are counted in an epoch
        self.owner.take_over("set_epoch", epoch)
        self.segments.forget(epoch)
        self._loaded = self._loaded_before = None
        self._check_epoch()

    def _has_batches_left(self) -> bool:
        """Whether the next iteration delivers a batch, as far as that is known before rows are read."""
        counts = self.pass_progress()
        return bool(self.progress.rows_left) if counts["total"] is None else counts["initial"] < counts["total"]

    def exclude(self, rows: ExcludedRows) -> None:
        """Exclude rows from the next iteration on."""
        self._plans = replace(self._plans, exclusions=self._plans.exclusions.with_rows(rows, self.epoch))
        self._note_exclusion()

    def exclude_by(self, opened_files: Opened, digest: str) -> None:
        """Exclude rows from the next iteration on by an expression of opened files, given by its digest.

        Raises:
            ValueError: If ranks are balanced.
        """
        uneven = self._plans.planner.options.uneven_ranks
        if uneven != "allow":
            msg = f"exclude: uneven_ranks={uneven!r} needs the number of rows of each rank, which only reading tells "
            raise ValueError(msg + "if an expression excludes rows: exclude them by their paths and row numbers")
        expression = ExcludedExpression(digest, str(opened_files.expressions[digest]), self.epoch)
        exclusions = self._plans.exclusions.with_expression(expression)
        self._plans = replace(self._plans, opened_files=opened_files, exclusions=exclusions)
        self._note_exclusion()

    def _note_exclusion(self) -> None:
        """Let copies know that more rows are excluded, and the ledger, unless an iteration goes on without it."""
        self.owner.copies.publish_exclusion()
        if self.owner.iteration is None and self.owner.loaded is not None:
            self._note_removals(self.owner.loaded.batches_delivered)

    def _note_removals(self, step: int) -> None:
        """Let the ledger know which rows the batches lose of an iteration that continues what was loaded."""
        self.segments.exclude(self.segment(self.epoch), step, own_alone=self._is_own_alone(step))

    def _is_own_alone(self, step: int) -> bool:
        """Whether it is not known at which step other ranks begin an iteration that continues what was loaded."""
        began, loaded = self._loaded or (None, None)
        return step > 0 if began is None else began == "state" and not (loaded and loaded.is_one_step)

    def set_weights(self, weights: tuple[Fraction, ...]) -> None:
        """Let the next epoch that begins, or the next state that is loaded, have other weights.

        Raises:
            ValueError: If the weights change by a schedule.
        """
        require_no_schedule(self._plans.planner)
        self._plans = replace(self._plans, next_weights=weights)

    def skip_steps(self, start: int, stop: int) -> None:
        """Skip steps from the next iteration on: see the loader's."""
        progress = self.progress
        require_steps(start, stop, progress, self._plans.most_steps(progress, self.epoch))
        self._skips = self._skips.adding(start, stop)
        if self.owner.iteration is None:  # else the iteration goes on without it, and the next one begins the epoch
            self.segments.skip(self.segment(self.epoch))
            self.owner.take_over("skip_steps", self.epoch, self._skipping(progress))

    def restore_skipped(self) -> None:
        """Deliver skipped steps after the last one: see the loader's."""
        self._skips = replace(self._skips, restores=True)
        iteration = self.owner.iteration
        if iteration is None:
            self.segments.skip(self.segment(self.epoch))
            if self.owner.loaded is not None:
                self.owner.take_over("restore_skipped", self.epoch, self.owner.loaded._replace(restores=True))
            return
        is_first_call = not iteration.progress.restores
        iteration.progress = iteration.progress._replace(restores=True)
        steps = iteration.progress.skip_requests  # those that were requested since then are of the next iteration
        self.segments.skip(replace(self.segment(self.epoch), skipped=steps))
        if is_first_call and iteration.finished():  # also where this rank has skipped nothing: others may have
            self.owner.iteration = None  # its iterator ends, where it has read ahead that nothing follows
            self.owner.take_over("restore_skipped", self.epoch, iteration.progress)

    def _keep_restorable(self) -> None:
        """Let the next iteration deliver what is to be restored, if the newest one has made all other steps.

        That one may not have been asked for a batch after its last. It may be nothing: others may have skipped steps.
        """
        iteration = self.owner.iteration
        if iteration is None or (iteration.finished() and not iteration.read_past_restored):
            return
        progress = iteration.progress
        if progress.restores and progress.restored is None and not progress._replace(restores=False).rows_left:
            self.owner.take_over("restore_skipped", self.epoch, progress)

    @without_gc
    def load_state_dict(self, states: Any, *, strict: bool, on_changed_files: OnChangedFiles) -> None:
        """Load a state, or those of all ranks. If this raises, nothing has changed."""
        saved = parse_states(states)
        if not strict:
            loaded = load_elastically(saved, self._plans, on_changed_files=on_changed_files)
        elif on_changed_files != "error":
            msg = f"on_changed_files={on_changed_files!r} needs strict=False: what is left has to be planned again"
            raise ValueError(msg)
        else:
            loaded = load_strictly(saved, self._plans, adopts_num_workers=self._adopts_num_workers)
        epoch, progress = saved[0].epoch, loaded.progress
        if epoch == self.epoch:  # another epoch forgets them in any case
            forgets_restore = self._skips.forget_restore(progress, saved)
            warn_of_forgotten_skips(self._skips.forgotten(progress, saved), forgets_restore=forgets_restore)
        self._plans = loaded.plans
        self._skips = SkipRequests(progress.skip_requests, restores=progress.restores)
        self.owner.take_over("load_state_dict", epoch, progress)
        before = Loaded.of(saved)
        self._loaded = "state" if strict else "elastic state", before
        is_known = strict and before.num_ranks == self.topology.num_ranks  # else of virtual ranks, dealt out anew
        is_known = is_known and before.batch_size is not None and before.drop_last is not None
        self._loaded_before = (before, progress.batches_delivered) if is_known else None
        segment = replace(self.segment(epoch), baseline=progress.baseline)
        if strict:
            own = next((state for state in saved if state.rank == self.topology.rank), saved[0])
            own_alone = self._is_own_alone(progress.batches_delivered)
            self.segments.load_strictly(segment, own, progress, own_alone=own_alone)
        else:
            self.segments.load_elastically(segment, saved)

    def join_plain_loader(self, num_workers: int, loader_seed: int) -> None:
        """Take over, in a worker of a plain loader, the epoch and the loaded state of the training process."""
        virtual = self.topology.virtual_workers
        if virtual is not None and virtual % num_workers:
            msg = f"virtual_workers={virtual} is not a multiple of the plain DataLoader's num_workers={num_workers}"
            raise ValueError(msg)
        workers_of_state = self.topology.processes if virtual is None else num_workers
        self.owner.join_plain_loader(workers_of_state, num_workers, loader_seed)
        self._skips.require_none(self.progress)
        self._plans = replace(self._plans, topology=replace(self.topology, num_workers=num_workers))

    # Copies ----------------------------------------------------------------------------------------------------------

    def without_footers(self, opened_files: Opened) -> EpochState:
        """Return a copy for a worker. These opened files have no footers: the worker's assignments contain them."""
        copied = copy.copy(self)
        copied._plans = plans = replace(copied._plans, opened_files=opened_files)  # noqa: SLF001 - of this class
        copied.owner.loaded = None
        copied.segments = Segments(plans.planner, counts_rows=False)
        return copied

    def for_user(self) -> EpochState:
        """Return a copy that continues where this stands. After a finished pass it begins the epoch, as this does."""
        copied = copy.copy(self)
        iteration = self.owner.iteration
        if iteration is not None and not iteration.finished():
            copied.owner.loaded = iteration.progress
        return copied

    def __copy__(self) -> EpochState:
        copied = EpochState.__new__(EpochState)
        plans = replace(self._plans, planner=copy.copy(self._plans.planner))
        own = {"owner": copy.copy(self.owner), "_plans": plans, "_record": None}
        own |= {"monitor": self.monitor.for_copy(self.topology.processes)}
        copied.__dict__.update(self.__dict__, **own, segments=self.segments.copied(plans.planner))
        return copied

    # Within ----------------------------------------------------------------------------------------------------------

    def _log_segment(self, progress: Progress) -> None:
        """Write into the run log that a segment begins, before its first batch is delivered.

        Each worker of a plain loader begins an iteration of its own; the first of them writes.
        """
        worker = get_worker_info()
        if self._run_log is None or (worker is not None and worker.id):
            return
        began: Began = "epoch"
        loaded = None
        if self.owner.loaded is not None:
            began, loaded = self._loaded or ("state", None)
        run, record = self.run(self.epoch), self._recorded(progress)
        self._run_log.write(run, self.epoch, progress, record, began=began, loaded=loaded)

    def _fresh(self) -> Progress:
        """Return the progress at the beginning of the epoch."""
        return self._skipping(self._plans.fresh(self.epoch))

    def _skipping(self, progress: Progress) -> Progress:
        """Return the progress with what the user wants skipped and restored."""
        return self._plans.skipping(progress, self.epoch, self._skips)

    def _current_plan(self) -> Plan:
        """Return the plan of the epoch, or of the rows that an elastic load left of it."""
        progress = self.owner.progress
        return self._plans.plan(self.epoch, None if progress is None else progress.baseline)

    def _prepare_states(self, progress: Progress) -> None:
        """Compute now what all states of the epoch share, so that each of them takes little time."""
        _ = self._shared_digest, self._plans.opened_files.manifest.fingerprint, self.run(self.epoch)
        self._recorded(progress).prepare()

    def _recorded(self, progress: Progress) -> EpochRecord:
        """Return what all states of the progress' epoch share."""
        if self._record is None or not self._record.is_of(progress):
            self._record = EpochRecord(self._plans.planner.manifest_of(self.epoch, self.topology), progress)
        return self._record

    def _check_epoch(self) -> None:
        """Warn once if ranks make different numbers of steps, and run a split strategy now, which may be wrong."""
        plans, planner = self._plans, self._plans.planner
        if planner.strategy is not None:
            plans.plan(self.epoch)
        check_weights(planner, self.epoch, self.topology)
        allowed = self.topology.num_ranks > 1 and planner.options.uneven_ranks == "allow"
        if self._warned_of_uneven_ranks or not allowed:
            return
        unknown = plans.unknown_steps(self.epoch)
        if unknown is not None:
            self._warned_of_uneven_ranks = True
            warn_of_unknown_lengths(unknown)
            return
        ranks = plans.ranks(self.epoch)
        batches = list(map(plans.batches, ranks))
        if len(set(batches)) > 1:
            self._warned_of_uneven_ranks = True
            rows = [rank.rows_left for rank in ranks]
            warn_of_uneven_ranks(self.epoch, batches, rows, planner.options.unit)
