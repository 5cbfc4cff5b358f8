"""The values that everything else passes around: frozen, plain, without I/O."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

__all__ = [
    "DESCRIBED",
    "Assignment",
    "DataFile",
    "Manifest",
    "Piece",
    "Plan",
    "Receipt",
    "RowGroup",
    "Shard",
    "SizedSplit",
    "Split",
    "root_prefix",
]


DESCRIBED = "_metadata:"
"""What begins the digest of a file whose footer was not read, because a `_metadata` file describes it."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group as its file's footer describes it.

    Attributes:
        rows: Number of rows.
        bytes: The footer's ``total_byte_size``: uncompressed bytes over all columns.
    """

    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file, by content.

    Attributes:
        path: Path relative to the dataset's root, with forward slashes.
        size: Size in bytes.
        digest: Digest of the footer, 16 hexadecimal characters; or, behind `DESCRIBED`, of what `_metadata` says.
        row_groups: The row groups in file order.
        etag: What the storage calls this version of the object, where it says.
        modified: Modification time as seconds since 1970, where the storage says.
        rows: Number of rows in all row groups.
    """

    path: str
    size: int
    digest: str
    row_groups: tuple[RowGroup, ...]
    etag: str | None = None
    modified: float | None = None
    rows: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", sum(group.rows for group in self.row_groups))


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """A row range of one file, aligned to row groups."""

    path: str
    row_offset: int
    row_length: int

    def content(self) -> bytes:
        """Return the bytes that stand for this range in digests and in shuffle keys."""
        return f"{self.path}\0{self.row_offset}\0{self.row_length}".encode()


@dataclass(frozen=True, slots=True)
class SizedSplit:
    """A split and its uncompressed bytes."""

    split: Split
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """A dataset's data files, sorted by relative path.

    Attributes:
        root: What the paths are relative to, as a URL without credentials or query.
        files: The files, sorted by path.
    """

    root: str
    files: tuple[DataFile, ...]

    def __post_init__(self) -> None:
        paths = [file.path for file in self.files]
        if any(one >= other for one, other in pairwise(paths)):
            msg = "a manifest's files are sorted by path, each path once"
            raise ValueError(msg)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what can be worked out again."""
        return {"root": self.root, "files": self.files}

    @cached_property
    def fingerprint(self) -> str:
        """Digest of every file's relative path, size and footer digest (blake2b, 32 hexadecimal characters)."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            digest.update(f"{len(file.path.encode())}:{file.path}:{file.size}:{file.digest}\n".encode())
        return digest.hexdigest()

    @cached_property
    def first_rows(self) -> dict[str, int]:
        """Place of each file's first row among all rows of the manifest, by relative path."""
        starts = accumulate((file.rows for file in self.files), initial=0)
        return {file.path: start for file, start in zip(self.files, starts, strict=False)}

    @cached_property
    def row_group_splits(self) -> list[list[SizedSplit]]:
        """Each file's row groups as splits of their own; every one counts a byte at least."""
        return [_row_group_splits(file) for file in self.files]

    @cached_property
    def entries(self) -> list[list[str | int | float | None]]:
        """What states say of each file: path, size, digest, and as far as the storage tells etag and mtime."""
        return [_entry(file) for file in self.files]

    @cached_property
    def written_lengths(self) -> dict[str, int]:
        """How many characters each file's path under the root takes in JSON, by relative path."""
        return {file.path: len(json.dumps(self.full_path(file.path))) for file in self.files}

    @cached_property
    def rows(self) -> int:
        """Number of rows in all files."""
        return sum(file.rows for file in self.files)

    def full_path(self, path: str) -> str:
        """Return a file's path under the root: for people and for states, never for opening."""
        return root_prefix(self.root) + path


def _row_group_splits(file: DataFile) -> list[SizedSplit]:
    offsets = accumulate((group.rows for group in file.row_groups), initial=0)
    return [
        SizedSplit(Split(file.path, offset, group.rows), max(1, group.bytes))
        for offset, group in zip(offsets, file.row_groups, strict=False)
    ]


def _entry(file: DataFile) -> list[str | int | float | None]:
    if file.modified is not None:
        return [file.path, file.size, file.digest, file.etag, file.modified]
    return [file.path, file.size, file.digest] if file.etag is None else [file.path, file.size, file.digest, file.etag]


def root_prefix(root: str) -> str:
    """Return what stands before a relative path in a full one."""
    return root if root.endswith("/") or not root else f"{root}/"


@dataclass(frozen=True, slots=True)
class Shard:
    """An ordered bundle of splits: the unit of reading, shuffling, assignment and progress."""

    splits: tuple[Split, ...]
    rows: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", sum(split.row_length for split in self.splits))

    def content(self) -> bytes:
        """Return the bytes that stand for this shard in digests and in permutation keys."""
        return b"\n".join(split.content() for split in self.splits)


@dataclass(frozen=True, slots=True)
class Piece:
    """What is left to deliver of a shard: its delivered rows from `start` on.

    Attributes:
        shard: The shard.
        start: Number of the shard's rows that were delivered before, counted after the filter and in shuffled order.
    """

    shard: Shard
    start: int = 0


@dataclass(frozen=True)
class Plan:
    """An epoch's sequence of shards and who walks them.

    Attributes:
        epoch: The epoch.
        num_ranks: Number of ranks.
        num_workers: Number of worker processes of each rank; 0 means the rank's own process.
        shards: The epoch's shards, in order.
    """

    epoch: int
    num_ranks: int
    num_workers: int
    shards: tuple[Shard, ...]

    @property
    def streams(self) -> int:
        """Number of streams that each rank walks: its workers, or one where there are none."""
        return max(1, self.num_workers)

    def stream(self, rank: int, worker: int) -> tuple[Shard, ...]:
        """Return what one worker of one rank walks: shard i with i % ranks == rank, i // ranks % workers == worker."""
        return self.shards[rank + self.num_ranks * worker :: self.num_ranks * self.streams]

    def rank_streams(self, rank: int) -> tuple[tuple[Shard, ...], ...]:
        """Return the streams of all of a rank's workers."""
        return tuple(self.stream(rank, worker) for worker in range(self.streams))

    @cached_property
    def digest(self) -> str:
        """Digest of the sequence of shards and of who walks them (blake2b, 32 hexadecimal characters)."""
        digest = hashlib.blake2b(f"{self.epoch}\n{self.num_ranks}\n{self.num_workers}".encode(), digest_size=16)
        for shard in self.shards:
            digest.update(b"\n\n" + shard.content())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Receipt:
    """How far a stream has come once the batch that this travels with is handed over.

    A stream walks its pieces in order, so one place says it all: pieces before `position` are done, whether they
    gave rows or ended empty.

    Attributes:
        stream: The worker whose stream this is.
        position: Index, in the stream's pieces of this iteration, of the piece that is under way.
        rows_delivered: Rows of that piece's shard delivered so far, those before the piece's start included.
        rows: Rows in this batch.
        rows_dropped: Rows left out because the last batch of the stream would have been short.
    """

    stream: int
    position: int
    rows_delivered: int
    rows: int
    rows_dropped: int = 0


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one worker process is sent at the start of an iteration.

    Attributes:
        iteration: Number of the iteration, carried by every message that answers it.
        stream: The stream that the worker walks.
        epoch: The epoch, which keys the shuffle inside shards.
        pieces: The pieces to walk, in order.
        footers: Footers of the files that they lie in, by path, which the worker does not have yet.
    """

    iteration: int
    stream: int
    epoch: int
    pieces: tuple[Piece, ...]
    footers: Mapping[str, bytes] = field(default_factory=dict, repr=False)
