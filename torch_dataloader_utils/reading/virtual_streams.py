"""What one process reads: a stream, or of a grid several side by side, their rows put together step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from torch_dataloader_utils.columns.convert import interleave, size_of
from torch_dataloader_utils.formats.base import OpenedFiles
from torch_dataloader_utils.planning.assignment import Assignment, Receipt
from torch_dataloader_utils.reading.batching import Batches, BytesRead, StreamEnd
from torch_dataloader_utils.reading.read_ahead import MemoryBudget
from torch_dataloader_utils.reading.scan import ReadOptions
from torch_dataloader_utils.reading.stream import read_stream

__all__ = ["read_assignment"]


def read_assignment(
    opened_files: OpenedFiles, assignment: Assignment, options: ReadOptions, budget: MemoryBudget
) -> Iterator[Batches | StreamEnd]:
    """Read what a process is to read and yield its batches, then its end.

    Args:
        opened_files: The data files.
        assignment: What to read.
        options: How rows become batches.
        budget: How much may be read that is not delivered yet. Whoever delivers gives back what batches held.

    Yields:
        Every batch with its receipt; last the end, with the receipt that says that all slices are done.
    """
    stream_assignments = assignment.stream_assignments
    if len(stream_assignments) == 1:
        yield from read_stream(opened_files, stream_assignments[0], assignment.epoch, options, budget)
        return
    reserved = budget.limit // 2  # for the streams, each of which has its share to itself; the rest is for batches
    budget.take(reserved)
    budget.keep(reserved)
    own = replace(options, batch_size=options.batch_size // len(assignment.turns[0]))
    rooms = [MemoryBudget(max(1, reserved // len(stream_assignments))) for _ in stream_assignments]
    readers = {
        stream_assignment.stream: _StreamReader(
            read_stream(opened_files, stream_assignment, assignment.epoch, own, share), own.batch_size, share
        )
        for stream_assignment, share in zip(stream_assignments, rooms, strict=True)
    }
    try:
        yield from _put_together(
            [[readers[stream_assignment.stream] for stream_assignment in turn] for turn in assignment.turns], budget
        )
    finally:
        for reader in readers.values():
            reader.close()


def _put_together(turns: list[list[_StreamReader]], budget: MemoryBudget) -> Iterator[Batches | StreamEnd]:
    """Yield the batches of each turn as one, turn after turn, until all have come to their end."""
    waiting = deque(turns)
    ends: list[StreamEnd] = []
    while waiting:
        cycle = [reader for turn in waiting for reader in turn]
        count = min(reader.full_batches for reader in cycle)
        if not count:  # some turn is at its end, or at a short batch: one at a time
            turn = waiting.popleft()
            at_end = [reader.end for reader in turn]
            if any(at_end):
                ends += [end for end in at_end if end is not None]
                if not all(at_end):
                    msg = "streams of a grid ended at different steps"
                    raise RuntimeError(msg)
                continue
            waiting.append(turn)
            cycle, count, width = turn, 1, len(turn)
        else:
            width = len(waiting[0])
        taken = [reader.take(count) for reader in cycle]
        columns = interleave([one.columns for one in taken], count)
        receipts = [one.receipts for one in taken]
        together = tuple(
            _beside([receipts[place + stream_assignment][number] for stream_assignment in range(width)])
            for number in range(count)
            for place in range(0, len(cycle), width)
        )
        bytes_read = _sum(taken)
        del taken
        for reader in cycle:
            reader.release()
        size = size_of(columns)
        budget.take(size)
        yield Batches(columns, together, bytes_read, size)
        del columns
    yield StreamEnd(_beside([end.receipt for end in ends]), _sum(ends))


class _StreamReader:
    """Takes some batches of a stream at a time. They are views: their budget is free once they are copied.

    Args:
        contents: The stream.
        size: Rows of a full batch.
        budget: Its budget.
    """

    def __init__(self, contents: Iterator[Batches | StreamEnd], size: int, budget: MemoryBudget) -> None:
        self._contents = contents
        self._size = size
        self._room = budget
        self._rest: Batches | None = None
        self._used = 0
        self._end: StreamEnd | None = None

    @property
    def full_batches(self) -> int:
        """How many full batches are at hand, one after the other; more are read if there are none."""
        rest = self._filled()
        return 0 if rest is None else sum(receipt.rows == self._size for receipt in rest.receipts)

    @property
    def end(self) -> StreamEnd | None:
        """The end of the stream, once all batches are taken."""
        return self._end if self._filled() is None else None

    def take(self, count: int) -> Batches:
        """Return the next batches, of those that are at hand."""
        rest = self._filled()
        assert rest is not None  # noqa: S101 - there are so many
        taken, self._rest = rest.cut(count)
        if self._rest is None:
            self._used = taken.held
        return taken

    def release(self) -> None:
        """Give back the budget of what was taken, for it is copied."""
        self._room.give_back(self._used)
        self._used = 0

    def close(self) -> None:
        """Read nothing more."""
        self._room.close()
        self._rest = None
        close = getattr(self._contents, "close", None)
        if close is not None:
            close()

    def _filled(self) -> Batches | None:
        if self._rest is None and self._end is None:
            following = next(self._contents)
            if isinstance(following, StreamEnd):
                self._end = following
            else:
                self._rest = following
        return self._rest


def _beside(receipts: list[Receipt]) -> Receipt:
    """Return the receipt of what several streams deliver together."""
    first, *others = receipts
    return replace(
        first,
        rows=sum(one.rows for one in receipts),
        rows_dropped=sum(one.rows_dropped for one in receipts),
        beside=tuple(others),
    )


def _sum(contents: list[Batches] | list[StreamEnd]) -> BytesRead:
    parts = [content.bytes_read for content in contents]
    return BytesRead(sum(part.total for part in parts), sum(part.again for part in parts))
