"""From receipts to progress: which rows of an epoch were delivered to the training loop. Pure.

A stream delivers its slices in order, so its progress is a position in them. A rank's progress is the position of each
of its streams. It is a frozen value, and each delivered batch makes a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch_dataloader_utils.checkpoint.skipped_steps import Mark, Place, SkippedSteps, rows_in
from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.planning.excluded import NONE_EXCLUDED, ExcludedRows
from torch_dataloader_utils.planning.plan import DeliveredBaseline, ShardSlice
from torch_dataloader_utils.planning.row_hash import RowHash
from torch_dataloader_utils.planning.row_ranges import Windows, size_of


class StreamProgress(NamedTuple):
    """The progress of a stream. Each batch makes one for each of its streams, as of its `Receipt`.

    Attributes:
        planned: All slices of the stream, in order.
        slices: Those that this iteration delivers: all, or those that a loaded state had left.
        position: Index in `slices` of the current slice. The slices before it are done.
        rows_delivered: Rows delivered of the current slice's shard, including those before the slice's start.
    """

    planned: tuple[ShardSlice, ...]
    slices: tuple[ShardSlice, ...]
    position: int = 0
    rows_delivered: int = 0

    @property
    def reached(self) -> tuple[int, ShardSlice | None]:
        """How many of the planned slices are done, and the part of the next one that is delivered, if any is."""
        slices_left = len(self.slices) - self.position
        if not slices_left:
            return len(self.planned), None
        current, done = self.slices[self.position], len(self.planned) - slices_left
        start = max(current.start, self.rows_delivered)
        if start > current.start and start == current.stop:  # a batch may end with a slice whose end was not known then
            return done + 1, None
        planned = self.planned[done]
        return done, replace(planned, stop=start) if start > planned.start else None

    @property
    def place(self) -> Place:
        """How far the stream has come in the planned slices."""
        count, part = self.reached
        return count, 0 if part is None else part.stop

    def at(self, place: Place) -> StreamProgress:
        """Return the progress at a place that this iteration reaches."""
        index, rows = place
        return self._replace(position=index - (len(self.planned) - len(self.slices)), rows_delivered=rows)

    @property
    def left(self) -> tuple[ShardSlice, ...]:
        """The slices that are not done. The current slice begins with its first undelivered row."""
        slices = self.slices[self.position :]
        if not slices or self.rows_delivered <= slices[0].start:
            return slices
        if self.rows_delivered == slices[0].stop:  # a batch may end with a slice whose end was not known then
            return slices[1:]
        return (replace(slices[0], start=self.rows_delivered), *slices[1:])

    @property
    def done(self) -> tuple[ShardSlice, ...]:
        """The slices that are done: the stream's first ones. The current slice ends with its last delivered row."""
        count, part = self.reached
        return self.planned[:count] if part is None else (*self.planned[:count], part)

    @property
    def rows_left(self) -> int:
        """Rows that are not delivered yet, where no filter drops any."""
        return sum(shard_slice.rows for shard_slice in self.left)


@dataclass(frozen=True, slots=True)
class Restored:
    """How far skipped rows that come after the epoch's last step were delivered.

    They come in groups, one after the other: see `Progress.restorable`.

    Attributes:
        number: Number of the current group, from 0. Those before it are delivered.
        streams: The progress of each stream in this group.
        next_turn: The worker turn of the next batch.
    """

    number: int
    streams: tuple[StreamProgress, ...]
    next_turn: int

    @property
    def slices_left(self) -> tuple[tuple[ShardSlice, ...], ...]:
        """The slices of this group that are left, of each stream."""
        return tuple(stream.left for stream in self.streams)


@dataclass(frozen=True, slots=True)
class RemovedRows:
    """Rows that were excluded in the current epoch.

    Attributes:
        rows: All that batches lose from some step on.
        delivered: Those of them that were delivered before that step, by this rank or before an elastic load.
    """

    rows: ExcludedRows = NONE_EXCLUDED
    delivered: ExcludedRows = NONE_EXCLUDED


