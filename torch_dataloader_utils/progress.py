"""From receipts to progress: what of an epoch has been handed to the training loop. Pure.

A stream walks its pieces in order, so its progress is one place in them. A rank's progress is one place for each of
its streams; it is a frozen value, and every batch handed over makes a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch_dataloader_utils.model import Piece, Receipt, Shard

__all__ = ["Progress", "StreamProgress"]


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """How far one stream has come.

    Attributes:
        shards: All shards of the stream, in order.
        pieces: What this iteration set out to walk of them (the same objects): all, or what a loaded state had left.
        position: Index of the piece that is under way; those before it are done.
        rows_delivered: Rows delivered of that piece's shard, those before the piece's start included.
    """

    shards: tuple[Shard, ...]
    pieces: tuple[Piece, ...]
    position: int = 0
    rows_delivered: int = 0

    @classmethod
    def fresh(cls, shards: tuple[Shard, ...]) -> StreamProgress:
        """Return the progress of a stream of which nothing is delivered."""
        return cls(shards, tuple(map(Piece, shards)))

    @property
    def left(self) -> tuple[Piece, ...]:
        """The pieces that are not done, the one under way cut to what it has left."""
        pieces = self.pieces[self.position :]
        if pieces and self.rows_delivered > pieces[0].start:
            return (Piece(pieces[0].shard, self.rows_delivered), *pieces[1:])
        return pieces

    @property
    def done(self) -> tuple[Shard, ...]:
        """The shards that are done, in the stream's order, which are its first ones."""
        return self.shards[: len(self.shards) - len(self.left)]

    @property
    def rows_left(self) -> int:
        """Rows that are not delivered yet, where no filter takes any."""
        return sum(piece.shard.rows - piece.start for piece in self.left)

    def rebased(self) -> StreamProgress:
        """Return the same progress for an iteration that sets out from here."""
        return StreamProgress(self.shards, self.left)

    def advanced(self, receipt: Receipt) -> StreamProgress:
        """Return the progress once the receipt's batch is handed over."""
        return StreamProgress(self.shards, self.pieces, receipt.position, receipt.rows_delivered)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one rank has come in an epoch.

    Attributes:
        streams: One entry for each of the rank's streams.
        next_stream: The stream whose batch is due next; streams take turns, those at their end are passed over.
        batches_delivered: Batches of the epoch handed over, those before a resume included.
    """

    streams: tuple[StreamProgress, ...]
    next_stream: int = 0
    batches_delivered: int = 0

    @classmethod
    def fresh(cls, streams: tuple[tuple[Shard, ...], ...]) -> Progress:
        """Return the progress at the beginning of an epoch."""
        return cls(tuple(map(StreamProgress.fresh, streams)))

    def rebased(self) -> Progress:
        """Return the same progress for an iteration that sets out from here."""
        return replace(self, streams=tuple(stream.rebased() for stream in self.streams))

    def advanced(self, receipt: Receipt) -> Progress:
        """Return the progress once a batch is handed over."""
        count = len(self.streams)
        return Progress(self._at(receipt), (receipt.stream + 1) % count, self.batches_delivered + 1)

    def ended(self, receipt: Receipt) -> Progress:
        """Return the progress once a stream has said that it is at its end."""
        return replace(self, streams=self._at(receipt))

    def _at(self, receipt: Receipt) -> tuple[StreamProgress, ...]:
        streams = list(self.streams)
        streams[receipt.stream] = streams[receipt.stream].advanced(receipt)
        return tuple(streams)

    @property
    def rows_left(self) -> int:
        """Rows that are not delivered yet, where no filter takes any."""
        return sum(stream.rows_left for stream in self.streams)

    def turns(self) -> tuple[int, ...]:
        """Return the streams in the order in which they take turns, from the one that is due."""
        count = len(self.streams)
        return tuple((self.next_stream + turn) % count for turn in range(count))

    def batches(self, batch_size: int, *, drop_last: bool) -> int:
        """Return the epoch's number of batches, where no filter takes rows: those delivered and those to come."""
        short = 0 if drop_last else batch_size - 1
        return self.batches_delivered + sum((stream.rows_left + short) // batch_size for stream in self.streams)
