"""The segments of the epochs that a process knows: those that it has begun or loaded, and those of a run log."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.restore import load_baseline
from torch_dataloader_utils.checkpoint.saved_state import SavedState
from torch_dataloader_utils.errors import LedgerUnknownError
from torch_dataloader_utils.loader.mixture import place_of
from torch_dataloader_utils.planning.ledger.lookup import SegmentLedger
from torch_dataloader_utils.planning.ledger.restored_steps import restored_segments
from torch_dataloader_utils.planning.ledger.segment import NO_REMOVAL, RankStart, Removal, Segment
from torch_dataloader_utils.planning.manifest import Manifest
from torch_dataloader_utils.planning.mixture.passes import MixturePlace
from torch_dataloader_utils.planning.plan import Plan
from torch_dataloader_utils.planning.planner import EpochPlanner
from torch_dataloader_utils.planning.topology import Topology

LEDGERS_KEPT = 4
"""How many segments' plans and indexes are kept: users ask about many steps of the same ones."""


class SegmentLog(Protocol):
    """A run log."""

    def of(self, epoch: int, segments: Segments, /) -> Sequence[Segment]:
        """Return the segments of an epoch, oldest first. Each but the last has its stops."""

    def forget(self) -> None:
        """Note that the log may have changed."""


BEFORE_ELASTIC_LOAD = (
    "the steps of epoch {epoch} before step {step} were delivered before an elastic load planned the rest again, from "
    "plans that this process does not know: the run log has them (run_log=...)"
)

OTHER_BATCHES = (
    "the state that was loaded at step {step} of epoch {epoch} continues batches of other sizes than it records, so "
    "that it is not known which batches were before it: the run log has them (run_log=...)"
)

RESTORED_OTHERWISE = (
    "the state that was loaded at step {step} of epoch {epoch} is between restored steps, and they go on in batches of "
    "other sizes than it records, so that it is not known which rows the steps from there on have"
)


