"""The segments of a run: which plan delivered which steps, and which steps were rolled back. Pure.

A segment begins where an epoch begins or a state is loaded. It does not know how far it will come: it ends where the
next one begins. What it delivered beyond that was rolled back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from torch_dataloader_utils.checkpoint.checksum import checksum_of
from torch_dataloader_utils.checkpoint.dump import dump_state
from torch_dataloader_utils.checkpoint.epoch_record import EpochRecord
from torch_dataloader_utils.checkpoint.json_value import JsonValue
from torch_dataloader_utils.checkpoint.parse.states import parse_state
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.saved_state import SavedState
from torch_dataloader_utils.planning.manifest import json_digest
from torch_dataloader_utils.planning.plan import PlanOptions
from torch_dataloader_utils.planning.row_ranges import Windows
from torch_dataloader_utils.planning.topology import Topology

FORMAT = "torch_dataloader_utils.RunLog"
VERSION = 1

Began: TypeAlias = Literal["epoch", "state", "elastic state"]

BEGAN: tuple[str, ...] = get_args(Began)


class Reached(NamedTuple):
    """What a segment records of the one before it.

    Attributes:
        segment: Its number.
        step: The step that it had reached.
        has_ended: Whether its process had made all its steps there. Other ranks may have more of them.
    """

    segment: int
    step: int
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """What states say of the steps before them.

    Attributes:
        num_ranks: How many ranks had made these steps.
        steps: How many each of them had made, by rank; None where this rank's state alone was loaded.
        batch_size: Rows of a rank's batch; None where the state does not record it.
        drop_last: Whether short last batches were left out; None where the state does not record it.
    """

    num_ranks: int
    steps: tuple[int, ...] | None
    batch_size: int | None
    drop_last: bool | None

    @classmethod
    def of(cls, states: Sequence[SavedState]) -> Loaded:
        """Return what these states say."""
        first = states[0]
        steps = {state.rank: state.batches_delivered for state in states}
        is_all = set(steps) == set(range(first.num_ranks))
        in_order = tuple(steps[rank] for rank in sorted(steps)) if is_all else None
        return cls(first.num_ranks, in_order, first.batch_size, first.drop_last)

    @property
    def is_one_step(self) -> bool:
        """Whether all ranks are known to stand at the same step."""
        return self.steps is not None and len(set(self.steps)) == 1


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a segment begins, apart from its plan.

    Attributes:
        began: With an epoch, from a state, or from states of all ranks after which the rest was planned again.
        loaded: What the states say, if it began from states.
        reached: The number of the segment before it, and the step that it had reached, if this process delivered it.
    """

    began: Began
    loaded: Loaded | None = None
    reached: Reached | None = None


