"""What every format provides: what files say of themselves, and how a row group's bytes become rows.

A text format has neither footers nor row groups. It makes both: see `text.footer`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.formats.read_cache import FooterStore, ParsedFooters, ReadCache
from torch_dataloader_utils.formats.row_packing import RowGroupPacking
from torch_dataloader_utils.formats.row_transform import UNKNOWN, RowTransform
from torch_dataloader_utils.formats.schema import AllColumns, Projection
from torch_dataloader_utils.planning.manifest import DataFile, Manifest, Split
from torch_dataloader_utils.planning.plan import ShardSlice
from torch_dataloader_utils.planning.source_paths import parse_source_path
from torch_dataloader_utils.planning.token_counts import TokenCounts
from torch_dataloader_utils.storage.attempts import Retry
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.listing import Listing
from torch_dataloader_utils.storage.local_file import LocalFile
from torch_dataloader_utils.storage.stored_file import StoredFile


@dataclass(frozen=True, slots=True)
class NullCount:
    """How many nulls a footer announces in a column of one of the file's row groups."""

    column: str
    row_group: int
    nulls: int


@dataclass(frozen=True, slots=True)
class Footer:
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

    def extent(self, numbers: range) -> tuple[int, int]:
        """Return the range from the first to the last of these bytes of consecutive row groups; it may be empty."""
        ranges = [found for number in numbers for found in self.ranges(number)]
        return min((start for start, _ in ranges), default=0), max((stop for _, stop in ranges), default=0)


class RowGroups(ABC):
    """The row groups of an open file."""

    @abstractmethod
    def read(self, number: int) -> pa.Table:
        """Return a row group."""

    def read_joined(self, numbers: range) -> pa.Table:
        """Return consecutive row groups as one table, if the codec joins some."""
        raise NotImplementedError(numbers)

    def decoded(self, numbers: range) -> Iterator[tuple[pa.Table, bool]]:
        """Yield consecutive row groups in one or more tables as `tables` does; several of them in one."""
        if len(numbers) == 1:
            yield from self.tables(numbers.start)
        else:
            yield self.read_joined(numbers), True

    def tables(self, number: int) -> Iterator[tuple[pa.Table, bool]]:
        """Yield a row group in one or more tables, each as soon as it is decoded, and whether it is the last one."""
        yield self.read(number), True

    @abstractmethod
    def batches(self, number: int, rows: int, *, use_threads: bool) -> Iterator[pa.RecordBatch]:
        """Yield a row group in batches of about so many rows."""

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


