"""What every format provides: what files say of themselves, and how a row group's bytes become rows.

A text format has neither footers nor row groups. It makes both: see `text.footer`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.formats.read_cache import FooterStore, ParsedFooters
from torch_dataloader_utils.formats.schema import Projection
from torch_dataloader_utils.planning.manifest import DataFile, Manifest
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.listing import Listing
from torch_dataloader_utils.storage.local_file import LocalFile
from torch_dataloader_utils.storage.stored_file import StoredFile

ColumnsToCount: TypeAlias = Callable[[pa.Schema], Sequence[str]]
"""Returns those of a file's columns of which nulls are counted, by name."""


@dataclass(frozen=True, slots=True)
class NullCount:
    """How many nulls a footer announces in a column of one of the file's row groups."""

    column: str
    row_group: int
    nulls: int


class Footer(NamedTuple):
    """What a file says of itself, parsed. Its nulls are those that it announces in the requested columns.

    `content` is what was read, as bytes, so that it need not be read again; None where `_metadata` was read instead.
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
    """The footer of each file, in order, and that of the `_metadata` file that described them, if one did.

    `parsed` has the first ones as the format has parsed them, if it keeps any.
    """

    footers: Sequence[Footer]
    metadata_file: bytes | None = None
    parsed: ParsedFooters = field(default_factory=ParsedFooters)


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
    """The numbers of a file's deleted rows, ascending, and at which rows its row groups begin and the last one ends."""

    positions: npt.NDArray[np.int64]
    bounds: tuple[int, ...]

    def within(self, number: int, count: int = 1) -> npt.NDArray[np.int64]:
        """Return the deleted rows of a row group, or of several from it on, counted from its first row."""
        first = self.bounds[number]
        start, stop = np.searchsorted(self.positions, [first, self.bounds[number + count]])
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
        """Return the sizes of the row groups."""

    @abstractmethod
    def ranges(self, number: int) -> list[tuple[int, int]]:
        """Return the ranges of bytes that are needed of a row group."""

    def extent(self, numbers: Sequence[int]) -> tuple[int, int]:
        """Return the range from the first to the last of these bytes of consecutive row groups; it may be empty."""
        ranges = [found for number in numbers for found in self.ranges(number)]
        return min((start for start, _ in ranges), default=0), max((stop for _, stop in ranges), default=0)


class RowGroups(ABC):
    """The row groups of an open file."""

    @abstractmethod
    def read(self, number: int) -> pa.Table:
        """Return a row group."""

    def read_joined(self, numbers: Sequence[int]) -> pa.Table:
        """Return several row groups as one table, if the codec joins some."""
        raise NotImplementedError(numbers)

    def decoded(self, numbers: Sequence[int]) -> Iterator[tuple[pa.Table, bool]]:
        """Yield row groups in one or more tables as `tables` does; several of them in one."""
        if len(numbers) == 1:
            yield from self.tables(numbers[0])
        else:
            yield self.read_joined(numbers), True

    def tables(self, number: int) -> Iterator[tuple[pa.Table, bool]]:
        """Yield a row group in one or more tables, each as soon as it is decoded, and whether it is the last one."""
        yield self.read(number), True

    @abstractmethod
    def batches(self, number: int, rows: int, *, use_threads: bool) -> Iterator[pa.RecordBatch]:
        """Yield a row group in batches of about so many rows."""

    def forget(self) -> None:  # noqa: B027 - most keep nothing
        """Free the bytes that were read of the file."""

    def close(self) -> None:  # noqa: B027 - for some nothing is open but the bytes
        """Close the file."""


