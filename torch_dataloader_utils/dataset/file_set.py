"""What a dataset is opened from: files given by path, or another list of files, such as a table."""

from __future__ import annotations

import os
import posixpath
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch_dataloader_utils.dataset.discovery import Request, open_files
from torch_dataloader_utils.dataset.manifest_file import load_manifest
from torch_dataloader_utils.dataset.partitions import Partitioning, is_hive, partition_columns, require_partitioning
from torch_dataloader_utils.formats.base import Format, OpenedFiles
from torch_dataloader_utils.formats.recognition import format_hint
from torch_dataloader_utils.loader.arguments import parse_paths
from torch_dataloader_utils.storage.filesystem import Storage, StoredFile
from torch_dataloader_utils.storage.listing import GLOB, list_files
from torch_dataloader_utils.storage.redaction import is_http, without_query

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
        hint = partial(format_hint, current=self.format.name)
        if self.manifest is None:
            listing, known = list_files(storage, locations, self.format.suffixes, hint), None
        else:
            listing, known = load_manifest(self.manifest, storage, locations)
        paths = {file.path: file.path for file in listing.files}
        if is_hive(self.partitioning):
            given = _GivenPaths(dict(zip(locations, self.urls, strict=True)), is_local=storage.is_local)
            paths = {file.path: given.path_of(file) for file in listing.files}
        annotations = partition_columns(paths, self.partitioning, listing.root)
        return open_files(storage, listing, self.format, request, annotations=annotations, known=known)


class _GivenPaths:
    """Which directories of a file's path were given by the user, or are below those that were.

    pyarrow and polars take Hive columns from all directories in the path of a given file (polars: of a glob, too), and
    only from those below a given directory:
    https://arrow.apache.org/docs/python/generated/pyarrow.dataset.dataset.html,
    https://docs.pola.rs/user-guide/io/hive.

    Args:
        urls: What the user gave, by what the storage calls it.
        is_local: Whether the files are local.
    """

    def __init__(self, urls: Mapping[str, str], *, is_local: bool) -> None:
        normal = posixpath.normpath if is_local else str  # as local files are listed
        self._urls = {normal(location).rstrip("/"): url for location, url in urls.items()}
        self._globs = [location for location in self._urls if re.search(GLOB, location)]
        self._is_local = is_local

    def path_of(self, file: StoredFile) -> str:
        """Return a file's path, starting with the first directory that can become a column."""
        parts = file.location.split("/")
        if any("/".join(parts[:depth]) in self._urls for depth in range(1, len(parts))):
            return file.path  # below a given directory
        url = self._urls.get(file.location)
        if url is None:
            plain = ((location, re.split(GLOB, location, maxsplit=1)[0]) for location in self._globs)
            url = next((self._urls[glob] for glob, prefix in plain if file.location.startswith(prefix)), "/")
        if not self._is_local:
            return without_query(file.location) if is_http(file.location) else file.location
        is_relative = "://" not in url and not url.startswith(("/", "~"))
        return os.path.relpath(file.location) if is_relative else file.location
