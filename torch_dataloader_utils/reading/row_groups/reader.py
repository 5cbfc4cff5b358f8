"""Row groups to Arrow tables: requested ahead of need, decoded several at once, returned in order."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import cache, partial
from itertools import accumulate, groupby, pairwise
from operator import attrgetter
from typing import Any
from weakref import ReferenceType

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torch_dataloader_utils.columns.arrow import sliced, stacked
from torch_dataloader_utils.columns.arrow_memory import release_unused
from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.formats.cpus import MOST_DECODERS, decoding_threads
from torch_dataloader_utils.formats.opened_files import OpenedFiles
from torch_dataloader_utils.formats.read_cache import ReadCache
from torch_dataloader_utils.planning.excluded import NOTHING_EXCLUDED, EpochExclusions
from torch_dataloader_utils.planning.manifest import Split
from torch_dataloader_utils.planning.token_counts import TokenCounts
from torch_dataloader_utils.reading.arrow_threads import wait_for_release
from torch_dataloader_utils.reading.row_groups.cursor import Cursor
from torch_dataloader_utils.reading.row_groups.decoder import Decoded, DecodedTables, Decoder
from torch_dataloader_utils.reading.row_groups.fetcher import FETCHES, Fetcher
from torch_dataloader_utils.reading.row_groups.file_row_group import FileRowGroup, row_groups_of
from torch_dataloader_utils.reading.row_groups.made_rows import MadeRows
from torch_dataloader_utils.reading.row_groups.selection import RowSelection
from torch_dataloader_utils.reading.row_groups.sizes import RowGroupSizes
from torch_dataloader_utils.reading.work import Wait
from torch_dataloader_utils.storage.request_size import RequestSize

ROW_NUMBERS_COLUMN = "\ufdd0row numbers"
"""The name of the column of row numbers where the rows that a filter keeps are looked up."""


class RowGroupReader:
    """Reads the row groups of one stream; keeps the files that it read last open.

    The row id column is an int64 column to add: each row's number among all rows of the manifest. `adds_marks` says
    whether to add the rows' marks as well. Excluded rows that the plan leaves out are left out; with `flags_removed`,
    the column `REMOVED_COLUMN` flags those that batches are to lose. `encodable` are columns that may be dictionaries
    in some tables, and their values in others, unless the reader needs the values itself.

    Attributes:
        sizes: How large its row groups are.
    """

    def __init__(
        self,
        files: OpenedFiles,
        read_cache: ReadCache,
        row_id_column: str | None = None,
        excluded: EpochExclusions = NOTHING_EXCLUDED,
        *,
        adds_marks: bool = False,
        flags_removed: bool = False,
        encodable: Collection[str] = (),
    ) -> None:
        self._files = files
        self._excluded = excluded
        self._selection = RowSelection(
            files, row_id_column, excluded, adds_marks=adds_marks, flags_removed=flags_removed
        )
        file_of = files.manifest.file
        stored = files.stored_rows or {}
        self._groups = cache(lambda path: row_groups_of(file_of(path), stored.get(path)))
        self._made = MadeRows(files)
        self._read_cache = read_cache
        self._filter_reader: RowGroupReader | None = None
        self._kept = cache(self._read_kept)

        may_be_encoded = set() if files.makes_rows else set(encodable) - self._selection.compared
        codec = self._codec = files.format.codec(files, read_cache.footers, may_be_encoded)
        self._fetcher = Fetcher(files.storage, files.files, codec.layout, files.row_group_name)
        self._held: list[ReferenceType[Any]] = []  # of files that were closed
        self._new_decoder = partial(Decoder, files, codec, self._fetcher, read_cache.reads, self._held)
        self._decoders = [self._new_decoder() for _ in range(min(MOST_DECODERS, decoding_threads()))]
        self._decoded: defaultdict[tuple[FileRowGroup, ...], deque[DecodedTables]] = defaultdict(deque)
        self._waits: list[Wait] = []
        self.sizes = RowGroupSizes(
            files,
            codec,
            read_cache.sizes,
            self._selection,
            fetches=self._fetcher.fetches,
            on_wait=self._waits.append,
        )

    @property
    def columns(self) -> int:
        """Number of columns of a table, those that are added included."""
        return len(self._files.delivered_schema if self.makes_rows else self._selection.schema)

    @property
    def makes_rows(self) -> bool:
        """Whether the rows that are delivered are made of those that are read."""
        return self._files.makes_rows

    @property
    def knows_rows(self) -> bool:
        """Whether it is known how many rows are delivered of each row group."""
        return self._files.unknown_rows_read is None and self._excluded.unknown_rows is None

    def most_requested(self, group: FileRowGroup) -> int:
        """Return how many to request ahead: as many as can be fetched at once, or decoded while one is used."""
        return FETCHES if self._fetcher.fetches(group.path) else self.decoders + 1

    def expect(self, splits: Iterable[Split]) -> None:
        """Begin to read what has to be known of files before any of their row groups can be requested."""
        self._codec.expect(self._files.path_of(split) for split in splits)

    def row_groups(self, split: Split) -> list[FileRowGroup]:
        """Return the row groups that make up a split, in order; those without rows are left out."""
        groups = self._groups(self._files.path_of(split))
        start = bisect_left(groups, split.row_offset, key=attrgetter("first_row"))
        stop = bisect_left(groups, split.row_offset + split.row_length, key=attrgetter("first_row"))
        return [group for group in groups[start:stop] if group.rows]

    @property
    def tokens(self) -> TokenCounts | None:
        """The tokens of documents, if they were counted ahead."""
        return self._files.tokens

    def rows_left(self, group: FileRowGroup) -> int:
        """Return the rows of a row group that the plan does not leave out."""
        left_out = self._excluded.left_out
        return left_out.left(Split(group.path, group.first_row, group.rows)) if left_out else group.rows

    def has_all_rows(self, group: FileRowGroup) -> bool:
        """Whether neither the filter nor the plan leaves out a row of a row group."""
        return self.knows_rows and self.rows_left(group) == group.unfiltered

    def name(self, group: FileRowGroup) -> str:
        """Return a row group's name for messages."""
        return self._files.row_group_name(group.path, group.number, group.count)

    def joins(self, path: str) -> bool:
        """Whether consecutive row groups of a file may be read as one, as many as have room.

        All columns have to be of fixed width: footers do not tell how large strings in dictionaries become, and many
        row groups would be estimated too small together; large strings are decoded faster by themselves, and nested
        columns would be copied to join them. Where bytes are fetched, each row group is decoded as soon as its own have
        come. A transform gets each by itself.
        """
        return self.sizes.has_fixed_widths and self._can_join(path)

    def joins_small(self, group: FileRowGroup) -> bool:
        """Whether a row group may be read as one with a few others, also of other files, if all of them are small.

        It may have strings, too, once some of each column were decoded, which tells how large they become.
        """
        can_join = self.sizes.has_single_values and self._can_join(group.path) and self.sizes.are_known(group)
        return can_join and self.sizes.are_as_before(group)

    def _can_join(self, path: str) -> bool:
        return self._codec.joins_row_groups and not self.makes_rows and not self._fetcher.fetches(path)

    def has_deleted(self, path: str) -> bool:
        """Whether some stored rows of a file are deleted."""
        return path in self._files.deletes

    @property
    def decoders(self) -> int:
        """How many row groups are decoded at once."""
        return len(self._decoders)

    def single(self, group: FileRowGroup) -> list[FileRowGroup]:
        """Return the row groups that are read as one, each by itself."""
        return [group] if group.count == 1 else [self.group(group.path, number) for number in group.numbers]

    # Reading -------------------------------------------------------------------------------------------------------

    @property
    def request_size(self) -> RequestSize | None:
        """How many bytes of consecutive row groups of a file to receive by one request; None for no more than one."""
        return self._fetcher.request_size

    def request(self, group: FileRowGroup, following: Sequence[FileRowGroup] = (), *, whole: bool) -> None:
        """Begin to fetch a row group that is read soon, and to decode it unless it is read in parts.

        `following` are those of its file that are requested next, in that order, and may be received by its request.
        """
        self._fetcher.request(group.path, group.number, [later.number for later in following])
        if whole:
            decoded = self._next_decoder().whole(group.path, group.numbers, self.sizes.stored_bytes(group))
            # Two slices of one shard may follow one another and request the same row group.
            self._decoded[group,].append(decoded)

    def request_together(self, groups: Sequence[FileRowGroup]) -> None:
        """Begin to decode several row groups, which `joins` allows, file by file, for `read_together`."""
        wanted = [
            (path, [number for group in of_file for number in group.numbers])
            for path, of_file in groupby(groups, key=attrgetter("path"))
        ]
        decoded = self._next_decoder().of_files(wanted, sum(map(self.sizes.stored_bytes, groups)))
        self._decoded[tuple(groups)].append(decoded)

    def receives(self, group: FileRowGroup) -> bool:
        """Whether a request was made whose answer goes on with a row group."""
        return self._fetcher.receives(group.path, group.number)

    def prepare(self, groups: Sequence[FileRowGroup]) -> None:
        """Let the answer begin that has consecutive row groups of a file, which are requested later."""
        self._fetcher.prepare(groups[0].path, [group.number for group in groups])

    def cut(self, group: FileRowGroup) -> None:
        """Receive no more by the request that has a row group; it and those that follow are requested by others."""
        self._fetcher.cut(group.path, group.number)

    def read(self, group: FileRowGroup) -> pa.Table:
        """Return the rows that the filter keeps of a row group that was requested, in file order.

        The columns are those of the files' schema, and last the row ids and marks if they are added. With a transform,
        they are its rows and its columns.

        Raises:
            FileNotFoundError: If the file is gone.
            UnreadableFileError: If it changed, is damaged, or cannot be read.
            TransformError: If the transform fails.
        """
        began = time.perf_counter()
        with self._errors(group):
            decoded = list(self._take_decoded(group))
            table = stacked([each.table for each in decoded])
            self._require_all(group, table.num_rows)
            finished = self._selected(group, table, 0)[0]
        self._note_wait(began, decoded[-1])
        return self._made.of(group, finished)

    def read_together(self, groups: Sequence[FileRowGroup]) -> list[pa.Table]:
        """Return what `read` returns of each of several row groups, which were requested together.

        An error may name another of them that is in the same file.
        """
        tables, decoded = [], self._take_decoded(*groups)
        for _, of_file in groupby(groups, key=attrgetter("path")):
            began, own = time.perf_counter(), tuple(of_file)
            with self._errors(own[0]):
                stored = next(decoded)
                rows = [self._selection.stored_rows(group) for group in own]
                stops = list(accumulate(rows, initial=0))
                self._require_all(own[-1], rows[-1] + stored.table.num_rows - stops[-1])
                for group, (start, stop) in zip(own, pairwise(stops), strict=True):
                    part = stored.table if len(own) == 1 else sliced(stored.table, start, stop)
                    tables.append(self._selected(group, part, 0)[0])
            self._note_wait(began, stored)
        return tables

    def read_as_decoded(self, group: FileRowGroup) -> Iterator[tuple[pa.Table, bool]]:
        """Yield what `read` returns in the tables that it is decoded in, and whether each is the last one.

        A transform gets the whole row group: it may make other rows of its parts.
        """
        if self.makes_rows:
            yield self.read(group), True
            return
        done, began = 0, time.perf_counter()
        with self._errors(group):
            for decoded in self._take_decoded(group):
                done += decoded.table.num_rows
                if decoded.is_last or done > self._selection.stored_rows(group):
                    self._require_all(group, done)
                finished = self._selected(group, decoded.table, done - decoded.table.num_rows)[0]
                self._note_wait(began, decoded)
                yield finished, decoded.is_last
                del decoded, finished
                began = time.perf_counter()

    def _take_decoded(self, *groups: FileRowGroup) -> DecodedTables:
        waiting = self._decoded[groups]
        decoded = waiting.popleft()
        if not waiting:
            del self._decoded[groups]
        return decoded

    def read_in_parts(self, group: FileRowGroup, rows: Callable[[], int]) -> Iterator[tuple[pa.Table, int]]:
        """Yield a row group in parts of at most as many rows as are asked for. It was requested, but not as a whole.

        Each part is the rows that the filter keeps, and how many there were before it and before excluded rows were
        left out. Raises what `read` raises.
        """
        if self._made.are_packed:
            parts = [self._made.transformed(group, stored) for stored, _ in self._stored_parts(group, rows)]
            yield self._made.packed(group, pa.concat_tables(parts)), group.rows
            return
        made = 0
        for stored, count in self._stored_parts(group, rows):
            table = self._made.transformed(group, stored)
            del stored
            made += table.num_rows
            self._made.require_counted(group, made, is_whole=False)
            yield table, count
            del table
        self._made.require_counted(group, made, is_whole=True)

    def _stored_parts(self, group: FileRowGroup, rows: Callable[[], int]) -> Iterator[tuple[pa.Table, int]]:
        with self._errors(group):
            done, began = 0, time.perf_counter()
            for decoded in self._next_decoder().in_parts(group.path, group.number, rows):
                finished, count = self._selected(group, decoded.table, done)
                done += decoded.table.num_rows
                self._note_wait(began, decoded)
                yield finished, count if self._counts else 0
                began = time.perf_counter()
            self._require_all(group, done)
        if not self._counts:  # only the end of a row group tells that it has no more
            yield self._selection.schema.empty_table(), group.rows

    def cursor(self, group: FileRowGroup, rows: int, first: int) -> Cursor:
        """Begin to read a row group part by part, from a first row on, while others are read.

        A part has about so many rows.
        """
        self._fetcher.request(group.path, group.number)
        decoder = self._new_decoder(thread=self._next_decoder().thread)
        return Cursor(
            decoder,
            group,
            rows,
            first,
            stored_rows=partial(self.stored_rows, group),
            finished=partial(self.finished_part, group),
        )

    def stored_rows(self, group: FileRowGroup, rows: int) -> int:
        """Return how many rows of the file a row group's first rows are, with the deleted ones among and before them.

        Deleted rows that follow the last of them count only if these are all rows of the row group.
        """
        deleted = self._selection.deleted(group)
        if rows == group.rows:
            return group.unfiltered + len(deleted)
        if self._files.stored_rows is not None and group.rows < group.unfiltered:
            rows = 0 if not rows else int(self._kept(group)[rows - 1]) + 1
        before = deleted - np.arange(len(deleted))  # rows that are not deleted before each deleted one
        return rows + int(np.searchsorted(before, rows, side="left"))

    def finished_part(self, group: FileRowGroup, first: int, part: Future[Decoded], rows: int) -> pa.Table:
        """Return the rows that are delivered of a part of a row group, in file order.

        The part should have `rows` stored rows, and `first` are before it.
        """
        began = time.perf_counter()
        with self._errors(group):
            decoded = part.result()
            if decoded.table.num_rows != rows:
                self._require_all(group, first + decoded.table.num_rows)
            finished = self._selected(group, decoded.table, first)[0]
        self._note_wait(began, decoded)
        return self._made.transformed(group, finished)

    def take_waits(self) -> tuple[Wait, ...]:
        """Return when rows were waited for, since the last call."""
        waits = tuple(self._waits)
        self._waits.clear()  # the list stays the one that `sizes` adds to
        return waits

    def _note_wait(self, began: float, decoded: Decoded) -> None:
        """Note that rows were waited for until now."""
        self._waits.append(Wait(began, max(began, decoded.fetched), time.perf_counter()))

    def close(self) -> None:
        """Close the open files; wait for what is being fetched and decoded."""
        if self._filter_reader is not None:
            self._filter_reader.close()
        self._fetcher.close()
        for decoder in self._decoders:
            decoder.close()
        self._codec.close()
        wait_for_release(self._held)
        release_unused()  # what threads that ended leave behind would pile up over epochs
        del self._kept  # which refers to this reader: it would wait for the collector

    def _next_decoder(self) -> Decoder:
        """Return the decoder with the fewest bytes of whole row groups; of several the one returned longest ago."""
        decoder = min(self._decoders, key=attrgetter("pending_bytes"))
        self._decoders.remove(decoder)
        self._decoders.append(decoder)
        return decoder

    def _errors(self, group: FileRowGroup) -> AbstractContextManager[None]:
        return self._files.storage.errors_at(self.name(group))

    @property
    def _counts(self) -> bool:
        """Whether the files tell how many rows they have."""
        return self._files.format.unknown_rows is None

    def _require_all(self, group: FileRowGroup, rows: int) -> None:
        expected = self._selection.stored_rows(group)
        if rows != expected and self._counts:
            raise UnreadableFileError(f"{self.name(group)} has {rows} rows, not {expected}")

    def _read_kept(self, group: FileRowGroup) -> npt.NDArray[np.int64]:
        """Return the rows that a counted filter keeps of a row group, counted from its first row, deleted ones not."""
        if self._filter_reader is None:
            files = self._files.for_filter_alone()
            self._filter_reader = RowGroupReader(files, self._read_cache, ROW_NUMBERS_COLUMN)
        unfiltered = self._filter_reader.group(group.path, group.number)
        self._filter_reader.request(unfiltered, whole=True)
        numbers = self._filter_reader.read(unfiltered)[ROW_NUMBERS_COLUMN].to_numpy()
        kept: npt.NDArray[np.int64] = numbers - self._files.first_unfiltered[group.path] - group.first_unfiltered
        return kept

    def _selected(self, group: FileRowGroup, table: pa.Table, first: int) -> tuple[pa.Table, int]:
        """Return what is delivered of a row group's stored rows from `first` on, and how many are not deleted."""
        self.sizes.learn(group, table, first)
        return self._selection.apply(group, table, first)

    def group(self, path: str, number: int) -> FileRowGroup:
        """Return a row group of a file."""
        return self._groups(path)[number]
