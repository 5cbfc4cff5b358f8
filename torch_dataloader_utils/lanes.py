"""What one process reads: a stream, or of a grid several side by side, their rows put together step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from torch_dataloader_utils.convert import Cut, copy_rows, join, size_of
from torch_dataloader_utils.cutting import Batches, BytesRead, StreamEnd
from torch_dataloader_utils.formats.parquet import ParquetSource
from torch_dataloader_utils.model import Assignment, Receipt
from torch_dataloader_utils.readahead import Room
from torch_dataloader_utils.reading import read_stream
from torch_dataloader_utils.walking import ReadOptions

__all__ = ["read_assignment"]


def read_assignment(
    source: ParquetSource, assignment: Assignment, options: ReadOptions, room: Room
) -> Iterator[Batches | StreamEnd]:
    """Read what a process is to read and yield its batches, then its end.

    Args:
        source: The data files.
        assignment: What to read.
        options: How rows become batches.
        room: How much may be read that is not delivered yet. Whoever delivers gives back what batches held.

    Yields:
        Every batch with its receipt; last the end, with the receipt that says that all pieces are done.
    """
    lanes = assignment.lanes
    if len(lanes) == 1:
        yield from read_stream(source, lanes[0], assignment.epoch, options, room)
        return
    reserved = room.limit // 2  # for the streams, each of which has its share to itself; the rest is for batches
    room.take(reserved)
    room.keep(reserved)
    own = replace(options, batch_size=options.batch_size // len(assignment.turns[0]))
    rooms = [Room(max(1, reserved // len(lanes))) for _ in lanes]
    readers = {
        lane.stream: _LaneReader(read_stream(source, lane, assignment.epoch, own, share), share)
        for lane, share in zip(lanes, rooms, strict=True)
    }
    try:
        yield from _put_together([[readers[lane.stream] for lane in turn] for turn in assignment.turns], room)
    finally:
        for reader in readers.values():
            reader.close()


def _put_together(turns: list[list[_LaneReader]], room: Room) -> Iterator[Batches | StreamEnd]:
    """Yield the batches of each turn as one, turn after turn, until all have come to their end."""
    waiting = deque(turns)
    ends: list[StreamEnd] = []
    while waiting:
        turn = waiting.popleft()
        taken = [reader.take() for reader in turn]
        batches = [one for one in taken if isinstance(one, Batches)]
        ends += [one for one in taken if isinstance(one, StreamEnd)]
        if len(batches) == len(taken):
            waiting.append(turn)
            columns = join([Cut(one.columns, 0, one.receipts[0].rows) for one in batches])
            size = size_of(columns)
            room.take(size)
            yield Batches(columns, (_beside([one.receipts[0] for one in batches]),), _sum(batches), size)
            del columns
        elif batches:
            msg = "streams of a grid ended at different steps"
            raise RuntimeError(msg)
        del taken, batches
    yield StreamEnd(_beside([end.receipt for end in ends]), _sum(ends))


class _LaneReader:
    """Takes one batch of a stream at a time, as a copy, so that its room is free once all of what was read is taken."""

    def __init__(self, contents: Iterator[Batches | StreamEnd], room: Room) -> None:
        self._contents = contents
        self._room = room
        self._content: Batches | None = None
        self._taken = 0
        self._row = 0

    def take(self) -> Batches | StreamEnd:
        """Return the next batch, alone, or the end."""
        content = self._content
        if content is None:
            following = next(self._contents)
            if isinstance(following, StreamEnd):
                return following
            content, self._taken, self._row = following, 0, 0
        receipt = content.receipts[self._taken]
        columns = copy_rows(Cut(content.columns, self._row, self._row + receipt.rows))
        bytes_read = BytesRead() if self._taken else content.bytes_read
        self._taken += 1
        self._row += receipt.rows
        self._content = content if self._taken < len(content.receipts) else None
        if self._content is None:
            self._room.give_back(content.held)
        return Batches(columns, (receipt,), bytes_read)

    def close(self) -> None:
        """Read nothing more."""
        self._room.close()
        self._content = None
        close = getattr(self._contents, "close", None)
        if close is not None:
            close()


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
