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
    "TEXT",
    "Assignment",
    "Base",
    "DataFile",
    "Evened",
    "Lane",
    "Manifest",
    "Piece",
    "Plan",
    "Receipt",
    "RowGroup",
    "Shard",
    "SizedSplit",
    "Split",
    "Started",
    "root_prefix",
]


DESCRIBED = "_metadata:"
"""What begins the digest of a file whose footer was not read, because a `_metadata` file describes it."""


TEXT = "text:"
"""What begins the digest of a file of text, which has no footer: of its first and last bytes."""

UNTOLD = -1


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group as its file's footer describes it.

    Attributes:
        rows: Number of rows; where rows are not counted, of bytes, which are more than it can have.
        bytes: The footer's ``total_byte_size``: uncompressed bytes over all columns.
        expected: Where rows are not counted, about how many there are; else `rows`.
    """

    rows: int
    bytes: int
    expected: int = UNTOLD

    def __post_init__(self) -> None:
        if self.expected == UNTOLD:
            object.__setattr__(self, "expected", self.rows)


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file, by content.

    Attributes:
        path: Path relative to the dataset's root, with forward slashes.
        size: Size in bytes.
        digest: Digest of the footer, 16 hexadecimal characters; or, behind `DESCRIBED`, of what `_metadata` says, or,
            behind `TEXT`, of its first and last bytes.
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
    """A split, its uncompressed bytes, and its rows, or about how many they are where they are not counted."""

    split: Split
    bytes: int
    rows: int = UNTOLD

    def __post_init__(self) -> None:
        if self.rows == UNTOLD:
            object.__setattr__(self, "rows", self.split.row_length)


@dataclass(frozen=True)
class Manifest:
    """A dataset's data files, sorted by relative path.

    Attributes:
        root: What the paths are relative to, as a URL without credentials or query.
        files: The files, sorted by path.
        counts_rows: Whether it is known how many rows they have. If not, each byte that a file's text may have stands
            for a row in all that is planned and recorded.
    """

    root: str
    files: tuple[DataFile, ...]
    counts_rows: bool = True

    def __post_init__(self) -> None:
        paths = [file.path for file in self.files]
        if any(one >= other for one, other in pairwise(paths)):
            msg = "a manifest's files are sorted by path, each path once"
            raise ValueError(msg)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what can be worked out again."""
        return {"root": self.root, "files": self.files, "counts_rows": self.counts_rows}

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
        """What states say of each file: path, size, digest, etag and mtime (None where unknown), rows."""
        return [_entry(file) for file in self.files]

    @cached_property
    def rows_by_file(self) -> list[tuple[str, int]]:
        """Each file's path and its number of rows."""
        return [(file.path, file.rows) for file in self.files]

    @cached_property
    def rows_of(self) -> dict[str, int]:
        """Each file's number of rows, by relative path."""
        return dict(self.rows_by_file)

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
        SizedSplit(Split(file.path, offset, group.rows), max(1, group.bytes), group.expected)
        for offset, group in zip(offsets, file.row_groups, strict=False)
    ]


def _entry(file: DataFile) -> list[str | int | float | None]:
    return [file.path, file.size, file.digest, file.etag, file.modified, file.rows]


def root_prefix(root: str) -> str:
    """Return what stands before a relative path in a full one."""
    return root if root.endswith("/") or not root else f"{root}/"


@dataclass(frozen=True, slots=True)
class Shard:
    """An ordered bundle of splits: the unit of reading, shuffling, assignment and progress.

    Attributes:
        splits: The row ranges.
        rounds: Where rows are mixed, in how many parts that is done: one after the other, each of every split its
            part of the rows, in file order. More than one where row groups are larger than what may be mixed at once.
        absent: Places of the splits whose rows cannot be delivered any more: their files have changed since the epoch
            began. The others are delivered in the order that they always had.
        rows: Rows to deliver, where no filter takes any.
    """

    splits: tuple[Split, ...]
    rounds: int = 1
    absent: tuple[int, ...] = ()
    rows: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        rows = sum(split.row_length for split in self.splits)
        object.__setattr__(self, "rows", rows - sum(self.splits[place].row_length for place in self.absent))

    @property
    def present(self) -> tuple[Split, ...]:
        """The splits that can be read."""
        if not self.absent:
            return self.splits
        return tuple(split for place, split in enumerate(self.splits) if place not in self.absent)

    def content(self) -> bytes:
        """Return the bytes that stand for this shard in digests and in permutation keys."""
        return b"\n".join(split.content() for split in self.splits)


WHOLE = -1


