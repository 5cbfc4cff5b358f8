"""What every format provides: what files say of themselves, and how a row group's bytes become rows.

A text format has neither footers nor row groups. It makes both: see `text.footer`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.formats.read_cache import FooterStore
from torch_dataloader_utils.formats.schema import Projection
from torch_dataloader_utils.planning.manifest import DataFile, Manifest
from torch_dataloader_utils.storage.filesystem import LocalFile, Storage, StoredFile
from torch_dataloader_utils.storage.listing import Listing

__all__ = [
    "AnnouncedNulls",
    "Codec",
    "Deletes",
    "Described",
    "FileCase",
    "Footer",
    "Format",
    "KnownFooters",
    "Layout",
    "Measures",
    "NullCount",
    "OpenedFiles",
    "RowGroups",
]


@dataclass(frozen=True, slots=True)
class NullCount:
    """Nulls that a footer announces.

    Attributes:
        column: The file's column.
        row_group: Number of the row group.
        nulls: How many.
    """

    column: str
    row_group: int
    nulls: int


@dataclass(frozen=True, slots=True)
class Footer:
    """What a file says of itself, parsed.

    Attributes:
        file: The file by content.
        schema: Its columns.
        nulls: The nulls that it announces in the requested columns.
        content: What was read, as bytes, so that it need not be read again; None where `_metadata` was read instead.
    """

    file: DataFile
    schema: pa.Schema
    nulls: tuple[NullCount, ...]
    content: bytes | None


@dataclass(frozen=True, slots=True)
class KnownFooters:
    """Footers that were read before: each file's, by path, or that of the `_metadata` file that describes all files."""

    footers: Mapping[str, bytes]
    metadata_file: bytes | None = None


@dataclass(frozen=True, slots=True)
class Described:
    """What all files say of themselves.

    Attributes:
        footers: The footer of each file, in order.
        metadata_file: The footer of the `_metadata` file that described them, if one did.
    """

    footers: Sequence[Footer]
    metadata_file: bytes | None = None


@dataclass(frozen=True, slots=True)
class AnnouncedNulls:
    """Nulls in a column that cannot be delivered with them.

    Attributes:
        path: The file, as messages name it.
        found: What it announces.
        home: A file that has the column, if this one does not; else None.
    """

    path: str
    found: NullCount
    home: str | None = None


@dataclass(frozen=True, slots=True)
class FileCase:
    """What is known of a file apart from its statistics.

    Attributes:
        guarantee: What is true of all of its rows, such as the values of partition columns; None for nothing.
        comparable: Whether its statistics are those of the filter's columns, in the dataset's types.
    """

    guarantee: pc.Expression | None = None
    comparable: bool = True


@dataclass(frozen=True, slots=True)
class Deletes:
    """Rows of a file that a table says are deleted.

    Attributes:
        positions: int64, their numbers in the file, ascending.
        group_rows: The rows that each row group has in the file, the deleted ones included.
    """

    positions: npt.NDArray[np.int64]
    group_rows: tuple[int, ...]

    def within(self, number: int) -> npt.NDArray[np.int64]:
        """Return the deleted rows of a row group, counted from its first row."""
        first = sum(self.group_rows[:number])
        start, stop = np.searchsorted(self.positions, [first, first + self.group_rows[number]])
        return self.positions[start:stop] - first


@dataclass(frozen=True, slots=True)
class Measures:
    """How large a file's row groups are, in the columns that are needed.

    Attributes:
        row_bytes: What a row takes in memory, columns of no fixed width left out.
        stored: The compressed bytes of each row group.
        variable: The uncompressed bytes in each row group of those columns, by name; a dictionary counts once.
        rows: For text, whose size in memory follows from its bytes, about how many rows each row group has; else None.
    """

    row_bytes: float
    stored: tuple[int, ...]
    variable: Mapping[str, tuple[int, ...]]
    rows: tuple[int, ...] | None = None


class Layout(ABC):
    """Which bytes of a file hold the needed columns of its row groups, and how large the row groups are."""

    @abstractmethod
    def measures(self) -> Measures:
        """Return how large the row groups are."""

    @abstractmethod
    def ranges(self, number: int) -> list[tuple[int, int]]:
        """Return the ranges of bytes that are needed of a row group."""

    def extent(self, number: int) -> tuple[int, int]:
        """Return the range from the first of these bytes to the last; it may be empty."""
        ranges = self.ranges(number)
        return min((start for start, _ in ranges), default=0), max((stop for _, stop in ranges), default=0)


class RowGroups(Protocol):
    """The row groups of an open file."""

    def read(self, number: int) -> pa.Table:
        """Return a row group."""

    def batches(self, number: int, rows: int, *, use_threads: bool) -> Iterator[pa.RecordBatch]:
        """Yield a row group in batches of about so many rows."""

    def close(self) -> None:
        """Close the file."""


class Codec(ABC):
    """Opens files for one reader; keeps what it has parsed."""

    def expect(self, paths: Iterable[str]) -> None:  # noqa: B027 - most need nothing
        """Begin to read what has to be known of files before any of their row groups can be requested."""

    @abstractmethod
    def layout(self, path: str) -> Layout:
        """Return which bytes of a file are needed of its row groups."""

    def tail(self, path: str) -> bytes:  # noqa: ARG002 - some formats need the path
        """Return the bytes at a file's end that its reader needs to open it and that are not read otherwise."""
        return b""

    @abstractmethod
    def open(self, path: str, file: Any, local: LocalFile | None) -> RowGroups:
        """Open a file.

        Args:
            path: The file.
            file: Its bytes, as pyarrow reads them: all of them, or those of the row groups that are needed.
            local: The same, if it is local.

        Raises:
            UnreadableFileError: If the file is not the listed one, as far as can be seen.
        """

    def close(self) -> None:  # noqa: B027 - most need nothing
        """Read nothing more; wait for what is being read."""