class Format(ABC):
    """A file format: what users call it, and the endings of its files, in lower case. Frozen, and sent to workers."""

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
        """Read what the files say of themselves, once, or take what was read before.

        `counts_nulls` says of a file's column whether its nulls matter.

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
        files: OpenedFiles,  # noqa: ARG002 - formats with statistics need them
        column: str,  # noqa: ARG002
        *,
        nulls_are_values: bool,  # noqa: ARG002
    ) -> Mapping[str, Sequence[int | None]]:
        """Return, by path, how many values the lists of a column have in each row group; None where it is not known.

        `nulls_are_values` says that nulls within lists count.
        """
        return {}

    def verify(self, files: OpenedFiles) -> None:  # noqa: B027 - most have nothing to verify
        """Raise if a file that is never read, because `_metadata` rules out all of its rows, is not as described."""

    @abstractmethod
    def codec(self, files: OpenedFiles, footers: FooterStore) -> Codec:
        """Return what opens files for one reader. Footers that it reads are added to the known ones."""


FILTER_UNKNOWN = "only reading tells how many rows the filter leaves"


def expression_digest(expression: pc.Expression) -> str:
    """Return the digest of a serialised expression, 16 hexadecimal characters: its text leaves too much out."""
    return hashlib.blake2b(bytes(expression.__reduce__()[1][0]), digest_size=8).hexdigest()


@dataclass(frozen=True)
class OpenedFiles:
    """A dataset's files, described and checked. Nothing in it changes: what readers learn is in their `ReadCache`.

    Attributes:
        manifest: The files by content.
        schema: The columns to deliver, in order, with their types; all nullable, as files may differ in that alone.
            With a transform, those that it is called with.
        needed: These, and last the columns that only the filter needs.
        filter: Which rows to deliver, or None for all.
        filter_columns: The columns that the filter needs.
        filter_name: What the filter is in messages, which name the excluded expressions that are a part of it.
        files: The files as the storage lists them, by path.
        footers: The footers that were read when the files were opened, by path.
        parsed: The first of them as the format has parsed them.
        metadata_file: The footer of the `_metadata` file that described them, if one did.
        projections: How files' columns become the needed ones: by the first projection unless `projected` says another.
        selection: For each file the row groups that may hold rows for the filter; None if that is all.
        announced_nulls: The message about nulls that a footer announces, that cannot be delivered and that the filter
            does not remove; None if there are none.
        projected: The index of a file's projection, by path.
        constants: The values that `constant_columns` have in a file, by path.
        constant_columns: Columns that have a single value in all of a file: partition columns.
        deletes: Rows that are deleted, by path.
        all_columns: The columns of all files; None in copies that are sent to workers.
        expressions: The expressions by which rows are excluded, by their digest.
        pin: What a table was pinned to: its ``snapshot_id`` or ``version``, which states record.
        stored_rows: The rows of each file's row groups before filter and transform, by path, if those that are
            delivered were counted. Then the manifest has the rows that are delivered. None where they were not.
        source: The name of the source of a mixture that these files are; None for a single dataset.
        transform: What makes other rows of the rows that the filter keeps, and is delivered in their place.
        unknown_made: Why it is unknown how many rows are made of those that are read; None if they are delivered.
        packing: What makes sequences of the rows of each row group; None where nothing does, or of whole shards.
        tokens: The tokens of documents, where they were counted; else None.
    """

    storage: Storage
    format: Format
    manifest: Manifest
    schema: pa.Schema
    needed: pa.Schema
    filter: pc.Expression | None
    filter_columns: tuple[str, ...]
    files: Mapping[str, StoredFile] = field(repr=False)
    footers: Mapping[str, bytes] = field(repr=False)
    metadata_file: bytes | None = field(repr=False)
    projections: tuple[Projection, ...] = field(repr=False)
    parsed: ParsedFooters = field(default_factory=ParsedFooters, repr=False, compare=False)
    selection: tuple[tuple[int, ...], ...] | None = None
    announced_nulls: str | None = None
    projected: Mapping[str, int] = field(default_factory=dict, repr=False)
    constants: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, repr=False)
    constant_columns: tuple[str, ...] = ()
    deletes: Mapping[str, Deletes] = field(default_factory=dict, repr=False)
    all_columns: AllColumns | None = field(default=None, repr=False)
    expressions: Mapping[str, pc.Expression] = field(default_factory=dict)
    filter_name: str = "the filter"
    pin: Mapping[str, int] = field(default_factory=dict)
    stored_rows: Mapping[str, tuple[int, ...]] | None = field(default=None, repr=False)
    source: str | None = None
    transform: RowTransform | None = None
    unknown_made: str | None = None
    packing: RowGroupPacking | None = None
    tokens: TokenCounts | None = None

    @property
    def format_name(self) -> str:
        """What users call the format."""
        return self.format.name

    @property
    def options_digest(self) -> str | None:
        """Digest of the format's options."""
        return self.format.options_digest

    @cached_property
    def filter_digest(self) -> str | None:
        """Digest of the filter."""
        return None if self.filter is None else expression_digest(self.filter)

    @cached_property
    def filter_binding(self) -> str | None:
        """Digest of what the filter's columns are: their types, and in each file the column or the value that they are.

        The same filter keeps other rows where a table's columns were renamed, or partitions are read in another way.
        """
        if self.filter is None:
            return None
        digest = hashlib.blake2b(self._filter_types.encode(), digest_size=8)
        for source in self._filter_sources():
            digest.update(f"\n{source}".encode())
        return digest.hexdigest()

    @cached_property
    def filter_bindings(self) -> str | None:
        """The same of each file alone, 8 hexadecimal characters for each in the order of the manifest."""
        if self.filter is None:
            return None
        texts = [f"{self._filter_types}\n{source}" for source in self._filter_sources()]
        digests = {text: hashlib.blake2b(text.encode(), digest_size=4).hexdigest() for text in set(texts)}
        return "".join(map(digests.__getitem__, texts))

    @property
    def _filter_types(self) -> str:
        return repr([(column.name, str(column.type)) for column in self.needed if column.name in self.filter_columns])

    def _filter_sources(self) -> Iterator[str]:
        """Yield for each file which of its columns, or which values, the filter's columns are."""
        names = [name for name in self.needed.names if name in self.filter_columns]
        wanted = [number for number, name in enumerate(self.needed.names) if name in self.filter_columns]
        sources = [repr([projection.sources[number] for number in wanted]) for projection in self.projections]
        for file in self.manifest.files:
            values = self.constants_of(file.path) if self.constant_columns else {}
            constants = [repr(values[name]) for name in names if name in values]
            yield f"{sources[self.projected.get(file.path, 0)]} {constants}"

    @property
    def delivered_schema(self) -> pa.Schema:
        """The columns that are delivered: those of the sequences, or of the transform, if there are any."""
        if self.packing is not None:
            return self.packing.schema
        return self.schema if self.transform is None else self.transform.delivered_schema

    def row_group_name(self, path: str, number: int, count: int = 1) -> str:
        """Return the name of a row group, or of several from it on, for messages."""
        numbers = f"row group {number}" if count == 1 else f"row groups {number} to {number + count - 1}"
        return f"{numbers} of {self.manifest.full_path(path)}"

    @property
    def first_unfiltered(self) -> Mapping[str, int]:
        """Number of each file's first row among all rows, those that a filter drops included, by path."""
        return self.manifest.first_rows if self.stored_rows is None else self._first_stored

    @cached_property
    def _first_stored(self) -> Mapping[str, int]:
        stored = self.stored_rows or {}
        starts = accumulate((sum(stored[file.path]) for file in self.manifest.files), initial=0)
        return {file.path: start for file, start in zip(self.manifest.files, starts, strict=False)}

    @property
    def unknown_rows(self) -> str | None:
        """Why it is unknown, before the files are read, how many rows are delivered; None where it is known."""
        return self.unknown_rows_read or self.unknown_made

    @property
    def unknown_rows_read(self) -> str | None:
        """Why it is unknown how many rows the filter leaves; None where it is known."""
        if self.stored_rows is not None:
            return self.format.unknown_rows
        if self.transform is not None:
            return UNKNOWN
        if self.filter is not None:
            return f"only reading tells how many rows {self.filter_name} leaves"
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

    @property
    def makes_rows(self) -> bool:
        """Whether what is delivered is made of the rows that are read."""
        return self.transform is not None or self.packing is not None

    def for_filter_alone(self) -> OpenedFiles:
        """Return the same files with the columns of the filter alone, before the rows that it keeps were counted."""
        return self._with_columns(())

    def for_lengths_alone(self) -> OpenedFiles:
        """Return the same files with the column alone that decides how many sequences there are, and not packed.

        A transform needs all of its columns.
        """
        packing = self.packing
        assert packing is not None  # noqa: S101 - the caller asks
        if self.transform is not None:
            return replace(self, packing=None)
        return replace(self._with_columns((packing.packing.column,)), packing=None)

    def _with_columns(self, delivered: tuple[str, ...]) -> OpenedFiles:
        """Return the same files with some columns and those of the filter; those of the filter alone for none."""
        names = list(dict.fromkeys([*delivered, *self.filter_columns]))
        needed = pa.schema([self.needed.field(name) for name in names])
        schema = pa.schema([self.needed.field(name) for name in delivered or names])
        places = [self.needed.get_field_index(name) for name in names]
        projections = tuple(
            projection.of(tuple(projection.sources[place] for place in places)) for projection in self.projections
        )
        groups = self.stored_rows or {}
        files = tuple(
            replace(
                file,
                row_groups=tuple(
                    replace(group, rows=rows, expected=rows)
                    for group, rows in zip(file.row_groups, groups[file.path], strict=True)
                ),
            )
            if file.path in groups
            else file
            for file in self.manifest.files
        )
        manifest = replace(self.manifest, files=files)
        return replace(self, schema=schema, needed=needed, projections=projections, manifest=manifest, stored_rows=None)

    def projection(self, path: str) -> Projection:
        """Return how a file's columns become the needed ones."""
        return self.projections[self.projected.get(path, 0)]

    def new_cache(self) -> ReadCache:
        """Return what readers share of which nothing was read but the footers."""
        return ReadCache.of_opened(self.footers)

    def take_retries(self) -> tuple[Retry, ...]:
        """Return the failed attempts of the storage since the last call."""
        return self.storage.take_retries()

    def without_footers(self) -> OpenedFiles:
        """Return the same for a process that gets footers with its assignments."""
        tokens = None if self.tokens is None else self.tokens.without_lengths()
        return replace(self, footers={}, metadata_file=None, all_columns=None, tokens=tokens)

    def path_of(self, split: Split) -> str:
        """Return the path of a split's file. In a mixture a split names source and pass, too."""
        return split.path if self.source is None else parse_source_path(split.path).path

    def constants_of(self, path: str) -> dict[str, Any]:
        """Return the values that columns have in all rows of a file."""
        return dict(zip(self.constant_columns, self.constants.get(path, ()), strict=False))


