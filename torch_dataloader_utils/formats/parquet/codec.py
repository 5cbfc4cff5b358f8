"""The row groups of Parquet files: which bytes they have, and how they are decoded; footers are read when needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.parquet.core import ParquetReader

from torch_dataloader_utils.columns.arrow import width
from torch_dataloader_utils.columns.arrow_memory import memory_pool
from torch_dataloader_utils.errors import ColumnError, UnreadableFileError
from torch_dataloader_utils.formats.base import Codec, FilesToRead, Layout, Measures, RowGroups
from torch_dataloader_utils.formats.concurrency import FOOTER_THREADS, OPEN_FILES
from torch_dataloader_utils.formats.cpus import uses_arrows_threads
from torch_dataloader_utils.formats.parquet.dictionaries import ReadDictionaries, StoredDictionaries
from torch_dataloader_utils.formats.parquet.footer import (
    AS_PARQUET_FILE,
    FooterReader,
    leaves_of,
    parse_footer,
    read_schema_of,
    row_groups_of,
    schema_of,
)
from torch_dataloader_utils.formats.parquet.metadata_file import described_columns, description_digest
from torch_dataloader_utils.formats.read_cache import FooterStore
from torch_dataloader_utils.storage.local_file import LocalFile

PARQUET_MR = re.compile(r"parquet-mr(?: version (\d+)\.(\d+)\.(\d+))?")

FIRST_WITH_WHOLE_SIZES = 1, 2, 9
"""The version of parquet-mr from which on a chunk's size has the header of its dictionary page."""

DICTIONARY_HEADER_BYTES = 100
"""How many bytes Arrow takes such a header to have, at most."""

PARQUET_CPP = "parquet-cpp"
"""What the name of Arrow's writer begins with in a footer."""

INT96 = "INT96"

INT96_ROWS = 1 << 16
"""Rows of which times are looked at together."""

LAST_NANOSECONDS = 2**63 - 1

END_BYTES = 8
"""Behind the footer: its length, and the mark of the format."""

LEAST_TOGETHER = 8
"""Of so many column chunks of a row group, Arrow reads those that are neighbours by one call of Python. Another thread
makes this call, which takes about as long as eight calls where nothing else keeps Python busy."""


class ParquetCodec(Codec):
    """Row groups decoded by pyarrow, by footers that are known or are read when they are needed."""

    joins_row_groups = True
    layout: Callable[[str], ParquetLayout]

    def __init__(
        self, files: FilesToRead, known: FooterStore, encodable: Collection[str] = (), *, verifies_checksums: bool
    ) -> None:
        self._files = files
        self._encodable = frozenset(encodable)
        self._encoded = known.encoded
        self._verifies_checksums = verifies_checksums
        self._footers = footers = FooterCache(files, known)

        def layout(path: str) -> ParquetLayout:
            columns = files.projection(path).stored.names
            key = path, tuple(columns)
            kept: ParquetLayout | None = known.parsed.get(key)
            if kept is None:
                content = footers[path]
                metadata, schema = files.parsed.get(path) or (parse_footer(content), None)
                kept = ParquetLayout(metadata, columns, schema)
                known.parsed.keep(key, kept, len(content))
            return kept

        self.layout = lru_cache(OPEN_FILES)(layout)

    def expect(self, paths: Iterable[str]) -> None:
        """Begin to read footers that are needed soon."""
        self._footers.expect(paths)

    def open(self, path: str, file: Any, local: LocalFile | None) -> _ParquetRowGroups:
        """Open a file."""
        if local is not None and not local.ends_with(self._footers[path]):
            raise UnreadableFileError(f"{self._files.manifest.full_path(path)} was rewritten since it was listed")
        layout = self.layout(path)

        def reader(**more: Any) -> ParquetReader:
            made = ParquetReader(memory_pool=memory_pool())  # ParquetFile would not say where to allocate
            made.open(
                file,
                metadata=layout.metadata,
                pre_buffer=isinstance(file, pa.PythonFile) and len(layout.leaves) >= LEAST_TOGETHER,
                page_checksum_verification=self._verifies_checksums,
                **AS_PARQUET_FILE,
                **more,
            )
            return made

        encoded = layout.dictionaries.encoded(self._encodable_of(path), self._encoded)
        row_groups = reader(read_dictionary=list(encoded.values()))
        times = None
        if layout.int96:
            by_arrow = str(layout.metadata.created_by).startswith(PARQUET_CPP)
            in_microseconds = reader(coerce_int96_timestamp_unit="us")
            times = _Int96Times(in_microseconds, layout.int96, row_groups if by_arrow else None)
        dictionaries = ReadDictionaries(file, layout.dictionaries, encoded)
        return _ParquetRowGroups(row_groups, layout.leaves, times, dictionaries, reader)

    def _encodable_of(self, path: str) -> dict[str, str]:
        """Return a file's names of columns that may be read as dictionaries, and the dataset's names of them."""
        if not self._encodable:
            return {}
        sources = list(zip(self._files.needed.names, self._files.projection(path).sources, strict=True))
        others = {source for name, source in sources if name not in self._encodable}
        return {source: name for name, source in sources if source is not None and source not in others}

    def close(self) -> None:
        """Read no more footers; wait for those that are being read."""
        self._footers.close()


