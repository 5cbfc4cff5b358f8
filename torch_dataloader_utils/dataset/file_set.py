"""What a dataset is opened from: paths of files, or whatever else lists files, such as a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.dataset.discovery import open_files
from torch_dataloader_utils.dataset.manifest_file import load_manifest
from torch_dataloader_utils.dataset.partitions import Partitioning, partition_columns
from torch_dataloader_utils.formats.base import Format, OpenedFiles
from torch_dataloader_utils.formats.recognition import format_hint
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.listing import list_files

__all__ = ["FileSet", "PathSet"]


class FileSet(ABC):
    """Files that make up a dataset."""

    @abstractmethod
    def open(
        self,
        columns: Sequence[str] | None,
        filters: pc.Expression | None,
        refuses_nulls: Callable[[pa.Field], bool],
    ) -> OpenedFiles:
        """List the files and read what they say of themselves.

        Args:
            columns: The columns to deliver; None for all.
            filters: Which rows to deliver; None for all.
            refuses_nulls: The columns that cannot be delivered with nulls.
        """


@dataclass(frozen=True, slots=True)
class PathSet(FileSet):
    """Files that paths stand for.

    Attributes:
        urls: Files, directories and globs.
        format: Their format.
        storage_options: fsspec's options.
        partitioning: How directories stand for columns, or None.
        manifest: What an earlier dataset kept of them, or None.
    """

    urls: Sequence[str]
    format: Format
    storage_options: Mapping[str, Any] | None = field(repr=False)
    partitioning: Partitioning | None
    manifest: bytes | None = field(repr=False)

    def open(
        self,
        columns: Sequence[str] | None,
        filters: pc.Expression | None,
        refuses_nulls: Callable[[pa.Field], bool],
    ) -> OpenedFiles:
        """List the files, unless a manifest does, and read what they say of themselves."""
        storage, locations = Storage.for_urls(self.urls, self.storage_options)
        hint = partial(format_hint, current=self.format.name)
        if self.manifest is None:
            listing, known = list_files(storage, locations, self.format.suffixes, hint), None
        else:
            listing, known = load_manifest(self.manifest, storage, locations)
        return open_files(
            storage,
            listing,
            self.format,
            columns=columns,
            filters=filters,
            refuses_nulls=refuses_nulls,
            known=known,
            annotations=partition_columns([file.path for file in listing.files], self.partitioning, listing.root),
        )