@dataclass(frozen=True)
class OpenedSources:
    """The opened sources of a mixture, by name, in order. All deliver the same columns, and know their rows.

    What it says of itself is what `OpenedFiles` does; a mixture has no filter, and its sources have one each.
    """

    sources: Mapping[str, OpenedFiles]
    unknown_rows: ClassVar[None] = None
    unknown_made: ClassVar[None] = None
    tokens: ClassVar[None] = None
    filter: ClassVar[None] = None
    filter_columns: ClassVar[tuple[str, ...]] = ()
    filter_digest: ClassVar[None] = None
    filter_binding: ClassVar[None] = None
    filter_bindings: ClassVar[None] = None
    selection: ClassVar[None] = None
    transform: ClassVar[None] = None
    pin: ClassVar[Mapping[str, int]] = {}
    footers: ClassVar[Mapping[str, bytes]] = {}
    expressions: ClassVar[Mapping[str, pc.Expression]] = {}
    format_name: ClassVar[str] = "mixed"

    @property
    def schema(self) -> pa.Schema:
        """The columns that all sources deliver."""
        return next(iter(self.sources.values())).delivered_schema

    @property
    def delivered_schema(self) -> pa.Schema:
        """The same."""
        return self.schema

    @property
    def announced_nulls(self) -> str | None:
        """The message about nulls that cannot be delivered, of the first source that announces any."""
        named = ((name, files.announced_nulls) for name, files in self.sources.items())
        return next((f"source {name!r}: {nulls}" for name, nulls in named if nulls is not None), None)

    @cached_property
    def manifest(self) -> Manifest:
        """The files of all sources, each once, under the name of its source."""
        files = (
            replace(file, path=f"{name}/{file.path}")
            for name, opened in self.sources.items()
            for file in opened.manifest.files
        )
        return Manifest("", tuple(sorted(files, key=lambda file: file.path)))

    @property
    def pruned(self) -> tuple[int, int]:
        """How many row groups filters ruled out before anything was read, and their uncompressed bytes."""
        groups, sizes = zip(*(files.pruned for files in self.sources.values()), strict=True)
        return sum(groups), sum(sizes)

    @cached_property
    def options_digest(self) -> str:
        """Digest of all that decides which rows the sources have, beside their files."""
        parts = [
            (
                name,
                files.filter_digest,
                files.filter_binding,
                files.format_name,
                files.options_digest,
                *files.pin.items(),
                *([] if files.transform is None else [files.transform.id]),
                *([] if files.packing is None else [files.packing.text]),
            )
            for name, files in self.sources.items()
        ]
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    def of_slices(self, slices: Sequence[ShardSlice]) -> OpenedFiles:
        """Return the source that slices are of; any for none."""
        if not slices:
            return next(iter(self.sources.values()))
        return self.sources[parse_source_path(slices[0].shard.splits[0].path).source]

    def new_cache(self) -> ReadCache:
        """Return what readers share of which nothing was read but the footers: each source's own."""
        caches = {name: files.new_cache() for name, files in self.sources.items()}
        return replace(ReadCache.of_opened({}), of_sources=caches)

    def take_retries(self) -> tuple[Retry, ...]:
        """Return the failed attempts of the storages since the last call."""
        return tuple(retry for files in self.sources.values() for retry in files.take_retries())

    def without_footers(self) -> OpenedSources:
        """Return the same: the footers of sources travel with them."""
        return self


Opened: TypeAlias = OpenedFiles | OpenedSources
"""What a dataset has opened: files, or the files of several sources."""


def files_of(opened: Opened, what: str) -> OpenedFiles:
    """Return the files of a single dataset, or raise a ValueError that says what a mixture cannot do."""
    if isinstance(opened, OpenedSources):
        raise ValueError(f"{what} is not possible with a mixture of sources")  # noqa: TRY004 - not a type that users gave
    return opened
