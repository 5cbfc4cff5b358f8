"""Row groups to Arrow tables: asked for ahead of need, decoded side by side, handed over in order."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from torch_dataloader_utils.columns.arrow import takeable, width
from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.formats.base import OpenedFiles
from torch_dataloader_utils.planning.manifest import DataFile, Split
from torch_dataloader_utils.reading.decoder import Decoder
from torch_dataloader_utils.reading.fetcher import FETCHES, Fetcher

__all__ = ["Cursor", "RowGroupPlace", "RowGroupReader"]


NONE_DELETED = np.empty(0, dtype=np.int64)


ROW_ID_BYTES = 8


MOST_DECODERS = 4
"""Row groups that are decoded at once, if there are processors for it: a row group of few columns keeps few busy."""


@dataclass(frozen=True, slots=True)
class RowGroupPlace:
    """A row group and where its rows lie.

    Attributes:
        number: Number of the row group in its file.
        first_row: The file's rows before it, without deleted ones.
        rows: Its rows, without deleted ones; where rows are not counted, more than it can have.
    """

    number: int
    first_row: int
    rows: int


class RowGroupReader:
    """Reads row groups; keeps the files it read last open. One to a stream.

    Args:
        opened_files: The data files.
        row_id_column: Name of an int64 column to add, each row's place among all rows of the manifest; or None.
    """

    def __init__(self, opened_files: OpenedFiles, row_id_column: str | None = None) -> None:
        self._opened_files = opened_files
        self._row_id_column = row_id_column
        self._schema = opened_files.schema
        if row_id_column is not None:
            self._schema = opened_files.schema.append(pa.field(row_id_column, pa.int64()))
        self._places: dict[str, tuple[RowGroupPlace, ...]] = {}
        self._first_rows = opened_files.manifest.first_rows
        self._files = {file.path: file for file in opened_files.manifest.files}

        codec = self._codec = opened_files.format.codec(opened_files)
        self._measures = cache(lambda path: codec.layout(path).measures())  # small, and asked for in any order
        self._fetcher = (
            None if opened_files.storage.is_local else Fetcher(opened_files.storage, opened_files.files, codec.layout)
        )
        count = min(MOST_DECODERS, pa.cpu_count())
        self._new_decoder = partial(Decoder, opened_files, codec, self._fetcher)
        self._decoders = [self._new_decoder() for _ in range(count)]
        self._decoded: defaultdict[tuple[str, int], deque[Future[pa.Table]]] = defaultdict(deque)

    @property
    def columns(self) -> int:
        """Number of columns of a table, the row id column included."""
        return len(self._schema)

    @property
    def knows_rows(self) -> bool:
        """Whether it is known how many rows are delivered of each row group."""
        return self._opened_files.unknown_rows is None

    @property
    def most_asked(self) -> int:
        """How many row groups to ask for ahead: those to decode while another is worked on, or many to fetch."""
        return FETCHES if self._fetcher is not None else len(self._decoders) + 1

    def expect(self, splits: Iterable[Split]) -> None:
        """Begin to read what is needed to know of files before any of their row groups can be asked for."""
        self._codec.expect(split.path for split in splits)

    def row_groups(self, split: Split) -> list[RowGroupPlace]:
        """Return the row groups that make up a split, in order."""
        if split.path not in self._places:
            self._places[split.path] = tuple(_places(self._files[split.path]))
        places = self._places[split.path]
        start = bisect_left(places, split.row_offset, key=lambda place: place.first_row)
        stop = bisect_left(places, split.row_offset + split.row_length, key=lambda place: place.first_row)
        return [place for place in places[start:stop] if place.rows]

    def full_path(self, path: str) -> str:
        """Return a file's path for people."""
        return self._opened_files.manifest.full_path(path)

    # How large it is -----------------------------------------------------------------------------------------------

    def stored_bytes(self, path: str, place: RowGroupPlace) -> int:
        """Return the compressed bytes that reading a row group takes from storage."""
        return self._measures(path).stored[place.number]

    def fetched_bytes(self, path: str, place: RowGroupPlace) -> int:
        """Return the bytes that are in memory before a row group is decoded."""
        return 0 if self._fetcher is None else self.stored_bytes(path, place)

    def knows_sizes(self, path: str) -> bool:
        """Whether something was decoded of all columns that have no fixed width: footers tell too little, texts do."""
        measures = self._measures(path)
        return measures.rows is not None or all(name in self._opened_files.row_bytes for name in measures.variable)

    def expected_rows(self, path: str, place: RowGroupPlace) -> int:
        """Return the rows of a row group, or about how many they are where they are not counted."""
        expected = self._measures(path).rows
        return place.rows if expected is None else expected[place.number]

    def decoded_bytes(self, path: str, place: RowGroupPlace) -> int:
        """Return how large a row group will be in memory: exactly for numbers, by what others came to for the rest.

        Rows that are deleted are decoded before they are left out.
        """
        measures = self._measures(path)
        rows = self.expected_rows(path, place) + len(self._deleted(path, place))
        size = rows * (measures.row_bytes + self._added_bytes(path))
        for name, sizes in measures.variable.items():
            size += max(rows * self._opened_files.row_bytes.get(name, 0), sizes[place.number])
        return max(1, int(size))

    def _added_bytes(self, path: str) -> float:
        """Return what a row takes in columns that the file does not have."""
        sources = self._opened_files.projection(path).sources
        added = sum(
            width(field.type)
            for field, opened_files in zip(self._opened_files.needed, sources, strict=True)
            if opened_files is None
        )
        return added + (0 if self._row_id_column is None else ROW_ID_BYTES)

    def held_bytes(self, table: pa.Table) -> int:
        """Return how large a table will be once it is converted."""
        booleans = sum(pa.types.is_boolean(column.type) for column in table.schema)
        return int(table.nbytes + len(table) * booleans)

    # Reading -------------------------------------------------------------------------------------------------------

    def ask_for(self, path: str, place: RowGroupPlace, *, whole: bool) -> None:
        """Begin to fetch a row group that is to be read soon, and to decode it unless it is to be read in slices."""
        if self._fetcher is not None:
            self._fetcher.ask_for(path, place.number)
        if whole:
            # Two slices of one shard may follow one another, and ask for the same row group.
            self._decoded[path, place.number].append(self._next_decoder().whole(path, place.number))

    def read(self, path: str, place: RowGroupPlace) -> pa.Table:
        """Return the rows that the filter leaves of a row group that was asked for, in file order.

        Args:
            path: The file, relative to the root.
            place: The row group.

        Returns:
            The columns of the opened files's schema, and the row ids last where asked for.

        Raises:
            FileNotFoundError: If the file is gone.
            UnreadableFileError: If it changed, is damaged, or cannot be read.
        """
        with self._errors(path, place):
            table = self._decoded[path, place.number].popleft().result()
            self._require_all(path, place, table.num_rows)
            self._learn(table)
            return self._finished(table, path, place, 0)[0]

    def read_in_pieces(self, path: str, place: RowGroupPlace, rows: int) -> Iterator[tuple[pa.Table, int]]:
        """Yield a row group in slices. It was asked for, but not as a whole.

        Args:
            path: The file, relative to the root.
            place: The row group.
            rows: Rows of a slice, at most.

        Yields:
            The rows of a slice that the filter leaves, and how many it had before.

        Raises:
            FileNotFoundError: If the file is gone.
            UnreadableFileError: If it changed, is damaged, or cannot be read.
        """
        with self._errors(path, place):
            done = 0
            for table in self._next_decoder().slices(path, place.number, rows):
                self._learn(table)
                finished, count = self._finished(table, path, place, done)
                yield finished, count if self._counts else 0
                done += table.num_rows
            self._require_all(path, place, done)
        if not self._counts:  # only the end of a row group tells that it has no more
            yield self._schema.empty_table(), place.rows

    def cursor(self, path: str, place: RowGroupPlace, rows: int) -> Cursor:
        """Begin to read a row group part by part, beside others.

        Args:
            path: The file, relative to the root.
            place: The row group.
            rows: About how many rows a part has.
        """
        if self._fetcher is not None:
            self._fetcher.ask_for(path, place.number)
        decoder = self._new_decoder(thread=self._next_decoder().thread)
        return Cursor(self, decoder, path, place, rows)

    def stored_rows(self, path: str, place: RowGroupPlace, rows: int) -> int:
        """Return how many rows of the file a row group's first rows are, deleted ones among and before them included.

        Those that follow the last of them are left out, unless all are asked for.
        """
        deleted = self._deleted(path, place)
        if rows == place.rows or not len(deleted):
            return rows + (len(deleted) if rows == place.rows else 0)
        before = deleted - np.arange(len(deleted))  # rows that are not deleted before each deleted one
        return rows + int(np.searchsorted(before, rows, side="left"))

    def finished_part(self, path: str, place: RowGroupPlace, first: int, part: Future[pa.Table], rows: int) -> pa.Table:
        """Return the rows that are delivered of a part of a row group, in file order.

        Args:
            path: The file.
            place: The row group.
            first: The row group's stored rows before the part.
            part: The part.
            rows: How many stored rows it should have.
        """
        with self._errors(path, place):
            table = part.result()
            if table.num_rows != rows:
                self._require_all(path, place, first + table.num_rows)
            self._learn(table)
            return self._finished(table, path, place, first)[0]

    def close(self) -> None:
        """Close the files that are open; what is being fetched and decoded is waited for."""
        if self._fetcher is not None:
            self._fetcher.close()
        for decoder in self._decoders:
            decoder.close()
        self._codec.close()
        pa.default_memory_pool().release_unused()  # what threads that ended leave behind would pile up over epochs

    def _next_decoder(self) -> Decoder:
        """Return the decoder whose turn it is: they take turns, as row groups are read in turn."""
        self._decoders.append(self._decoders.pop(0))
        return self._decoders[-1]

    def _errors(self, path: str, place: RowGroupPlace) -> AbstractContextManager[None]:
        return self._opened_files.storage.errors_at(f"row group {place.number} of {self.full_path(path)}")

    @property
    def _counts(self) -> bool:
        """Whether the files tell how many rows they have."""
        return self._opened_files.format.unknown_rows is None

    def _require_all(self, path: str, place: RowGroupPlace, rows: int) -> None:
        expected = place.rows + len(self._deleted(path, place))
        if rows != expected and self._counts:
            msg = f"row group {place.number} of {self.full_path(path)} has {rows} rows, not {expected}"
            raise UnreadableFileError(msg)

    def _deleted(self, path: str, place: RowGroupPlace) -> npt.NDArray[np.int64]:
        """Return the deleted rows of a row group, counted from its first row."""
        deletes = self._opened_files.deletes.get(path)
        return NONE_DELETED if deletes is None else deletes.within(place.number)

    def _finished(self, table: pa.Table, path: str, place: RowGroupPlace, first: int) -> tuple[pa.Table, int]:
        """Return the rows to deliver of a row group's stored rows from `first` on, and how many are not deleted."""
        opened_files = self._opened_files
        rows = table.num_rows
        table = takeable(
            opened_files.projection(path).apply(table, opened_files.needed, opened_files.constants_of(path))
        )
        deleted = self._deleted(path, place)
        begin, end = np.searchsorted(deleted, [first, first + rows])
        if end > begin:
            kept = np.ones(rows, dtype=bool)
            kept[deleted[begin:end] - first] = False
            table = table.filter(pa.array(kept))
        count = rows - int(end - begin)
        if self._row_id_column is not None:
            first_id = self._first_rows[path] + place.first_row + first - int(begin)
            table = table.append_column(self._row_id_column, _row_ids(first_id, count))
        if opened_files.filter is not None:
            table = table.filter(_mask(table, opened_files.filter))
        return pa.table([table[name] for name in self._schema.names], schema=self._schema), count

    def _learn(self, table: pa.Table) -> None:
        """Learn how much rows take in columns of no fixed width."""
        known = self._opened_files.row_bytes
        for name in table.column_names if len(table) else ():
            if not width(table.schema.field(name).type):
                known[name] = max(known.get(name, 0), table[name].nbytes / len(table))


