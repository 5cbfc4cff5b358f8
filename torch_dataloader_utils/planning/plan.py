"""An epoch as planned: shards, slices of them, streams, and the options that plans depend on. Frozen and plain."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias, get_args

from torch_dataloader_utils.planning.excluded import NONE_EXCLUDED, ExcludedRows
from torch_dataloader_utils.planning.manifest import Split
from torch_dataloader_utils.planning.row_hash import RankHashes

TO_THE_END = 1 << 62
"""How many rows a shard delivers where only reading tells. It is larger than any number of rows, and fits into int64
together with another one."""


@dataclass(frozen=True, slots=True)
class Shard:
    """An ordered bundle of splits: the unit of reading, shuffling, assignment and progress.

    Attributes:
        splits: The row ranges.
        rounds: Number of rounds of a row-level shuffle. Each round shuffles the next rows of every split. It is more
            than 1 where row groups have more rows than may be shuffled together.
        missing: Indices of the splits that cannot be read any more: their files have changed since the epoch began.
            The rows of the other splits keep their order.
        excluded: Rows of files that are not delivered, although splits have them: a split names all of its rows.
        delivers: How many rows, or sequences, it delivers where these are made of its rows; `TO_THE_END` where only
            reading tells. None where it delivers the rows themselves.
        rows_read: Rows of its splits that are read, those that a filter drops included.
        rows: What it delivers: `delivers`, or the rows that are read, where no filter drops any.
    """

    splits: tuple[Split, ...]
    rounds: int = 1
    missing: tuple[int, ...] = ()
    excluded: ExcludedRows = field(default=NONE_EXCLUDED, compare=False, repr=False)
    delivers: int | None = field(default=None, compare=False, repr=False)
    rows_read: int = field(init=False, compare=False, repr=False)
    rows: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        try:
            rows = sum(split.row_length for split in self.splits)
        except (TypeError, AttributeError):  # made by a user's SplitStrategy
            raise TypeError(f"Shard({self.splits!r:.80}): expected Splits of a path and two integers") from None
        rows -= sum(self.splits[index].row_length for index in self.missing)
        if self.excluded:
            rows -= sum(map(self.excluded.within, self.present))
        object.__setattr__(self, "rows_read", rows)
        object.__setattr__(self, "rows", rows if self.delivers is None else self.delivers)

    def __hash__(self) -> int:
        """Return what little tells shards apart: small files are bundled by the thousand, and states look them up."""
        return hash((self.splits[:1], len(self.splits), self.rounds))

    @property
    def end(self) -> int:
        """How a state writes the end of what it delivers: `TO_THE_END` where rows of files do not tell it."""
        return self.rows if self.delivers is None else TO_THE_END

    @property
    def present(self) -> tuple[Split, ...]:
        """The splits that can be read."""
        missing = frozenset(self.missing)
        return tuple(split for index, split in enumerate(self.splits) if index not in missing)

    def content(self) -> bytes:
        """Return the bytes that represent this shard in digests and in permutation keys."""
        return b"\n".join(split.content() for split in self.splits)


WHOLE = -1


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """A window of the rows that a shard delivers: all of them, or the part that balancing or a resume leaves.

    Attributes:
        shard: The shard.
        start: Number of its rows before the window, counted in the order of delivery: after filter and shuffle.
        stop: The end of the window. What the shard delivers (`Shard.rows`) stands for the end of the shard, even where
            a filter leaves fewer rows.
        repeats: Whether another slice delivers these rows as well, so that all ranks have equally many.
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
        """Number of rows, where no filter drops any; larger than any number where only reading tells the end."""
        return self.stop - self.start

    @property
    def expected_rows(self) -> int:
        """About how much it delivers, to compare slices: the rows of its shard where only reading tells its end."""
        return self.shard.rows_read if self.stop == TO_THE_END else self.rows

    @property
    def window(self) -> tuple[int, int]:
        """Its start and stop as states write them: see `Shard.end`."""
        return self.start, self.shard.end if self.stop == self.shard.rows else self.stop

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its shard, which can be read whole, and no other slice delivers these rows."""
        return self.start == 0 and self.stop == self.shard.rows and not self.shard.missing and not self.repeats


@dataclass(frozen=True, slots=True)
class PartialShard:
    """A shard that was partly delivered when the rest of the epoch was planned again.

    The windows are the start and stop of delivered rows, in rising order. No two windows touch.
    """

    shard: Shard
    windows: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SkippedRows:
    """Rows that were skipped before an elastic load, and not delivered since. Equal on all ranks.

    Attributes:
        whole: Row ranges: whole row groups, neighbours merged.
        partial: Shards of which some rows were skipped. The windows are those of the skipped rows.
        steps: The skipped ones of the steps that the baseline counts: start and stop of each range.
        restores: Whether these rows are delivered after the last step.
    """

    whole: tuple[Split, ...]
    partial: tuple[PartialShard, ...]
    steps: tuple[tuple[int, int], ...]
    restores: bool


@dataclass(frozen=True, slots=True)
class DeliveredBaseline:
    """What was delivered of an epoch before an elastic load planned the rest again. Equal on all ranks.

    Rows that were skipped are not left for the rest: they count as delivered.

    Attributes:
        done: Row ranges that are done: whole row groups, neighbours merged.
        partial: Shards that were partly delivered.
        left_out: Paths of files that were removed or rewritten since the epoch began. No more rows of them are
            delivered in this epoch, even if they return.
        batches: Largest number of batches that a rank had delivered, skipped steps included.
        skipped: Which of these rows were skipped; None for none.
        hashes: For each elastic load, the hashes of the rows that each planned rank had delivered; none where the
            states had none.
        gone: Rows of a mixture that were delivered of files that are left out: they still count as rows of the epoch.
    """

    done: tuple[Split, ...]
    partial: tuple[PartialShard, ...]
    left_out: tuple[str, ...]
    batches: int
    skipped: SkippedRows | None = None
    hashes: tuple[RankHashes, ...] = ()
    gone: int = 0


@dataclass(frozen=True, slots=True)
class BalancedStreams:
    """For each rank and worker its slices, shortened or lengthened so that every rank makes the same steps.

    Rows that are dropped, or repeated, are fewer than there are ranks.
    """

    streams: tuple[tuple[tuple[ShardSlice, ...], ...], ...]
    dropped: tuple[ShardSlice, ...]
    repeated: tuple[ShardSlice, ...]


@dataclass(frozen=True)
class Plan:
    """An epoch's sequence of slices and their assignment to ranks and workers, which may be virtual.

    The rest of partly delivered shards comes before whole shards. 0 workers stand for the rank's own process.
    """

    epoch: int
    num_ranks: int
    num_workers: int
    slices: tuple[ShardSlice, ...]
    balanced: BalancedStreams | None = None

    @property
    def streams(self) -> int:
        """Number of streams of each rank: one for each worker, or one for its own process."""
        return max(1, self.num_workers)

    def stream(self, rank: int, worker: int) -> tuple[ShardSlice, ...]:
        """Return the slices of a worker of a rank.

        Unless streams are balanced, slice i belongs to rank i % ranks, and there to worker i // ranks % workers.
        """
        if self.balanced is not None:
            return self.balanced.streams[rank][worker]
        return self.slices[rank + self.num_ranks * worker :: self.num_ranks * self.streams]

    def rank_streams(self, rank: int) -> tuple[tuple[ShardSlice, ...], ...]:
        """Return the streams of all of a rank's workers."""
        return tuple(self.stream(rank, worker) for worker in range(self.streams))

    @cached_property
    def digest(self) -> str:
        """Digest of the sequence of slices and of their assignment (blake2b, 32 hexadecimal characters)."""
        digest = hashlib.blake2b(f"{self.epoch}\n{self.num_ranks}\n{self.num_workers}".encode(), digest_size=16)
        for shard_slice in self.slices:
            shard = shard_slice.shard
            digest.update(b"\n\n" + shard.content())
            if not shard_slice.is_whole or shard.rounds > 1:
                start, stop = shard_slice.window
                digest.update(f"\n{start} {stop} {shard.rounds} {shard.missing}".encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a plan depends on in addition to the files, the epoch and the number of streams.

    Attributes:
        split_bytes: Largest number of uncompressed bytes in a shard; only a larger row group exceeds it.
        split_rows: Largest number of rows in a shard, or None; only a larger row group exceeds it.
        shuffle: Whether shards come in random order.
        shuffle_seed: Seed of every random choice.
        shuffle_buffer_size: Largest number of rows that a row-level shuffle permutes together. None for shards in
            random order and rows in file order.
        shuffle_interleave: Largest number of row groups larger than that which share the rounds of a shard.
        uneven_ranks: Whether ranks may have different numbers of rows, or surplus rows are dropped, or rows repeated.
        batch_size: Rows of a step of a rank, or of a virtual rank, where ranks are balanced; else None.
        unit: What is delivered and counted: the rows of files, or what is made of them.
        is_open_ended: Whether only reading tells how many of these a shard delivers.
        packing: How sequences are made, as text: states record it. None where none are.
    """

    split_bytes: int
    split_rows: int | None = None
    shuffle: bool = False
    shuffle_seed: int = 42
    shuffle_buffer_size: int | None = None
    shuffle_interleave: int = 8
    uneven_ranks: UnevenRanks = "allow"
    batch_size: int | None = None
    unit: Unit = "rows"
    is_open_ended: bool = False
    packing: str | None = None

    def __post_init__(self) -> None:
        if self.shuffles_rows and not self.shuffle:
            raise ValueError(f"shuffle_buffer_size={self.shuffle_buffer_size} has no meaning without shuffle=True")

    @property
    def row_shuffle_seed(self) -> int | None:
        """The seed of a row-level shuffle, else None."""
        return self.shuffle_seed if self.shuffles_rows else None

    @property
    def shuffles_rows(self) -> bool:
        """Whether rows are shuffled within a shard."""
        return self.shuffle_buffer_size is not None


Unit: TypeAlias = Literal["rows", "transformed rows", "sequences"]

UNITS: tuple[str, ...] = get_args(Unit)

UnevenRanks: TypeAlias = Literal["allow", "drop", "pad"]

UNEVEN_RANKS: tuple[str, ...] = get_args(UnevenRanks)
