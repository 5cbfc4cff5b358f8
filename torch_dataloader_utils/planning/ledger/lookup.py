"""Which rows a step has, and which step has a row: computed from a plan, without reading data. Pure.

A stream delivers its slices in order. So a step is a window of its streams' rows (`schedule`), and the order
in which a shard delivers its rows (`shard_order`) says which rows of which files these are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from torch_dataloader_utils.planning.ledger.row_steps import Rows, RowStep
from torch_dataloader_utils.planning.ledger.schedule import MixedSchedule, Schedule, StepSchedule
from torch_dataloader_utils.planning.ledger.segment import RankStart, Segment, without_removed
from torch_dataloader_utils.planning.ledger.shard_order import Integers, ShardOrders
from torch_dataloader_utils.planning.manifest import Manifest
from torch_dataloader_utils.planning.mixture.source_paths import MIXTURE_KEY
from torch_dataloader_utils.planning.plan import Plan, ShardSlice
from torch_dataloader_utils.planning.quotas import Quotas


@dataclass(frozen=True, slots=True)
class StepWindows:
    """Where the rows of a step come from.

    Attributes:
        worker: The worker that makes the step.
        streams: For each stream of its turn the parts of slices that hold the rows, by the stream's number in the rank.
            The batch has the streams' rows one after the other.
    """

    worker: int
    streams: Mapping[int, tuple[ShardSlice, ...]]


class Holder(NamedTuple):
    """A slice whose shard has a row.

    Attributes:
        rank: The rank.
        stream: The number of the stream among those of the rank.
        position: The number of the slice in the stream.
        split: The number of the row's split in the shard.
    """

    rank: int
    stream: int
    position: int
    split: int


class _Stream(NamedTuple):
    """The slices of a stream; for each the rows of the stream before it, and last all of them."""

    slices: Sequence[ShardSlice]
    bounds: Integers


class SegmentLedger:
    """Answers which rows the steps of a segment have, and which steps have a row, where no filter drops rows.

    The index of rows is made when a row is first looked for. The quotas are those of a mixture's plan.
    """

    def __init__(self, segment: Segment, plan: Plan, manifest: Manifest, quotas: Quotas | None = None) -> None:
        self.segment = segment
        self.plan = plan
        self.manifest = manifest
        self.quotas = quotas
        epoch = segment.epoch if quotas is None else MIXTURE_KEY
        self._orders = ShardOrders(segment.options.row_shuffle_seed, epoch)
        self._streams: dict[int, list[_Stream]] = {}
        self._schedules: dict[int, Schedule] = {}

    def of(self, segment: Segment) -> SegmentLedger:
        """Return the ledger of another segment of the same plan."""
        return SegmentLedger(segment, self.plan, self.manifest, self.quotas)

    # Steps to rows ---------------------------------------------------------------------------------------------------

    def knows(self, rank: int) -> bool:
        """Whether it is known where a rank begins."""
        return self.segment.starts is None or rank in self.segment.starts

    def steps(self, rank: int) -> range:
        """Return the steps that a rank makes in this segment."""
        steps = self.schedule(rank).steps
        stop = steps.stop if self.segment.stops is None else min(steps.stop, self.segment.stops[rank])
        return range(steps.start, max(steps.start, stop))

    def windows(self, rank: int, step: int) -> StepWindows:
        """Return where the rows of a step come from. The rank makes the step."""
        turn, windows = self.schedule(rank).windows(step)
        first = turn * self._together
        streams = {
            number: _window(self.streams(rank)[number], start, stop)
            for number, (start, stop) in enumerate(windows, start=first)
            if start < stop
        }
        return StepWindows(turn % self.segment.topology.processes, streams)

    def rows_at(self, rank: int, step: int) -> Rows:
        """Return the rows of a step that the rank makes or skips, without those that its batch loses."""
        rows = self._planned_rows(rank, step)
        return without_removed(rows, self.segment.removed_of(rank, step, rows))

    def _planned_rows(self, rank: int, step: int) -> Rows:
        parts = [part for slices in self.windows(rank, step).streams.values() for part in slices]
        found = [self._orders.of(part.shard).rows(part.start, part.stop) for part in parts]
        files, rows = zip(*found, strict=True)
        return Rows(np.concatenate(files), np.concatenate(rows))

    def start_at(self, rank: int, step: int) -> RankStart:
        """Return where a rank stands before a step. If it makes fewer steps, that is its end."""
        schedule = self.schedule(rank)
        step = min(step, schedule.steps.stop)
        streams = zip(self.streams(rank), schedule.rows_of_streams(step), strict=True)
        left = tuple(_window(stream, begin, int(stream.bounds[-1])) for stream, begin in streams)
        return RankStart(left, schedule.windows(step).turn if step in schedule.steps else 0)

    def between(self, rank: int, start: int, stop: int) -> RankStart:
        """Return the rows of a rank's steps from a first one to an end, as far as it makes them."""
        steps, schedule = self.steps(rank), self.schedule(rank)
        start, stop = min(start, steps.stop), min(max(start, stop), steps.stop)
        bounds = zip(schedule.rows_of_streams(start), schedule.rows_of_streams(stop), strict=True)
        streams = zip(self.streams(rank), bounds, strict=True)
        slices = tuple(_window(stream, begin, end) for stream, (begin, end) in streams)
        return RankStart(slices, schedule.windows(start).turn if start in schedule.steps else 0)

    def streams(self, rank: int) -> list[_Stream]:
        """Return the streams of a rank."""
        if rank not in self._streams:
            segment = self.segment
            if segment.starts is None:
                slices = replace(segment.topology, rank=rank).own_streams(self.plan)
            else:
                slices = segment.starts[rank].streams
            self._streams[rank] = [_Stream(own, np.cumsum([0, *[part.rows for part in own]])) for own in slices]
        return self._streams[rank]

    def schedule(self, rank: int) -> Schedule:
        """Return the schedule of a rank, which does not know where the next segment begins."""
        if rank not in self._schedules:
            self._schedules[rank] = self._schedule(rank)
        return self._schedules[rank]

    def _schedule(self, rank: int) -> Schedule:
        segment = self.segment
        next_turn = 0 if segment.starts is None else segment.starts[rank].next_turn
        first_step = segment.begin_of(rank)
        if self.quotas is not None:
            before = 0 if segment.baseline is None else segment.baseline.batches
            counts, turns = self.quotas.counts[first_step - before :], self.plan.streams
            return MixedSchedule(counts, turns, self._together, next_turn=next_turn, first_step=first_step)
        firsts = self.streams(rank)[:: self._together]  # all streams of a turn have equally many rows
        return StepSchedule(
            [int(stream.bounds[-1]) for stream in firsts],
            segment.batch_size // self._together,
            drop_last=segment.drop_last,
            next_turn=next_turn,
            first_step=first_step,
            streams_per_turn=self._together,
        )

    @property
    def _together(self) -> int:
        return self.segment.topology.streams_per_turn

    # Rows to steps ---------------------------------------------------------------------------------------------------

    def plans(self, path: str, row: int) -> bool:
        """Whether the plan has a row, be it that balancing drops it. A row that was delivered before is not in it."""
        if any(self._row_in_stream(holder, row) is not None for holder in self.holders(path, row)):
            return True
        dropped = () if self.plan.balanced is None else self.plan.balanced.dropped
        return any((path, row) in self._rows_in(part) for part in dropped)

    def steps_of(self, path: str, row: int) -> list[RowStep]:
        """Return where a row is delivered: nowhere, once, or several times if it is repeated. The first comes first."""
        found = [step for holder in self.holders(path, row) if (step := self._step_of(holder, row)) is not None]
        return sorted(found, key=lambda at: (at.step, at.rank, at.place))

    def holders(self, path: str, row: int) -> list[Holder]:
        """Return the slices whose shards have a row."""
        starts, stops, holders = self._index
        if path not in self.manifest.first_rows:  # of another pass of a source
            return []
        number = self.manifest.first_rows[path] + row
        first, last = (int(np.searchsorted(starts, number, side=side)) for side in ("left", "right"))
        if last == 0 or stops[last - 1] <= number:
            return []
        first = int(np.searchsorted(starts, starts[last - 1], side="left"))  # a shard may be cut into several slices
        return [Holder(*holder) for holder in holders[first:last].tolist()]

    @cached_property
    def _index(self) -> tuple[Integers, Integers, Integers]:
        """Where each split begins and ends among all rows of the manifest, in rising order, and its holders."""
        firsts = self.manifest.first_rows
        splits, holders = [], []
        for rank in filter(self.knows, range(self.segment.topology.num_ranks)):
            for number, stream in enumerate(self.streams(rank)):
                for position, part in enumerate(stream.slices):
                    shard = part.shard
                    present = [index for index in range(len(shard.splits)) if index not in shard.missing]
                    splits += [shard.splits[index] for index in present]
                    holders += [(rank, number, position, index) for index in present]
        starts = np.fromiter((firsts[split.path] + split.row_offset for split in splits), np.int64, len(splits))
        stops = starts + np.fromiter((split.row_length for split in splits), np.int64, len(splits))
        order = np.argsort(starts, kind="stable")
        return starts[order], stops[order], np.array(holders, dtype=np.int64).reshape(-1, len(Holder._fields))[order]

    def _row_in_stream(self, holder: Holder, row: int) -> int | None:
        """Return how many rows a stream delivers before a row of a file; None if it is not in the slice."""
        slices, bounds = self.streams(holder.rank)[holder.stream]
        part = slices[holder.position]
        in_split = row - part.shard.splits[holder.split].row_offset
        place = self._orders.of(part.shard).place_of(holder.split, in_split)
        if place is None or not part.start <= place < part.stop:
            return None
        return int(bounds[holder.position]) + place - part.start

    def _step_of(self, holder: Holder, row: int) -> RowStep | None:
        number = self._row_in_stream(holder, row)
        turn, stream = divmod(holder.stream, self._together)
        schedule = self.schedule(holder.rank)
        step = None if number is None else schedule.step_of_row(holder.stream, number)
        if number is None or step is None or step not in self.steps(holder.rank) or self.segment.skips(step):
            return None
        windows = schedule.windows(step).windows
        place = sum(stop - start for start, stop in windows[:stream]) + number - windows[stream][0]
        if self.segment.removals:
            removed = self.segment.removed_of(holder.rank, step, self._planned_rows(holder.rank, step))
            if removed[place]:
                return None
            place -= int(removed[:place].sum())
        worker = turn % self.segment.topology.processes
        return RowStep(self.segment.epoch, step, holder.rank, worker, place)

    def _rows_in(self, part: ShardSlice) -> Iterator[tuple[str, int]]:
        files, rows = self._orders.of(part.shard).rows(part.start, part.stop)
        return zip(files.tolist(), rows.tolist(), strict=True)


def _window(stream: _Stream, start: int, stop: int) -> tuple[ShardSlice, ...]:
    """Return the parts of a stream's slices that have its rows from a first one to an end."""
    slices, bounds = stream
    first, last = int(np.searchsorted(bounds, start, side="right")) - 1, int(np.searchsorted(bounds, stop))
    window = []
    for part, before in zip(slices[first:last], bounds[first:last].tolist(), strict=True):
        begin, end = max(part.start, part.start + start - before), min(part.stop, part.start + stop - before)
        if (begin, end) != (part.start, part.stop):
            part = replace(part, start=begin, stop=end)  # noqa: PLW2901 - else the slice itself, which is compared faster
        if begin < end:
            window.append(part)
    return tuple(window)
