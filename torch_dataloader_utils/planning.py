"""From a manifest and options to an epoch's plan. Pure: no I/O, no clock, no process state.

Every rank and worker that computes a plan from the same manifest and options gets the same one, on any machine.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.random  # loaded here, for every forked worker would load it anew at its first use
import numpy.typing as npt

from torch_dataloader_utils.evening import UnevenRanks, even
from torch_dataloader_utils.model import Base, Manifest, Piece, Plan, Shard, SizedSplit, Split
from torch_dataloader_utils.ranges import Coverage, gaps

__all__ = [
    "PLAN_ALGORITHM",
    "PlanOptions",
    "delivery_order",
    "make_plan",
    "permutation",
    "round_bounds",
    "stable_argsort",
]

PLAN_ALGORITHM = 2
"""Number of the algorithm below. Any change that can change a plan or a permutation raises it."""

SHARDS_PER_STREAM = 4
"""How many shards a stream gets at least where row groups allow, so that streams end at about the same time."""


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
        batch_size: Rows of a rank's step, of a grid a virtual rank's, where ranks are evened; else None.
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
        if self.mixes_rows and not self.shuffle:
            msg = f"shuffle_buffer_size={self.shuffle_buffer_size} has no meaning without shuffle=True"
            raise ValueError(msg)

    @property
    def mixing_seed(self) -> int | None:
        """The seed where rows are mixed inside a shard, else None."""
        return self.shuffle_seed if self.mixes_rows else None

    @property
    def mixes_rows(self) -> bool:
        """Whether rows are mixed inside a shard."""
        return self.shuffle_buffer_size is not None


@dataclass(frozen=True, slots=True)
class _Limit:
    """The most that a split or a shard of more than one row group may hold."""

    bytes: int
    rows: int | None

    def holds(self, size: int, rows: int) -> bool:
        return size <= self.bytes and (self.rows is None or rows <= self.rows)

    def lowered(self) -> _Limit:
        return _Limit(self.bytes * 3 // 4, None if self.rows is None else self.rows * 3 // 4)


def make_plan(
    manifest: Manifest,
    options: PlanOptions,
    *,
    epoch: int,
    num_ranks: int,
    num_workers: int,
    selection: Sequence[Sequence[int]] | None = None,
    base: Base | None = None,
    bundled: Sequence[Sequence[SizedSplit]] | None = None,
) -> Plan:
    """Plan an epoch, or what is left of it.

    Args:
        manifest: The data files.
        options: What else the plan depends on.
        epoch: The epoch, from 0.
        num_ranks: Number of ranks; of a grid, its virtual ones.
        num_workers: Number of worker processes of each rank, 0 for the rank's own process; of a grid, its virtual ones.
        selection: For each file the row groups, by number and in order, that may hold rows to deliver; None for all.
        base: What was delivered of the epoch before; None for nothing.
        bundled: The row groups of each shard, in order, where a split strategy says so; every row group once.

    Returns:
        The plan: what the base left of its shards, then every other selected row group in exactly one shard.
    """
    streams = num_ranks * max(1, num_workers)
    groups = list(_row_groups(manifest, selection))
    carried: list[Piece] = []
    if base is not None:
        carried = list(_carried(base))
        groups = list(_untouched(groups, base))
    shards = _shards(groups, options, epoch, streams) if bundled is None else list(_given(bundled, groups, options))
    if options.shuffle and bundled is None:
        shards = _balanced(shards, carried, streams)
    pieces = [*carried, *map(Piece, shards)]
    plan = Plan(epoch=epoch, num_ranks=num_ranks, num_workers=num_workers, pieces=tuple(pieces))
    if options.uneven_ranks == "allow":
        return plan
    assert options.batch_size is not None  # noqa: S101 - whoever evens ranks says so
    ranks = [plan.rank_streams(rank) for rank in range(num_ranks)]
    return replace(plan, evened=even(ranks, options.batch_size, pad=options.uneven_ranks == "pad"))


def _carried(base: Base) -> Iterator[Piece]:
    """Yield what is left of shards that were under way."""
    for started in base.started:
        for start, stop in gaps(started.windows, started.shard.rows):
            yield Piece(started.shard, start, stop)


def _untouched(groups: Iterable[SizedSplit], base: Base) -> Iterator[SizedSplit]:
    """Yield the row groups of which nothing was delivered, and nothing was under way."""
    under_way = [split for started in base.started for split in started.shard.splits]
    touched = Coverage([*base.done, *under_way])
    left_out = set(base.left_out)
    for group in groups:
        if group.split.path not in left_out and not touched.covers(group.split):
            yield group


def _shards(groups: Sequence[SizedSplit], options: PlanOptions, epoch: int, streams: int) -> list[Shard]:
    """Bundle row groups into shards, in the epoch's order."""
    if not options.mixes_rows:
        return _in_files(groups, options, epoch, streams)
    room = _Limit(options.split_bytes, options.shuffle_buffer_size)
    groups = _shuffled(groups, options.shuffle_seed, epoch)
    large = [one for one in groups if not room.holds(one.bytes, one.rows)]
    if not large:
        return _mixed(groups, options, streams)
    in_rounds = list(_interleaved(large, options, streams))
    small = [one for one in groups if room.holds(one.bytes, one.rows)]
    bundled = _mixed(small, options, max(0, streams - len(in_rounds)))
    place = {one.split: number for number, one in enumerate(groups)}
    return sorted([*in_rounds, *bundled], key=lambda shard: place[shard.splits[0]])


