"""What a process reads of a mixture: the rows of its sources' streams, put together for many steps at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from torch_dataloader_utils.columns.convert import ColumnSlice, size_of
from torch_dataloader_utils.columns.interleave import Interleaved
from torch_dataloader_utils.planning.assignment import Receipt, StreamAssignment
from torch_dataloader_utils.reading.batching import Batches, Chunk, StreamEnd
from torch_dataloader_utils.reading.memory_budget import MemoryBudget
from torch_dataloader_utils.reading.row_marks import with_hashes
from torch_dataloader_utils.reading.scan import Scan
from torch_dataloader_utils.reading.work import Work

BLOCK_BYTES = 4 << 20
"""Bytes of the steps that are put together at once, unless one step has more: few enough to stay in the processor's
cache, enough that what a block costs by itself does not matter."""

BLOCK_SHARE = 16
"""A block of rows that are put together has at most this part of the budget, unless one step has more."""

BLOCKS = 2
"""There are at most so many blocks at a time: the one that is delivered and the one that is made meanwhile. Each leases
at least its part of the budget, and the streams have what the blocks leave."""

Counts: TypeAlias = npt.NDArray[np.int64]


class SourceReader:
    """Reads the stream of a source, chunk by chunk. It holds one chunk at a time, and the scan what is read ahead."""

    def __init__(self, stream: StreamAssignment, scan: Scan) -> None:
        self.scan = scan
        self._stream = stream
        self._chunks = scan.chunks()
        self._chunk: Chunk | None = None
        self._start = 0  # rows of the chunk that are taken
        self._row_bytes = 0.0

    def row_bytes(self) -> float:
        """Return about how many bytes a row takes; read first if nothing is in memory."""
        return 0.0 if self._held() is None else self._row_bytes

    def add_to(self, block: Interleaved, source: int, sizes: Sequence[int]) -> list[Receipt]:
        """Add the rows of some steps to a block, and return the receipt of each step. No size is 0."""
        receipts: list[Receipt] = []
        stops = np.cumsum(sizes).tolist()
        wanted, done = stops[-1] if stops else 0, 0
        while done < wanted:
            chunk = self._held()
            if chunk is None:
                raise RuntimeError("a stream of a mixture has fewer rows than its steps take")
            start, stop = self._start, min(chunk.rows, self._start + wanted - done)
            block.add(source, ColumnSlice(chunk.columns, start, stop), is_whole=done + stop - start == wanted)
            done += stop - start
            self._start = stop
            ended = bisect_right(stops, done)
            moved = stop - done  # from a row's number in the block to its number in the chunk
            steps = zip(stops[len(receipts) : ended], sizes[len(receipts) : ended], strict=True)
            receipts += [self._receipt(chunk, end + moved, size) for end, size in steps]
            if stop == chunk.rows:
                self._drop()
        return receipts

    def _receipt(self, chunk: Chunk, stop: int, rows: int) -> Receipt:
        last = chunk.position, chunk.first + stop
        if chunk.ends and stop == chunk.rows:
            return Receipt(self._stream.stream, chunk.position + 1, 0, rows, last=last)
        return Receipt(self._stream.stream, last[0], last[1], rows, 0, (), last)

    def end(self) -> StreamEnd:
        """Return the end of the stream, all rows of which are taken."""
        if self._held() is not None:
            raise RuntimeError("a stream of a mixture has more rows than its steps take")
        return StreamEnd(Receipt(self._stream.stream, len(self._stream.slices), 0, rows=0), self.scan.take_work())

    def _held(self) -> Chunk | None:
        """Return the chunk that has the next row; None if there is none."""
        while self._chunk is None or self._start == self._chunk.rows:
            self._drop()
            following = next(self._chunks, None)
            if following is None:
                return None
            self._chunk, self._start = following, 0
            self._row_bytes = size_of(following.columns) / max(1, following.rows)
        return self._chunk

    def _drop(self) -> None:
        chunk, self._chunk = self._chunk, None
        if chunk is not None and chunk.lease is not None:
            chunk.lease.release()

    def close(self) -> None:
        """Read nothing more."""
        self.scan.budget.close()
        self._chunk = None
        self._chunks.close()


def bytes_of_streams(budget: MemoryBudget) -> int:
    """Return the part of a budget that streams have, the rows of which are put together in blocks."""
    return budget.limit - BLOCKS * bytes_of_block(budget)


def bytes_of_block(budget: MemoryBudget) -> int:
    """Return the bytes that a block has at most, unless one step has more."""
    return budget.limit // BLOCK_SHARE


def lease_of_block(budget: MemoryBudget, size: int) -> int:
    """Return the bytes that a block of this size leases."""
    return max(size, bytes_of_block(budget))


def read_mixture(
    turns: Sequence[Sequence[StreamAssignment]], scans: Sequence[Scan], budget: MemoryBudget, *, fingerprint: bool
) -> Iterator[Batches | StreamEnd]:
    """Read the streams of a mixture and yield the batches of all worker turns, whose steps alternate, then the end.

    `scans` are those of all turns' streams. The budget is the memory of what is put together.
    """
    streams = [stream for turn in turns for stream in turn]
    readers = [SourceReader(stream, scan) for stream, scan in zip(streams, scans, strict=True)]
    cycles = _side_by_side(streams)
    done = 0
    try:
        while done < len(cycles):
            block = cycles[done : done + _steps_of_block(readers, cycles[done], budget)]
            yield _next_batches(readers, block, len(turns[0]), budget, fingerprint=fingerprint)
            done += len(block)
        ends = [reader.end() for reader in readers]
        yield StreamEnd(joined([end.receipt for end in ends]), total([end.work for end in ends]))
    finally:
        for reader in readers:
            reader.close()


def _side_by_side(streams: Sequence[StreamAssignment]) -> Counts:
    """Return the rows of all turns' streams in each cycle of turns, in which each turn makes a step, if it has one."""
    sizes = [stream.sizes for stream in streams if stream.sizes is not None]
    cycles = np.zeros((max(map(len, sizes)), len(streams)), dtype=np.int64)
    for number, of_stream in enumerate(sizes):
        cycles[: len(of_stream), number] = of_stream
    return cycles