@dataclass(frozen=True, slots=True)
class RunSegment:
    """Steps of a run that one plan delivers.

    Attributes:
        name: The name of its file.
        number: Its place in the log, from 1.
        run: Names the process that wrote it.
        epoch: The epoch.
        first_step: Number of its first step in the epoch, from 0.
        stop: The end of the steps that count. None: it is the last segment of its epoch, and counts to the epoch's
            end, or as far as the training came. Where its process left the epoch before the end, it is the step that
            this rank had reached: others, of which `exclude` has left other steps without rows, may have made more.
        rolled_back: Whether steps from `stop` on were, or may have been, delivered and rolled back, because the
            training went on from an earlier state. Where `stop` is `first_step`, nothing of the segment counts.
        reached: The step that it had reached when its process began the next segment; None where the process ended.
        began: How it began: with an ``"epoch"``, from a ``"state"``, or from an ``"elastic state"``, of which the rest
            of the epoch was planned again.
        rank_stops: The end by rank, where an elastic load ended it at different steps; None where all ends are `stop`.
        is_certain: Whether what comes after it in the log is known: whether no file of the log is missing there.
        loaded: What the states that were loaded say of the steps before it; None where none was loaded.
        skipped: Steps that it skips, as pairs of the first and the one after the last.
        restores: Whether it delivers skipped steps after the last one.
        state: What the plan depends on, as a state of rank 0 without progress.
    """

    name: str
    number: int
    run: str
    epoch: int
    first_step: int
    began: Began
    state: SavedState = field(repr=False)
    loaded: Loaded | None = None
    skipped: Windows = ()
    restores: bool = False
    stop: int | None = None
    rolled_back: bool = False
    reached: int | None = None
    rank_stops: tuple[int, ...] | None = None
    is_certain: bool = True

    @property
    def settings(self) -> dict[str, Any]:
        """What the plan depends on, by the names that users know: seed, shuffling, ranks and workers, the filter."""
        return self.state.settings

    @property
    def weights(self) -> dict[str, float] | None:
        """The share of each source of a mixture at the first step, by name; None for a single dataset."""
        mixture = self.state.mixture
        return None if mixture is None else {source.name: float(source.weight) for source in mixture.sources}

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.state.num_ranks

    @property
    def batch_size(self) -> int | None:
        """Rows of a rank's batch; None where a token budget decided how many these were."""
        return self.state.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether short last batches are left out."""
        return bool(self.state.drop_last)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the files."""
        return self.state.fingerprint

    @property
    def topology(self) -> Topology:
        """The ranks and workers, as rank 0 has them."""
        settings = self.settings
        virtual = settings["virtual_ranks"], settings["virtual_workers"]
        mixture = self.state.mixture
        sources = 1 if mixture is None else len(mixture.sources)
        return Topology(self.num_ranks, 0, self.state.num_workers, *virtual, sources=sources)

    @property
    def options(self) -> PlanOptions:
        """What the plan depends on in addition to files, topology and epoch."""
        settings, size = self.settings, self.settings["global_batch_size"]
        names = ("split_bytes", "split_rows", "shuffle", "shuffle_seed", "shuffle_buffer_size", "shuffle_interleave")
        return PlanOptions(
            **{name: settings[name] for name in names},
            uneven_ranks=settings["uneven_ranks"],
            batch_size=None if size is None else size // self.topology.planned_ranks,
            unit=settings["unit"],
            is_open_ended=self.state.is_open_ended,
            packing=settings["packing"],
        )

    def stop_of(self, rank: int) -> int | None:
        """Return the end of a rank's steps that count; None: to the epoch's end, or as far as the training came."""
        return self.stop if self.rank_stops is None else self.rank_stops[rank]

    def has(self, step: int, rank: int = 0) -> bool:
        """Whether it is the segment in which a rank's step counts, as far as the log tells."""
        stop = self.stop_of(rank)
        return self.first_step <= step and (stop is None or step < stop)


# Out ---------------------------------------------------------------------------------------------------------------


def dump_segment(
    run: Run, epoch: int, progress: Progress, beginning: Beginning, record: EpochRecord, *, number: int, process: str
) -> dict[str, Any]:
    """Return what the log records of a segment as plain values, without credentials.

    It is what a state records of the plan, without files and progress, and how the segment begins.
    """
    begun = Progress.fresh((), progress.streams_per_turn, progress.baseline)
    begun = begun._replace(next_turn=progress.next_turn, batches_delivered=progress.batches_delivered)
    state = dump_state(run, epoch, begun, None, record)
    files = None if run.manifest.counts_rows else state["files"]  # where rows are not counted, ranges refer to files
    bindings = None if files is None else state["plan"]["filter_bindings"]
    state |= {"files": files, "plan": state["plan"] | {"filter_bindings": bindings}}
    state["checksum"] = checksum_of(state)
    segment: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "number": number,
        "run": process,
        "began": beginning.began,
        "loaded": None if beginning.loaded is None else asdict(beginning.loaded),
        "reached": None if beginning.reached is None else beginning.reached._asdict(),
        "weights": None,
        "skipped": [list(steps) for steps in progress.skip_requests],
        "restores": progress.restores,
        "state": state,
    }
    return segment | {"checksum": json_digest(segment).hex()}


