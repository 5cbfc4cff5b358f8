"""A `_metadata` file: the row groups of all data files of its directory.

See https://arrow.apache.org/docs/python/parquet.html#writing-metadata-and-common-metadata-files. With it a plan needs
no other footer. But it may be older than the files, and then reading by it would return the wrong rows. So each file's
footer is read before its rows are, and compared with it. If a filter rules out all of a file, its footer is read when
the dataset is opened, because the file is not read later.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torch_dataloader_utils.errors import MetadataFileWarning, UnreadableFileError, warn_user
from torch_dataloader_utils.formats.base import FileCase, Footer
from torch_dataloader_utils.formats.parquet.footer import (
    SHOWN,
    FooterReader,
    NotParquetError,
    parse_footer,
    read_schema_of,
    schema_of,
)
from torch_dataloader_utils.formats.parquet.statistics import select_row_groups
from torch_dataloader_utils.planning.manifest import DESCRIBED, DataFile, RowGroup
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.stored_file import StoredFile


class MetadataFile:
    """What a `_metadata` file says of the data files in its directory.

    `content` is its footer, with length and magic; the file has nothing else.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.metadata = parse_footer(content)
        read_schema_of(self.metadata)  # raises if the columns are damaged
        self._numbers: dict[str, list[int]] = defaultdict(list)
        for number in range(self.metadata.num_row_groups):
            self._numbers[self.metadata.row_group(number).column(0).file_path].append(number)

    @property
    def paths(self) -> set[str]:
        """The files that it describes, by their paths relative to its directory."""
        return set(self._numbers)

    def describe(self, files: Iterable[StoredFile], reader: FooterReader) -> Iterator[Footer]:
        """Yield, for each file, what its footer would say, without the footer's bytes."""
        columns = reader.columns(self.metadata)
        described_by = described_columns(schema_of(self.metadata))
        for file in files:
            groups = [self.metadata.row_group(number) for number in self._numbers[file.path]]
            row_groups = tuple(RowGroup(group.num_rows, group.total_byte_size) for group in groups)
            digest = description_digest(described_by, groups)
            described = DataFile(file.path, file.size, digest, row_groups, file.etag, file.modified)
            yield Footer(described, columns.schema, tuple(columns.announced_nulls(groups)), None)

    def select_row_groups(
        self, files: Sequence[str], filters: pc.Expression, needed: pa.Schema
    ) -> tuple[tuple[int, ...], ...] | None:
        """Return what `statistics.select_row_groups` would return for the files' own footers."""
        found = select_row_groups([self.content], filters, needed, [FileCase()])
        if found is None:
            return None
        selected = frozenset(found[0])
        return tuple(
            tuple(index for index, number in enumerate(self._numbers[path]) if number in selected) for path in files
        )


def read_metadata_file(storage: Storage, file: StoredFile, files: Sequence[StoredFile]) -> MetadataFile | None:
    """Read a `_metadata` file; warn and return None if it does not describe exactly these files.

    A storage error is raised: ranks that read different footers could plan different epochs.
    """
    name = storage.display(file.location)
    try:
        metadata_file = _parsed(FooterReader(storage).content(file))
    except (NotParquetError, pa.ArrowException) as error:
        warn_user(f"{name} is not used, all footers are read instead: {error}", MetadataFileWarning)
        return None
    here = {file.path for file in files}
    if metadata_file.paths != here:
        lacking, surplus = sorted(here - metadata_file.paths), sorted(metadata_file.paths - here)
        parts = [
            f"{what} {', '.join(paths[:SHOWN])}" + (f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else "")
            for what, paths in (("it does not describe", lacking), ("it describes missing", surplus))
            if paths
        ]
        message = f"{name} is not used, all footers are read instead: {'; '.join(parts)}. Write it again, or remove it"
        warn_user(message, MetadataFileWarning)
        return None
    return metadata_file


def known_metadata_file(content: bytes, files: Sequence[StoredFile]) -> MetadataFile:
    """Return what a manifest holds of a `_metadata` file, or raise if that does not describe exactly these files."""
    try:
        metadata_file = MetadataFile(content)
    except (OSError, pa.ArrowException) as error:
        raise UnreadableFileError(f"the manifest's `_metadata` is damaged: {error}; dump the manifest again") from None
    if metadata_file.paths != {file.path for file in files}:
        raise UnreadableFileError("the manifest's `_metadata` describes other files than it: dump the manifest again")
    return metadata_file


def _parsed(content: bytes) -> MetadataFile:
    try:
        return MetadataFile(content)
    except OSError as error:  # pyarrow raises it for some kinds of damage
        raise NotParquetError(str(error)) from None


def description_digest(columns: str, groups: Iterable[pq.RowGroupMetaData]) -> str:
    """Return a digest of a file's columns, and of each column chunk's offset, size and statistics.

    The file's own footer and an up-to-date `_metadata` file give the same digest. The columns are as
    `described_columns` gives them.
    """
    digest = hashlib.blake2b(columns.encode(), digest_size=8)
    for group in groups:
        chunks = [group.column(number) for number in range(group.num_columns)]
        digest.update(f"{group.num_rows} {group.total_byte_size} {list(map(_described, chunks))}\n".encode())
    return DESCRIBED + digest.hexdigest()


def described_columns(schema: pq.ParquetSchema) -> str:
    """Return the names and types of a file's columns as a string."""
    columns = [schema.column(number) for number in range(len(schema))]
    return "\n".join(f"{column.path} {column.physical_type} {column.logical_type}" for column in columns)


def _described(chunk: pq.ColumnChunkMetaData) -> tuple[Any, ...]:
    extent = (chunk.data_page_offset, chunk.total_compressed_size)
    statistics = chunk.statistics
    if statistics is None:
        return extent
    bounds = (statistics.min_raw, statistics.max_raw) if statistics.has_min_max else ()
    return (*extent, statistics.has_null_count and statistics.null_count, *bounds)
