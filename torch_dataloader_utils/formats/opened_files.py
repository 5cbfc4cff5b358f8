"""What a dataset has opened: files that are described and checked, or the files of a mixture's sources."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.formats.base import FilesToRead, Format
from torch_dataloader_utils.formats.read_cache import ReadCache
from torch_dataloader_utils.formats.row_packing import RowGroupPacking
from torch_dataloader_utils.formats.row_transform import UNKNOWN, RowTransform
from torch_dataloader_utils.formats.schema import AllColumns
from torch_dataloader_utils.planning.manifest import Manifest, RowGroup, Split
from torch_dataloader_utils.planning.mixture.source_paths import parse_source_path
from torch_dataloader_utils.planning.plan import ShardSlice
from torch_dataloader_utils.planning.token_counts import TokenCounts
from torch_dataloader_utils.storage.attempts import Retry

FILTER_UNKNOWN = "only reading tells how many rows the filter leaves"


def expression_digest(expression: pc.Expression) -> str:
    """Return the digest of a serialised expression, 16 hexadecimal characters: its text leaves too much out."""
    return hashlib.blake2b(bytes(expression.__reduce__()[1][0]), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True)
class OpenedFiles(FilesToRead):
    """A dataset's files, described and checked. Nothing in it changes: what readers learn is in their `ReadCache`.

    Attributes:
        format: Their format.
        schema: The columns to deliver, in order, with their types; all nullable, as files may differ in that alone.
            With a transform, those that it is called with.
        filter: Which rows to deliver, or None for all.
        filter_columns: The columns that the filter needs.
        filter_name: What the filter is in messages, which name the excluded expressions that are a part of it.
        announced_nulls: The message about nulls that a footer announces, that cannot be delivered and that the filter
            does not remove; None if there are none.
        constants: The values that `constant_columns` have in a file, by path.
        constant_columns: Columns that have a single value in all of a file: partition columns.
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

    format: Format
    schema: pa.Schema
    filter: pc.Expression | None
    filter_columns: tuple[str, ...]
    filter_name: str = "the filter"
    announced_nulls: str | None = None
    constants: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, repr=False)
    constant_columns: tuple[str, ...] = ()
    all_columns: AllColumns | None = field(default=None, repr=False)
    expressions: Mapping[str, pc.Expression] = field(default_factory=dict)
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
            file._replace(
                row_groups=tuple(
                    RowGroup(rows, group.bytes) for group, rows in zip(file.row_groups, groups[file.path], strict=True)
                ),
            )
            if file.path in groups
            else file
            for file in self.manifest.files
        )
        manifest = replace(self.manifest, files=files)
        return replace(self, schema=schema, needed=needed, projections=projections, manifest=manifest, stored_rows=None)

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
            file._replace(path=f"{name}/{file.path}")
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
