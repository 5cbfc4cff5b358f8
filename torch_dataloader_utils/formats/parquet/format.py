"""Parquet: footers, or `_metadata` in their place, read once; row groups decoded by pyarrow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.formats.base import Codec, Described, FileCase, Format, KnownFooters, OpenedFiles
from torch_dataloader_utils.formats.concurrency import OPEN_FILES, read_each
from torch_dataloader_utils.formats.parquet.footer import FooterReader, parse_footer
from torch_dataloader_utils.formats.parquet.footer_cache import FooterCache
from torch_dataloader_utils.formats.parquet.layout import ParquetLayout
from torch_dataloader_utils.formats.parquet.metadata_file import MetadataFile, read_metadata_file
from torch_dataloader_utils.formats.parquet.statistics import select_row_groups
from torch_dataloader_utils.formats.read_cache import FooterStore
from torch_dataloader_utils.formats.recognition import ENDINGS
from torch_dataloader_utils.storage.filesystem import LocalFile, Storage
from torch_dataloader_utils.storage.listing import Listing

__all__ = ["Parquet"]


@dataclass(frozen=True, slots=True)
class Parquet(Format):
    """Apache Parquet: https://parquet.apache.org/docs/file-format/."""

    name: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = ENDINGS["parquet"]

    def describe(
        self, storage: Storage, listing: Listing, known: KnownFooters | None, counts_nulls: Callable[[pa.Field], bool]
    ) -> Described:
        """Read every file's footer, once, or `_metadata` if there is one."""
        reader = FooterReader(storage, counts_nulls)
        metadata_file = None
        if known is not None and known.metadata_file is not None:
            metadata_file = MetadataFile(known.metadata_file)
        elif known is None and listing.metadata_file is not None:
            metadata_file = read_metadata_file(storage, listing.metadata_file, listing.files)
        if metadata_file is not None:
            return Described(list(metadata_file.describe(listing.files, reader)), metadata_file.content)
        if known is not None:
            footers = [reader.parse(file, known.footers[file.path]) for file in listing.files]
        else:
            footers = list(read_each(reader.read, listing.files, storage))
        reader.warn_of_mismatches()
        return Described(footers)

    def select(
        self,
        described: Described,
        filters: pc.Expression,
        schema: pa.Schema,
        columns: Sequence[str],
        cases: Sequence[FileCase],
    ) -> Sequence[Sequence[int]] | None:
        """Return the row groups that their statistics do not rule out."""
        if described.metadata_file is None:
            contents = [footer.content for footer in described.footers if footer.content is not None]
            return select_row_groups(contents, filters, schema, columns, cases)
        if not all(case.comparable for case in cases):
            return None
        paths = [footer.file.path for footer in described.footers]
        return MetadataFile(described.metadata_file).select_row_groups(paths, filters, schema, columns)

    def verify(self, files: OpenedFiles) -> None:
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

    def codec(self, files: OpenedFiles, footers: FooterStore) -> Codec:
        """Return what opens files for one reader."""
        return _ParquetCodec(files, footers)


class _ParquetCodec(Codec):
    """Row groups decoded by pyarrow, by footers that are known or are read when they are needed."""

    def __init__(self, files: OpenedFiles, known: FooterStore) -> None:
        self._files = files
        self._footers = footers = FooterCache(files, known)
        self._layout = lru_cache(OPEN_FILES)(
            lambda path: ParquetLayout(parse_footer(footers[path]), files.projection(path).stored.names)
        )

    def expect(self, paths: Iterable[str]) -> None:
        self._footers.expect(paths)

    def layout(self, path: str) -> ParquetLayout:
        return self._layout(path)

    def open(self, path: str, file: Any, local: LocalFile | None) -> _ParquetRowGroups:
        if local is not None and not local.ends_with(self._footers[path]):
            msg = f"{self._files.manifest.full_path(path)} was rewritten since it was listed"
            raise UnreadableFileError(msg)
        opened = pq.ParquetFile(file, metadata=self._layout(path).metadata, pre_buffer=False)
        return _ParquetRowGroups(opened, self._files.projection(path).stored.names)

    def close(self) -> None:
        self._footers.close()


@dataclass(frozen=True, slots=True)
class _ParquetRowGroups:
    """An open Parquet file, and the columns that are needed of it."""

    parquet: pq.ParquetFile
    columns: list[str]

    def read(self, number: int) -> pa.Table:
        return self.parquet.read_row_group(number, columns=self.columns)

    def batches(self, number: int, rows: int, *, use_threads: bool) -> Iterator[pa.RecordBatch]:
        return self.parquet.iter_batches(rows, row_groups=[number], columns=self.columns, use_threads=use_threads)  # type: ignore[no-any-return]

    def close(self) -> None:
        self.parquet.close(force=True)
