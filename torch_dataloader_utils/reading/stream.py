"""What one process reads: one stream, or the streams of a virtual topology, their rows put together step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace

from torch_dataloader_utils.columns.convert import ColumnSlice, interleave, size_of, with_tensors
from torch_dataloader_utils.formats.opened_files import Opened, OpenedSources
from torch_dataloader_utils.formats.read_cache import ReadCache
from torch_dataloader_utils.planning.assignment import Assignment, Receipt, StreamAssignment
from torch_dataloader_utils.planning.mixture.source_paths import MIXTURE_KEY
from torch_dataloader_utils.reading.batching import Batcher, Batches, EmptyStep, StreamEnd
from torch_dataloader_utils.reading.memory_budget import MemoryBudget, MemoryLease
from torch_dataloader_utils.reading.mixture import (
    bytes_of_block,
    bytes_of_streams,
    joined,
    lease_of_block,
    read_mixture,
    total,
)
from torch_dataloader_utils.reading.packing import PackedScan, unpacked, with_sequences
from torch_dataloader_utils.reading.removal import without_removed
from torch_dataloader_utils.reading.row_groups.reader import RowGroupReader
from torch_dataloader_utils.reading.row_groups.selection import REMOVED_COLUMN
from torch_dataloader_utils.reading.row_marks import with_hashes
from torch_dataloader_utils.reading.scan import ReadOptions, Scan
from torch_dataloader_utils.reading.sequential import SequentialScan
from torch_dataloader_utils.reading.shuffled import ShuffledScan
from torch_dataloader_utils.reading.token_batching import TokenBatcher
from torch_dataloader_utils.reading.work import Work


def read_assignment(
    files: Opened, read_cache: ReadCache, assignment: Assignment, options: ReadOptions, budget: MemoryBudget
) -> Iterator[Batches | EmptyStep | StreamEnd]:
    """Read what a process is assigned and yield its batches, then its end.

    The last receipt says that all slices are done. The budget is the memory for what is read and not yet delivered. Who
    delivers batches releases their lease.

    Raises:
        UnreadableFileError: If a file cannot be read.
        ColumnError: If an integer or boolean column holds nulls; the message names the file and the row group.
    """
    if not _loses_rows(assignment):
        yield from _read_streams(files, read_cache, assignment, options, budget)
        return
    options = replace(options, transform=options.transform.with_flags(REMOVED_COLUMN))
    yield from without_removed(_read_streams(files, read_cache, assignment, options, budget, flags_removed=True))


def _loses_rows(assignment: Assignment) -> bool:
    """Whether batches of an assignment are to lose rows after they are cut."""
    removed = assignment.excluded.removed
    splits = (
        split for stream in assignment.stream_assignments for part in stream.slices for split in part.shard.present
    )
    return bool(assignment.excluded.removed_by) or (bool(removed) and any(map(removed.within, splits)))


def _read_streams(
    files: Opened,
    read_cache: ReadCache,
    assignment: Assignment,
    options: ReadOptions,
    budget: MemoryBudget,
    *,
    flags_removed: bool = False,
) -> Iterator[Batches | StreamEnd]:
    """Read the streams of an assignment and yield their batches, which are still to lose rows, then the end."""

    def new_reader(stream: StreamAssignment) -> RowGroupReader:
        own = files
        if isinstance(own, OpenedSources):
            own = own.of_slices(stream.slices)
        return RowGroupReader(
            own,
            read_cache.of_source(own.source),
            options.row_id_column,
            assignment.excluded,
            adds_marks=options.fingerprint,
            flags_removed=flags_removed,
            encodable=() if options.packing is not None else options.transform.encodable,
        )

    streams = assignment.stream_assignments
    if not isinstance(files, OpenedSources) and len(streams) == 1:
        scan = _scan(new_reader(streams[0]), streams[0], assignment.epoch, options, budget)
        try:
            yield from _delivered(_batches(scan, streams[0], options), options)
        finally:
            scan.close()
        return
    # The streams have equal shares of their part of the budget: one that shared with others could wait for their
    # memory, and they for its rows. The rest is for the batches that are put together out of copies of their rows.
    reserved = budget.take(bytes_of_streams(budget))
    reserved.keep()
    epoch = MIXTURE_KEY if isinstance(files, OpenedSources) else assignment.epoch
    # A mixture packs row groups, one by one.
    of_streams = replace(options, packing=None) if isinstance(files, OpenedSources) else options
    share = max(1, reserved.size // len(streams))
    scans = [
        _scan(new_reader(stream), stream, epoch, of_streams, MemoryBudget(share), num_streams=len(streams))
        for stream in streams
    ]
    try:
        if isinstance(files, OpenedSources):
            batches = read_mixture(assignment.turns, scans, budget, fingerprint=options.fingerprint)
            made = batches if options.packing is None else with_sequences(batches, options.packing)
            yield from _delivered(made, options)
        else:
            yield from _delivered(_read_grid(assignment, scans, options, budget), options)
    finally:
        for scan in scans:
            scan.close()
        reserved.release()


def _delivered(contents: Iterator[Batches | StreamEnd], options: ReadOptions) -> Iterator[Batches | StreamEnd]:
    """Yield batches as they are delivered: with tensors in the place of arrays, if tensors are."""
    return map(_with_tensors, contents) if options.transform.output_format == "torch" else contents


def _with_tensors(content: Batches | StreamEnd) -> Batches | StreamEnd:
    return content if isinstance(content, StreamEnd) else replace(content, columns=with_tensors(content.columns))


def _scan(
    reader: RowGroupReader,
    stream: StreamAssignment,
    epoch: int,
    options: ReadOptions,
    budget: MemoryBudget,
    *,
    num_streams: int = 1,
) -> Scan:
    seed, packing = options.row_shuffle_seed, options.packing
    slices = stream.slices if packing is None else unpacked(stream.slices, knows_rows=reader.knows_rows)
    scan: Scan
    if seed is None:
        scan = SequentialScan(reader, slices, options, budget)
    else:
        scan = ShuffledScan(reader, slices, options, budget, epoch, num_streams=num_streams)
    return scan if packing is None else PackedScan(scan, stream.slices, packing, seed=seed, epoch=epoch)


def _read_grid(
    assignment: Assignment, scans: Sequence[Scan], options: ReadOptions, budget: MemoryBudget
) -> Iterator[Batches | StreamEnd]:
    """Read the streams of a virtual topology and yield their batches, put together, then their end."""
    part = replace(options, batch_size=options.batch_size // len(assignment.turns[0]))
    readers = {
        stream.stream: _StreamReader(_batches(scan, stream, part), part.batch_size, scan.budget)
        for stream, scan in zip(assignment.stream_assignments, scans, strict=True)
    }
    try:
        yield from _put_together([[readers[stream.stream] for stream in turn] for turn in assignment.turns], budget)
    finally:
        for reader in readers.values():
            reader.close()


def _batches(scan: Scan, stream: StreamAssignment, options: ReadOptions) -> Generator[Batches | StreamEnd, None, None]:
    """Cut chunks into batches that span row groups, shards and files, and yield many together, then the end."""
    batcher = Batcher(stream.stream, options.batch_size)
    if options.batching is not None:
        batcher = TokenBatcher(stream.stream, options.batching)
    for chunk in scan.chunks():
        batcher.add(chunk)
        del chunk  # it must be gone before the next one is read
        for batches in batcher.full_batches():
            yield _completed(batches, scan, options)
            del batches
    if batcher.rows and not options.drop_last:
        yield _completed(batcher.take(batcher.rows), scan, options)
    batcher.release()
    end = Receipt(stream.stream, len(stream.slices), 0, rows=0, rows_dropped=batcher.rows)
    yield StreamEnd(end, scan.take_work())


def _completed(batches: Batches, scan: Scan, options: ReadOptions) -> Batches:
    """Return batches with what was read for them and, if asked for, with the hash of each one's rows."""
    read = replace(batches, work=scan.take_work())
    return with_hashes(read) if options.fingerprint else read


