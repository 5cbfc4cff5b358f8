"""The steps of a rank where only reading tells their rows: the filter's columns are read, and nothing is delivered.

The rows go the way that they take for training, without the columns that the filter does not need: so the steps are
the same. Where rows are not counted, a row's number is the first byte of its range and its number in that range.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from torch_dataloader_utils.checkpoint.progress import Progress, StreamProgress
from torch_dataloader_utils.columns.options import ColumnOptions
from torch_dataloader_utils.columns.transform import ColumnTransform
from torch_dataloader_utils.formats.opened_files import OpenedFiles
from torch_dataloader_utils.formats.read_cache import ReadCache
from torch_dataloader_utils.formats.schema import Projection
from torch_dataloader_utils.loader.contents import PartsOfPass, round_robin
from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.planning.excluded import EpochExclusions
from torch_dataloader_utils.planning.ledger.segment import Segment
from torch_dataloader_utils.planning.ledger.shard_order import FileRows, Integers
from torch_dataloader_utils.planning.manifest import DataFile, Split
from torch_dataloader_utils.planning.plan import ShardSlice
from torch_dataloader_utils.reading.batching import Batch
from torch_dataloader_utils.reading.row_groups.file_row_group import FileRowGroup
from torch_dataloader_utils.reading.row_groups.reader import RowGroupReader
from torch_dataloader_utils.reading.scan import ReadOptions
from torch_dataloader_utils.workers.producer import Stream


@dataclass(frozen=True, slots=True)
class ScannedStep:
    """A step that was read.

    Attributes:
        step: The step.
        stream: The stream of its rows.
        rows: The numbers of its rows among all rows of the manifest.
        slices: The parts of the stream's slices that hold the rows.
        position: The number of the slice, among all of the stream, that is delivered after the step.
    """

    step: int
    stream: int
    rows: Integers
    slices: tuple[ShardSlice, ...]
    position: int


class StepScan:
    """Reads the steps of a rank from a progress on: only what the filter needs.

    Attributes:
        segment: The segment of the steps.
        bytes_read: Compressed bytes of the row groups that were read so far, in the columns that were needed.
        progress: Where the rank stands after the last step that was read; None before the first.
    """

    def __init__(self, files: OpenedFiles, options: ReadOptions, segment: Segment) -> None:
        self.bytes_read = 0
        self.progress: Progress | None = None
        self.segment = segment
        self._files = _filter_alone(files)
        row_ids = "row"
        while row_ids in self._files.needed.names:
            row_ids += "_"
        self._row_ids = row_ids
        self._options = replace(
            options,
            batch_size=segment.batch_size,
            drop_last=segment.drop_last,
            transform=ColumnTransform.of(self._files.schema, ColumnOptions("numpy"), row_ids),
            row_id_column=row_ids,
            fingerprint=False,
        )

    def steps(self, progress: Progress) -> Generator[ScannedStep, None, None]:
        """Yield each step from a progress on."""
        excluded = EpochExclusions(self.segment.left_out)
        progress = progress.without_skips().rebased()
        parts = PartsOfPass(0, self.segment.epoch, progress, self.segment.topology.processes, excluded)
        cache = ReadCache.of_opened(self._files.footers)
        stream = Stream(self._files, cache, self._options, collate_fn=None, seed=0, rank=0)
        readers = [stream.batches(assignment) for [assignment] in parts.assigned(parts.first).values()]
        try:
            for content in round_robin(readers):
                self.bytes_read += 0 if content.work is None else content.work.counters.bytes_read
                if isinstance(content, Batch):
                    before, progress = progress, progress.advanced(content.receipt)
                    self.progress = progress
                    yield self._step(before.batches_delivered, before, content)
        finally:
            for reader in readers:
                reader.close()

    def _step(self, step: int, before: Progress, batch: Batch) -> ScannedStep:
        receipt = batch.receipt
        stream = before.streams[receipt.stream]
        slices = _window(stream, receipt)
        done, _ = stream._replace(position=receipt.position, rows_delivered=receipt.rows_delivered).reached
        return ScannedStep(step, receipt.stream, np.asarray(batch.data[self._row_ids]), slices, done)

    # Rows of files ---------------------------------------------------------------------------------------------------

    def file_rows(self, rows: Integers) -> FileRows:
        """Return rows by file, given their numbers among all rows of the manifest."""
        manifest = self._files.manifest
        starts = np.array(list(manifest.first_rows.values()), dtype=np.int64)
        files = np.searchsorted(starts, rows, side="right") - 1
        paths = np.array(list(manifest.first_rows))
        numbers = rows - starts[files]
        if not manifest.counts_rows:
            for file in np.unique(files).tolist():
                of_file = files == file
                numbers[of_file] = self._counted(manifest.files[file], numbers[of_file])
        return FileRows(paths[files], numbers)

    def _counted(self, file: DataFile, numbers: Integers) -> Integers:
        """Return the numbers of rows in a file of uncounted text, given the numbers that they have here."""
        firsts = _first_rows(file)
        ranges = np.searchsorted(firsts, numbers, side="right") - 1
        counts = list(self._counts(file, range(int(ranges.max()))))
        before = np.cumsum([0, *counts])
        return before[ranges] + numbers - firsts[ranges]

    def uncounted(self, path: str, row: int) -> int | None:
        """Return the number that a row of uncounted text has here in its file; None if the file has fewer rows."""
        file = next(file for file in self._files.manifest.files if file.path == path)
        for first, count in zip(_first_rows(file).tolist(), self._counts(file), strict=False):
            if row < count:
                return int(first) + row
            row -= count
        return None

    def _counts(self, file: DataFile, numbers: Iterable[int] | None = None) -> Iterator[int]:
        """Read ranges of a file of uncounted text, and yield how many rows each has."""
        files = replace(self._files, filter=None, filter_columns=())
        # The row ids are there because a table without columns has no rows.
        reader = RowGroupReader(_filter_alone(files), ReadCache.of_opened(files.footers), self._row_ids)
        groups = {group.number: group for group in reader.row_groups(Split(file.path, 0, file.rows))}
        try:
            for number in range(len(file.row_groups)) if numbers is None else numbers:
                yield self._count(reader, groups[number]) if number in groups else 0
        finally:
            reader.close()

    def _count(self, reader: RowGroupReader, group: FileRowGroup) -> int:
        reader.request(group, whole=True)
        self.bytes_read += reader.sizes.stored_bytes(group)
        return int(reader.read(group).num_rows)


def _first_rows(file: DataFile) -> Integers:
    return np.cumsum([0, *[group.rows for group in file.row_groups[:-1]]])


def _filter_alone(files: OpenedFiles) -> OpenedFiles:
    """Return the files with the columns of their filter alone, none of which is delivered."""
    wanted = [number for number, name in enumerate(files.needed.names) if name in files.filter_columns]

    def narrowed(projection: Projection) -> Projection:
        sources = tuple(projection.sources[number] for number in wanted)
        return Projection(pa.schema([column for column in projection.stored if column.name in sources]), sources)

    return replace(
        files,
        schema=pa.schema([]),
        needed=pa.schema([files.needed.field(number) for number in wanted]),
        projections=tuple(map(narrowed, files.projections)),
        announced_nulls=None,
    )


def _window(stream: StreamProgress, receipt: Receipt) -> tuple[ShardSlice, ...]:
    """Return the parts of a stream's slices that a batch has, up to the slice of its last row."""
    position, stop = receipt.last
    slices: Sequence[ShardSlice] = stream.slices[stream.position : position + 1]
    first = max(slices[0].start, stream.rows_delivered)
    begun = [replace(slices[0], start=first), *slices[1:]]
    return (*begun[:-1], replace(begun[-1], stop=stop))
