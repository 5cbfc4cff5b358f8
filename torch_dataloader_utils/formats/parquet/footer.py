"""The footer of a Parquet file: what it says of row groups, columns and nulls.

The layout (footer, its length as four little-endian bytes, the magic ``PAR1``) is that of the Apache Parquet file
format specification, https://parquet.apache.org/docs/file-format/.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import pyarrow as pa
import pyarrow.parquet as pq

from torch_dataloader_utils.errors import FooterMismatchWarning, UnreadableFileError, warn_user
from torch_dataloader_utils.formats.base import ColumnsToCount, Footer, NullCount
from torch_dataloader_utils.formats.read_cache import ParsedFooters
from torch_dataloader_utils.formats.recognition import PARQUET_MAGIC, format_hint
from torch_dataloader_utils.planning.manifest import DataFile, RowGroup
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.stored_file import StoredFile

TAIL_BYTES = 64 * 1024
"""How much of a file's end is read first. Most footers are smaller, and then one request is enough."""

SIGNATURE_BYTES = 28
"""The nonce and the tag at the end of a plain footer if columns are encrypted: "Plaintext footer mode" in
https://github.com/apache/parquet-format/blob/master/Encryption.md."""

COUNTING_WRITERS = {"parquet-cpp-arrow": 7, "parquet-mr": 1, "parquet-rs": 1}
"""Writers whose statistics count null lists and empty lists as nulls, each with the first such release.

Others may count nulls within lists alone, as Arrow did before https://github.com/apache/arrow/pull/11281."""

SHOWN = 3
"""How many files a warning names."""

EXTENSIONS = "arrow_extensions_enabled"

AS_PARQUET_FILE = {EXTENSIONS: True} if EXTENSIONS in inspect.signature(pq.ParquetFile).parameters else {}
"""The reader that a `ParquetFile` has reads Arrow's extension types, in releases that have some."""


class _MetadataOnlyError(Exception):
    """Ends the opening of a file once its footer is parsed."""


class _MetadataOnly:
    """What `ParquetReader.open` is given as `read_dictionary`, the columns to read as dictionaries.

    It asks for them when it has parsed the footer, before it derives Arrow's schema, which takes as long again.
    """

    def __iter__(self) -> Iterator[str]:
        raise _MetadataOnlyError


METADATA_ONLY = _MetadataOnly()


