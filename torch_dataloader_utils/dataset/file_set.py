"""What a dataset is opened from: files given by path, or another list of files, such as a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_dataloader_utils.dataset.discovery import Request, open_files
from torch_dataloader_utils.dataset.manifest_file import load_manifest
from torch_dataloader_utils.dataset.partitions import Partitioning, partition_columns, require_partitioning
from torch_dataloader_utils.formats.base import Format, OpenedFiles
from torch_dataloader_utils.loader.arguments import parse_paths
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.listing import list_files

__all__ = ["FileSet", "PathSet"]


class FileSet(ABC):
    """The files of a dataset. Nothing is accessed before `open`."""

    @property
    def is_filtered(self) -> bool:
        """Whether a filter of its own leaves out rows."""
        return False

    @abstractmethod
    def open(self, request: Request) -> OpenedFiles:
        """List the files and read their footers."""


@dataclass(frozen=True, slots=True)
class PathSet(FileSet):
    """Files given by path.

    Attributes:
        urls: Files, directories and globs.
        format: Their format.
        storage_options: fsspec's options.
        partitioning: Which directories become columns, or None.
        manifest: The files and footers that an earlier dataset dumped, or None.
    """

    urls: Sequence[str]
    format: Format
    storage_options: Mapping[str, Any] | None = field(repr=False)
    partitioning: Partitioning | None
    manifest: bytes | None = field(repr=False)

    @classmethod
    def parse(cls, given: Mapping[str, Any], file_format: Format) -> PathSet:
        """Check the arguments of `create_dataloader` that say where the files are."""
        partitioning = require_partitioning(given["partitioning"])
        return cls(parse_paths(given["path"]), file_format, given["storage_options"], partitioning, given["manifest"])

    def open(self, request: Request) -> OpenedFiles:
        """List the files, or take them from the manifest, and read their footers."""
        storage, locations = Storage.for_urls(self.urls, self.storage_options)
        if self.manifest is None:
            listing, known = list_files(storage, locations, self.format.suffixes), None
        else:
            listing, known = load_manifest(self.manifest, storage, locations)
        paths = {file.path: file.path for file in listing.files}
        annotations = partition_columns(paths, self.partitioning, listing.root)
        return open_files(storage, listing, self.format, request, annotations=annotations, known=known)