class Progress(NamedTuple):
    """The progress of a rank in an epoch. Each batch makes one, as it makes a `StreamProgress`.

    Attributes:
        streams: One entry for each of the rank's streams. The streams of a worker turn are neighbours.
        next_turn: The worker turn of the next batch. Turns whose streams have ended are skipped.
        batches_delivered: Number of the epoch's next step: the batches that were delivered, including those before a
            resume, and the steps that were skipped.
        hashes: The hash of the delivered rows of each planned rank that this rank delivers; None where it is not asked
            for, or not known.
        streams_per_turn: How many streams give the rows of a batch: 1, or the virtual ranks of this rank.
        baseline: What was delivered before an elastic load planned the rest of the epoch; None for nothing.
        skip_requests: The steps that the user wants skipped. Some of them may be beyond this rank's last step.
        skips: The skipped steps of which the rows are known: those that were passed and, where rows are counted, those
            that lie ahead.
        restores: Whether skipped rows are delivered after the last step.
        restored: How far they were. None until the last step is made.
        carried: The rows that were skipped before an elastic load, as this rank would deliver them: for each stream its
            slices. Empty for none.
        carried_dropped: Those of them that no rank delivers, because all ranks get equally many. One rank records them.
        removed: The rows that batches lose since the iteration began.
    """

    streams: tuple[StreamProgress, ...]
    next_turn: int = 0
    batches_delivered: int = 0
    hashes: tuple[RowHash, ...] | None = None
    streams_per_turn: int = 1
    baseline: DeliveredBaseline | None = None
    skip_requests: Windows = ()
    skips: tuple[SkippedSteps, ...] = ()
    restores: bool = False
    restored: Restored | None = None
    carried: tuple[tuple[ShardSlice, ...], ...] = ()
    carried_dropped: tuple[ShardSlice, ...] = ()
    removed: RemovedRows = RemovedRows()

    @classmethod
    def fresh(
        cls,
        streams: Iterable[tuple[ShardSlice, ...]],
        streams_per_turn: int = 1,
        baseline: DeliveredBaseline | None = None,
    ) -> Progress:
        """Return the progress at the beginning of an epoch, or of the rest that a baseline leaves of it."""
        batches = 0 if baseline is None else baseline.batches
        own = tuple(StreamProgress(part, part) for part in streams)
        return cls(own, batches_delivered=batches, streams_per_turn=streams_per_turn, baseline=baseline)

    def rebased(self) -> Progress:
        """Return the same progress for an iteration that begins here."""
        restored = self.restored
        if restored is not None:
            restored = replace(restored, streams=_rebased(restored.streams))
        return self._replace(streams=_rebased(self.streams), restored=restored)

    def advanced(self, receipt: Receipt) -> Progress:
        """Return the progress after a batch was delivered."""
        batches, turn, hashes = self.batches_delivered + 1, self._turn_after(receipt), self._hashes_after(receipt)
        if self.restored is None:
            streams = _at(self.streams, receipt)
            return Progress._make((streams, turn, batches, hashes, *self[4:]))  # less than half of `_replace`'s time
        restored = Restored(self.restored.number, _at(self.restored.streams, receipt), turn)
        return self._replace(restored=restored, batches_delivered=batches, hashes=hashes)

    def ended(self, receipt: Receipt) -> Progress:
        """Return the progress after a stream, or the streams of a worker turn, have ended."""
        if self.restored is None:
            return self._replace(streams=_at(self.streams, receipt))
        return self._replace(restored=replace(self.restored, streams=_at(self.restored.streams, receipt)))

    def with_turn_restored(self, processes: int) -> Progress:
        """Return the progress for a loader which itself remembers the worker whose batch is next.

        StatefulDataLoader does: it loads states in its workers, and begins with the worker that it remembers.
        `processes` is the number of its workers.
        """
        return self._replace(next_turn=self.steps_of_plan * processes % self.count_of_turns)

    def _turn_after(self, receipt: Receipt) -> int:
        return (receipt.stream // self.streams_per_turn + 1) % self.count_of_turns

    def _hashes_after(self, receipt: Receipt) -> tuple[RowHash, ...] | None:
        if self.hashes is None:
            return None
        hashes = list(self.hashes)
        for part in (receipt, *receipt.others):
            if part.row_hash is not None:
                hashes[part.stream % self.streams_per_turn] += part.row_hash
        return tuple(hashes)

    @property
    def steps_of_plan(self) -> int:
        """How many steps of its plan the rank has made: those since the last elastic load."""
        return self.batches_delivered - (0 if self.baseline is None else self.baseline.batches)

    @property
    def count_of_turns(self) -> int:
        """Number of worker turns: the number of workers, or of virtual workers."""
        return len(self.streams) // self.streams_per_turn

    # Skipped steps ---------------------------------------------------------------------------------------------------

    @property
    def will_restore(self) -> bool:
        """Whether skipped rows are to be delivered after the last step, and none of them was so far."""
        return self.restores and self.restored is None and bool(self.skips or self.carried)

    @property
    def planned(self) -> list[tuple[ShardSlice, ...]]:
        """The planned slices of each stream."""
        return [stream.planned for stream in self.streams]

    def without_skips(self) -> Progress:
        """Return the progress of the epoch's own steps, with none of them skipped."""
        return self._replace(skip_requests=(), skips=(), restores=False, restored=None, carried=(), carried_dropped=())

    @property
    def mark(self) -> Mark:
        """The beginning of the epoch's next step, as long as the last one is not made."""
        return Mark(self.batches_delivered, self.next_turn, tuple(stream.place for stream in self.streams))

    def at(self, mark: Mark) -> Progress:
        """Return the progress at the beginning of a step that this iteration reaches."""
        streams = tuple(stream.at(place) for stream, place in zip(self.streams, mark.places, strict=True))
        return self._replace(streams=streams, next_turn=mark.turn, batches_delivered=mark.step)

    def thrown_away(self, receipt: Receipt) -> Progress:
        """Return the progress after a batch that was read, because only that tells its rows, and not handed over."""
        streams, batches = _at(self.streams, receipt), self.batches_delivered + 1
        passed = self._replace(streams=streams, next_turn=self._turn_after(receipt), batches_delivered=batches)
        begin, before = self.mark, self.skips
        if before and before[-1].end.step == self.batches_delivered:
            begin, before = before[-1].begin, before[:-1]
        return passed._replace(skips=(*before, SkippedSteps(begin, passed.mark)))

    def rows_until(self, later: Progress) -> int:
        """Return the rows of the epoch's own steps between here and a later progress, where no filter drops any."""
        return sum(stream.rows_left for stream in self.streams) - sum(stream.rows_left for stream in later.streams)

    @property
    def skips_ahead(self) -> tuple[SkippedSteps, ...]:
        """The skipped steps that lie ahead, where rows are counted."""
        return () if self.restored is not None else self._skips_from(self.batches_delivered)

    def _skips_from(self, step: int) -> tuple[SkippedSteps, ...]:
        return tuple(skip for skip in self.skips if skip.begin.step >= step)

    @property
    def _skipped_before(self) -> Windows:
        """The steps that were skipped before an elastic load."""
        return () if self.baseline is None or self.baseline.skipped is None else self.baseline.skipped.steps

    @property
    def steps_skipped(self) -> int:
        """How many steps of the epoch were skipped so far."""
        return (
            size_of(self._skipped_before)
            + sum(len(skip.steps) for skip in self.skips)
            - sum(len(skip.steps) for skip in self.skips_ahead)
        )

    @property
    def skipped(self) -> list[tuple[tuple[ShardSlice, ...], ...]]:
        """The rows of the skipped steps, for each range of steps the slices of each stream."""
        return [skip.slices(self.planned) for skip in self.skips]

    @property
    def restorable(self) -> list[tuple[int, tuple[tuple[ShardSlice, ...], ...]]]:
        """The groups in which skipped rows are delivered after the last step: the first turn of each, and its slices.

        What was skipped before an elastic load comes first, then each range of steps. No batch has rows of two groups.
        """
        carried = [(0, self.carried)] if self.carried else []
        return carried + list(zip([skip.begin.turn for skip in self.skips], self.skipped, strict=True))

    @property
    def restorable_left(self) -> list[tuple[tuple[ShardSlice, ...], ...]]:
        """The skipped rows that were not delivered after the last step: the slices of each stream, by group."""
        groups = [slices for _, slices in self.restorable]
        if self.restored is None:
            return groups
        return [self.restored.slices_left, *groups[self.restored.number + 1 :]]

    def steps_restored(self, batch_size: int, *, drop_last: bool) -> int:
        """Return in how many batches of this size skipped rows were delivered after the last step."""
        if self.restored is None:
            return 0
        groups = [slices for _, slices in self.restorable]
        all_steps, left = (
            sum(self._batches_of(group, batch_size, drop_last=drop_last) for group in of_groups)
            for of_groups in (groups, self.restorable_left)
        )
        return all_steps - left

    # What is left ----------------------------------------------------------------------------------------------------

    @property
    def rows_left(self) -> int:
        """Rows that are still to be delivered, where no filter drops any."""
        left = sum(stream.rows_left for stream in self.streams)
        left -= sum(rows_in(skip.slices(self.planned)) for skip in self.skips_ahead)
        return left + sum(map(rows_in, self.restorable_left if self.restores else ()))

    def turns(self) -> tuple[int, ...]:
        """Return the worker turns in their order, beginning with the next."""
        return turns_from(self.next_turn, self.count_of_turns)

    def batches(self, batch_size: int, *, drop_last: bool) -> int:
        """Return the epoch's number of batches, delivered or not, where no filter drops rows.

        Skipped steps do not count, unless their rows are delivered after the last step.
        """
        handed_over = self.batches_delivered - self.steps_skipped
        left = self._batches_of([stream.left for stream in self.streams], batch_size, drop_last=drop_last)
        left -= sum(len(skip.steps) for skip in self.skips_ahead)
        for group in self.restorable_left if self.restores else ():
            left += self._batches_of(group, batch_size, drop_last=drop_last)
        return handed_over + left

    def _batches_of(self, streams: Sequence[tuple[ShardSlice, ...]], batch_size: int, *, drop_last: bool) -> int:
        short = 0 if drop_last else batch_size - 1
        together = self.streams_per_turn
        turns = (streams[first : first + together] for first in range(0, len(streams), together))
        return sum((rows_in(turn) + short) // batch_size for turn in turns)


def turns_from(first: int, count: int) -> tuple[int, ...]:
    """Return all worker turns in their order, beginning with one of them."""
    return tuple((first + number) % count for number in range(count))


def _rebased(streams: Iterable[StreamProgress]) -> tuple[StreamProgress, ...]:
    return tuple(StreamProgress(stream.planned, stream.left) for stream in streams)


def _at(streams: Iterable[StreamProgress], receipt: Receipt) -> tuple[StreamProgress, ...]:
    reached = list(streams)
    for part in (receipt, *receipt.others):
        before = reached[part.stream]
        reached[part.stream] = StreamProgress(before.planned, before.slices, part.position, part.rows_delivered)
    return tuple(reached)