class FooterReader:
    """Reads and parses footers. If consecutive files have equal schemas, as they mostly do, a schema is derived once.

    `columns_to_count` returns those of a file's columns whose nulls matter. `parsed` has the first footers of files,
    with their columns, by path.
    """

    def __init__(self, storage: Storage, columns_to_count: ColumnsToCount = lambda _: ()) -> None:
        self._storage = storage
        self._columns_to_count = columns_to_count
        self._mismatches: list[str] = []
        self.parsed = ParsedFooters()
        self._last: Columns | None = None
        self._schemas: dict[bytes, pa.Schema] = {}

    def read(self, file: StoredFile) -> Footer:
        """Read and parse a file's footer."""
        return self.parse(file, self.content(file))

    def content(self, file: StoredFile) -> bytes:
        """Return a file's footer as bytes, with their length and the magic: one request, or two for a long footer.

        Raises:
            UnreadableFileError: If the file is not a Parquet file, or damaged; the message names it.
        """
        if file.size < len(PARQUET_MAGIC) * 2 + 4:
            name = self._storage.display(file.location)
            msg = f"{name} is not a Parquet file: it has only {file.size} bytes{format_hint(file.path, 'parquet')}"
            raise NotParquetError(msg)
        tail = self._storage.read(file, max(0, file.size - TAIL_BYTES), file.size)
        if tail[-4:] != PARQUET_MAGIC:
            name = self._storage.display(file.location)
            what = "an encrypted" if tail[-4:] == b"PARE" else "no complete"
            msg = f"{name} is {what} Parquet file: it ends in {tail[-4:]!r}, not in {PARQUET_MAGIC!r}"
            msg += format_hint(file.path, "parquet", end=tail)
            raise NotParquetError(msg)
        length = int.from_bytes(tail[-8:-4], "little") + 8
        if length + len(PARQUET_MAGIC) > file.size:
            name = self._storage.display(file.location)
            msg = f"{name} is a damaged Parquet file: its footer would be {length} bytes of {file.size}"
            raise NotParquetError(msg)
        if length > len(tail):
            tail = self._storage.read(file, file.size - length, file.size - len(tail)) + tail
        return tail[-length:]

    def parse(self, file: StoredFile, content: bytes) -> Footer:
        """Parse a footer: its bytes, with their length and the magic."""
        try:
            metadata = parse_footer(content)
            columns = self.columns(metadata)
            groups = row_groups_of(metadata)
            row_groups = tuple([RowGroup(group.num_rows, group.total_byte_size) for group in groups])
            counts = [group.rows for group in row_groups]
            if min(counts, default=0) < 0:
                raise pa.ArrowInvalid("a row group has a negative number of rows")
            nulls = tuple(columns.announced_nulls(groups)) if columns.counted else ()
        except (pa.ArrowException, OSError, ValueError) as error:
            msg = f"cannot read the footer of {self._storage.display(file.location)}: {error}"
            raise UnreadableFileError(msg) from None
        if sum(counts) != metadata.num_rows:
            name = self._storage.display(file.location)
            self._mismatches.append(f"{name} says {metadata.num_rows} rows and has {sum(counts)}")
        self.parsed.keep(file.path, (metadata, columns.schema), len(content))
        digest = hashlib.blake2b(content, digest_size=8).hexdigest()
        described = DataFile(file.path, file.size, digest, row_groups, file.etag, file.modified)
        return Footer(described, columns.schema, nulls, content)

    def warn_of_mismatches(self) -> None:
        """Warn of the footers that were parsed whose total of rows disagrees with their row groups.

        pyarrow reads such a file by its row groups (seen in 17.0 and in 26.0), so its rows are these. This is called in
        the thread that opens the dataset, for a warning shows the line that did so.
        """
        if self._mismatches:
            shown = "; ".join(sorted(self._mismatches)[:SHOWN])  # threads read the footers, in any order
            others = f"; and {len(self._mismatches) - SHOWN} more files" if len(self._mismatches) > SHOWN else ""
            message = f"the total of rows in a footer disagrees with its row groups, by which it is read: {shown}"
            warn_user(f"{message}{others}. Write the files again", FooterMismatchWarning)

    def columns(self, metadata: pq.FileMetaData) -> Columns:
        """Return a file's columns."""
        arrow = (metadata.metadata or {}).get(b"ARROW:schema")  # Arrow writes its own schema there
        stored = schema_of(metadata)
        last = self._last
        if last is None or last.arrow != arrow or not last.is_of(stored):
            schema = read_schema_of(metadata).remove_metadata()
            schema = self._schemas.setdefault(schema.serialize().to_pybytes(), schema)  # equal ones are one object
            names = self._columns_to_count(schema)
            leaves = leaves_of(schema, len(stored)) if names else {}
            counted = tuple((name, leaves[name][0]) for name in names)
            last = self._last = Columns(stored, arrow, schema, counted)
        return last


@dataclass(frozen=True)
class Columns:
    """A file's columns.

    Attributes:
        stored: As Parquet has them.
        arrow: As Arrow has added them to the file's metadata, or None.
        schema: As pyarrow reads them.
        counted: The columns to count nulls of: the name and the number of the first leaf of each.
    """

    stored: pq.ParquetSchema
    arrow: bytes | None
    schema: pa.Schema
    counted: tuple[tuple[str, int], ...]

    @cached_property
    def nested(self) -> tuple[tuple[int, str], ...]:
        """Leaves within nested columns, and those whose names have a dot: the number and path of each."""
        paths = enumerate(self.stored.column(leaf).path for leaf in range(len(self.stored)))
        return tuple((leaf, path) for leaf, path in paths if "." in path)

    def is_of(self, stored: pq.ParquetSchema) -> bool:
        """Whether these are another file's columns, too. Parquet's `equals` compares leaves' names, not their paths."""
        return self.stored.equals(stored) and all(stored.column(leaf).path == path for leaf, path in self.nested)

    def announced_nulls(self, groups: Sequence[pq.RowGroupMetaData]) -> Iterator[NullCount]:
        """Yield the nulls that row groups announce in the columns to count them in."""
        for number, group in enumerate(groups):
            for name, leaf in self.counted:
                statistics = group.column(leaf).statistics
                if statistics is not None and statistics.null_count and statistics.has_null_count:
                    yield NullCount(name, number, statistics.null_count)


