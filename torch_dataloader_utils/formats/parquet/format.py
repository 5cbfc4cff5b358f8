"""Parquet: footers, or `_metadata` in their place, read once; row groups decoded by pyarrow."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.formats.base import (
    Codec,
    ColumnsToCount,
    Described,
    FileCase,
    FilesToRead,
    Format,
    KnownFooters,
)
from torch_dataloader_utils.formats.concurrency import read_each
from torch_dataloader_utils.formats.parquet.codec import FooterCache, ParquetCodec
from torch_dataloader_utils.formats.parquet.footer import FooterReader, list_values
from torch_dataloader_utils.formats.parquet.metadata_file import MetadataFile, known_metadata_file, read_metadata_file
from torch_dataloader_utils.formats.parquet.statistics import select_row_groups
from torch_dataloader_utils.formats.read_cache import FooterStore
from torch_dataloader_utils.formats.recognition import ENDINGS
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.listing import Listing


@dataclass(frozen=True, slots=True)
class Parquet(Format):
    """Apache Parquet: https://parquet.apache.org/docs/file-format/.

    `page_checksum_verification` says whether pages that have a checksum are compared with it.
    """

    page_checksum_verification: bool = True

    name: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = ENDINGS["parquet"]

    def describe(
        self, storage: Storage, listing: Listing, known: KnownFooters | None, columns_to_count: ColumnsToCount
    ) -> Described:
        """Read every file's footer, once, or `_metadata` if there is one."""
        reader = FooterReader(storage, columns_to_count)
        metadata_file = None
        if known is not None and known.metadata_file is not None:
            metadata_file = known_metadata_file(known.metadata_file, listing.files)
        elif known is None and listing.metadata_file is not None:
            metadata_file = read_metadata_file(storage, listing.metadata_file, listing.files)
        if metadata_file is not None:
            return Described(list(metadata_file.describe(listing.files, reader)), metadata_file.content)
        if known is not None:
            footers = [reader.parse(file, known.footers[file.path]) for file in listing.files]
        else:
            footers = list(read_each(reader.read, listing.files, storage))
        reader.warn_of_mismatches()
        return Described(footers, parsed=reader.parsed)

    def select(
        self, described: Described, filters: pc.Expression, needed: pa.Schema, cases: Sequence[FileCase]
    ) -> Sequence[Sequence[int]] | None:
        """Return the row groups that their statistics do not rule out."""
        if described.metadata_file is None:
            contents = [footer.content for footer in described.footers if footer.content is not None]
            return select_row_groups(contents, filters, needed, cases)
        if not all(case.comparable for case in cases):
            return None
        paths = [footer.file.path for footer in described.footers]
        return MetadataFile(described.metadata_file).select_row_groups(paths, filters, needed)

    def list_values(
        self, files: FilesToRead, column: str, *, nulls_are_values: bool
    ) -> Mapping[str, Sequence[int | None]]:
        """Return how many values the lists of a column have in each row group: see `Format`."""
        place = files.needed.names.index(column)
        names = {path: files.projection(path).sources[place] for path in files.footers if path not in files.deletes}
        return {
            path: list_values(files.footers[path], name, nulls_are_values=nulls_are_values)
            for path, name in names.items()
            if name is not None
        }

    def verify(self, files: FilesToRead) -> None:
        """Read the footers of files of which no row is read later: what `_metadata` says of them must be true."""
        if files.metadata_file is None or files.selection is None:
            return
        footers = FooterCache(files, FooterStore(files.footers))
        chosen = zip(files.manifest.files, files.selection, strict=True)
        ruled_out = [file.path for file, row_groups in chosen if not row_groups]
        try:
            footers.expect(ruled_out)
            for path in ruled_out:
                footers[path]
        finally:
            footers.close()

    def codec(self, files: FilesToRead, footers: FooterStore, encodable: Collection[str] = ()) -> Codec:
        """Return what opens files for one reader."""
        return ParquetCodec(files, footers, encodable, verifies_checksums=self.page_checksum_verification)
