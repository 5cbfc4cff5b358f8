"""An epoch as planned: shards, slices of them, streams, and the options that plans depend on. Frozen and plain."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias, get_args

from torch_dataloader_utils.planning.manifest import Split

__all__ = [
    "PLAN_ALGORITHM",
    "UNEVEN_RANKS",
    "BalancedStreams",
    "DeliveredBaseline",
    "PartialShard",
    "Plan",
    "PlanOptions",
    "Shard",
    "ShardSlice",
    "UnevenRanks",
]


@dataclass(frozen=True, slots=True)
class Shard:
    """An ordered bundle of splits: the unit of reading, shuffling, assignment and progress.

    Attributes:
        splits: The row ranges.
        rounds: Where rows are mixed, in how many parts that is done: one after the other, each of every split its
            part of the rows, in file order. More than one where row groups are larger than what may be mixed at once.
        missing: Places of the splits whose rows cannot be delivered any more: their files have changed since the epoch
            began. The others are delivered in the order that they always had.
        rows: Rows to deliver, where no filter takes any.
    """

    splits: tuple[Split, ...]
    rounds: int = 1
    missing: tuple[int, ...] = ()
    rows: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        rows = sum(split.row_length for split in self.splits)
        object.__setattr__(self, "rows", rows - sum(self.splits[place].row_length for place in self.missing))

    @property
    def present(self) -> tuple[Split, ...]:
        """The splits that can be read."""
        if not self.missing:
            return self.splits
        return tuple(split for place, split in enumerate(self.splits) if place not in self.missing)

    def content(self) -> bytes:
        """Return the bytes that stand for this shard in digests and in permutation keys."""
        return b"\n".join(split.content() for split in self.splits)


WHOLE = -1


@dataclass(frozen=True, slots=True)
class ShardSlice:
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
class PartialShard:
    """A shard that was under way when an epoch was planned anew.

    Attributes:
        shard: The shard.
        windows: Which of its rows were delivered: start and stop of each window, rising, not touching one another.
    """

    shard: Shard
    windows: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class DeliveredBaseline:
    """What was delivered of an epoch before what was left of it was planned anew. Equal on all ranks.

    Attributes:
        done: Row ranges of files that are done, whole row groups, neighbours merged.
        partial: Shards that were under way.
        left_out: Paths of files that went, or were written anew, since the epoch began: nothing more of them is
            delivered in it, whatever becomes of them.
        batches: Batches that the rank with the most of them had handed over.
    """

    done: tuple[Split, ...]
    partial: tuple[PartialShard, ...]
    left_out: tuple[str, ...]
    batches: int


@dataclass(frozen=True, slots=True)
class BalancedStreams:
    """Streams that were cut and lengthened so that every rank makes the same steps.

    Attributes:
        streams: For each rank and worker what it walks.
        dropped: Rows that are not delivered, as slices: fewer than there are ranks.
        repeated: Rows that are delivered twice, as slices: fewer than there are ranks.
    """

    streams: tuple[tuple[tuple[ShardSlice, ...], ...], ...]
    dropped: tuple[ShardSlice, ...]
    repeated: tuple[ShardSlice, ...]


@dataclass(frozen=True)
class Plan:
    """An epoch's sequence of slices and who walks them.

    Attributes:
        epoch: The epoch.
        num_ranks: Number of ranks; of a grid, its virtual ones.
        num_workers: Number of worker processes of each rank, 0 for the rank's own process; of a grid, its virtual ones.
        slices: The epoch's slices, in order: whole shards, and what is left of those that had been under way.
        balanced: The streams, where they are balanced.
    """

    epoch: int
    num_ranks: int
    num_workers: int
    slices: tuple[ShardSlice, ...]
    balanced: BalancedStreams | None = None

    @property
    def streams(self) -> int:
        """Number of streams that each rank walks: its workers, or one where there are none."""
        return max(1, self.num_workers)

    def stream(self, rank: int, worker: int) -> tuple[ShardSlice, ...]:
        """Return what one worker of one rank walks.

        Slice i belongs to rank i % ranks, and in it to worker i // ranks % workers, unless the streams are balanced.
        """
        if self.balanced is not None:
            return self.balanced.streams[rank][worker]
        return self.slices[rank + self.num_ranks * worker :: self.num_ranks * self.streams]

    def rank_streams(self, rank: int) -> tuple[tuple[ShardSlice, ...], ...]:
        """Return the streams of all of a rank's workers."""
        return tuple(self.stream(rank, worker) for worker in range(self.streams))

    @cached_property
    def digest(self) -> str:
        """Digest of the sequence of slices and of who walks them (blake2b, 32 hexadecimal characters)."""
        digest = hashlib.blake2b(f"{self.epoch}\n{self.num_ranks}\n{self.num_workers}".encode(), digest_size=16)
        for shard_slice in self.slices:
            shard = shard_slice.shard
            digest.update(b"\n\n" + shard.content())
            if shard_slice != ShardSlice(Shard(shard.splits)):
                digest.update(f"\n{shard_slice.start} {shard_slice.stop} {shard.rounds} {shard.missing}".encode())
        return digest.hexdigest()


PLAN_ALGORITHM = 2
"""Number of the algorithm below. Any change that can change a plan or a permutation raises it."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a plan depends on beside the files, the epoch and the number of streams.

    Attributes:
        split_bytes: Largest number of uncompressed bytes in a shard; only a larger row group exceeds it.
        split_rows: Largest number of rows in a shard, or None; only a larger row group exceeds it.
        shuffle: Whether shards come in random order.
        shuffle_seed: Seed of every random choice.
        shuffle_buffer_size: Largest number of rows that are mixed with one another, or None for shards in random
            order and rows in file order.
        shuffle_interleave: Row groups larger than that which are mixed with one another, part by part, at most.
        uneven_ranks: What becomes of the rows that ranks would have more than others.
        batch_size: Rows of a rank's step, of a grid a virtual rank's, where ranks are balanced; else None.
    """

    split_bytes: int
    split_rows: int | None = None
    shuffle: bool = False
    shuffle_seed: int = 42
    shuffle_buffer_size: int | None = None
    shuffle_interleave: int = 8
    uneven_ranks: UnevenRanks = "allow"
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.shuffles_rows and not self.shuffle:
            msg = f"shuffle_buffer_size={self.shuffle_buffer_size} has no meaning without shuffle=True"
            raise ValueError(msg)

    @property
    def row_shuffle_seed(self) -> int | None:
        """The seed where rows are mixed inside a shard, else None."""
        return self.shuffle_seed if self.shuffles_rows else None

    @property
    def shuffles_rows(self) -> bool:
        """Whether rows are mixed inside a shard."""
        return self.shuffle_buffer_size is not None


UnevenRanks: TypeAlias = Literal["allow", "drop", "pad"]


UNEVEN_RANKS: tuple[str, ...] = get_args(UnevenRanks)