class NotParquetError(UnreadableFileError):
    """A file was read and is not a complete Parquet file."""


def parse_footer(footer: bytes) -> pq.FileMetaData:
    """Parse a footer, as a file that has only the magic and the footer.

    ``pq.read_metadata`` takes three times as long for the same, because it prepares to read columns.

    Raises:
        OSError: If the file has encrypted columns: to ask pyarrow for their metadata would end the process.
        pyarrow.ArrowException: If it is damaged.
    """
    file = pa.BufferReader(PARQUET_MAGIC + footer)
    reader = pq.ParquetReader()
    try:  # noqa: SIM105 - contextlib takes longer, for each of many files
        reader.open(file, read_dictionary=METADATA_ONLY)
    except (_MetadataOnlyError, TypeError):
        pass
    metadata = reader.metadata or pq.read_metadata(file)  # should a release of pyarrow look at those columns first
    if len(footer) - len(PARQUET_MAGIC) - 4 - metadata.serialized_size == SIGNATURE_BYTES:
        raise OSError("it has encrypted columns, which are not supported: decrypt the file")
    return metadata


def schema_of(metadata: pq.FileMetaData) -> pq.ParquetSchema:
    """Return the schema of a footer, as `metadata.schema` would.

    That one makes a cycle: while the garbage collector rests, the footers of all files would stay.
    """
    return pq.ParquetSchema(metadata)


def read_schema_of(metadata: pq.FileMetaData) -> pa.Schema:
    """Return the columns of a footer as they are read.

    `to_arrow_schema` leaves out extension types that only Parquet's own types stand for: UUID and JSON of other
    writers than Arrow.
    """
    reader = pq.ParquetReader()
    reader.open(pa.BufferReader(PARQUET_MAGIC), metadata=metadata, **AS_PARQUET_FILE)
    return reader.schema_arrow


def row_groups_of(metadata: pq.FileMetaData) -> list[pq.RowGroupMetaData]:
    """Return the row groups that a footer describes."""
    return [metadata.row_group(number) for number in range(metadata.num_row_groups)]


def list_values(content: bytes, column: str, *, nulls_are_values: bool) -> list[int | None]:
    """Return how many values the lists of a column have in each row group, by a footer; None where it does not say.

    A column chunk has an entry for each value, for each null list and for each empty list. The statistics count those
    without a value. Where values within lists may be null, as well, and `nulls_are_values`, that does not tell.
    """
    metadata = parse_footer(content)
    schema = schema_of(metadata).to_arrow_schema()
    groups = row_groups_of(metadata)
    writer = re.match(r"(\S+) version (\d+)", metadata.created_by or "")
    if writer is None or int(writer[2]) < COUNTING_WRITERS.get(writer[1], sys.maxsize):
        return [None] * len(groups)
    has_nulls = nulls_are_values and schema.field(column).type.value_field.nullable
    leaf = leaves_of(schema, metadata.num_columns)[column][0]
    counted: list[int | None] = []
    for chunk in (group.column(leaf) for group in groups):
        statistics = chunk.statistics
        nulls = statistics.null_count if statistics is not None and statistics.has_null_count else None
        counted.append(None if nulls is None or (nulls and has_nulls) else chunk.num_values - nulls)
    return counted


def leaves_of(schema: pa.Schema, leaves: int, names: Iterable[str] | None = None) -> dict[str, tuple[int, ...]]:
    """Return the numbers of columns' leaf columns: Parquet stores each leaf of a nested type as a column.

    `leaves` is how many leaf columns the file has, and `names` are the columns, or None for all. Where there are as
    many leaf columns as columns, none is nested: to look at a thousand types takes longer than to read two columns.
    """
    counts = [1] * leaves if leaves == len(schema) else list(map(_leaf_count, schema.types))
    firsts = list(accumulate(counts, initial=0))
    wanted = enumerate(schema.names) if names is None else ((schema.get_field_index(name), name) for name in names)
    return {name: tuple(range(firsts[index], firsts[index] + counts[index])) for index, name in wanted}


def _leaf_count(dtype: pa.DataType) -> int:
    if isinstance(dtype, pa.BaseExtensionType):
        return _leaf_count(dtype.storage_type)
    if pa.types.is_dictionary(dtype) or not pa.types.is_nested(dtype):
        return 1
    return sum(_leaf_count(dtype.field(number).type) for number in range(dtype.num_fields))
