"""What a process is given to read, and the receipt that travels with each batch. Frozen and plain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch_dataloader_utils.planning.plan import ShardSlice

__all__ = ["Assignment", "Receipt", "StreamAssignment"]


@dataclass(frozen=True, slots=True)
class Receipt:
    """How far a stream has come once the batch that this travels with is handed over.

    A stream walks its slices in order, so one place says it all: slices before `position` are done, whether they
    gave rows or ended empty.

    Attributes:
        stream: Number of the stream among those of its rank: the worker's, or of a grid its place there.
        position: Index, in the stream's slices of this iteration, of the slice that is under way.
        rows_delivered: Rows of that slice's shard delivered so far, those before the slice's start included.
        rows: Rows in this batch.
        rows_dropped: Rows left out because the last batch of the stream would have been short.
        beside: How far the other streams have come whose rows are in this batch too.
        last: Slice of the batch's last row, and that row's place among the shard's delivered rows, from 1: the same
            whether or not it was known that the slice ends there.
    """

    stream: int
    position: int
    rows_delivered: int
    rows: int
    rows_dropped: int = 0
    beside: tuple[Receipt, ...] = ()
    last: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class StreamAssignment:
    """A stream and what this iteration walks of it, in order."""

    stream: int
    slices: tuple[ShardSlice, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one worker process is sent at the start of an iteration.

    Attributes:
        iteration: Number of the iteration, carried by every message that answers it.
        worker: The worker.
        epoch: The epoch, which keys the shuffle inside shards.
        turns: The streams that the worker walks, one unless there is a grid: they take turns, and a turn's rows are
            those of its streams one after the other.
        footers: Footers of the files that they lie in, by path, which the worker does not have yet.
    """

    iteration: int
    worker: int
    epoch: int
    turns: tuple[tuple[StreamAssignment, ...], ...]
    footers: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @property
    def stream_assignments(self) -> tuple[StreamAssignment, ...]:
        """All streams that the worker walks."""
        return tuple(stream_assignment for turn in self.turns for stream_assignment in turn)
