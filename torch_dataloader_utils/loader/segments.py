"""The segments of the epochs that a process knows: those that it has begun or loaded, and those of a run log."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.restore import load_baseline
from torch_dataloader_utils.checkpoint.saved_state import SavedState
from torch_dataloader_utils.planning.ledger import NO_REMOVAL, RankStart, Removal, Segment, SegmentLedger
from torch_dataloader_utils.planning.planner import EpochPlanner

LEDGERS_KEPT = 4
"""How many segments' plans and indexes are kept: users ask about many steps of the same ones."""

SegmentsOfEpoch: TypeAlias = Callable[[int], Sequence[Segment]]
"""Returns the segments of an epoch that a run log has, oldest first. Each but the last has its stops."""

BEFORE_ELASTIC_LOAD = (
    "the steps of epoch {epoch} before step {step} were delivered before an elastic load planned the rest again, from "
    "plans that this process does not know: the run log has them (run_log=...)"
)

OTHER_BATCHES = (
    "the state that was loaded at step {step} of epoch {epoch} continues batches of other sizes than it records, so "
    "that it is not known which batches were before it: the run log has them (run_log=...)"
)


class Segments:
    """The segments of epochs. An epoch that this process neither began nor loaded has those of the run log, if any.

    Attributes:
        run_log: Returns the segments of an epoch that a run log has; None without one.
        loaded: The epoch of the state that was loaded last, and its progress; None if that epoch has begun again.
    """

    def __init__(self, planner: EpochPlanner, *, counts_rows: bool) -> None:
        self.run_log: SegmentsOfEpoch | None = None
        self._planner = planner
        self._counts_rows = counts_rows
        self._segments: dict[int, tuple[Segment, ...]] = {}
        self._before: dict[int, str] = {}  # why the steps before the first segment of an epoch are not known
        self._ledgers: list[SegmentLedger] = []
        self.loaded: tuple[int, Progress] | None = None

    # What is known ---------------------------------------------------------------------------------------------------

    def of(self, fresh: Segment) -> tuple[Segment, ...]:
        """Return the known segments of an epoch, oldest first; `fresh` is that of its plan from the beginning."""
        epoch = fresh.epoch
        own = self._segments.get(epoch)
        logged = () if self.run_log is None or (own and not own[0].begin) else tuple(self.run_log(epoch))
        if own is None:
            return logged or (fresh,)
        return (*(segment for segment in logged if segment.begin < own[0].begin), *own)

    def why_unknown(self, first: Segment) -> str | None:
        """Return why the steps before the first known segment of an epoch are not known; None if there are none."""
        if not first.begin:
            return None
        return self._before.get(first.epoch, BEFORE_ELASTIC_LOAD).format(epoch=first.epoch, step=first.begin)

    def ledger(self, segment: Segment) -> SegmentLedger:
        """Return the ledger of a segment."""
        found = next((ledger for ledger in self._ledgers if ledger.segment == segment), None)
        if found is None:
            planner = self._planner.with_options(segment.options)
            baseline, algorithm = segment.baseline, segment.plan_algorithm
            plan = planner.plan(segment.epoch, segment.topology, baseline, algorithm, segment.left_out)
            found = SegmentLedger(segment, plan, planner.manifest)
            self._ledgers = [found, *self._ledgers[: LEDGERS_KEPT - 1]]
        return found

    # What this process does ------------------------------------------------------------------------------------------

    def begin(self, segment: Segment) -> None:
        """Note that an epoch begins with a segment."""
        self.forget(segment.epoch)
        self._segments[segment.epoch] = (segment,)

    def forget(self, epoch: int) -> None:
        """Note that an epoch will begin again."""
        self._segments.pop(epoch, None)
        self._before.pop(epoch, None)
        if self.loaded is not None and self.loaded[0] == epoch:
            self.loaded = None

    def load_strictly(self, segment: Segment, saved: SavedState, progress: Progress) -> None:
        """Note that this rank continues the plan of a segment where a state stands."""
        known = self._segments.get(segment.epoch, ())
        same = (number for number, other in enumerate(known) if _have_one_plan(other, segment))
        first = next(same, None)
        before = known[: first or 0]  # those of other plans, which an elastic load of this process has followed
        earlier = () if first is None else known[-1].removals
        segment = replace(segment, removals=_from_step(segment, earlier, progress.batches_delivered))
        self.begin(segment)
        self._segments[segment.epoch] = (*before, *self._around(segment, saved, progress))
        self.loaded = segment.epoch, progress

    def _around(self, segment: Segment, saved: SavedState, progress: Progress) -> tuple[Segment, ...]:
        """Return the segments before and after a state, in one plan.

        The batches after it may have another size, and a virtual topology may have other real ranks.
        """
        topology, step = segment.topology, progress.batches_delivered
        rows = segment.batch_size * topology.num_ranks  # of all ranks, as the state's may be others
        rows = rows if saved.batch_size is None else saved.batch_size * saved.num_ranks
        drop_last = segment.drop_last if saved.drop_last is None else saved.drop_last
        then = replace(segment, batch_size=rows // topology.num_ranks, drop_last=drop_last)
        saved_topology = replace(topology, num_ranks=saved.num_ranks, num_workers=saved.num_workers)
        is_same = (then, topology) == (segment, saved_topology)
        own = RankStart(tuple(stream.left for stream in progress.streams), progress.next_turn)
        after = replace(segment, first_step=step, starts={topology.rank: own})
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
        for number, earlier in reversed(list(enumerate(known))):
            if self._is_of(earlier, states[0]):
                self._segments[segment.epoch] = (*known[:number], replace(earlier, stops=stops), segment)
                return

    def _is_of(self, segment: Segment, saved: SavedState) -> bool:
        """Whether a state was saved in a segment."""
        manifest, topology = self._planner.manifest, segment.topology
        baseline = None if saved.baseline is None else load_baseline(saved.baseline, manifest, segment.left_out)
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
        own = {"_planner": planner, "_segments": {**self._segments}, "_before": {**self._before}}
        copied.__dict__.update(own)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what can be computed again, or belongs to this process."""
        return self.__dict__ | {"_ledgers": [], "run_log": None}


def _have_one_plan(segment: Segment, other: Segment) -> bool:
    """Whether two segments of an epoch are parts of one plan."""
    return (segment.plan_algorithm, segment.options, segment.left_out, segment.baseline) == (
        other.plan_algorithm,
        other.options,
        other.left_out,
        other.baseline,
    ) and (segment.topology.planned_ranks, segment.topology.planned_workers) == (
        other.topology.planned_ranks,
        other.topology.planned_workers,
    )


def _from_step(segment: Segment, earlier: Sequence[Removal], step: int) -> tuple[Removal, ...]:
    """Return the removals of a segment that an iteration continues from a step on, and those before the step."""
    before = tuple(removal for removal in earlier if removal.first_step < step)
    now = replace(segment.removals[-1], first_step=step) if segment.removals else NO_REMOVAL
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
    rest = SegmentLedger(going_on, ledger.plan, ledger.manifest).schedule(rank)
    has_same_streams = all(
        left == planned or not left  # a stream that has ended has dropped a short last batch
        for left, planned in zip(own.streams, expected.streams, strict=True)
    )
    has_same_steps = rest.steps == range(step, schedule.steps.stop)
    return has_same_streams and has_same_steps and (not rest.steps or rest.at(step).turn == expected.next_turn)
