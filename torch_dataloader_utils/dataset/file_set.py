"""What a dataset is opened from: files given by path, or another list of files, such as a table."""

from __future__ import annotations

import posixpath
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch_dataloader_utils.dataset.discovery import Request, open_files
from torch_dataloader_utils.dataset.manifest_file import load_manifest
from torch_dataloader_utils.dataset.packing import sequence_counts
from torch_dataloader_utils.dataset.partitions import Partitioning, is_hive, partition_columns, require_partitioning
from torch_dataloader_utils.formats.base import Format
from torch_dataloader_utils.formats.opened_files import Opened, OpenedFiles
from torch_dataloader_utils.formats.recognition import format_hint
from torch_dataloader_utils.gc_pause import without_gc
from torch_dataloader_utils.loader.arguments import parse_paths
from torch_dataloader_utils.planning.manifest import Manifest
from torch_dataloader_utils.planning.plan import PlanOptions
from torch_dataloader_utils.planning.planner import EpochPlanner
from torch_dataloader_utils.planning.strategy import SplitStrategy
from torch_dataloader_utils.storage.listing import GLOB, list_files
from torch_dataloader_utils.storage.redaction import is_http, without_query
from torch_dataloader_utils.storage.stored_file import StoredFile
from torch_dataloader_utils.storage.zip_archives import require_readable


class FileSet(ABC):
    """The files of a dataset. Nothing is accessed before `open`."""

    @property
    def is_filtered(self) -> bool:
        """Whether a filter of its own leaves out rows."""
        return False

    @abstractmethod
    def open(self, request: Request) -> Opened:
        """List the files and read their footers."""

    @property
    def sources(self) -> int:
        """Number of sources of a mixture; 1 for a single dataset."""
        return 1

    @property
    def is_mixture(self) -> bool:
        """Whether these are the files of the sources of a mixture, of which there may be one."""
        return False

    def planner(
        self,
        opened: Opened,
        options: PlanOptions,
        strategy: SplitStrategy | None,
        *,
        drop_last: bool,  # noqa: ARG002
    ) -> EpochPlanner:
        """Return what plans the epochs of the opened files."""
        return EpochPlanner(opened.manifest, options, opened.selection, strategy, sequence_counts(opened, options))


@dataclass(frozen=True, slots=True)
class PathSet(FileSet):
    """Files, directories and globs, given by path; or their files and footers, which an earlier dataset dumped."""

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

    @without_gc
    def describe(self, request: Request) -> Manifest:
        """List the files and read their footers. Whether their columns fit together is not looked at."""
        with request.opened_storage(self.urls, self.storage_options) as (storage, locations):
            listing = list_files(
                storage, locations, self.format.suffixes, partial(format_hint, current=self.format.name)
            )
            described = self.format.describe(storage, listing, None, lambda _: ())
        counts_rows = self.format.unknown_rows is None
        return Manifest(listing.root, tuple(footer.file for footer in described.footers), counts_rows)

    def open(self, request: Request) -> OpenedFiles:
        """List the files, or take them from the manifest, and read their footers."""
        with request.opened_storage(self.urls, self.storage_options) as (storage, locations):
            hint = partial(format_hint, current=self.format.name)
            if self.manifest is None:
                listing, known = list_files(storage, locations, self.format.suffixes, hint), None
            else:
                listing, known = load_manifest(self.manifest, storage, locations, self.format.name)
                require_readable(storage.fs, (file.location for file in listing.files), storage.display)
            paths = {file.path: file.path for file in listing.files}
            if is_hive(self.partitioning):
                given = _GivenPaths(
                    dict(zip(locations, self.urls, strict=True)), listing.files, is_local=storage.is_local
                )
                paths = {file.path: given.path_of(file) for file in listing.files}
            annotations = partition_columns(paths, self.partitioning, listing.root)
            return open_files(storage, listing, self.format, request, annotations=annotations, known=known)


class _GivenPaths:
    """Which directories of a file's path were given by the user, or are below those that were.

    pyarrow and polars take Hive columns from all directories in the path of a given file (polars: of a glob, too), and
    only from those below a given directory:
    https://arrow.apache.org/docs/python/generated/pyarrow.dataset.dataset.html,
    https://docs.pola.rs/user-guide/io/hive.

    In a list of files or globs and directories, all follow the rule of files, so that alike paths have alike columns.
    `urls` is what the user gave, by what the storage calls it.
    """

    def __init__(self, urls: Mapping[str, str], files: Sequence[StoredFile], *, is_local: bool) -> None:
        normal = posixpath.normpath if is_local else str  # as local files are listed
        given = {normal(location).rstrip("/"): url for location, url in urls.items()}
        self._first_segments = {location: _first_given(location, url) for location, url in given.items()}
        # A name may have a wildcard in it and be a directory all the same.
        found = [file.location for file in files]
        directories = {location for location in given if any(path.startswith(f"{location}/") for path in found)}
        self._globs = [location for location in given if location not in directories and re.search(GLOB, location)]
        self._has_files = bool(self._globs) or any(path in given for path in found)
        self._of_directories: dict[str, int] = {}

    def path_of(self, file: StoredFile) -> str:
        """Return a file's path, starting with the first directory that can become a column."""
        if not self._has_files:
            return file.path  # from below the given directories
        first = self._first_segments.get(file.location)
        if first is None:
            directory = posixpath.dirname(file.location)
            if directory not in self._of_directories:
                self._of_directories[directory] = self._first_segment_of(directory)
            first = self._of_directories[directory]
        location = without_query(file.location) if is_http(file.location) else file.location
        return "/".join(location.split("/")[first:])

    def _first_segment_of(self, directory: str) -> int:
        """Return the first given segment of the path of a directory that a given directory or glob contains."""
        segments = directory.split("/")
        for depth in range(len(segments), 0, -1):
            first = self._first_segments.get("/".join(segments[:depth]))
            if first is not None:
                return first
        containing = (glob for glob in self._globs if directory.startswith(posixpath.dirname(re.split(GLOB, glob)[0])))
        return self._first_segments.get(next(containing, ""), 0)


def _first_given(location: str, url: str) -> int:
    """Return the first segment of a location that the user wrote: a relative path leaves out those before it."""
    if "://" in url or url.startswith(("/", "~")):
        return 0
    written = [segment for segment in posixpath.normpath(url).split("/") if segment not in {".", ".."}]
    return len(location.split("/")) - len(written)