def _steps_of_block(readers: Sequence[SourceReader], cycle: Counts, budget: MemoryBudget) -> int:
    """Return how many cycles like the next one make a block."""
    sizes = zip(readers, cycle.tolist(), strict=True)
    size = sum(reader.row_bytes() * rows for reader, rows in sizes if rows)
    return max(1, int(min(BLOCK_BYTES, bytes_of_block(budget)) // max(1.0, size)))


def _next_batches(
    readers: Sequence[SourceReader], block: Counts, width: int, budget: MemoryBudget, *, fingerprint: bool
) -> Batches:
    """Return the batches of some cycles, of which each worker turn has `width` streams."""
    by_rows = zip(readers, block[0].tolist(), strict=True)
    size = int(len(block) * sum(reader.row_bytes() * rows for reader, rows in by_rows if rows))
    lease = budget.take(lease_of_block(budget, size))
    interleaved = Interleaved(block)
    of_readers = []
    for source, (reader, sizes) in enumerate(zip(readers, block.T.tolist(), strict=True)):
        receipts = iter(reader.add_to(interleaved, source, [rows for rows in sizes if rows]))
        of_readers.append([next(receipts) if rows else None for rows in sizes])
    columns = interleaved.columns()
    lease.resize(lease_of_block(budget, size_of(columns)))
    by_stream = [
        [receipt for receipt in cycle[first : first + width] if receipt is not None]
        for cycle in zip(*of_readers, strict=True)
        for first in range(0, len(readers), width)
    ]
    by_step = [receipts for receipts in by_stream if receipts]
    if fingerprint:
        flat = with_hashes(Batches(columns, tuple(chain.from_iterable(by_step))))
        columns, hashed = flat.columns, iter(flat.receipts)
        by_step = [[next(hashed) for _ in receipts] for receipts in by_step]
    work = total([reader.scan.take_work() for reader in readers])
    return Batches(columns, tuple(map(joined, by_step)), work, lease)


def joined(receipts: list[Receipt]) -> Receipt:
    """Return the receipt of what several streams deliver together."""
    first, *others = receipts
    if not others:
        return first
    rows, dropped = first.rows, first.rows_dropped
    for other in others:
        rows += other.rows
        dropped += other.rows_dropped
    position = first.stream, first.position, first.rows_delivered
    return Receipt(*position, rows, dropped, tuple(others), first.last, first.rows_excluded, first.row_hash)


def total(works: Sequence[Work | None]) -> Work:
    """Return what was done in all."""
    found = Work()
    for work in works:
        if work is not None:
            found.add(work)
    return found
