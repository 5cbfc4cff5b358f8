"""One stream, from its slices to batches with their receipts."""

from __future__ import annotations

from collections.abc import Iterator

from torch_dataloader_utils.columns.convert import join
from torch_dataloader_utils.formats.base import OpenedFiles
from torch_dataloader_utils.formats.read_cache import ReadCache
from torch_dataloader_utils.planning.assignment import Receipt, StreamAssignment
from torch_dataloader_utils.reading.batching import Batcher, Batches, StreamEnd
from torch_dataloader_utils.reading.memory_budget import MemoryBudget
from torch_dataloader_utils.reading.row_groups import RowGroupReader
from torch_dataloader_utils.reading.scan import ReadOptions, Scan
from torch_dataloader_utils.reading.sequential import SequentialScan
from torch_dataloader_utils.reading.shuffled import ShuffledScan

__all__ = ["read_stream"]


def read_stream(
    files: OpenedFiles,
    read_cache: ReadCache,
    stream: StreamAssignment,
    epoch: int,
    options: ReadOptions,
    *,
    budget: MemoryBudget,
) -> Iterator[Batches | StreamEnd]:
    """Read the slices of one stream and yield its batches, then its end.

    Args:
        files: The data files.
        read_cache: What readers of the files have learned before.
        stream: What to read.
        epoch: The epoch.
        options: How rows become batches.
        budget: Memory for what is read and not yet delivered. Who delivers batches releases their lease.

    Yields:
        Every batch with its receipt, many together. Last the end, with the receipt that says that all slices are done.

    Raises:
        UnreadableFileError: If a file cannot be read.
        ColumnError: If an integer or boolean column holds nulls; the message names the file and the row group.
    """
    reader = RowGroupReader(files, read_cache, options.row_id_column)
    scan: Scan
    if options.row_shuffle_seed is None:
        scan = SequentialScan(reader, stream.slices, options, budget)
    else:
        scan = ShuffledScan(reader, stream.slices, options, budget, epoch)
    try:
        yield from _batches(scan, stream, options)
    finally:
        scan.close()
        reader.close()


def _batches(scan: Scan, stream: StreamAssignment, options: ReadOptions) -> Iterator[Batches | StreamEnd]:
    """Cut chunks into batches that span row groups, shards and files."""
    batcher = Batcher(stream.stream, options.batch_size)
    for chunk in scan.chunks():
        batcher.add(chunk)
        del chunk  # it must be gone before the next one is read
        for part in batcher.full_batches():
            yield Batches(join(part.slices), part.receipts, scan.take_bytes_read(), part.lease)
            del part
    if batcher.rows and not options.drop_last:
        part = batcher.take(batcher.rows)
        yield Batches(join(part.slices), part.receipts, scan.take_bytes_read(), part.lease)
    batcher.release()
    end = Receipt(stream.stream, len(stream.slices), 0, rows=0, rows_dropped=batcher.rows)
    yield StreamEnd(end, scan.take_bytes_read())