def _given(
    bundled: Iterable[Sequence[SizedSplit]], groups: Iterable[SizedSplit], options: PlanOptions
) -> Iterator[Shard]:
    """Yield the shards of a split strategy, as far as their row groups are to be delivered."""
    wanted = {one.split for one in groups}
    for shard in bundled:
        left = [one for one in shard if one.split in wanted]
        if left and options.shuffle_buffer_size is not None:
            yield _in_rounds(left, options.shuffle_buffer_size, options.split_bytes)
        elif left:
            yield Shard(tuple(each.split for each in _join(left, _Limit(sum(one.bytes for one in left), None))))


def _in_files(groups: Sequence[SizedSplit], options: PlanOptions, epoch: int, streams: int) -> list[Shard]:
    """Bundle neighbouring row groups, at least to some shards for each stream if there are as many row groups."""
    least = min(streams * SHARDS_PER_STREAM, len(groups))
    limit = _first_limit(groups, options, max(1, least))
    if streams > 1 and not options.shuffle:
        shards = list(_cut_evenly(groups, limit, streams))
        if len(shards) >= least:
            return shards
    while True:
        splits = list(_join(groups, limit))
        if options.shuffle:
            splits = _shuffled(splits, options.shuffle_seed, epoch)
        shards = list(_bundle(splits, limit))
        if len(shards) >= least:
            return shards
        limit = limit.lowered()