@dataclass(frozen=True, slots=True)
class Piece:
    """A window of the rows that a shard delivers: what a cut or a resume leaves of it.

    Attributes:
        shard: The shard.
        start: Number of its rows before the window, counted after the filter and in shuffled order.
        stop: Where the window ends; at the shard's number of rows it ends with the shard, however many rows a filter
            leaves.
        repeats: Whether these rows are delivered elsewhere as well, to give every rank as many.
    """

    shard: Shard
    start: int = 0
    stop: int = WHOLE
    repeats: bool = False

    def __post_init__(self) -> None:
        if self.stop == WHOLE:
            object.__setattr__(self, "stop", self.shard.rows)

    @property
    def rows(self) -> int:
        """Number of rows, where no filter takes any."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Started:
    """A shard that was under way when an epoch was planned anew.

    Attributes:
        shard: The shard.
        windows: Which of its rows were delivered: start and stop of each window, rising, not touching one another.
    """

    shard: Shard
    windows: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Base:
    """What was delivered of an epoch before what was left of it was planned anew. Equal on all ranks.

    Attributes:
        done: Row ranges of files that are done, whole row groups, neighbours merged.
        started: Shards that were under way.
        left_out: Paths of files that went, or were written anew, since the epoch began: nothing more of them is
            delivered in it, whatever becomes of them.
        batches: Batches that the rank with the most of them had handed over.
    """

    done: tuple[Split, ...]
    started: tuple[Started, ...]
    left_out: tuple[str, ...]
    batches: int


@dataclass(frozen=True, slots=True)
class Evened:
    """Streams that were cut and lengthened so that every rank makes the same steps.

    Attributes:
        streams: For each rank and worker what it walks.
        dropped: Rows that are not delivered, as pieces: fewer than there are ranks.
        repeated: Rows that are delivered twice, as pieces: fewer than there are ranks.
    """

    streams: tuple[tuple[tuple[Piece, ...], ...], ...]
    dropped: tuple[Piece, ...]
    repeated: tuple[Piece, ...]


@dataclass(frozen=True)
class Plan:
    """An epoch's sequence of pieces and who walks them.

    Attributes:
        epoch: The epoch.
        num_ranks: Number of ranks; of a grid, its virtual ones.
        num_workers: Number of worker processes of each rank, 0 for the rank's own process; of a grid, its virtual ones.
        pieces: The epoch's pieces, in order: whole shards, and what is left of those that had been under way.
        evened: The streams, where they are evened.
    """

    epoch: int
    num_ranks: int
    num_workers: int
    pieces: tuple[Piece, ...]
    evened: Evened | None = None

    @property
    def streams(self) -> int:
        """Number of streams that each rank walks: its workers, or one where there are none."""
        return max(1, self.num_workers)

    def stream(self, rank: int, worker: int) -> tuple[Piece, ...]:
        """Return what one worker of one rank walks.

        Piece i belongs to rank i % ranks, and in it to worker i // ranks % workers, unless the streams are evened.
        """
        if self.evened is not None:
            return self.evened.streams[rank][worker]
        return self.pieces[rank + self.num_ranks * worker :: self.num_ranks * self.streams]

    def rank_streams(self, rank: int) -> tuple[tuple[Piece, ...], ...]:
        """Return the streams of all of a rank's workers."""
        return tuple(self.stream(rank, worker) for worker in range(self.streams))

    @cached_property
    def digest(self) -> str:
        """Digest of the sequence of pieces and of who walks them (blake2b, 32 hexadecimal characters)."""
        digest = hashlib.blake2b(f"{self.epoch}\n{self.num_ranks}\n{self.num_workers}".encode(), digest_size=16)
        for piece in self.pieces:
            shard = piece.shard
            digest.update(b"\n\n" + shard.content())
            if piece != Piece(Shard(shard.splits)):
                digest.update(f"\n{piece.start} {piece.stop} {shard.rounds} {shard.absent}".encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Receipt:
    """How far a stream has come once the batch that this travels with is handed over.

    A stream walks its pieces in order, so one place says it all: pieces before `position` are done, whether they
    gave rows or ended empty.

    Attributes:
        stream: Number of the stream among those of its rank: the worker's, or of a grid its place there.
        position: Index, in the stream's pieces of this iteration, of the piece that is under way.
        rows_delivered: Rows of that piece's shard delivered so far, those before the piece's start included.
        rows: Rows in this batch.
        rows_dropped: Rows left out because the last batch of the stream would have been short.
        beside: How far the other streams have come whose rows are in this batch too.
        last: Piece of the batch's last row, and that row's place among the shard's delivered rows, from 1: the same
            whether or not it was known that the piece ends there.
    """

    stream: int
    position: int
    rows_delivered: int
    rows: int
    rows_dropped: int = 0
    beside: tuple[Receipt, ...] = ()
    last: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Lane:
    """A stream and what this iteration walks of it, in order."""

    stream: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one worker process is sent at the start of an iteration.

    Attributes:
        iteration: Number of the iteration, carried by every message that answers it.
        worker: The worker.
        epoch: The epoch, which keys the shuffle inside shards.
        turns: The streams that the worker walks, one unless there is a grid: they take turns, and a turn's rows are
            those of its streams one after the other.
        footers: Footers of the files that they lie in, by path, which the worker does not have yet.
    """

    iteration: int
    worker: int
    epoch: int
    turns: tuple[tuple[Lane, ...], ...]
    footers: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """All streams that the worker walks."""
        return tuple(lane for turn in self.turns for lane in turn)
