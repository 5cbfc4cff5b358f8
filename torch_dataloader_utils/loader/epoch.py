"""A rank's epochs: the plan of each, its progress, and the states that save and load it."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal

from torch.utils.data import get_worker_info

from torch_dataloader_utils.checkpoint.delivered_hash import begun_hashes, loaded_hashes
from torch_dataloader_utils.checkpoint.dump import dump_hashes, dump_state
from torch_dataloader_utils.checkpoint.epoch_record import EpochRecord
from torch_dataloader_utils.checkpoint.merge import Merged, OnChangedFiles, merge_states
from torch_dataloader_utils.checkpoint.parse import parse_states
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.removed_rows import with_removed
from torch_dataloader_utils.checkpoint.restore import check_states, place_states
from torch_dataloader_utils.checkpoint.restore_skips import with_carried
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.run_segments import Began, Loaded
from torch_dataloader_utils.checkpoint.saved_state import SavedState, lists_files
from torch_dataloader_utils.formats.opened_files import Opened
from torch_dataloader_utils.gc_pause import without_gc
from torch_dataloader_utils.loader.advice import advise
from torch_dataloader_utils.loader.events import Hooks
from torch_dataloader_utils.loader.exclusions import loaded_exclusions, loaded_removed
from torch_dataloader_utils.loader.iteration import Iteration
from torch_dataloader_utils.loader.logged_segments import LoggedSegments
from torch_dataloader_utils.loader.metrics import Metrics, MetricsReading
from torch_dataloader_utils.loader.mixture import (
    check_weights,
    mixture_of,
    placed,
    require_no_schedule,
    reweighted,
    source_metrics,
    with_changed_passes,
    with_sources,
)
from torch_dataloader_utils.loader.progress_bar import PassProgress, ProgressBar
from torch_dataloader_utils.loader.progress_owner import ProgressOwner
from torch_dataloader_utils.loader.reports import Reports
from torch_dataloader_utils.loader.run_log import RunLogFiles, RunLogWriter
from torch_dataloader_utils.loader.segments import Segments
from torch_dataloader_utils.loader.skip_requests import SkipRequests, requests_left, require_same_batches
from torch_dataloader_utils.loader.skipping import SkipsSteps
from torch_dataloader_utils.loader.user_warnings import (
    LOG,
    log_uneven_rows,
    warn_of_lost_rows,
    warn_of_touched_files,
    warn_of_uneven_ranks,
    warn_of_unknown_hashes,
    warn_of_unknown_lengths,
)
from torch_dataloader_utils.planning.excluded import (
    NO_EXCLUSIONS,
    EpochExclusions,
    ExcludedExpression,
    ExcludedRows,
)
from torch_dataloader_utils.planning.ledger import Removal, Segment
from torch_dataloader_utils.planning.plan import DeliveredBaseline, Plan
from torch_dataloader_utils.planning.planner import PLAN_ALGORITHMS, EpochPlanner, newest_algorithm
from torch_dataloader_utils.planning.quotas import Quotas
from torch_dataloader_utils.planning.topology import Topology
from torch_dataloader_utils.reading.scan import ReadOptions
from torch_dataloader_utils.workers.cpus import usable_cpus


class EpochState(SkipsSteps):
    """A rank's current epoch: its plan and its progress.

    `adopts_num_workers` says that a loaded state's number of workers replaces the topology's. A bar shows
    the progress, drawn again every `progress_interval_sec` seconds; None for no bar. A run log tells of earlier
    segments of the run; one process writes it. The hooks are told of events.
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
        self.topology = topology
        self._opened_files = opened_files
        self._read_options = read_options
        self._planner = planner
        self.owner = ProgressOwner()
        counts_rows = opened_files.unknown_rows is None and read_options.batching is None
        self.segments = Segments(self._planner, counts_rows=counts_rows)
        self._adopts_num_workers = adopts_num_workers
        self._progress_interval_sec = progress_interval_sec
        self._hooks = hooks
        self._counted = _nothing_counted(topology)
        self._warned_of_uneven_ranks = False
        self._record: EpochRecord | None = None
        self._exclusions = NO_EXCLUSIONS
        self._plan_algorithm: int | None = None  # that of a loaded state; None for the newest
        self._loaded: tuple[Began, Loaded] | None = None  # how the next iteration begins, if a state was loaded
        self._run_log = None if run_log is None or not writes_run_log else RunLogWriter(run_log)
        if run_log is not None:
            self.segments.run_log = LoggedSegments(run_log, opened_files)
        self._skips = SkipRequests()
        self._weights: tuple[Fraction, ...] | None = None  # those that the next epoch begins with, if they change
        self._check_epoch()

    # What is known of the epoch --------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration delivers, or continues."""
        return self.owner.epoch

    @property
    def plan(self) -> Plan:
        """The plan of the whole epoch."""
        return self._plan_of(None)

    @property
    def progress(self) -> Progress:
        """The progress: that of the newest iteration, else that of a loaded state, else none."""
        progress = self.owner.progress
        return self._removing(self._fresh() if progress is None else self._skipping(progress))

    def _removing(self, progress: Progress) -> Progress:
        """Return the progress with all rows that batches lose if an iteration begins with it."""
        removed, seed = self.excluded_in(self.epoch).removed, self._planner.options.row_shuffle_seed
        is_exact = self._opened_files.unknown_rows is None and self.excluded_in(self.epoch).unknown_rows is None
        return with_removed(progress, removed, seed=seed, epoch=self.epoch, is_exact=is_exact)

    def excluded_in(self, epoch: int) -> EpochExclusions:
        """Return what is excluded in an epoch."""
        return self._exclusions.in_epoch(epoch)

    @property
    def unknown_steps(self) -> str | None:
        """Why it is unknown, before the epoch is read, which rows each step has; None where it is known."""
        return self._unknown_steps(self.excluded_in(self.epoch))

    def _unknown_steps(self, excluded: EpochExclusions) -> str | None:
        """Return the same for an epoch in which this is excluded."""
        return self._opened_files.unknown_rows or excluded.unknown_rows or self._read_options.unknown_batches

    @property
    def num_batches(self) -> int:
        """The epoch's number of batches, also when it is continued from a state.

        Raises:
            TypeError: If it is known only once the rows are read.
        """
        if self.unknown_steps is not None:
            raise TypeError(f"the number of batches is not known ahead: {self.unknown_steps}")
        return self._batches(self.progress)

    @property
    def plan_digest(self) -> str:
        """Digest of this epoch's plan and of everything else that determines its batches."""
        options = self._read_options
        return _digest(self._rows_digest, options.batching or options.batch_size, options.drop_last)

    @property
    def _rows_digest(self) -> str:
        """Digest of all that determines which rows each rank delivers. Their batches may have different sizes."""
        files = self._opened_files
        versions = files.manifest.fingerprint, files.manifest.versions_digest, *sorted(files.pin.items())
        made = () if files.transform is None else (files.transform.id,)
        contents = *versions, files.filter_digest, files.filter_binding, files.options_digest, *made
        algorithm = self._plan_algorithm or newest_algorithm()
        fixed = algorithm, self.topology.num_ranks
        excluded = () if self._exclusions.digest is None else (self._exclusions.digest,)
        requested = *excluded, *self._skips.contents
        return _digest(self._current_plan().digest, *fixed, *contents, self._planner.options, *requested)

    @property
    def _shared_digest(self) -> str | None:
        """The digest by which the states of several ranks are compared; None on a single rank."""
        return self._rows_digest if self.topology.num_ranks > 1 else None

    def pass_progress(self, uneven: Literal["drop", "pad"] | None = None) -> PassProgress:
        """Return how many batches were delivered before the next one, and how many there are: see the loader's."""
        is_going_on = self.owner.upcoming is not None and self.owner.iteration is not None
        progress = self._fresh() if self.owner.upcoming is None else self.owner.upcoming
        progress = progress if is_going_on else self._skipping(progress)
        total = None
        if self.unknown_steps is None:
            total = self._batches(progress)
            if uneven is not None and self._planner.options.uneven_ranks == "allow":
                requests = SkipRequests(progress.skip_requests, restores=progress.restores)
                fresh = self._ranks(self._plan_of(progress.baseline), progress.baseline)
                # Only a mixture has quotas, and its ranks are always balanced.
                ranks = (requests.applied(one, self._read_options, None, counts_rows=True) for one in fresh)
                total = (min if uneven == "drop" else max)(map(self._batches, ranks))
        return {"initial": progress.batches_delivered - progress.steps_skipped, "total": total}

    def delivered_hash(self) -> dict[str, list[dict[str, Any]] | None]:
        """Return the metric of the delivered rows' hashes, None if they are not known; nothing if not asked for."""
        if not self._read_options.fingerprint:
            return {}
        hashes = self.progress.hashes
        if hashes is None:
            return {"delivered_hash": None}
        known = dump_hashes(zip(self.topology.own_ranks, hashes, strict=True))
        return {"delivered_hash": with_sources(self._planner, known)}

    def balanced_rows(self) -> dict[str, list[tuple[str, int]]]:
        """Return the rows that are dropped or repeated in this epoch: see `EpochPlanner.uneven_rows`."""
        return self._planner.uneven_rows(self._current_plan(), self._restored_plan())

    def balanced_sequences(self) -> dict[str, int]:
        """Return how many sequences are dropped or repeated in this epoch."""
        return self._planner.uneven_sequences(self._current_plan(), self._restored_plan())

    def _restored_plan(self) -> Plan | None:
        """Return the plan of rows that were skipped before an elastic load and are restored."""
        progress = self.progress
        if not progress.restores or progress.baseline is None:
            return None
        return self._skipped_plan_for(self.run(self.epoch), self.epoch, progress.baseline)

    def metrics(self) -> dict[str, Any]:
        """Return the counters of the newest iteration, and what they say of the bottleneck."""
        iteration = self.owner.iteration
        reading = (iteration.metrics if iteration else Metrics(self.topology.processes)).read()
        advice = advise(reading, num_workers=self.topology.num_workers, cpus=max(1, usable_cpus()))
        return reading.as_dict() | {"advice": advice}

    def total_metrics(self) -> dict[str, Any]:
        """Return the counters of all iterations together. Another thread may call it at any moment."""
        before, newest = self._counted
        return before.plus(newest.read()).as_dict()

    def segment(self, epoch: int) -> Segment:
        """Return the segment of an epoch that begins now."""
        algorithm = self._plan_algorithm if epoch == self.epoch else None
        excluded = self.excluded_in(epoch)
        removal = Removal(0, excluded.removed, excluded.removed_by)
        return Segment(
            left_out=excluded.left_out,
            removals=(removal,) if removal.rows or removal.expressions else (),
            epoch=epoch,
            plan_algorithm=algorithm or newest_algorithm(),
            options=self._planner.options,
            topology=self.topology,
            batch_size=self._read_options.batch_size,
            drop_last=self._read_options.drop_last,
            skipped=self._skips.steps if epoch == self.epoch else (),
            restores=self._skips.restores and epoch == self.epoch,
            mixture=(self._planner if epoch == self.epoch else self._planner_of(epoch)).place,
        )

    def _planner_of(self, epoch: int) -> EpochPlanner:
        """Return the planner of an epoch that `set_epoch` begins."""
        baseline = None if self.owner.progress is None else self.owner.progress.baseline
        planner = self._planner.moved_to(epoch, self.topology, self.epoch, baseline)
        if self._weights is None:
            return planner
        return reweighted(planner, self._weights, epoch, self.topology, is_loaded=False)

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
            self._plan_algorithm = None
            self.segments.begin(self.segment(self.epoch))
        else:
            self._note_removals(self.owner.loaded.batches_delivered)
        progress = self._removing(self._fresh() if self.owner.loaded is None else self._skipping(self.owner.loaded))
        counts = self.pass_progress()
        self._log_segment(progress)
        quotas = self._quotas_of(progress)
        iteration = self.owner.begin(progress, self.topology.processes, self.excluded_in(self.epoch), quotas)
        self._loaded = None
        if self._run_log is not None:
            self._run_log.follow(iteration)
        self._counted = self._counted[0].plus(self._counted[1].read()), iteration.metrics
        if get_worker_info() is None:
            if self._progress_interval_sec is not None:
                iteration.bar = ProgressBar(self.epoch, counts, self._progress_interval_sec)
            self._report_begin(iteration)
        self._prepare_states(progress)
        if LOG.isEnabledFor(logging.INFO):
            log_uneven_rows(self.epoch, self.balanced_rows())
        return iteration

    def _report_begin(self, iteration: Iteration) -> None:
        """Let an iteration tell the hooks of events, if there are any, and report that it begins."""
        retries = self._opened_files.take_retries()
        if self._hooks:
            counts, workers = self._opened_files.unknown_rows is None, self.topology.num_workers
            reports = Reports(iteration.epoch, self._hooks, iteration.metrics, workers=workers, counts_rows=counts)
            iteration.reports = reports
            reports.begun(iteration.progress, retries)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Changes nothing if it is the current one and no batch of it was delivered since it began."""
        if epoch == self.epoch and self.owner.is_untouched and (self._weights is None or self.owner.loaded is not None):
            return
        self._planner.require_epoch(epoch, self.topology)
        self._planner = self._planner_of(epoch)
        self._weights = None
        if epoch != self.epoch:
            self._skips = SkipRequests()  # steps are counted in an epoch
        self.owner.take_over("set_epoch", epoch)
        self.segments.forget(epoch)
        self._plan_algorithm = self._loaded = None
        self._check_epoch()

    def exclude(self, rows: ExcludedRows) -> None:
        """Exclude rows from the next iteration on."""
        self._exclusions = self._exclusions.with_rows(rows, self.epoch)
        self._note_exclusion()

    def exclude_by(self, opened_files: Opened, digest: str) -> None:
        """Exclude rows from the next iteration on by an expression of opened files, given by its digest.

        Raises:
            ValueError: If ranks are balanced.
        """
        uneven = self._planner.options.uneven_ranks
        if uneven != "allow":
            msg = f"exclude: uneven_ranks={uneven!r} needs the number of rows of each rank, which only reading tells "
            raise ValueError(msg + "if an expression excludes rows: exclude them by their paths and row numbers")
        expression = ExcludedExpression(digest, str(opened_files.expressions[digest]), self.epoch)
        self._exclusions = self._exclusions.with_expression(expression)
        self._opened_files = opened_files
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
        require_no_schedule(self._planner)
        self._weights = weights

    def source_metrics(self) -> dict[str, dict[str, Any]]:
        """Return what was delivered of each source of a mixture in this epoch."""
        return source_metrics(self._planner, self.progress, self.epoch, self.topology)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as a state."""
        progress = self.progress
        return dump_state(self.run(self.epoch), self.epoch, progress, self._shared_digest, self._recorded(progress))

    @without_gc
    def load_state_dict(self, states: Any, *, strict: bool, on_changed_files: OnChangedFiles) -> None:
        """Load a state, or those of all ranks. If this raises, nothing has changed."""
        saved = parse_states(states)
        planner = self._planner
        self._planner = placed(planner, saved[0], self.topology, strict=strict)
        if self._weights is not None:
            self._planner = reweighted(self._planner, self._weights, saved[0].epoch, self.topology, is_loaded=True)
        try:
            self._load(saved, strict=strict, on_changed_files=on_changed_files)
        except BaseException:
            self._planner = planner
            raise
        self._weights = saved[0].mixture.next_weights if strict and saved[0].mixture is not None else None

    def _load(self, saved: Sequence[SavedState], *, strict: bool, on_changed_files: OnChangedFiles) -> None:
        epoch = saved[0].epoch
        run = self.run(epoch)
        algorithm = saved[0].settings["plan_algorithm"]
        if algorithm in PLAN_ALGORITHMS:  # else it will be a difference
            run = replace(run, plan_algorithm=algorithm)
        before, run = run, replace(run, exclusions=loaded_exclusions(saved, run, self._opened_files))
        changed: frozenset[str] = frozenset()
        if not strict:
            merged = merge_states(saved, run, on_changed_files=on_changed_files)
            changed = merged.changed
            run = replace(run, exclusions=loaded_exclusions(saved, before, self._opened_files, changed))
            progress = self._planned_again(saved, run, merged)
        elif on_changed_files != "error":
            msg = f"on_changed_files={on_changed_files!r} needs strict=False: what is left has to be planned again"
            raise ValueError(msg)
        elif get_worker_info() is not None:  # a loader that loads states in its workers restores their turns as well
            progress = self._placed(saved, run).with_turn_restored(run.topology.processes)
        else:
            if self._adopts_num_workers and run.topology.virtual_workers is None:
                run = replace(run, topology=replace(run.topology, num_workers=saved[0].num_workers))
            progress = self._placed(saved, run)
        progress = replace(progress, removed=loaded_removed(saved, run, strict=strict, changed=changed))
        self.topology = run.topology
        self._plan_algorithm = run.plan_algorithm
        self._exclusions = run.exclusions
        if self._read_options.fingerprint:
            progress = replace(progress, hashes=loaded_hashes(saved, run.topology, is_strict=strict))
            warn_of_unknown_hashes(epoch, progress)
        self._skips = SkipRequests(progress.skip_requests, restores=progress.restores)
        self.owner.take_over("load_state_dict", epoch, progress)
        self._loaded = "state" if strict else "elastic state", Loaded.of(saved)
        segment = replace(self.segment(epoch), baseline=progress.baseline)
        if strict:
            own = next((state for state in saved if state.rank == self.topology.rank), saved[0])
            own_alone = self._is_own_alone(progress.batches_delivered)
            self.segments.load_strictly(segment, own, progress, own_alone=own_alone)
        else:
            self.segments.load_elastically(segment, saved)

    def _placed(self, states: Sequence[SavedState], run: Run) -> Progress:
        """Return the progress of a run that continues exactly where it saved the states."""
        checked = check_states(states, run)
        progress = place_states(
            checked,
            self._plan_for(run, checked.epoch, checked.baseline),
            self._skipped_plan_for(run, checked.epoch, checked.baseline),
        )
        counts_rows = self._unknown_steps(run.exclusions.in_epoch(checked.epoch)) is None
        quotas = self._planner.quotas(checked.epoch, run.topology, progress.baseline)
        require_same_batches(progress, self._read_options, quotas, counts_rows=counts_rows)
        warn_of_touched_files(states[0], run)
        return progress

    def _planned_again(self, states: Sequence[SavedState], run: Run, merged: Merged) -> Progress:
        """Return the progress of a run that plans again what other ranks and workers have not delivered."""
        epoch, baseline = states[0].epoch, merged.baseline
        self._planner = with_changed_passes(self._planner, merged)
        plan = self._plan_for(run, epoch, baseline)
        self._planner = self._planner.reaching(plan, run.topology)
        warn_of_touched_files(states[0], run)
        period = "epoch" if run.mixture is None else "pass"
        warn_of_lost_rows(merged.lost_rows, period, counts_rows=run.manifest.counts_rows)
        progress = Progress.fresh(run.topology.own_streams(plan), run.topology.streams_per_turn, baseline)
        progress = with_carried(progress, run.topology, self._skipped_plan_for(run, epoch, baseline))
        if self._unknown_steps(run.exclusions.in_epoch(epoch)) is not None:
            progress = replace(progress, skip_requests=requests_left(states[0], baseline))
        return progress

    def join_plain_loader(self, num_workers: int, loader_seed: int) -> None:
        """Take over, in a worker of a plain loader, the epoch and the loaded state of the training process."""
        virtual = self.topology.virtual_workers
        if virtual is not None and virtual % num_workers:
            msg = f"virtual_workers={virtual} is not a multiple of the plain DataLoader's num_workers={num_workers}"
            raise ValueError(msg)
        workers_of_state = self.topology.processes if virtual is None else num_workers
        self.owner.join_plain_loader(workers_of_state, num_workers, loader_seed)
        self._skips.require_none(self.progress)
        self.topology = replace(self.topology, num_workers=num_workers)

    # Copies ----------------------------------------------------------------------------------------------------------

    def without_footers(self, opened_files: Opened) -> EpochState:
        """Return a copy for a worker. These opened files have no footers: the worker's assignments contain them."""
        copied = copy.copy(self)
        copied._opened_files, copied.owner.loaded = opened_files, None  # noqa: SLF001 - of this class
        copied.segments = Segments(copied._planner, counts_rows=False)  # noqa: SLF001
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
        planner = copy.copy(self._planner)
        own = {"owner": copy.copy(self.owner), "_planner": planner, "_record": None}
        own |= {"_hooks": Hooks(), "_counted": _nothing_counted(self.topology)}
        copied.__dict__.update(self.__dict__, **own, segments=self.segments.copied(planner))
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
        progress = Progress.fresh(self.topology.own_streams(self.plan), self.topology.streams_per_turn)
        hashes = begun_hashes(self.topology) if self._read_options.fingerprint else None
        return self._skipping(replace(progress, hashes=hashes))

    def _all_ranks(self) -> list[Progress]:
        progress = self.progress
        is_even = self._planner.options.uneven_ranks != "allow"
        return [progress, *([] if is_even else self._ranks(self._plan_of(progress.baseline), progress.baseline))]

    def _quotas_of(self, progress: Progress) -> Quotas | None:
        return self._planner.quotas(self.epoch, self.topology, progress.baseline)

    def _current_plan(self) -> Plan:
        """Return the plan of the epoch, or of the rows that an elastic load left of it."""
        progress = self.owner.progress
        return self._plan_of(None if progress is None else progress.baseline)

    @without_gc
    def _plan_of(self, baseline: DeliveredBaseline | None) -> Plan:
        """Return the plan of the epoch, or of the rows that a baseline leaves of it."""
        left_out = self.excluded_in(self.epoch).left_out
        return self._planner.plan(self.epoch, self.topology, baseline, self._plan_algorithm, left_out)

    @without_gc
    def _plan_for(self, run: Run, epoch: int, baseline: DeliveredBaseline | None) -> Plan:
        """Return the plan of a run that is to become this one."""
        left_out = run.exclusions.in_epoch(epoch).left_out
        return self._planner.plan(epoch, run.topology, baseline, run.plan_algorithm, left_out)

    def _skipped_plan_for(self, run: Run, epoch: int, baseline: DeliveredBaseline | None) -> Plan | None:
        """Return the plan of the rows that were skipped before a baseline, of a run that is to become this one."""
        left_out = run.exclusions.in_epoch(epoch).left_out
        return self._planner.plan_skipped(epoch, run.topology, baseline, run.plan_algorithm, left_out)

    def _prepare_states(self, progress: Progress) -> None:
        """Compute now what all states of the epoch share, so that each of them takes little time."""
        _ = self._shared_digest, self._opened_files.manifest.fingerprint, self.run(self.epoch)
        self._recorded(progress).prepare()

    def _recorded(self, progress: Progress) -> EpochRecord:
        """Return what all states of the progress' epoch share."""
        if self._record is None or not self._record.is_of(progress):
            self._record = EpochRecord(self._planner.manifest_of(self.epoch, self.topology), progress)
        return self._record

    def run(self, epoch: int) -> Run:
        """Return what a state of an epoch is compared with."""
        worker = get_worker_info()
        topology = self.topology if worker is None else replace(self.topology, num_workers=worker.num_workers)
        mixture = mixture_of(self._opened_files, self._planner, epoch, topology, self._weights)
        return Run(
            manifest=self._planner.manifest_of(epoch, topology),
            options=self._planner.options,
            filter_digest=self._opened_files.filter_digest,
            filter_binding=self._opened_files.filter_binding,
            filter_bindings=self._opened_files.filter_bindings if lists_files(self._opened_files.manifest) else None,
            topology=topology,
            format=self._opened_files.format_name,
            format_options=None if mixture is not None else self._opened_files.options_digest,
            snapshot_id=self._opened_files.pin.get("snapshot_id"),
            version=self._opened_files.pin.get("version"),
            split_strategy=self._planner.strategy_digest(epoch),
            plan_algorithm=self._plan_algorithm or newest_algorithm(),
            exclusions=self._exclusions,
            batch_size=None if self._read_options.batching else self._read_options.batch_size,
            drop_last=self._read_options.drop_last,
            mixture=mixture,
            transform_id=None if self._opened_files.transform is None else self._opened_files.transform.id,
        )

    def _batches(self, progress: Progress) -> int:
        return progress.batches(self._read_options.batch_size, drop_last=self._read_options.drop_last)

    def _ranks(self, plan: Plan, baseline: DeliveredBaseline | None = None) -> list[Progress]:
        """Return the progress of all ranks at the beginning of a plan, where the topology is not virtual."""
        run = self.run(plan.epoch)
        skipped = self._skipped_plan_for(run, plan.epoch, baseline)
        ranks = [replace(self.topology, rank=rank) for rank in range(self.topology.num_ranks)]
        fresh = (Progress.fresh(rank.own_streams(plan), baseline=baseline) for rank in ranks)
        return [with_carried(progress, rank, skipped) for rank, progress in zip(ranks, fresh, strict=True)]

    def _check_epoch(self) -> None:
        """Warn once if ranks make different numbers of steps, and run a split strategy now, which may be wrong."""
        if self._planner.strategy is not None:
            self._planner.plan(self.epoch, self.topology, left_out=self.excluded_in(self.epoch).left_out)
        check_weights(self._planner, self.epoch, self.topology)
        allowed = self.topology.num_ranks > 1 and self._planner.options.uneven_ranks == "allow"
        if self._warned_of_uneven_ranks or not allowed:
            return
        if self.unknown_steps is not None:
            self._warned_of_uneven_ranks = True
            warn_of_unknown_lengths(self.unknown_steps)
            return
        ranks = self._ranks(self.plan)
        batches = list(map(self._batches, ranks))
        if len(set(batches)) > 1:
            self._warned_of_uneven_ranks = True
            rows = [rank.rows_left for rank in ranks]
            warn_of_uneven_ranks(self.epoch, batches, rows, self._planner.options.unit)


def _nothing_counted(topology: Topology) -> tuple[MetricsReading, Metrics]:
    """Return what was counted before the newest iteration, and what that one counts. Other threads may read both."""
    return Metrics(topology.processes).read(), Metrics(topology.processes)


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