class Codec(ABC):
    """Opens files for one reader; keeps what it has parsed."""

    joins_row_groups: ClassVar[bool] = False
    """Whether several small row groups are decoded faster together."""

    layout: Callable[[str], Layout]
    """Returns which bytes of a file, by path, are needed of its row groups."""

    def expect(self, paths: Iterable[str]) -> None:  # noqa: B027 - most need nothing
        """Begin to read what has to be known of files before any of their row groups can be requested."""

    def tail(self, path: str) -> bytes:  # noqa: ARG002 - some formats need the path
        """Return the bytes at a file's end that its reader needs to open it and that are not read otherwise."""
        return b""

    @abstractmethod
    def open(self, path: str, file: Any, local: LocalFile | None) -> RowGroups:
        """Open a file, or raise an UnreadableFileError if it is not the listed one, as far as can be seen.

        `file` has its bytes, as pyarrow reads them: all of them if it is mapped into memory, else those of the row
        groups that are needed. `local` is the file itself, if it is a local one.
        """

    def close(self) -> None:  # noqa: B027 - most need nothing
        """Read nothing more; wait for what is being read."""


@dataclass(frozen=True, kw_only=True)
class FilesToRead:
    """A dataset's files as their format sees them: how each is read, and which columns are needed of it.

    Attributes:
        manifest: The files by content.
        needed: The columns to deliver, in order, and last those that only the filter needs.
        files: The files as the storage lists them, by path.
        footers: The footers that were read when the files were opened, by path.
        parsed: The first of them as the format has parsed them.
        metadata_file: The footer of the `_metadata` file that described them, if one did.
        projections: How files' columns become the needed ones: by the first projection unless `projected` says another.
        projected: The index of a file's projection, by path.
        selection: For each file the row groups that may hold rows for the filter; None if that is all.
        deletes: Rows that are deleted, by path.
    """

    storage: Storage
    manifest: Manifest
    needed: pa.Schema
    files: Mapping[str, StoredFile] = field(repr=False)
    footers: Mapping[str, bytes] = field(repr=False)
    parsed: ParsedFooters = field(default_factory=ParsedFooters, repr=False, compare=False)
    metadata_file: bytes | None = field(repr=False)
    projections: tuple[Projection, ...] = field(repr=False)
    projected: Mapping[str, int] = field(default_factory=dict, repr=False)
    selection: tuple[tuple[int, ...], ...] | None = None
    deletes: Mapping[str, Deletes] = field(default_factory=dict, repr=False)

    def projection(self, path: str) -> Projection:
        """Return how a file's columns become the needed ones."""
        return self.projections[self.projected.get(path, 0)]


class Format(ABC):
    """A file format: what users call it, and the endings of its files, in lower case. Frozen, and sent to workers."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    types_option: ClassVar[str | None] = None  # what in format_options gives types that files do not tell

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
        self, storage: Storage, listing: Listing, known: KnownFooters | None, columns_to_count: ColumnsToCount
    ) -> Described:
        """Read what the files say of themselves, once, or take what was read before.

        `columns_to_count` returns those of a file's columns whose nulls matter.

        Raises:
            UnreadableFileError: If a file cannot be read; the message names it.
        """

    def select(
        self,
        described: Described,  # noqa: ARG002 - formats with statistics need them
        filters: pc.Expression,  # noqa: ARG002
        needed: pa.Schema,  # noqa: ARG002
        cases: Sequence[FileCase],  # noqa: ARG002
    ) -> Sequence[Sequence[int]] | None:
        """Return, for each file, the row groups that may hold a row for a filter, by what it says; None for all.

        `needed` are the columns that the filter needs, and `cases` what else is known of each file.
        """
        return None

    def list_values(
        self,
        files: FilesToRead,  # noqa: ARG002 - formats with statistics need them
        column: str,  # noqa: ARG002
        *,
        nulls_are_values: bool,  # noqa: ARG002
    ) -> Mapping[str, Sequence[int | None]]:
        """Return, by path, how many values the lists of a column have in each row group; None where it is not known.

        `nulls_are_values` says that nulls within lists count.
        """
        return {}

    def verify(self, files: FilesToRead) -> None:  # noqa: B027 - most have nothing to verify
        """Raise if a file that is never read, because `_metadata` rules out all of its rows, is not as described."""

    @abstractmethod
    def codec(self, files: FilesToRead, footers: FooterStore, encodable: Collection[str] = ()) -> Codec:
        """Return what opens files for one reader. Footers that it reads are added to the known ones.

        `encodable` are needed columns that may be dictionaries in some files' tables, and their values in others'.
        """
