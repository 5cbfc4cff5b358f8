"""The parts in which an iteration delivers an epoch: without skipped steps, and with restored ones last. Pure.

A part is consecutive steps. No stream begins a part before all streams have ended the one before. So the steps after
skipped ones come from the same worker turns as without them, and no batch has rows of two parts. An iteration of an
epoch without skipped steps has one part.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch_dataloader_utils.checkpoint.progress import Progress, Restored, StreamProgress, turns_from
from torch_dataloader_utils.checkpoint.skipped_steps import Mark, Place, SkippedSteps, between, ends_of, place_after
from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.planning.ledger.schedule import MixedSchedule, Schedule, StepSchedule
from torch_dataloader_utils.planning.plan import ShardSlice
from torch_dataloader_utils.planning.quotas import Quotas
from torch_dataloader_utils.planning.row_ranges import Windows


@dataclass(frozen=True)
class Part:
    """Consecutive steps that an iteration delivers.

    Attributes:
        streams: The progress of each stream at the beginning of the iteration, or of a group of restored rows.
        begin: The beginning of its first step. In a restored group the step has no meaning.
        end: How far each stream has come at its end.
        group: Number of the group of restored rows; None for the epoch's own steps.
        steps: Number of the epoch's own steps; None for all that are left, and for restored rows.
        is_last: Whether no other part follows, of the epoch's own steps or of the restored ones.
    """

    streams: tuple[StreamProgress, ...]
    begin: Mark
    end: tuple[Place, ...]
    group: int | None = None
    is_last: bool = True
    steps: int | None = None
    slices: tuple[tuple[ShardSlice, ...], ...] = field(init=False)
    _bounds: tuple[tuple[int, Place], ...] = field(init=False, repr=False)
    _is_whole: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        parts = zip(self.streams, self.begin.places, self.end, strict=True)
        slices = tuple(between(stream.planned, begin, end) for stream, begin, end in parts)
        before = [len(stream.planned) - len(stream.slices) for stream in self.streams]
        places = zip(self.begin.places, self.end, before, strict=True)
        bounds = tuple((begin[0] - count, (end[0] - count, end[1])) for begin, end, count in places)
        whole = all(bound == (0, (len(stream.slices), 0)) for bound, stream in zip(bounds, self.streams, strict=True))
        object.__setattr__(self, "slices", slices)
        object.__setattr__(self, "_bounds", bounds)
        object.__setattr__(self, "_is_whole", whole)

    def turns(self, streams_per_turn: int) -> tuple[int, ...]:
        """Return the worker turns in the order in which they make the first steps."""
        return turns_from(self.begin.turn, len(self.streams) // streams_per_turn)

    def placed(self, receipt: Receipt) -> Receipt:
        """Return a receipt of this part's slices as one of the slices of the iteration, or of the group."""
        if self._is_whole:
            return receipt
        position, rows = self._placed(receipt)
        return receipt._replace(position=position, rows_delivered=rows, others=tuple(map(self.placed, receipt.others)))

    def _placed(self, receipt: Receipt) -> Place:
        first, end = self._bounds[receipt.stream]
        at_end = receipt.position == len(self.slices[receipt.stream])
        return end if at_end else (first + receipt.position, receipt.rows_delivered)

    def begun(self, progress: Progress) -> Progress:
        """Return the progress at the beginning of this part, when all parts before it are delivered."""
        if self.group is None:
            return progress.at(self.begin)
        return progress._replace(restored=Restored(self.group, self.streams, self.begin.turn))


def own_parts(progress: Progress) -> list[Part]:
    """Return the parts of the epoch's own steps that an iteration delivers which begins at a progress."""
    parts, begin = [], progress.mark
    for skip in progress.skips_ahead:
        steps = skip.begin.step - begin.step
        parts.append(Part(progress.streams, begin, skip.begin.places, is_last=False, steps=steps))
        begin = skip.end
    return [*parts, Part(progress.streams, begin, ends_of(progress.planned))]


def restored_parts(progress: Progress) -> list[Part]:
    """Return the parts of skipped rows that come after the last step: a part for each group that is left."""
    parts = []
    begun = progress.restored
    for number, (turn, slices) in enumerate(progress.restorable):
        if begun is not None and number < begun.number:
            continue
        group = Restored(number, tuple(StreamProgress(planned, planned) for planned in slices), turn)
        if begun is not None and number == begun.number:
            group = begun
        streams, begin = group.streams, Mark(0, group.next_turn, tuple(stream.place for stream in group.streams))
        parts.append(Part(streams, begin, ends_of([stream.planned for stream in streams]), number, is_last=False))
    return [*parts[:-1], replace(parts[-1], is_last=True)] if parts else []


def schedule_of(progress: Progress, batch_size: int, quotas: Quotas | None = None, *, drop_last: bool) -> Schedule:
    """Return the steps of the epoch that are left, skipped ones included, where no filter drops rows.

    The quotas are those of a mixture's plan.
    """
    if quotas is not None:
        counts = quotas.counts[progress.steps_of_plan :]
        turns, together = progress.count_of_turns, progress.streams_per_turn
        first, turn = progress.batches_delivered, progress.next_turn
        return MixedSchedule(counts, turns, together, next_turn=turn, first_step=first)
    size = batch_size // progress.streams_per_turn
    rows = [stream.rows_left for stream in progress.streams[:: progress.streams_per_turn]]
    first, turn = progress.batches_delivered, progress.next_turn
    together = progress.streams_per_turn
    return StepSchedule(rows, size, drop_last=drop_last, next_turn=turn, first_step=first, streams_per_turn=together)


def with_skips(progress: Progress, requests: Windows, schedule: Schedule | None) -> Progress:
    """Return the progress with these steps skipped, as far as they are not behind it.

    The schedule has the steps that are left; None where only reading tells which rows a step has.
    """
    if schedule is None or progress.restored is not None:
        return progress._replace(skip_requests=requests)
    skips = [skip for skip in progress.skips if skip.end.step <= progress.batches_delivered]
    for start, stop in requests:
        steps = range(max(start, schedule.steps.start), min(stop, schedule.steps.stop))
        if steps:
            begin, end = (_mark_at(progress, schedule, step) for step in (steps.start, steps.stop))
            skips.append(SkippedSteps(begin, end))
    return progress._replace(skip_requests=requests, skips=tuple(skips))


def _mark_at(progress: Progress, schedule: Schedule, step: int) -> Mark:
    """Return the beginning of a step that is left."""
    streams = zip(progress.streams, schedule.rows_of_streams(step), strict=True)
    places = [place_after(stream.planned, stream.place, rows) for stream, rows in streams]
    turn = schedule.windows(step).turn if step in schedule.steps else 0  # no step follows the epoch's end
    return Mark(step, turn, tuple(places))