# In ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recorded:
    """A segment as its file has it, and what it says of the one before it: its number, and the step it had reached."""

    segment: RunSegment
    reached: Reached | None


def parse_segment(raw: object, name: str) -> Recorded:
    """Check what a file of the log holds, or raise a ValueError that names the wrong value."""
    value = JsonValue(raw, name)
    content = dict(value.mapping())
    if value["format"].string() != FORMAT:
        raise value["format"].fail(repr(FORMAT))
    if value["version"].integer() != VERSION:
        raise value["version"].fail(f"{VERSION}, which this release reads")
    saved = value["checksum"].string()
    del content["checksum"]
    if saved != json_digest(content).hex():
        raise value["checksum"].fail("the checksum of what it holds: it was damaged or edited")
    state = parse_state(value["state"].mapping())
    if state.drop_last is None:
        raise value["state"].fail("a state with the size of its batches")
    reached = value["reached"]
    segment = RunSegment(
        name=name,
        number=value["number"].integer(1),
        run=value["run"].string(),
        epoch=state.epoch,
        first_step=state.batches_delivered,
        began=value["began"].choice(BEGAN),  # type: ignore[arg-type] # one of them
        state=state,
        loaded=None if value["loaded"].is_null else _loaded(value["loaded"]),
        skipped=tuple(_pair(steps) for steps in value["skipped"].items()),
        restores=value["restores"].boolean(),
    )
    if reached.is_null:
        return Recorded(segment, None)
    has_ended = reached["has_ended"].boolean()
    return Recorded(segment, Reached(reached["segment"].integer(), reached["step"].integer(), has_ended))


def _pair(steps: JsonValue) -> tuple[int, int]:
    bounds = [bound.integer() for bound in steps.items()]
    if len(bounds) != len(("start", "stop")) or bounds[0] >= bounds[1]:
        raise steps.fail("start and stop of skipped steps")
    return bounds[0], bounds[1]


def _loaded(value: JsonValue) -> Loaded:
    steps, drop_last = value["steps"], value["drop_last"]
    return Loaded(
        num_ranks=value["num_ranks"].integer(1),
        steps=None if steps.is_null else tuple(step.integer() for step in steps.items()),
        batch_size=value["batch_size"].optional_integer(1),
        drop_last=None if drop_last.is_null else drop_last.boolean(),
    )


def in_order(recorded: Iterable[Recorded]) -> tuple[RunSegment, ...]:
    """Return the segments of a log in order, each with where it ends.

    Raises:
        ValueError: If two have the same number: two runs wrote into the log at the same time.
    """
    ordered = sorted(recorded, key=lambda one: (one.segment.number, one.segment.name))
    given_up = _given_up([one.segment for one in _with_reached(ordered)])
    found: list[RunSegment] = []
    for one in ordered:
        segment = one.segment
        if found and found[-1].number == segment.number:
            msg = f"two runs wrote into this log at the same time: {found[-1].name} and {segment.name} have the same "
            raise ValueError(f"{msg}number. Give each run a directory of its own, and remove what does not belong here")
        if segment.number != (found[-1].number + 1 if found else 1):
            found = [replace(before, is_certain=False) for before in found]
        if segment.number in given_up:
            found = [_reached_before(before, one) for before in found]
            segment = replace(segment, stop=segment.first_step, rolled_back=True)
        else:
            found = [_before(before, one) for before in found]
        found.append(segment)
    return tuple(found)


def _with_reached(ordered: Sequence[Recorded]) -> list[Recorded]:
    """Return segments, each with the step that it had reached when its process began the next one."""
    reached = {one.reached.segment: one.reached.step for one in ordered if one.reached is not None}
    return [replace(one, segment=replace(one.segment, reached=reached.get(one.segment.number))) for one in ordered]