def _cut_evenly(groups: Sequence[SizedSplit], limit: _Limit, streams: int) -> Iterator[Shard]:
    """Cut the files, one after the other, into shards of about as many rows, as many for each stream."""
    total = sum(one.rows for one in groups)
    size = sum(one.bytes for one in groups)
    count = max(-(-size // limit.bytes), -(-total // limit.rows) if limit.rows else 1)
    count = -(-count // streams) * streams
    held: list[SizedSplit] = []
    whole = _Limit(2 * size, None)
    held_bytes = held_rows = rows = closed = 0
    for one in groups:
        fits = limit.holds(held_bytes + one.bytes, held_rows + one.rows)
        # The middle of it is beyond where the next shard is to begin.
        if held and (not fits or (2 * rows + one.rows) * count >= 2 * (closed + 1) * total):
            yield Shard(tuple(each.split for each in _join(held, whole)))
            held = []
            held_bytes = held_rows = 0
            closed = max(closed + 1, rows * count // total)
        held.append(one)
        held_bytes += one.bytes
        held_rows += one.rows
        rows += one.rows
    if held:
        yield Shard(tuple(each.split for each in _join(held, whole)))


def _balanced(shards: Sequence[Shard], carried: Sequence[Piece], streams: int) -> list[Shard]:
    """Put shards that are in random order into another, in which streams have about as many rows.

    The largest shard left goes to the stream with the fewest rows that may have one more (Graham, "Bounds on
    multiprocessing timing anomalies", 1969); in each stream they stay in their order.
    """
    begin, count = len(carried), len(shards)
    quotas = [len(range(begin + (stream - begin) % streams, begin + count, streams)) for stream in range(streams)]
    rows = [sum(piece.rows for piece in carried[stream::streams]) for stream in range(streams)]
    waiting = [(rows[stream], stream) for stream in range(streams) if quotas[stream]]
    heapq.heapify(waiting)
    dealt: list[list[int]] = [[] for _ in range(streams)]
    for place in sorted(range(count), key=lambda place: -shards[place].rows):
        held, stream = heapq.heappop(waiting)
        dealt[stream].append(place)
        if len(dealt[stream]) < quotas[stream]:
            heapq.heappush(waiting, (held + shards[place].rows, stream))
    own = [iter(sorted(places)) for places in dealt]
    return [shards[next(own[position % streams])] for position in range(begin, begin + count)]


def _mixed(groups: Sequence[SizedSplit], options: PlanOptions, least: int) -> list[Shard]:
    """Bundle row groups that are in random order, at least to so many shards if there are as many row groups."""
    limit = _first_limit(groups, options, max(1, least))
    while True:
        shards = list(_bundle(groups, limit))
        if len(shards) >= min(least, len(groups)):
            return shards
        limit = limit.lowered()


def _interleaved(groups: Sequence[SizedSplit], options: PlanOptions, streams: int) -> Iterator[Shard]:
    """Bundle row groups that are too large to be mixed at once into shards that are mixed in rounds.

    As many row groups share a shard as may, and as leaves each stream one; shards have about as many rows.
    """
    assert options.shuffle_buffer_size is not None  # noqa: S101 - rows are mixed
    if not groups:
        return
    most = min(options.shuffle_interleave, -(-len(groups) // streams))
    count = -(-len(groups) // most)
    count = min(len(groups), -(-count // streams) * streams)
    total = sum(one.rows for one in groups)
    held: list[SizedSplit] = []
    rows = closed = 0
    for number, one in enumerate(groups):
        held.append(one)
        rows += one.rows
        others = len(groups) - number - 1  # none, or just enough for the shards that are wanted yet
        if others <= max(0, count - closed - 1) or len(held) == most or rows * count >= (closed + 1) * total:
            yield _in_rounds(held, options.shuffle_buffer_size, options.split_bytes)
            held = []
            closed += 1


def _in_rounds(groups: Sequence[SizedSplit], most_rows: int, most_bytes: int) -> Shard:
    """Return a shard that mixes at most so many rows and bytes at once, but for a row of each of its row groups."""
    rows, size = sum(one.rows for one in groups), sum(one.bytes for one in groups)
    rounds = max(-(-rows // most_rows), -(-size // most_bytes))
    return Shard(tuple(one.split for one in groups), rounds=min(rounds, rows))


def round_bounds(shard: Shard, number: int) -> list[tuple[int, int]]:
    """Return which rows of each of a shard's splits are mixed in one of its rounds: start and stop within the split."""
    return [
        (split.row_length * number // shard.rounds, split.row_length * (number + 1) // shard.rounds)
        for split in shard.splits
    ]


def permutation(rows: int, *, seed: int, epoch: int, shard: Shard, number: int = 0) -> npt.NDArray[np.intp]:
    """Return the order in which a shard's rows, or those of one of its rounds, are delivered when rows are mixed.

    The stable argsort of 64 random bits for each row, from Philox (Salmon et al., "Parallel random numbers: as easy
    as 1, 2, 3", 2011) keyed by the seed, the epoch, the shard's content and the round. Raw bits of a counter-based
    generator are the same on every machine and in every NumPy, which the distributions built on them need not be.

    Args:
        rows: Number of rows to order: those that a filter left, and those of absent splits.
        seed: The shuffle seed.
        epoch: The epoch.
        shard: The shard.
        number: The round.

    Returns:
        int64 of shape ``(rows,)``: a permutation of ``0..rows-1``.
    """
    content = shard.content() + (f"\0round {number}".encode() if number else b"")
    key = hashlib.blake2b(content, key=_key("rows", seed, epoch), digest_size=16).digest()
    return stable_argsort(numpy.random.Philox(key=int.from_bytes(key, "little")).random_raw(rows))


def delivery_order(piece: Piece, *, seed: int | None, epoch: int) -> npt.NDArray[np.intp]:
    """Return which rows a piece delivers, in their order, where no filter takes any.

    Args:
        piece: The piece.
        seed: The shuffle seed, or None where rows are not mixed.
        epoch: The epoch.

    Returns:
        int64 of shape ``(piece.rows,)``: places among all rows of the shard's splits, absent ones counted but left out.
    """
    shard = piece.shard
    starts = np.cumsum([0, *(split.row_length for split in shard.splits)])
    parts, first = [np.empty(0, dtype=np.intp)], 0
    for number in range(shard.rounds):
        bounds = round_bounds(shard, number)
        count = sum(stop - start for place, (start, stop) in enumerate(bounds) if place not in shard.absent)
        if first < piece.stop and first + count > piece.start:
            rows = np.concatenate([np.arange(*bound) + begin for begin, bound in zip(starts, bounds, strict=False)])
            if seed is not None:
                rows = rows[permutation(len(rows), seed=seed, epoch=epoch, shard=shard, number=number)]
            if shard.absent:
                rows = rows[~np.isin(np.searchsorted(starts[1:], rows, side="right"), shard.absent)]
            parts.append(rows[max(0, piece.start - first) : piece.stop - first])
        first += count
    return np.concatenate(parts)


def stable_argsort(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    """Return NumPy's stable argsort of random values in a fraction of its time.

    Each value's lowest bits give way to its place, and the values themselves are sorted, which is quicker than to sort
    places by them. Where two agree in all other bits, which random ones hardly ever do, NumPy sorts.
    """
    count = len(values)
    if count < 2:  # noqa: PLR2004 - there is nothing to sort
        return np.arange(count)
    lowest = np.uint64((1 << (count - 1).bit_length()) - 1)
    keyed = np.bitwise_and(values, ~lowest)
    keyed |= np.arange(count, dtype=np.uint64)
    keyed.sort()
    if np.min(keyed[1:] ^ keyed[:-1]) <= lowest:
        return np.argsort(values, kind="stable")
    keyed &= lowest
    order: npt.NDArray[np.intp] = keyed.astype(np.intp)
    return order


def _row_groups(manifest: Manifest, selection: Sequence[Sequence[int]] | None) -> Iterator[SizedSplit]:
    """Yield each selected row group that has rows."""
    for number, file in enumerate(manifest.row_group_splits):
        selected = file if selection is None else [file[place] for place in selection[number]]
        yield from [one for one in selected if one.split.row_length]


def _first_limit(groups: Sequence[SizedSplit], options: PlanOptions, least: int) -> _Limit:
    """Lower the maxima so far that `least` shards of equal size would hold everything."""
    share = -(-sum(one.bytes for one in groups) // least)
    rows = options.split_rows
    if options.shuffle_buffer_size is not None:
        row_share = -(-sum(one.rows for one in groups) // least)
        rows = min(options.shuffle_buffer_size, max(1, row_share), *([] if rows is None else [rows]))
    return _Limit(min(options.split_bytes, max(1, share)), rows)


def _join(groups: Iterable[SizedSplit], limit: _Limit) -> Iterator[SizedSplit]:
    """Join neighbouring row groups of a file into splits."""
    held: SizedSplit | None = None
    for one in groups:
        joined = held and _joined(held, one)
        if joined and limit.holds(joined.bytes, joined.rows):
            held = joined
            continue
        if held:
            yield held
        held = one
    if held:
        yield held


def _joined(one: SizedSplit, other: SizedSplit) -> SizedSplit | None:
    end = one.split.row_offset + one.split.row_length
    if one.split.path != other.split.path or end != other.split.row_offset:
        return None
    rows = one.split.row_length + other.split.row_length
    return SizedSplit(Split(one.split.path, one.split.row_offset, rows), one.bytes + other.bytes, one.rows + other.rows)


def _bundle(splits: Iterable[SizedSplit], limit: _Limit) -> Iterator[Shard]:
    """Bundle neighbouring splits into shards."""
    held: list[Split] = []
    size = rows = 0
    for one in splits:
        if held and not limit.holds(size + one.bytes, rows + one.rows):
            yield Shard(tuple(held))
            held, size, rows = [], 0, 0
        held.append(one.split)
        size += one.bytes
        rows += one.rows
    if held:
        yield Shard(tuple(held))


def _key(purpose: str, seed: int, epoch: int) -> bytes:
    return hashlib.blake2b(f"{PLAN_ALGORITHM}|{purpose}|{seed}|{epoch}".encode(), digest_size=32).digest()


def _shuffled(splits: Iterable[SizedSplit], seed: int, epoch: int) -> list[SizedSplit]:
    """Put splits into the random order of an epoch."""
    key = _key("shards", seed, epoch)

    def drawn(one: SizedSplit) -> tuple[bytes, Split]:
        return hashlib.blake2b(one.split.content(), key=key, digest_size=16).digest(), one.split

    return sorted(splits, key=drawn)