@dataclass(frozen=True, slots=True)
class _ParquetRowGroups(RowGroups):
    """An open Parquet file, and the leaf columns that are needed of it.

    `looked_up` opens a reader that gives the values of dictionaries.
    """

    reader: ParquetReader
    leaves: list[int]
    times: _Int96Times | None
    dictionaries: ReadDictionaries
    looked_up: Callable[[], ParquetReader]

    def read(self, number: int) -> pa.Table:
        if self.times is not None:
            self.times.require_nanoseconds(range(number, number + 1))
        table = self.reader.read_row_group(number, column_indices=self.leaves, use_threads=uses_arrows_threads())
        return table if self.dictionaries.are_whole(table, [number]) else self._looked_up([number])

    def read_joined(self, numbers: Sequence[int]) -> pa.Table:
        if self.times is not None:
            self.times.require_nanoseconds(numbers)
        table = self.reader.read_row_groups(
            list(numbers), column_indices=self.leaves, use_threads=uses_arrows_threads()
        )
        return table if self.dictionaries.are_whole(table, numbers) else self._looked_up(numbers)

    def _looked_up(self, numbers: Sequence[int]) -> pa.Table:
        """Return rows of which the dictionaries that Arrow has returned do not have the values."""
        reader = self.looked_up()
        try:
            table = reader.read_row_groups(list(numbers), column_indices=self.leaves)
            return self.dictionaries.required(table)
        finally:
            reader.close()

    def batches(self, number: int, rows: int, *, use_threads: bool) -> Iterator[pa.RecordBatch]:
        if self.times is not None:
            self.times.require_nanoseconds(range(number, number + 1), rows)
        if self.dictionaries:
            return self._checked_batches(number, rows, use_threads=use_threads)
        return self._batches_of(self.reader, number, rows, use_threads=use_threads)

    def _batches_of(
        self, reader: ParquetReader, number: int, rows: int, *, use_threads: bool
    ) -> Iterator[pa.RecordBatch]:
        batches: Iterator[pa.RecordBatch] = reader.iter_batches(
            rows, [number], column_indices=self.leaves, use_threads=use_threads and uses_arrows_threads()
        )
        return batches

    def _checked_batches(self, number: int, rows: int, *, use_threads: bool) -> Iterator[pa.RecordBatch]:
        """Yield batches as `_looked_up` returns a table, without a reference to any."""
        batches = self._batches_of(self.reader, number, rows, use_threads=use_threads)
        first = list(islice(batches, 1))
        # Each batch has a copy of the whole dictionary.
        if all(self.dictionaries.are_whole(one, [number]) and not self.dictionaries.are_large(one) for one in first):
            while first:
                yield first.pop()
            yield from map(self.dictionaries.required, batches)
            return
        del first, batches
        reader = self.looked_up()
        try:
            batches = self._batches_of(reader, number, rows, use_threads=use_threads)
            yield from map(self.dictionaries.required, batches)
        finally:
            reader.close()

    def forget(self) -> None:
        self.reader.read_row_groups([], column_indices=[])  # the reader keeps what it read for the last row groups
        if self.times is not None:
            self.times.reader.read_row_groups([], column_indices=[])

    def close(self) -> None:
        self.reader.close()
        if self.times is not None:
            self.times.reader.close()


