"""Chunks of rows cut into batches that span row groups, shards and files, each with its receipt."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from torch_dataloader_utils.columns.convert import Columns, ColumnSlice, copy_rows, join, size_of, split
from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.reading.memory_budget import MemoryLease
from torch_dataloader_utils.reading.work import Work


class Batch(NamedTuple):
    """A batch, the receipt that travels with it, and what was done for it and is not told by a batch before it."""

    data: Any
    receipt: Receipt
    work: Work | None = None


@dataclass(frozen=True, slots=True)
class Batches:
    """Consecutive batches of a stream, still together as columns.

    The rows of the receipts, without excluded ones, add up to those of the columns.

    The lease is the memory to release once they are delivered. It is None where later batches have the same memory, or
    where nothing accounts for it.
    """

    columns: Columns
    receipts: tuple[Receipt, ...]
    work: Work | None = None
    lease: MemoryLease | None = None

    @property
    def sizes(self) -> list[int]:
        """Rows of each batch."""
        return [receipt.rows_left for receipt in self.receipts]

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches one by one; the work counts as done for the first."""
        work = self.work
        for data, receipt in zip(split(self.columns, self.sizes), self.receipts, strict=True):
            yield Batch(data, receipt, work)
            work = None

    def cut(self, count: int) -> tuple[Batches, Batches | None]:
        """Return the first batches and the others, if any. The first have the work, the others the lease."""
        if count >= len(self.receipts):
            return self, None
        sizes = self.sizes
        rows, cut = sum(sizes), sum(sizes[:count])
        first, others = (join([ColumnSlice(self.columns, start, stop)]) for start, stop in ((0, cut), (cut, rows)))
        head = Batches(first, self.receipts[:count], self.work)
        return head, Batches(others, self.receipts[count:], lease=self.lease)

    def portions(self, size: int) -> Iterator[Batches]:
        """Yield the batches in portions of as many as take so many bytes on average, or of one."""
        count = max(1, size * len(self.receipts) // max(1, size_of(self.columns)))
        rest: Batches | None = self
        while rest is not None:
            portion, rest = rest.cut(count)
            yield portion

    def with_own_last(self) -> tuple[Batches, Batches]:
        """Return all batches but the last one, and a copy of that, which does not keep the others in memory."""
        others, last = self.cut(len(self.receipts) - 1)
        assert last is not None  # noqa: S101 - it is cut off
        rows = last.receipts[0].rows_left
        return others, replace(last, columns=copy_rows(ColumnSlice(last.columns, 0, rows)))


class Transfer(Protocol):
    """Copies batches to where they are to be delivered, such as a device, before they are handed on."""

    def batches(self, batches: Batches) -> Iterator[Batch]:
        """Yield batches that are together as columns one by one."""
        ...

    def batch(self, batch: Batch) -> Batch:
        """Return a single batch."""
        ...


PORTION_BYTES = 32 << 20
"""Bytes of batches that are copied into pinned memory, or to a device, together."""


class EmptyStep(NamedTuple):
    """A step without a batch, since all rows of its batch were excluded after it was cut."""

    receipt: Receipt
    work: Work | None = None


class StreamEnd(NamedTuple):
    """The end of a stream: a receipt without a batch."""

    receipt: Receipt
    work: Work | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Converted rows of one slice.

    Attributes:
        position: Index of the slice in the stream's slices.
        first: The shard's delivered rows before the first of these.
        rows: Number of rows.
        ends: Whether the slice has no rows after these.
        columns: The rows.
        lease: Their memory, until a batcher takes it over.
    """

    position: int
    first: int
    rows: int
    ends: bool
    columns: Columns
    lease: MemoryLease | None


class Batcher:
    """Holds chunks that are read and not yet cut into batches, with one lease for all of them."""

    def __init__(self, stream: int, batch_size: int) -> None:
        self._stream = stream
        self._batch_size = batch_size
        self._chunks: deque[Chunk] = deque()
        self._lease: MemoryLease | None = None
        self._start = 0
        self.rows = 0

    def add(self, chunk: Chunk) -> None:
        """Take over a chunk."""
        if chunk.rows:
            self._chunks.append(chunk)
            self.rows += chunk.rows
            if chunk.lease is not None:
                self._hold(chunk.lease)
        elif chunk.lease is not None:
            chunk.lease.release()

    def _hold(self, lease: MemoryLease) -> None:
        if self._lease is None:
            self._lease = lease
        else:
            self._lease.merge(lease)
        if self.rows < self._batch_size:  # what a batch needs beyond the budget has to be read all the same
            self._lease.keep()

    def release(self) -> None:
        """Release the lease of rows that are not delivered."""
        if self._lease is not None:
            self._lease.release()

    def full_batches(self) -> Iterator[Batches]:
        """Cut off what makes full batches. Few rows are left, and they keep no chunk in memory."""
        if self.rows < self._batch_size:
            return
        if len(self._chunks) > 1:
            yield self.take(self._batch_size)
        if self.rows >= self._batch_size:
            yield self._take_many()
        self._compact()

    def take(self, count: int) -> Batches:
        """Cut off a batch of the next rows, which may be in several chunks."""
        slices = []
        wanted = count
        while wanted:
            chunk, start = self._chunks[0], self._start
            stop = min(chunk.rows, start + wanted)
            slices.append(ColumnSlice(chunk.columns, start, stop))
            wanted -= stop - start
            receipt = self._receipt(chunk, stop, count)
            self._advance(stop)
        return Batches(join(slices), (receipt,), lease=self._take_lease())

    def _take_many(self) -> Batches:
        """Cut off as many full batches as the only chunk has."""
        first = self._start + self._batch_size
        return self._take_each(range(first, self._chunks[0].rows + 1, self._batch_size))

    def _take_each(self, stops: Sequence[int]) -> Batches:
        """Cut the next rows of the only chunk into batches that end at these rows of it."""
        chunk, start = self._chunks[0], self._start
        starts = (start, *stops[:-1])
        receipts = tuple(self._receipt(chunk, stop, stop - begin) for begin, stop in zip(starts, stops, strict=True))
        cut = join([ColumnSlice(chunk.columns, start, stops[-1])])
        self._advance(stops[-1])
        return Batches(cut, receipts, lease=self._take_lease())

    def _take_lease(self) -> MemoryLease | None:
        """Return the lease if the last full batch is cut off; until then the chunks have rows for others."""
        if self._lease is None or self.rows >= self._batch_size:
            return None
        lease, self._lease = self._lease, None
        return lease.pass_on()

    def _advance(self, stop: int) -> None:
        self.rows -= stop - self._start
        self._start = stop
        if stop == self._chunks[0].rows:
            self._chunks.popleft()
            self._start = 0

    def _receipt(self, chunk: Chunk, stop: int, rows: int) -> Receipt:
        last = chunk.position, chunk.first + stop
        if chunk.ends and stop == chunk.rows:
            return Receipt(self._stream, chunk.position + 1, 0, rows, last=last)
        return Receipt(self._stream, last[0], last[1], rows, 0, (), last)

    def _compact(self) -> None:
        """Copy the few rows that are left of a chunk, so that they do not keep all of it in memory."""
        if self._chunks:
            chunk, start = self._chunks.pop(), self._start
            columns = copy_rows(ColumnSlice(chunk.columns, start, chunk.rows))
            self._chunks.append(Chunk(chunk.position, chunk.first + start, self.rows, chunk.ends, columns, None))
            self._start = 0
