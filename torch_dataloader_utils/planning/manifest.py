"""The files of a dataset as plans see them: row groups, splits, and the manifest. Frozen and plain."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

DESCRIBED = "_metadata:"
"""The first characters of the digest of a file whose footer was not read because a `_metadata` file describes it."""

TEXT = "text:"
"""The first characters of the digest of a text file. It has no footer, so its first and last bytes are digested."""


def json_digest(value: object) -> bytes:
    """Return the digest of a value by its canonical JSON: sorted keys, no spaces, ASCII.

    Raises:
        TypeError: If it is no JSON value.
        ValueError: If it contains itself.
        RecursionError: If it is nested too deeply.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class RowGroup(NamedTuple):
    """A row group as its file's footer describes it.

    Attributes:
        rows: Number of rows. Where rows are not counted, number of bytes: it cannot have more rows.
        bytes: The footer's ``total_byte_size``: uncompressed bytes over all columns.
        estimate: The estimated number of rows where rows are not counted; else None.
    """

    rows: int
    bytes: int
    estimate: int | None = None

    @property
    def expected(self) -> int:
        """The number of rows, or the estimated number where rows are not counted."""
        return self.rows if self.estimate is None else self.estimate


class DataFile(NamedTuple):
    """A data file, by content.

    Attributes:
        path: Path relative to the dataset's root, with forward slashes.
        size: Size in bytes.
        digest: Digest of the footer, 16 hexadecimal characters; or `DESCRIBED` and the digest of the `_metadata`
            file's entries for it; or `TEXT` and the digest of its first and last bytes.
        row_groups: The row groups in file order.
        etag: The storage's identifier of this version of the object, or None.
        modified: Modification time as seconds since 1970, or None.
    """

    path: str
    size: int
    digest: str
    row_groups: tuple[RowGroup, ...]
    etag: str | None = None
    modified: float | None = None

    @property
    def rows(self) -> int:
        """Number of rows in all row groups."""
        return sum([group.rows for group in self.row_groups])


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """A row range of one file, aligned to row groups."""

    path: str
    row_offset: int
    row_length: int

    def content(self) -> bytes:
        """Return the bytes that represent this range in digests and in shuffle keys."""
        return f"{self.path}\0{self.row_offset}\0{self.row_length}".encode()


@dataclass(frozen=True, slots=True)
class SizedSplit:
    """A split, its uncompressed bytes, and its rows, which are estimated where rows are not counted."""

    split: Split
    bytes: int
    rows: int


class Layout(list[tuple[str, int]]):
    """The files in order, each with its path and number of rows: what row numbers of a whole manifest refer to."""

    @cached_property
    def stops(self) -> list[int]:
        """The number of the first row after each file."""
        return list(accumulate(rows for _, rows in self))


@dataclass(frozen=True)
class Manifest:
    """A dataset's data files, sorted by relative path.

    Attributes:
        root: The directory to which the paths are relative, as a URL without credentials or query.
        files: The files, sorted by path.
        counts_rows: Whether the numbers of rows are known. If not, plans and states count bytes in place of rows: as
            many as the uncompressed text of a file can have.
    """

    root: str
    files: tuple[DataFile, ...]
    counts_rows: bool = True

    def __post_init__(self) -> None:
        paths = [file.path for file in self.files]
        if any(path >= following for path, following in pairwise(paths)):
            raise ValueError("a manifest's files are sorted by path, each path once")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what can be computed again."""
        return {"root": self.root, "files": self.files, "counts_rows": self.counts_rows}

    def file(self, path: str) -> DataFile:
        """Return a file by its path. Workers need few of the files, so it is searched: an index would have all."""
        index = bisect_left(self.files, path, key=attrgetter("path"))
        if index == len(self.files) or self.files[index].path != path:
            raise KeyError(path)
        return self.files[index]

    @cached_property
    def fingerprint(self) -> str:
        """Digest of every file's relative path, size and footer digest (blake2b, 32 hexadecimal characters)."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            digest.update(f"{len(file.path.encode())}:{file.path}:{file.size}:{file.digest}\n".encode())
        return digest.hexdigest()

    @cached_property
    def first_rows(self) -> dict[str, int]:
        """Number of each file's first row among all rows of the manifest, by relative path."""
        starts = accumulate((file.rows for file in self.files), initial=0)
        return {file.path: start for file, start in zip(self.files, starts, strict=False)}

    @cached_property
    def row_group_splits(self) -> list[list[SizedSplit]]:
        """Each file's row groups as splits. Each split counts at least one byte."""
        return [_row_group_splits(file) for file in self.files]

    @cached_property
    def entries(self) -> list[list[str | int | float | None]]:
        """What states record of each file: path, size, digest, etag and mtime (None where unknown), rows."""
        return [[file.path, file.size, file.digest, file.etag, file.modified, file.rows] for file in self.files]

    @cached_property
    def entries_digest(self) -> bytes:
        """Digest of the entries: a part of each state's checksum."""
        return json_digest(self.entries)

    @cached_property
    def versions_digest(self) -> bytes:
        """Digest of the files' etags: of which version each file is, where the storage has versions."""
        return json_digest([file.etag for file in self.files])

    @cached_property
    def rows_by_file(self) -> Layout:
        """Each file's path and its number of rows."""
        return Layout((file.path, file.rows) for file in self.files)

    @cached_property
    def rows_of(self) -> dict[str, int]:
        """Each file's number of rows, by relative path."""
        return dict(self.rows_by_file)

    @cached_property
    def written_lengths(self) -> dict[str, int]:
        """Number of characters of each file's full path in JSON, by relative path."""
        return {file.path: len(json.dumps(self.full_path(file.path))) for file in self.files}

    @cached_property
    def rows(self) -> int:
        """Number of rows in all files."""
        return sum(file.rows for file in self.files)

    def full_path(self, path: str) -> str:
        """Return a file's path under the root, for messages and states. It is never opened."""
        return root_prefix(self.root) + path


def _row_group_splits(file: DataFile) -> list[SizedSplit]:
    offsets = accumulate((group.rows for group in file.row_groups), initial=0)
    return [
        SizedSplit(Split(file.path, offset, group.rows), max(1, group.bytes), group.expected)
        for offset, group in zip(offsets, file.row_groups, strict=False)
    ]


def root_prefix(root: str) -> str:
    """Return the part of a full path before the relative path."""
    return root if root.endswith("/") or not root else f"{root}/"