@dataclass(frozen=True, slots=True)
class _Int96Times:
    """Columns of Parquet's deprecated times of 96 bits, which are read once more, in microseconds.

    pyarrow makes nanoseconds of them, and in silence other times where 64 bits do not hold these (seen in 26.0).

    Attributes:
        reader: Reads microseconds.
        leaves: The columns.
        in_nanoseconds: Reads nanoseconds of what Arrow wrote; None for other files.
    """

    reader: ParquetReader
    leaves: list[int]
    in_nanoseconds: ParquetReader | None

    def require_nanoseconds(self, numbers: Sequence[int], rows: int = INT96_ROWS) -> None:
        """Raise if a time of some row groups is beyond nanoseconds of 64 bits."""
        for place, batch in enumerate(self._batches(self.reader, numbers, rows)):
            far = [
                (name, one)
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
                for times in _times(column)
                for one in pc.min_max(times).values()
                if abs(one.value or 0) > LAST_NANOSECONDS // 1000
            ]
            if far and not self._are_near(batch, place, numbers, rows):
                name, time = far[0]
                msg = f"column {name!r} holds {time.cast(pa.string())}, which is too far from 1970 for nanoseconds: "
                raise ColumnError(msg + "write the file with microseconds, or choose `columns` without it")

    def _batches(self, reader: ParquetReader, numbers: Sequence[int], rows: int) -> Iterator[pa.RecordBatch]:
        yield from reader.iter_batches(rows, list(numbers), column_indices=self.leaves, use_threads=False)

    def _are_near(self, batch: pa.RecordBatch, place: int, numbers: Sequence[int], rows: int) -> bool:
        """Whether all times of a batch are within nanoseconds of 64 bits, although in microseconds some are not.

        Before release 24 Arrow wrote times before 1970 as a later day and a negative time of it, of which it reads the
        right nanoseconds, but microseconds that are 2**64 nanoseconds too late. A time that is really so late was
        written from whole microseconds, since nanoseconds do not hold it: then those that are read are 384 above a
        whole microsecond.
        """
        if self.in_nanoseconds is None:
            return False
        same = next(islice(self._batches(self.in_nanoseconds, numbers, rows), place, None))
        pairs = zip(*(chain.from_iterable(map(_times, one.columns)) for one in (batch, same)), strict=True)
        return all(_is_near(*map(_as_integers, pair)) for pair in pairs)


def _as_integers(times: pa.Array) -> npt.NDArray[np.int64]:
    """Return times as integers in their unit; nulls as 0."""
    integers: npt.NDArray[np.int64] = times.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    return integers