class Format(ABC):
    """A file format. Frozen, and sent to workers.

    Attributes:
        name: What users call it.
        suffixes: Endings of the names of its files, in lower case.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    @property
    def unknown_rows(self) -> str | None:
        """Why the files do not tell how many rows they have; None where they do."""
        return None

    @property
    def options_digest(self) -> str | None:
        """Digest of the options that decide which rows a file has; None if the format has no options."""
        return None

    @abstractmethod
    def describe(
        self, storage: Storage, listing: Listing, known: KnownFooters | None, counts_nulls: Callable[[pa.Field], bool]
    ) -> Described:
        """Read what the files say of themselves, once, or take what is known.

        Args:
            storage: Where the files are.
            listing: The files.
            known: What was read before, so that nothing has to be read; or None.
            counts_nulls: Says of a file's column whether its nulls matter.

        Raises:
            UnreadableFileError: If a file cannot be read; the message names it.
        """

    def select(
        self,
        described: Described,  # noqa: ARG002 - formats with statistics need them
        filters: pc.Expression,  # noqa: ARG002
        schema: pa.Schema,  # noqa: ARG002
        columns: Sequence[str],  # noqa: ARG002
        cases: Sequence[FileCase],  # noqa: ARG002
    ) -> Sequence[Sequence[int]] | None:
        """Return, for each file, the row groups that may hold a row for a filter, by what it says; None for all.

        Args:
            described: What the files say.
            filters: The filter.
            schema: The dataset's columns.
            columns: The columns that the filter needs.
            cases: What else is known of each file.
        """
        return None

    def verify(self, files: OpenedFiles) -> None:  # noqa: B027 - most have nothing to verify
        """Raise if a file that is never read, because `_metadata` rules out all of its rows, is not as described."""

    @abstractmethod
    def codec(self, files: OpenedFiles, footers: FooterStore) -> Codec:
        """Return what opens files for one reader.

        Args:
            files: The files.
            footers: Their footers, as far as they are known. Those that the codec reads are added.
        """


@dataclass(frozen=True)
class OpenedFiles:
    """A dataset's files, described and checked. Nothing in it changes: what readers learn is in their `ReadCache`.

    Attributes:
        storage: Where the files are.
        format: Their format.
        manifest: The files by content.
        schema: The columns to deliver, in order, with their types; all nullable, as files may differ in that alone.
        needed: These, and last the columns that only the filter needs.
        filter: Which rows to deliver, or None for all.
        filter_columns: The columns that the filter needs.
        selection: For each file the row groups that may hold such rows, by their statistics; None if that is all.
        announced_nulls: Nulls that footers announce, that cannot be delivered and that the filter does not remove.
        files: The files as the storage lists them, by path.
        footers: The footers that were read when the files were opened, by path.
        metadata_file: The footer of the `_metadata` file that described them, if one did.
        projections: How files' columns become the needed ones: by the first projection unless `projected` says another.
        projected: The index of a file's projection, by path.
        constants: The values that `constant_columns` have in a file, by path.
        constant_columns: Columns that have a single value in all of a file: partition columns.
        deletes: Rows that are deleted, by path.
        pin: What a table was pinned to: its ``snapshot_id`` or ``version``, which states record.
    """

    storage: Storage
    format: Format
    manifest: Manifest
    schema: pa.Schema
    needed: pa.Schema
    filter: pc.Expression | None
    filter_columns: tuple[str, ...]
    selection: tuple[tuple[int, ...], ...] | None
    announced_nulls: tuple[AnnouncedNulls, ...]
    files: Mapping[str, StoredFile] = field(repr=False)
    footers: Mapping[str, bytes] = field(repr=False)
    metadata_file: bytes | None = field(repr=False)
    projections: tuple[Projection, ...] = field(repr=False)
    projected: Mapping[str, int] = field(default_factory=dict, repr=False)
    constants: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, repr=False)
    constant_columns: tuple[str, ...] = ()
    deletes: Mapping[str, Deletes] = field(default_factory=dict, repr=False)
    pin: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def filter_digest(self) -> str | None:
        """Digest of the serialised filter, 16 hexadecimal characters: its text leaves too much out."""
        if self.filter is None:
            return None
        serialised = self.filter.__reduce__()[1][0]
        return hashlib.blake2b(bytes(serialised), digest_size=8).hexdigest()

    @property
    def unknown_rows(self) -> str | None:
        """Why it is unknown, before the files are read, how many rows are delivered; None where it is known."""
        if self.filter is not None:
            return "only reading tells how many rows the filter leaves"
        return self.format.unknown_rows

    @cached_property
    def pruned(self) -> tuple[int, int]:
        """How many row groups the filter ruled out before anything was read, and their uncompressed bytes."""
        if self.selection is None:
            return 0, 0
        groups = [
            group
            for file, selected in zip(self.manifest.files, map(set, self.selection), strict=True)
            for number, group in enumerate(file.row_groups)
            if number not in selected
        ]
        return len(groups), sum(group.bytes for group in groups)

    def projection(self, path: str) -> Projection:
        """Return how a file's columns become the needed ones."""
        return self.projections[self.projected.get(path, 0)]

    def constants_of(self, path: str) -> dict[str, Any]:
        """Return the values that columns have in all rows of a file."""
        return dict(zip(self.constant_columns, self.constants.get(path, ()), strict=False))
