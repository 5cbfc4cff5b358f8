"""From receipts to progress: what of an epoch has been handed to the training loop. Pure.

A stream walks its slices in order, so its progress is one place in them. A rank's progress is one place for each of
its streams; it is a frozen value, and every batch handed over makes a new one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.planning.plan import DeliveredBaseline, ShardSlice

__all__ = ["Progress", "StreamProgress"]


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """How far one stream has come.

    Attributes:
        planned: All slices of the stream, in order.
        slices: What this iteration set out to walk of them: all, or what a loaded state had left.
        position: Index of the slice that is under way; those before it are done.
        rows_delivered: Rows delivered of that slice's shard, those before the slice's start included.
    """

    planned: tuple[ShardSlice, ...]
    slices: tuple[ShardSlice, ...]
    position: int = 0
    rows_delivered: int = 0

    @classmethod
    def fresh(cls, slices: tuple[ShardSlice, ...]) -> StreamProgress:
        """Return the progress of a stream of which nothing is delivered."""
        return cls(slices, slices)

    @property
    def left(self) -> tuple[ShardSlice, ...]:
        """The slices that are not done, the one under way cut to what it has left."""
        slices = self.slices[self.position :]
        if not slices or self.rows_delivered <= slices[0].start:
            return slices
        if self.rows_delivered == slices[0].stop:  # its last row did not tell that it was the last
            return slices[1:]
        return (replace(slices[0], start=self.rows_delivered), *slices[1:])

    @property
    def done(self) -> tuple[ShardSlice, ...]:
        """The slices that are done, which are the stream's first ones; the one under way cut to what is done of it."""
        left = self.left
        count = len(self.planned) - len(left)
        done = self.planned[:count]
        if left and left[0].start > (shard_slice := self.planned[count]).start:
            return (*done, replace(shard_slice, stop=left[0].start))
        return done

    @property
    def rows_left(self) -> int:
        """Rows that are not delivered yet, where no filter takes any."""
        return sum(shard_slice.rows for shard_slice in self.left)

    def rebased(self) -> StreamProgress:
        """Return the same progress for an iteration that sets out from here."""
        return StreamProgress(self.planned, self.left)

    def advanced(self, receipt: Receipt) -> StreamProgress:
        """Return the progress once the receipt's batch is handed over."""
        return StreamProgress(self.planned, self.slices, receipt.position, receipt.rows_delivered)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one rank has come in an epoch.

    Attributes:
        streams: One entry for each of the rank's streams: those of a turn stand together.
        next_turn: The turn that is due next; turns that are at their end are passed over.
        batches_delivered: Batches of the epoch handed over, those before a resume included.
        streams_per_turn: How many streams give the rows of a batch: one, or of a grid the rank's virtual ranks.
        baseline: What was delivered of the epoch before what was left of it was planned anew; None for nothing.
    """

    streams: tuple[StreamProgress, ...]
    next_turn: int = 0
    batches_delivered: int = 0
    streams_per_turn: int = 1
    baseline: DeliveredBaseline | None = None

    @classmethod
    def fresh(
        cls,
        streams: Iterable[tuple[ShardSlice, ...]],
        streams_per_turn: int = 1,
        baseline: DeliveredBaseline | None = None,
    ) -> Progress:
        """Return the progress at the beginning of an epoch, or of what a baseline left of it."""
        batches = 0 if baseline is None else baseline.batches
        return cls(tuple(map(StreamProgress.fresh, streams)), 0, batches, streams_per_turn, baseline)

    def rebased(self) -> Progress:
        """Return the same progress for an iteration that sets out from here."""
        return replace(self, streams=tuple(stream.rebased() for stream in self.streams))

    def advanced(self, receipt: Receipt) -> Progress:
        """Return the progress once a batch is handed over."""
        turn = (receipt.stream // self.streams_per_turn + 1) % self.count_of_turns
        streams = self._at(receipt)
        return Progress(streams, turn, self.batches_delivered + 1, self.streams_per_turn, self.baseline)

    def ended(self, receipt: Receipt) -> Progress:
        """Return the progress once a stream has said that it is at its end."""
        return replace(self, streams=self._at(receipt))

    def _at(self, receipt: Receipt) -> tuple[StreamProgress, ...]:
        streams = list(self.streams)
        for one in (receipt, *receipt.beside):
            streams[one.stream] = streams[one.stream].advanced(one)
        return tuple(streams)

    @property
    def rows_left(self) -> int:
        """Rows that are not delivered yet, where no filter takes any."""
        return sum(stream.rows_left for stream in self.streams)

    @property
    def count_of_turns(self) -> int:
        """How many turns there are: as many as workers, or of a grid as virtual workers."""
        return len(self.streams) // self.streams_per_turn

    def turns(self) -> tuple[int, ...]:
        """Return the turns in their order, from the one that is due."""
        count = self.count_of_turns
        return tuple((self.next_turn + number) % count for number in range(count))

    def batches(self, batch_size: int, *, drop_last: bool) -> int:
        """Return the epoch's number of batches, where no filter takes rows: those delivered and those to come."""
        size = batch_size // self.streams_per_turn
        short = 0 if drop_last else size - 1
        firsts = self.streams[:: self.streams_per_turn]  # the others of a turn have as many rows
        return self.batches_delivered + sum((stream.rows_left + short) // size for stream in firsts)