class Cursor:
    """A row group that is read part by part, out of a file that nobody else reads.

    Args:
        reader: The reader that made it.
        decoder: Decodes it, and nothing else.
        path: The file.
        place: The row group.
        rows: About how many rows a part has.
    """

    def __init__(self, reader: RowGroupReader, decoder: Decoder, path: str, place: RowGroupPlace, rows: int) -> None:
        self._reader = reader
        self._decoder = decoder
        self._parts = decoder.parts(path, place.number, rows)
        self._path = path
        self._place = place
        self._first = 0  # stored rows that were taken
        self._last = 0  # rows, without deleted ones, that were asked for
        self._asked: deque[tuple[Future[pa.Table], int]] = deque()

    def skip(self, rows: int) -> None:
        """Leave out the first rows."""
        self._first = self._advance(rows)
        self._parts.skip(self._first)

    def ask(self, rows: int) -> None:
        """Begin to decode the next rows."""
        stored = self._advance(rows)
        self._asked.append((self._parts.next(stored), stored))

    def take(self) -> pa.Table:
        """Return the rows that the filter leaves of the first part that was asked for and not taken."""
        part, stored = self._asked.popleft()
        table = self._reader.finished_part(self._path, self._place, self._first, part, stored)
        self._first += stored
        return table

    def _advance(self, rows: int) -> int:
        """Go on by some rows, and return how many stored rows these are."""
        before = self._reader.stored_rows(self._path, self._place, self._last)
        self._last += rows
        return self._reader.stored_rows(self._path, self._place, self._last) - before

    def close(self) -> None:
        """Decode nothing more; what is being decoded is waited for."""
        wait([part for part, _ in self._asked if not part.cancel()])
        self._decoder.close()


def _places(file: DataFile) -> Iterator[RowGroupPlace]:
    first = 0
    for number, group in enumerate(file.row_groups):
        yield RowGroupPlace(number, first, group.rows)
        first += group.rows


def _mask(table: pa.Table, filters: pc.Expression) -> pa.ChunkedArray:
    """Evaluate a filter row by row; a scan without threads keeps the order."""
    return pads.dataset(table).scanner(columns={"keep": filters}, use_threads=False).to_table()["keep"]


def _row_ids(first: int, rows: int) -> pa.Array:
    return pa.array(np.arange(first, first + rows, dtype=np.int64))
