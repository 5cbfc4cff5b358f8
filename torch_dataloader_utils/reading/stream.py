"""A stream read: from its slices to batches with their receipts."""

from __future__ import annotations

from collections.abc import Iterator

from torch_dataloader_utils.columns.convert import join
from torch_dataloader_utils.formats.base import OpenedFiles
from torch_dataloader_utils.planning.assignment import Receipt, StreamAssignment
from torch_dataloader_utils.reading.batching import Batcher, Batches, StreamEnd
from torch_dataloader_utils.reading.read_ahead import MemoryBudget
from torch_dataloader_utils.reading.row_groups import RowGroupReader
from torch_dataloader_utils.reading.scan import ReadOptions, Scan
from torch_dataloader_utils.reading.sequential import SequentialScan
from torch_dataloader_utils.reading.shuffled import ShuffledScan

__all__ = ["read_stream"]


def read_stream(
    opened_files: OpenedFiles,
    stream_assignment: StreamAssignment,
    epoch: int,
    options: ReadOptions,
    budget: MemoryBudget,
) -> Iterator[Batches | StreamEnd]:
    """Read the slices of one stream and yield its batches, then its end.

    Args:
        opened_files: The data files.
        stream_assignment: What to read.
        epoch: The epoch.
        options: How rows become batches.
        budget: How much may be read that is not delivered yet. Whoever delivers gives back what batches held.

    Yields:
        Every batch with its receipt, many together; last the end, with the receipt that says that all slices are done.

    Raises:
        UnreadableFileError: If a file cannot be read.
        ColumnError: If an integer or boolean column holds nulls; the message names the file and the row group.
    """
    reader = RowGroupReader(opened_files, options.row_id_column)
    mixes = options.row_shuffle_seed is not None
    scan: Scan
    scan = (
        ShuffledScan(reader, stream_assignment.slices, options, budget, epoch)
        if mixes
        else SequentialScan(reader, stream_assignment.slices, options, budget)
    )
    try:
        yield from _cut(scan, stream_assignment, options, budget)
    finally:
        scan.close()
        reader.close()


def _cut(
    scan: Scan, stream_assignment: StreamAssignment, options: ReadOptions, budget: MemoryBudget
) -> Iterator[Batches | StreamEnd]:
    """ColumnSlice chunks into batches that span row groups, shards and files."""
    batcher = Batcher(stream_assignment.stream, options.batch_size)
    held = 0
    for chunk in scan.chunks():
        batcher.add(chunk)
        held += chunk.held
        del chunk  # it must be gone before the next one is read
        for taken in batcher.full_batches():
            is_last = batcher.rows < options.batch_size
            yield Batches(join(taken.slices), taken.receipts, scan.take_bytes_read(), held if is_last else 0)
            held = 0 if is_last else held
        budget.keep(held)  # no batch is full yet: what it needs beyond the budget has to be read all the same
    if batcher.rows and not options.drop_last:
        taken = batcher.take(batcher.rows)
        yield Batches(join(taken.slices), taken.receipts, scan.take_bytes_read(), held)
    else:
        budget.give_back(held)
    end = Receipt(stream_assignment.stream, len(stream_assignment.slices), 0, rows=0, rows_dropped=batcher.rows)
    yield StreamEnd(end, scan.take_bytes_read())