def _given_up(segments: Sequence[RunSegment]) -> set[int]:
    """Return the numbers of the segments that the last one does not continue.

    A run that goes back to a checkpoint may go on from it in another way, give that up, too, and go on from a later
    checkpoint of the first way. What came between is then no part of the run. Of segments before a missing file that is
    not known.
    """
    given_up: set[int] = set()
    after = len(segments) - 1
    while after > 0 and segments[after].number == segments[after - 1].number + 1:
        segment, before = segments[after], after - 1
        if segment.loaded is not None:
            while before >= 0 and not _continues(segment, segments[before], segment.loaded):
                before -= 1
            between = segments[before + 1 : after]
            given_up |= {one.number for one in between if before >= 0 or one.epoch == segment.epoch}
            before = before if before >= 0 else after - 1
        after = before
    return given_up


def _continues(segment: RunSegment, before: RunSegment, loaded: Loaded) -> bool:
    """Whether the states that a segment was loaded from may have been saved in one before it in the log."""
    step = segment.first_step if loaded.steps is None else loaded.steps[0]
    batches = loaded.batch_size in {None, before.batch_size} and loaded.drop_last in {None, before.drop_last}
    if (before.epoch, before.num_ranks) != (segment.epoch, loaded.num_ranks) or not batches:
        return False
    if before.first_step > step or (before.reached is not None and before.reached < step):
        return False
    return segment.began == "elastic state" or _is_one_plan(segment, before)


def _is_one_plan(segment: RunSegment, before: RunSegment) -> bool:
    """Whether a segment that was loaded strictly has the plan, and the skipped steps, of one before it."""
    plan, plan_before = (
        (one.settings["plan_algorithm"], one.options, one.topology.planned_ranks, one.topology.planned_workers)
        for one in (segment, before)
    )
    is_same = plan == plan_before and segment.state.baseline == before.state.baseline
    return is_same and {*before.skipped} <= {*segment.skipped}


def _reached_before(segment: RunSegment, after: Recorded) -> RunSegment:
    """Return a segment with what the one after it tells of the step that it had reached."""
    reached = after.reached
    if reached is None or reached.segment != segment.number:
        return segment
    segment = replace(segment, reached=reached.step)
    if reached.has_ended or (segment.stop is not None and segment.stop <= reached.step):
        return segment
    return replace(segment, stop=reached.step)


def _before(segment: RunSegment, after: Recorded) -> RunSegment:
    """Return a segment with the end that one after it gives it."""
    later = after.segment
    segment = _reached_before(segment, after)
    if later.began == "epoch" and after.reached is not None:
        return segment  # the process went on to another epoch, or delivered one again
    start = later.epoch, later.first_step
    if (segment.epoch, segment.first_step) >= start:
        return replace(segment, stop=segment.first_step, rank_stops=None, rolled_back=True)
    if segment.epoch < later.epoch or (segment.stop is not None and segment.stop <= later.first_step):
        return segment
    stops = None if later.loaded is None else later.loaded.steps
    has_own = stops is not None and len(stops) == segment.num_ranks and len({*stops}) > 1
    came_further = segment.reached is None or segment.reached > later.first_step
    return replace(
        segment,
        stop=later.first_step,
        rank_stops=stops if has_own else None,
        rolled_back=came_further,
    )


def segment_of(segments: Sequence[RunSegment], epoch: int, step: int, rank: int = 0) -> RunSegment | None:
    """Return the segment in which a rank's step counts; None where the log does not tell.

    Of an epoch that was delivered several times it is the last one. See `RunSegment.stop` for an epoch that was left.
    """
    for segment in reversed(segments):
        if segment.epoch == epoch and segment.is_certain and rank < segment.num_ranks and segment.has(step, rank):
            return segment
    return None