def _is_near(microseconds: npt.NDArray[np.int64], nanoseconds: npt.NDArray[np.int64]) -> bool:
    """Whether times are within nanoseconds of 64 bits, or read as so many microseconds only as Arrow wrote them."""
    is_far = abs(microseconds) > LAST_NANOSECONDS // 1000
    microseconds, nanoseconds = microseconds[is_far], nanoseconds[is_far]
    is_late = (nanoseconds < 0) & (microseconds == (nanoseconds.view(np.uint64) // np.uint64(1000)).view(np.int64))
    return bool(np.all(is_late & (nanoseconds % 1000 != -(2**64) % 1000)))


def _times(values: pa.Array) -> Iterator[pa.Array]:
    """Yield the times of a column, at any depth."""
    dtype = values.type
    if pa.types.is_timestamp(dtype):
        yield values
    elif pa.types.is_map(dtype):
        yield from chain(_times(values.keys), _times(values.items))
    elif pa.types.is_struct(dtype):
        for number in range(dtype.num_fields):
            yield from _times(values.field(number))
    elif pa.types.is_nested(dtype):
        yield from _times(values.flatten())


class ParquetLayout(Layout):
    """A parsed footer, and which of the file's column chunks are needed, by the names of columns.

    `schema` has all columns of the file, if that is known: to derive those of a thousand takes a millisecond.
    """

    def __init__(self, metadata: pq.FileMetaData, columns: Sequence[str], schema: pa.Schema | None = None) -> None:
        schema = schema_of(metadata).to_arrow_schema() if schema is None else schema
        leaves = leaves_of(schema, metadata.num_columns, columns)
        self.metadata = metadata
        self.leaves = [leaf for name in columns for leaf in leaves[name]]
        widths = {name: width(schema.field(name).type) for name in columns}
        stored = schema_of(metadata)
        may_be_times = [name for name in columns if _may_be_times(schema.field(name).type)]
        self.int96 = [one for name in may_be_times for one in leaves[name] if stored.column(one).physical_type == INT96]
        self.dictionaries = StoredDictionaries(metadata, {name: (schema.field(name), leaves[name]) for name in columns})
        self._row_bytes = sum(widths.values())
        self._variable = {name: leaves[name] for name in columns if not widths[name]}
        self._beyond = _beyond_chunks(metadata)

    def measures(self) -> Measures:
        """Return how large the row groups are."""
        groups = row_groups_of(self.metadata)
        stored = tuple(sum(group.column(leaf).total_compressed_size for leaf in self.leaves) for group in groups)
        variable = {
            name: tuple(sum(group.column(leaf).total_uncompressed_size for leaf in leaves) for group in groups)
            for name, leaves in self._variable.items()
        }
        return Measures(self._row_bytes, stored, variable)

    def ranges(self, number: int) -> list[tuple[int, int]]:
        """Return the ranges of bytes of the needed column chunks."""
        group = self.metadata.row_group(number)
        return [_range(group.column(leaf), self._beyond) for leaf in self.leaves]


def _may_be_times(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(dtype) or pa.types.is_nested(dtype))


def _range(chunk: pq.ColumnChunkMetaData, beyond: int) -> tuple[int, int]:
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:  # some writers set it to 0 if there is none
        start = min(start, chunk.dictionary_page_offset)
    return start, start + chunk.total_compressed_size + beyond


def _beyond_chunks(metadata: pq.FileMetaData) -> int:
    """Return how many bytes Arrow reads behind each column chunk: none but of files by a parquet-mr before 1.2.9.

    Their chunks' sizes lack the header of the dictionary page (https://issues.apache.org/jira/browse/PARQUET-816).
    """
    found = PARQUET_MR.match(metadata.created_by or "")
    if found is None or tuple(int(part or 0) for part in found.groups()) >= FIRST_WITH_WHOLE_SIZES:
        return 0
    behind: int = metadata.serialized_size + END_BYTES  # the file ends no sooner
    return min(DICTIONARY_HEADER_BYTES, behind)


class FooterCache:
    """Files' footers as bytes: those that are known, and those that are read when they are first needed, and added.

    A file whose footer is not known is described by `_metadata`, with which its footer is compared.
    """

    def __init__(self, files: FilesToRead, known: FooterStore) -> None:
        self._storage = files.storage
        self._files = files.files
        self._manifest = files.manifest
        self._known = known
        self._requested: dict[str, Future[bytes]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def expect(self, paths: Iterable[str]) -> None:
        """Begin to read footers that are needed soon, unless the storage is local and answers at once."""
        if self._storage.is_local:
            return
        for path in paths:
            if path not in self._known and path not in self._requested:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(FOOTER_THREADS, thread_name_prefix="fetch_footers")
                self._requested[path] = self._threads.submit(self._read, path)

    def __getitem__(self, path: str) -> bytes:
        if path not in self._known:
            requested = self._requested.pop(path, None)
            self._known.add({path: self._read(path) if requested is None else requested.result()})
        return self._known[path]

    def close(self) -> None:
        """Read nothing more; wait for what is being read."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _read(self, path: str) -> bytes:
        content = FooterReader(self._storage).content(self._files[path])
        name = self._storage.display(self._files[path].location)
        with self._storage.errors_at(f"the footer of {name}"):
            metadata = parse_footer(content)
            read_schema_of(metadata)  # raises if the columns are damaged
            digest = description_digest(described_columns(schema_of(metadata)), row_groups_of(metadata))
            if digest != self._manifest.file(path).digest:
                msg = f"{name} is not the file that `_metadata` describes: write `_metadata` again, or remove it"
                raise UnreadableFileError(msg)
        return content