def _put_together(turns: list[list[_StreamReader]], budget: MemoryBudget) -> Iterator[Batches | StreamEnd]:
    """Yield the batches of each worker turn's streams as one, turn after turn, until all streams have ended."""
    waiting = deque(turns)
    ends: list[StreamEnd] = []
    while waiting:
        cycle = [reader for turn in waiting for reader in turn]
        count = min(reader.full_batches for reader in cycle)
        width = len(waiting[0])
        if not count:  # a stream is at its end, or at a short batch: go on with one turn at a time
            turn = waiting.popleft()
            at_end = [reader.end for reader in turn]
            if any(at_end):
                ends += [end for end in at_end if end is not None]
                if not all(at_end):
                    raise RuntimeError("streams of a virtual topology ended at different steps")
                continue
            waiting.append(turn)
            cycle, count = turn, 1
        step = sum(reader.batch_bytes for reader in cycle)
        yield _next_batches(cycle, min(count, max(1, bytes_of_block(budget) // max(1, step))), width, budget)
    yield StreamEnd(joined([end.receipt for end in ends]), total([end.work for end in ends]))


def _next_batches(cycle: list[_StreamReader], count: int, width: int, budget: MemoryBudget) -> Batches:
    """Return the next `count` batches of each stream. The cycle has several worker turns of `width` streams each.

    The budget is the memory for the copies of their rows.
    """
    taken = [reader.take(count) for reader in cycle]
    columns = interleave([batches.rows for batches in taken], count)
    receipts = tuple(
        joined([batches.receipts[number] for batches in taken[first : first + width]])
        for number in range(count)
        for first in range(0, len(cycle), width)
    )
    work = total([batches.work for batches in taken])
    del taken
    for reader in cycle:
        reader.release()
    return Batches(columns, receipts, work, budget.take(lease_of_block(budget, size_of(columns))))


@dataclass(frozen=True, slots=True)
class _Taken:
    """Some consecutive batches of a stream: their rows, the receipt of each, and what was done for them."""

    rows: ColumnSlice
    receipts: tuple[Receipt, ...]
    work: Work | None


class _StreamReader:
    """Takes some batches of a stream at a time. They are views; their lease is released once their rows are copied.

    `size` counts the rows of a full batch. The budget is the stream's share of the memory.
    """

    def __init__(self, contents: Generator[Batches | StreamEnd, None, None], size: int, budget: MemoryBudget) -> None:
        self._contents = contents
        self._size = size
        self._budget = budget
        self._batches: Batches | None = None
        self._taken = 0  # of these batches
        self._rows = 0  # of those that are taken
        self._lease: MemoryLease | None = None
        self._end: StreamEnd | None = None

    @property
    def full_batches(self) -> int:
        """How many consecutive full batches are in memory; more are read if there are none."""
        batches = self._filled()
        return 0 if batches is None else sum(each.rows == self._size for each in batches.receipts[self._taken :])

    @property
    def batch_bytes(self) -> int:
        """About how many bytes each batch in memory has; 0 if there are none."""
        batches = self._filled()
        return 0 if batches is None else size_of(batches.columns) // len(batches.receipts)

    @property
    def end(self) -> StreamEnd | None:
        """The end of the stream, once all batches are taken."""
        return self._end if self._filled() is None else None

    def take(self, count: int) -> _Taken:
        """Return the next batches of those that are in memory."""
        batches = self._filled()
        assert batches is not None  # noqa: S101 - the caller takes no more than there are
        first, start = self._taken, self._rows
        receipts = batches.receipts[first : first + count]
        self._taken, self._rows = first + count, start + sum(receipt.rows_left for receipt in receipts)
        taken = _Taken(ColumnSlice(batches.columns, start, self._rows), receipts, None if first else batches.work)
        if self._taken == len(batches.receipts):
            self._batches, self._taken, self._rows = None, 0, 0
            self._lease = batches.lease
        return taken

    def release(self) -> None:
        """Release the lease of what was taken, for its rows are copied."""
        if self._lease is not None:
            self._lease.release()
        self._lease = None

    def close(self) -> None:
        """Read nothing more."""
        self._budget.close()
        self._batches = None
        self._contents.close()

    def _filled(self) -> Batches | None:
        if self._batches is None and self._end is None:
            following = next(self._contents)
            if isinstance(following, StreamEnd):
                self._end = following
            else:
                self._batches = following
        return self._batches
