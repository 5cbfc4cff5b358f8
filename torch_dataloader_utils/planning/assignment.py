"""What a process has to read, and the receipt that travels with each batch. Frozen and plain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch_dataloader_utils.planning.excluded import NOTHING_EXCLUDED, EpochExclusions
from torch_dataloader_utils.planning.plan import ShardSlice
from torch_dataloader_utils.planning.quotas import Counts
from torch_dataloader_utils.planning.row_hash import RowHash


class Receipt(NamedTuple):
    """The progress of a stream after the delivery of the batch that this travels with.

    A stream delivers its slices in order, so a position is enough: slices before `position` are done, whether they had
    rows to deliver or not. Each stream of each batch has one, so it is a tuple: a frozen dataclass takes three times as
    long to make.

    Attributes:
        stream: Index of the stream among those of its rank.
        position: Index of the current slice in the stream's slices of this iteration.
        rows_delivered: Rows of that slice's shard delivered so far, including those before the slice's start.
        rows: Rows in this batch.
        rows_dropped: Rows left out because the last batch of the stream would have been short.
        others: The receipts of the other streams that have rows in this batch.
        last: Index of the slice of the batch's last row, and that row's number among the shard's delivered rows, from
            1. It is the same whether or not the reader knew that the slice ends there.
        rows_excluded: How many of the rows, those of `others` included, were excluded after the batch was cut.
        row_hash: The hash of the stream's rows in this batch; None unless it is asked for.
    """

    stream: int
    position: int
    rows_delivered: int
    rows: int
    rows_dropped: int = 0
    others: tuple[Receipt, ...] = ()
    last: tuple[int, int] = (0, 0)
    rows_excluded: int = 0
    row_hash: RowHash | None = None

    @property
    def rows_left(self) -> int:
        """Rows in the batch that were not excluded."""
        return self.rows - self.rows_excluded


@dataclass(frozen=True, slots=True)
class StreamAssignment:
    """A stream and the slices of it that this iteration delivers, in order.

    Attributes:
        stream: Index of the stream among those of its rank.
        slices: The slices.
        sizes: The rows of each of its steps, where the streams of a turn give unequal numbers of rows; else None.
    """

    stream: int
    slices: tuple[ShardSlice, ...]
    sizes: Counts | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker process receives at the start of an iteration.

    Attributes:
        iteration: Number of the iteration. Every message that answers the assignment carries it.
        worker: The worker.
        epoch: The epoch, which keys the shuffle inside shards.
        turns: The worker's turns: one turn of one stream, unless there is a virtual topology. A batch comes from one
            turn, and its rows are those of the turn's streams one after the other.
        excluded: What is excluded in the epoch.
        footers: Footers of the streams' files, by path, which the worker does not have yet.
        may_skip: Whether some of the batches are of skipped steps, and thrown away: that is not known before they are
            made. An error of `collate_fn` is that of its batch alone.
    """

    iteration: int
    worker: int
    epoch: int
    turns: tuple[tuple[StreamAssignment, ...], ...]
    excluded: EpochExclusions = NOTHING_EXCLUDED
    footers: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    may_skip: bool = False

    @property
    def stream_assignments(self) -> tuple[StreamAssignment, ...]:
        """All streams of the worker."""
        return tuple(stream for turn in self.turns for stream in turn)