class Segments:
    """The segments of epochs. An epoch that this process neither began nor loaded has those of the run log, if any.

    Attributes:
        run_log: The run log; None without one.
        loaded: The epoch of the state that was loaded last, and its progress; None if that epoch has begun again.
    """

    def __init__(self, planner: EpochPlanner, *, counts_rows: bool) -> None:
        self.run_log: SegmentLog | None = None
        self._planner = planner
        self._counts_rows = counts_rows
        self._segments: dict[int, tuple[Segment, ...]] = {}
        self._ends: dict[int, tuple[int, ...]] = {}  # by rank, of the steps before the first segment of an epoch
        self._before: dict[int, str] = {}  # why the steps before the first segment of an epoch are not known
        self._not_in_log: dict[int, str] = {}  # why the run log does not tell them
        self._ledgers: list[SegmentLedger] = []
        self.loaded: tuple[int, Progress] | None = None
        self._proved: Progress | None = None  # that of `loaded` to which the steps before it are known to lead

    # What is known ---------------------------------------------------------------------------------------------------

    def of(self, fresh: Segment) -> tuple[Segment, ...]:
        """Return the known segments of an epoch, oldest first; `fresh` is that of its plan from the beginning."""
        epoch = fresh.epoch
        own = self._segments.get(epoch)
        if own is None:
            logged = () if self.run_log is None else self.run_log.of(epoch, self)
            return self._with_restored(tuple(logged) or (self._plannable(fresh),))
        begin, ends = own[0].begin, self._ends.get(epoch)
        logged = self._logged_before(epoch) if begin else ()
        earlier = (_ended(segment, begin, ends) for segment in logged if segment.begin < begin)
        return self._with_restored((*earlier, *own))

    def _logged_before(self, epoch: int) -> Sequence[Segment]:
        """Return the segments that the run log has of an epoch, which has others of this process.

        There are none if the log does not tell them. Those of this process are known all the same.
        """
        self._not_in_log.pop(epoch, None)
        try:
            return () if self.run_log is None else self.run_log.of(epoch, self)
        except LedgerUnknownError as error:
            self._not_in_log[epoch] = str(error)
            return ()

    def _plannable(self, fresh: Segment) -> Segment:
        """Return a segment, or raise if it is not known where its epoch begins."""
        try:
            self._planner.at(fresh.mixture).require_epoch(fresh.epoch, fresh.topology)
        except ValueError as error:
            raise LedgerUnknownError(str(error)) from None
        return fresh

    def manifest(self, segment: Segment) -> Manifest:
        """Return the files by which a segment names rows."""
        return self._planner.at(segment.mixture).manifest_of(segment.epoch, segment.topology)

    def place_of(self, saved: SavedState, topology: Topology, *, drop_last: bool) -> MixturePlace | None:
        """Return where the sources of a mixture stood when a state was saved; None for a single dataset."""
        return place_of(self._planner, saved, topology, drop_last=drop_last)

    def strategy_digest(self, epoch: int) -> str | None:
        """Return what is recorded of the split strategy in an epoch; None without one."""
        return self._planner.strategy_digest(epoch)

    def _with_restored(self, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """Return segments, and those of skipped steps that are delivered after the last one."""
        newest = segments[-1]
        if not newest.restores or not self._counts_rows:
            return segments
        ranks = [replace(newest.topology, rank=rank) for rank in range(newest.topology.num_ranks)]
        plan = self._plan_skipped(newest)
        carried = {} if plan is None else {each.rank: each.own_streams(plan) for each in ranks}
        ledgers = [self.ledger(segment) for segment in segments if have_one_plan(segment, newest)]
        return (*segments, *restored_segments(ledgers, carried))

    def was_skipped(self, segment: Segment, path: str, row: int) -> bool:
        """Whether a row was skipped before the elastic load that a segment begins with."""
        plan = self._plan_skipped(segment)
        plain = replace(segment, first_step=None, starts=None)
        return plan is not None and SegmentLedger(plain, plan, self.manifest(segment)).plans(path, row)

    def _plan_skipped(self, segment: Segment) -> Plan | None:
        """Return the plan of the rows that were skipped before a segment's elastic load; None if there are none."""
        planner, algorithm = self._planner.with_options(segment.options), segment.plan_algorithm
        return planner.plan_skipped(segment.epoch, segment.topology, segment.baseline, algorithm, segment.left_out)

    def why_unknown(self, first: Segment) -> str | None:
        """Return why the steps before the first known segment of an epoch are not known; None if there are none."""
        if not first.begin:
            return None
        if first.epoch in self._not_in_log:
            return self._not_in_log[first.epoch]
        return self._before.get(first.epoch, BEFORE_ELASTIC_LOAD).format(epoch=first.epoch, step=first.begin)

    def why_unknown_after(self, segment: Segment) -> str | None:
        """Return why it is not known which steps there are after a segment; None where they are known."""
        is_last = self._segments.get(segment.epoch, ())[-1:] == (segment,)
        if not is_last or self.loaded is None or self._before.get(segment.epoch) != OTHER_BATCHES:
            return None
        epoch, progress = self.loaded
        is_restored = epoch == segment.epoch and progress.restored is not None
        return RESTORED_OTHERWISE.format(step=segment.begin, epoch=epoch) if is_restored else None

    def unproved(self, epoch: int) -> Progress | None:
        """Return the progress that was loaded in an epoch, if only reading tells whether the steps before lead there.

        A state records the size of its own batches. Those before it may have had another, after a load before.
        """
        if self._counts_rows or self.loaded is None or self.loaded[0] != epoch or self.loaded[1] is self._proved:
            return None
        return self.loaded[1]

    def logs_other_batches(self, segment: Segment, step: int) -> bool:
        """Whether the run log has batches of other sizes than a segment's up to a step of its epoch.

        Those of the segment's size may lead to the same place, as seven of 5 rows do for 6, 6, 4, 4, 4, 6 and 5.
        """
        logged = () if self.run_log is None else self.run_log.of(segment.epoch, self)
        return any(one.batch_size != segment.batch_size for one in logged if one.begin <= step)

    def prove(self, epoch: int, *, leads_there: bool) -> None:
        """Note whether the steps before the progress that was loaded in an epoch lead there: see `unproved`."""
        progress = self.unproved(epoch)
        assert progress is not None  # noqa: S101
        self._proved = progress
        if not leads_there:
            newest = self._segments[epoch][-1]
            own = RankStart(tuple(stream.left for stream in progress.streams), progress.next_turn)
            starts = {newest.topology.rank: own}
            self._segments[epoch] = (replace(newest, first_step=progress.batches_delivered, starts=starts),)
            self._before[epoch] = OTHER_BATCHES

    def ledger(self, segment: Segment) -> SegmentLedger:
        """Return the ledger of a segment."""
        found = next((ledger for ledger in self._ledgers if ledger.segment == segment), None)
        if found is None:
            planner = self._planner.at(segment.mixture).with_options(segment.options)
            epoch, topology, baseline = segment.epoch, segment.topology, segment.baseline
            plan = planner.plan(epoch, topology, baseline, segment.plan_algorithm, segment.left_out)
            manifest, quotas = planner.manifest_of(epoch, topology), planner.quotas(epoch, topology, baseline)
            found = SegmentLedger(segment, plan, manifest, quotas)
            self._ledgers = [found, *self._ledgers[: LEDGERS_KEPT - 1]]
        return found

    # What this process does ------------------------------------------------------------------------------------------

    def begin(self, segment: Segment) -> None:
        """Note that an epoch begins with a segment."""
        self.forget(segment.epoch)
        self._segments[segment.epoch] = (segment,)

    def forget(self, epoch: int) -> None:
        """Note that an epoch will begin again."""
        for known in (self._segments, self._before, self._not_in_log, self._ends):
            known.pop(epoch, None)
        if self.run_log is not None:
            self.run_log.forget()
        if self.loaded is not None and self.loaded[0] == epoch:
            self.loaded = None

    def skip(self, segment: Segment) -> None:
        """Note which steps of an epoch are skipped, and whether they are restored."""
        known = self._segments.get(segment.epoch, (segment,))
        newest = replace(known[-1], skipped=segment.skipped, restores=segment.restores)
        self._segments[segment.epoch] = (*known[:-1], newest)

    def exclude(self, segment: Segment, step: int, *, own_alone: bool) -> None:
        """Note which rows the batches of an epoch lose from a step on.

        `own_alone` says that it is not known from which step on other ranks' batches do.
        """
        known = self._segments.get(segment.epoch)
        if known:
            removals = removals_from(segment, known[-1].removals, step, own_alone=own_alone)
            self._segments[segment.epoch] = (*known[:-1], replace(known[-1], removals=removals))

    def load_strictly(self, segment: Segment, saved: SavedState, progress: Progress, *, own_alone: bool) -> None:
        """Note that this rank continues the plan of a segment where a state stands: see `exclude`."""
        known = self._segments.get(segment.epoch, ())
        same = (number for number, other in enumerate(known) if have_one_plan(other, segment))
        first = next(same, None)
        before = known[: first or 0]  # those of other plans, which an elastic load of this process has followed
        earlier = () if first is None else known[-1].removals
        earlier = earlier or self._removals_before(segment, progress)
        segment = replace(
            segment, removals=removals_from(segment, earlier, progress.batches_delivered, own_alone=own_alone)
        )
        self.begin(segment)
        self._segments[segment.epoch] = (*before, *self._around(segment, saved, progress))
        self.loaded = segment.epoch, progress

    def _removals_before(self, segment: Segment, progress: Progress) -> tuple[Removal, ...]:
        """Return what the batches before a state have lost, which another process delivered.

        The state records which excluded rows were delivered, of its own rank: it has lost all others that it passed.
        """
        lost = progress.removed.rows.minus(progress.removed.delivered)
        expressions = segment.removals[-1].expressions if segment.removals else ()
        if not lost and not expressions:
            return ()
        return (Removal(0, lost, expressions, None if segment.topology.num_ranks == 1 else segment.topology.rank),)

    def _around(self, segment: Segment, saved: SavedState, progress: Progress) -> tuple[Segment, ...]:
        """Return the segments before and after a state, in one plan.

        The batches after it may have another size, and a virtual topology may have other real ranks.
        """
        topology = segment.topology
        if self._counts_rows and saved.has_unequal_batches:
            own = RankStart(tuple(stream.left for stream in progress.streams), progress.next_turn)
            self._before[segment.epoch] = OTHER_BATCHES
            step, restores = progress.batches_delivered, segment.restores and progress.restored is None
            return (replace(segment, first_step=step, starts={topology.rank: own}, restores=restores),)
        rows = segment.batch_size * topology.num_ranks  # of all ranks, as the state's may be others
        rows = rows if saved.batch_size is None else saved.batch_size * saved.num_ranks
        drop_last = segment.drop_last if saved.drop_last is None else saved.drop_last
        then = replace(segment, batch_size=rows // topology.num_ranks, drop_last=drop_last)
        saved_topology = replace(topology, num_ranks=saved.num_ranks, num_workers=saved.num_workers)
        # The epoch's own steps end where the first of the restored ones begins.
        step = progress.batches_delivered - progress.steps_restored(then.batch_size, drop_last=drop_last)
        is_same = (then, topology) == (segment, saved_topology)
        own = RankStart(tuple(stream.left for stream in progress.streams), progress.next_turn)
        after = replace(segment, first_step=step, starts={topology.rank: own})
        same_batches = (then.batch_size, then.drop_last) == (segment.batch_size, segment.drop_last)
        if self._counts_rows and progress.restored is not None and not same_batches:
            self._before[segment.epoch] = OTHER_BATCHES
            return (replace(after, first_step=progress.batches_delivered, restores=False),)
        if self._counts_rows and not _stands_at(self.ledger(then), topology.rank, step, own):
            self._before[segment.epoch] = OTHER_BATCHES
            return (after,)
        if is_same:
            return (segment,)
        before = replace(then, batch_size=rows // saved.num_ranks, topology=saved_topology)
        if self._counts_rows:
            starts = {rank: self.ledger(then).start_at(rank, step) for rank in range(topology.num_ranks)}
            after = replace(after, starts=starts | {topology.rank: own})
        return replace(before, stops=(step,) * saved.num_ranks), after

    def load_elastically(self, segment: Segment, states: Sequence[SavedState]) -> None:
        """Note that the rest of an epoch is planned again after states of all ranks."""
        known = self._segments.get(segment.epoch, ())
        self.begin(segment)
        batches = {state.rank: state.batches_delivered for state in states}
        stops = tuple(batches[rank] for rank in sorted(batches))
        self._ends[segment.epoch] = stops
        for number, earlier in reversed(list(enumerate(known))):
            if self._is_of(earlier, states[0]):
                self._segments[segment.epoch] = (*known[:number], replace(earlier, stops=stops), segment)
                return

    def _is_of(self, segment: Segment, saved: SavedState) -> bool:
        """Whether a state was saved in a segment."""
        manifest, topology = self.manifest(segment), segment.topology
        baseline = None
        if saved.baseline is not None:
            is_open = segment.options.is_open_ended
            baseline = load_baseline(saved.baseline, manifest, segment.left_out, is_open_ended=is_open)
        settings = {
            "num_ranks": topology.num_ranks,
            "num_workers": topology.num_workers,
            "virtual_ranks": topology.virtual_ranks,
            "virtual_workers": topology.virtual_workers,
            "uneven_ranks": segment.options.uneven_ranks,
            "plan_algorithm": segment.plan_algorithm,
        }
        return (
            saved.fingerprint == manifest.fingerprint
            and all(saved.settings[name] == value for name, value in settings.items())
            and (saved.batch_size, saved.drop_last) == (segment.batch_size, segment.drop_last)
            and baseline == segment.baseline
            and saved.batches_delivered >= segment.begin
        )

    # Copies ----------------------------------------------------------------------------------------------------------

    def copied(self, planner: EpochPlanner) -> Segments:
        """Return a copy with a planner of its own."""
        copied = copy.copy(self)
        own = {
            "_planner": planner,
            "_segments": {**self._segments},
            "_before": {**self._before},
            "_not_in_log": {**self._not_in_log},
            "_ends": {**self._ends},
        }
        copied.__dict__.update(own)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what can be computed again, or belongs to this process."""
        return self.__dict__ | {"_ledgers": [], "run_log": None}


def _ended(segment: Segment, begin: int, ends: tuple[int, ...] | None) -> Segment:
    """Return an earlier segment with its end where the first segment begins that this process knows itself."""
    num_ranks = segment.topology.num_ranks
    latest = ends if ends is not None and len(ends) == num_ranks else (begin,) * num_ranks
    stops = latest if segment.stops is None else tuple(map(min, segment.stops, latest))
    return replace(segment, stops=stops)


def have_one_plan(segment: Segment, other: Segment) -> bool:
    """Whether two segments of an epoch are parts of one plan."""
    return (segment.plan_algorithm, segment.options, segment.left_out, segment.baseline, segment.mixture) == (
        other.plan_algorithm,
        other.options,
        other.left_out,
        other.baseline,
        other.mixture,
    ) and (segment.topology.planned_ranks, segment.topology.planned_workers) == (
        other.topology.planned_ranks,
        other.topology.planned_workers,
    )


def removals_from(segment: Segment, earlier: Sequence[Removal], step: int, *, own_alone: bool) -> tuple[Removal, ...]:
    """Return the removals of a segment that an iteration continues from a step on, and those before the step.

    `own_alone` says that it is not known from which step on other ranks continue it.
    """
    before = tuple(removal for removal in earlier if removal.first_step < step)
    rank = segment.topology.rank if own_alone else None
    now = replace(segment.removals[-1], first_step=step, rank=rank) if segment.removals else NO_REMOVAL
    last = before[-1] if before else NO_REMOVAL
    same = (last.rows, last.expressions) == (now.rows, now.expressions)
    return before if same else (*before, now)


def _stands_at(ledger: SegmentLedger, rank: int, step: int, own: RankStart) -> bool:
    """Whether a rank stands in a segment where it stands before a step, however many streams have ended."""
    schedule = ledger.schedule(rank)
    if not schedule.steps.start <= step <= schedule.steps.stop:
        return False
    expected = ledger.start_at(rank, step)
    going_on = replace(ledger.segment, first_step=step, starts={rank: own})
    rest = ledger.of(going_on).schedule(rank)
    has_same_streams = all(
        left == planned or not left  # a stream that has ended has dropped a short last batch
        for left, planned in zip(own.streams, expected.streams, strict=True)
    )
    has_same_steps = rest.steps == range(step, schedule.steps.stop)
    return has_same_streams and has_same_steps and (not rest.steps or rest.windows(step).turn == expected.next_turn)
