"""From receipts to progress: which rows of an epoch were delivered to the training loop. Pure.

A stream delivers its slices in order, so its progress is a position in them. A rank's progress is the position of each
of its streams. It is a frozen value, and each delivered batch makes a new one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.planning.plan import DeliveredBaseline, ShardSlice
from torch_dataloader_utils.planning.row_hash import RowHash


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """The progress of a stream.

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
class Progress:
    """The progress of a rank in an epoch.

    Attributes:
        streams: One entry for each of the rank's streams. The streams of a worker turn are neighbours.
        next_turn: The worker turn of the next batch. Turns whose streams have ended are skipped.
        batches_delivered: Batches of the epoch that were delivered, including those before a resume.
        streams_per_turn: How many streams give the rows of a batch: 1, or the virtual ranks of this rank.
        baseline: What was delivered before an elastic load planned the rest of the epoch; None for nothing.
        hashes: The hash of the delivered rows of each planned rank that this rank delivers; None where it is not asked
            for, or not known.
    """

    streams: tuple[StreamProgress, ...]
    next_turn: int = 0
    batches_delivered: int = 0
    streams_per_turn: int = 1
    baseline: DeliveredBaseline | None = None
    hashes: tuple[RowHash, ...] | None = None

    @classmethod
    def fresh(
        cls,
        streams: Iterable[tuple[ShardSlice, ...]],
        streams_per_turn: int = 1,
        baseline: DeliveredBaseline | None = None,
    ) -> Progress:
        """Return the progress at the beginning of an epoch, or of the rest that a baseline leaves of it."""
        batches = 0 if baseline is None else baseline.batches
        return cls(tuple(StreamProgress(part, part) for part in streams), 0, batches, streams_per_turn, baseline)

    def rebased(self) -> Progress:
        """Return the same progress for an iteration that begins here."""
        return replace(self, streams=tuple(StreamProgress(stream.planned, stream.left) for stream in self.streams))

    def advanced(self, receipt: Receipt) -> Progress:
        """Return the progress after a batch was delivered."""
        turn = (receipt.stream // self.streams_per_turn + 1) % self.count_of_turns
        streams, batches, hashes = self._at(receipt), self.batches_delivered + 1, self._hashes_after(receipt)
        return Progress(streams, turn, batches, self.streams_per_turn, self.baseline, hashes)

    def ended(self, receipt: Receipt) -> Progress:
        """Return the progress after a stream, or the streams of a worker turn, have ended."""
        return replace(self, streams=self._at(receipt))

    def with_turn_restored(self, processes: int) -> Progress:
        """Return the progress for a loader which itself remembers the worker whose batch is next.

        StatefulDataLoader does: it loads states in its workers, and begins with the worker that it remembers.
        `processes` is the number of its workers.
        """
        before = 0 if self.baseline is None else self.baseline.batches
        return replace(self, next_turn=(self.batches_delivered - before) * processes % self.count_of_turns)

    def _at(self, receipt: Receipt) -> tuple[StreamProgress, ...]:
        streams = list(self.streams)
        for part in (receipt, *receipt.others):
            before = streams[part.stream]
            streams[part.stream] = StreamProgress(before.planned, before.slices, part.position, part.rows_delivered)
        return tuple(streams)

    def _hashes_after(self, receipt: Receipt) -> tuple[RowHash, ...] | None:
        if self.hashes is None:
            return None
        hashes = list(self.hashes)
        for part in (receipt, *receipt.others):
            if part.row_hash is not None:
                hashes[part.stream % self.streams_per_turn] += part.row_hash
        return tuple(hashes)

    @property
    def rows_left(self) -> int:
        """Rows that are not delivered yet, where no filter drops any."""
        return sum(stream.rows_left for stream in self.streams)

    @property
    def count_of_turns(self) -> int:
        """Number of worker turns: the number of workers, or of virtual workers."""
        return len(self.streams) // self.streams_per_turn

    def turns(self) -> tuple[int, ...]:
        """Return the worker turns in their order, beginning with the next."""
        count = self.count_of_turns
        return tuple((self.next_turn + number) % count for number in range(count))

    def batches(self, batch_size: int, *, drop_last: bool) -> int:
        """Return the epoch's number of batches, delivered or not, where no filter drops rows."""
        size = batch_size // self.streams_per_turn
        short = 0 if drop_last else size - 1
        firsts = self.streams[:: self.streams_per_turn]  # all streams of a turn have equally many rows
        return self.batches_delivered + sum((stream.rows_left + short) // size for stream in firsts)
