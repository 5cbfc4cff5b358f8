"""Parquet: footers read once, or `_metadata` in their place; row groups decoded by pyarrow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.formats.base import (
    OPEN_FILES,
    Codec,
    Described,
    FileCase,
    Format,
    KnownFooters,
    OpenedFiles,
    read_each,
)
from torch_dataloader_utils.formats.parquet.footer import FooterReader, parse_footer
from torch_dataloader_utils.formats.parquet.footer_cache import Footers
from torch_dataloader_utils.formats.parquet.layout import ParquetLayout
from torch_dataloader_utils.formats.parquet.metadata_file import MetadataFile, read_metadata_file
from torch_dataloader_utils.formats.parquet.statistics import select_row_groups
from torch_dataloader_utils.storage.filesystem import LocalFile, Storage
from torch_dataloader_utils.storage.listing import Listing

__all__ = ["Parquet"]


@dataclass(frozen=True, slots=True)
class Parquet(Format):
    """Apache Parquet: https://parquet.apache.org/docs/file-format/."""

    name: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".parq", ".pq")

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
            return Described([reader.parse(file, known.footers[file.path]) for file in listing.files])
        return Described(list(read_each(reader.read, listing.files, at_once=storage.is_local)))

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

    def verify(self, opened_files: OpenedFiles) -> None:
        """Read the footers of files of which nobody will read a row: what `_metadata` says of them must be true."""
        if opened_files.metadata_file is None or opened_files.selection is None:
            return
        footers = _footers_of(opened_files)
        paths = [
            file.path
            for file, chosen in zip(opened_files.manifest.files, opened_files.selection, strict=True)
            if not chosen
        ]
        try:
            footers.expect(paths)
            for path in paths:
                footers[path]
        finally:
            footers.close()

    def codec(self, opened_files: OpenedFiles) -> Codec:
        """Return the way to the rows for one that reads."""
        return _ParquetCodec(opened_files)


def _footers_of(opened_files: OpenedFiles) -> Footers:
    """Return the files' footers, those that are not known read and checked when they are first needed."""
    described = {file.path: file for file in opened_files.manifest.files}
    return Footers(opened_files.storage, opened_files.files, described, opened_files.footers)


class _ParquetCodec(Codec):
    """Row groups decoded by pyarrow, by footers that are known or read when they are needed."""

    def __init__(self, opened_files: OpenedFiles) -> None:
        self._opened_files = opened_files
        self._footers = footers = _footers_of(opened_files)
        self._layout = lru_cache(OPEN_FILES)(
            lambda path: ParquetLayout(parse_footer(footers[path]), opened_files.projection(path).stored.names)
        )

    def expect(self, paths: Iterable[str]) -> None:
        self._footers.expect(paths)

    def layout(self, path: str) -> ParquetLayout:
        return self._layout(path)

    def open(self, path: str, file: Any, local: LocalFile | None) -> _ParquetRowGroups:
        if local is not None:
            self._check_footer(path, local)
        opened = pq.ParquetFile(file, metadata=self._layout(path).metadata, pre_buffer=False)
        return _ParquetRowGroups(opened, self._opened_files.projection(path).stored.names)

    def close(self) -> None:
        self._footers.close()

    def _check_footer(self, path: str, local: LocalFile) -> None:
        footer = self._footers[path]
        local.file.seek(local.size - len(footer))
        if local.file.read(len(footer)) != footer:
            msg = f"{self._opened_files.manifest.full_path(path)} was written anew since it was listed"
            raise UnreadableFileError(msg)


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
