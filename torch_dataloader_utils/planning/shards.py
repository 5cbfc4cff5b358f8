"""Row groups bundled into the shards of an epoch, in its order. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch_dataloader_utils.planning.manifest import SizedSplit, Split
from torch_dataloader_utils.planning.plan import PlanOptions, Shard, ShardSlice
from torch_dataloader_utils.planning.shuffle import shuffled

__all__ = ["balanced_shards", "given_shards", "in_rounds", "join_row_groups", "make_shards"]


SHARDS_PER_STREAM = 4
"""How many shards a stream gets at least where row groups allow, so that streams end at about the same time."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """The most that a split or a shard of more than one row group may hold."""

    bytes: int
    rows: int | None

    def holds(self, size: int, rows: int) -> bool:
        return size <= self.bytes and (self.rows is None or rows <= self.rows)

    def lowered(self) -> _Limit:
        return _Limit(self.bytes * 3 // 4, None if self.rows is None else self.rows * 3 // 4)


def make_shards(groups: Sequence[SizedSplit], options: PlanOptions, epoch: int, streams: int) -> list[Shard]:
    """Bundle row groups into shards, in the epoch's order."""
    if not options.shuffles_rows:
        return _in_files(groups, options, epoch, streams)
    room = _Limit(options.split_bytes, options.shuffle_buffer_size)
    groups = shuffled(groups, options.shuffle_seed, epoch)
    large = [one for one in groups if not room.holds(one.bytes, one.rows)]
    if not large:
        return _mixed(groups, options, streams)
    in_rounds = list(_interleaved(large, options, streams))
    small = [one for one in groups if room.holds(one.bytes, one.rows)]
    bundled = _mixed(small, options, max(0, streams - len(in_rounds)))
    place = {one.split: number for number, one in enumerate(groups)}
    return sorted([*in_rounds, *bundled], key=lambda shard: place[shard.splits[0]])


def given_shards(
    bundled: Iterable[Sequence[SizedSplit]], groups: Iterable[SizedSplit], options: PlanOptions
) -> Iterator[Shard]:
    """Yield the shards of a split strategy, as far as their row groups are to be delivered."""
    wanted = {one.split for one in groups}
    for shard in bundled:
        left = [one for one in shard if one.split in wanted]
        if left and options.shuffle_buffer_size is not None:
            yield in_rounds(left, options.shuffle_buffer_size, options.split_bytes)
        elif left:
            yield Shard(
                tuple(each.split for each in join_row_groups(left, _Limit(sum(one.bytes for one in left), None)))
            )


def _in_files(groups: Sequence[SizedSplit], options: PlanOptions, epoch: int, streams: int) -> list[Shard]:
    """Bundle neighbouring row groups, at least to some shards for each stream if there are as many row groups."""
    least = min(streams * SHARDS_PER_STREAM, len(groups))
    limit = _first_limit(groups, options, max(1, least))
    if streams > 1 and not options.shuffle:
        shards = list(_cut_evenly(groups, limit, streams))
        if len(shards) >= least:
            return shards
    while True:
        splits = list(join_row_groups(groups, limit))
        if options.shuffle:
            splits = shuffled(splits, options.shuffle_seed, epoch)
        shards = list(_bundle(splits, limit))
        if len(shards) >= least:
            return shards
        limit = limit.lowered()


def _cut_evenly(groups: Sequence[SizedSplit], limit: _Limit, streams: int) -> Iterator[Shard]:
    """ColumnSlice the files, one after the other, into shards of about as many rows, as many for each stream."""
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
            yield Shard(tuple(each.split for each in join_row_groups(held, whole)))
            held = []
            held_bytes = held_rows = 0
            closed = max(closed + 1, rows * count // total)
        held.append(one)
        held_bytes += one.bytes
        held_rows += one.rows
        rows += one.rows
    if held:
        yield Shard(tuple(each.split for each in join_row_groups(held, whole)))


def balanced_shards(shards: Sequence[Shard], carried: Sequence[ShardSlice], streams: int) -> list[Shard]:
    """Put shards that are in random order into another, in which streams have about as many rows.

    The largest shard left goes to the stream with the fewest rows that may have one more (Graham, "Bounds on
    multiprocessing timing anomalies", 1969); in each stream they stay in their order.
    """
    begin, count = len(carried), len(shards)
    quotas = [len(range(begin + (stream - begin) % streams, begin + count, streams)) for stream in range(streams)]
    rows = [sum(shard_slice.rows for shard_slice in carried[stream::streams]) for stream in range(streams)]
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
            yield in_rounds(held, options.shuffle_buffer_size, options.split_bytes)
            held = []
            closed += 1


def in_rounds(groups: Sequence[SizedSplit], most_rows: int, most_bytes: int) -> Shard:
    """Return a shard that mixes at most so many rows and bytes at once, but for a row of each of its row groups."""
    rows, size = sum(one.rows for one in groups), sum(one.bytes for one in groups)
    rounds = max(-(-rows // most_rows), -(-size // most_bytes))
    return Shard(tuple(one.split for one in groups), rounds=min(rounds, rows))


def _first_limit(groups: Sequence[SizedSplit], options: PlanOptions, least: int) -> _Limit:
    """Lower the maxima so far that `least` shards of equal size would hold everything."""
    share = -(-sum(one.bytes for one in groups) // least)
    rows = options.split_rows
    if options.shuffle_buffer_size is not None:
        row_share = -(-sum(one.rows for one in groups) // least)
        rows = min(options.shuffle_buffer_size, max(1, row_share), *([] if rows is None else [rows]))
    return _Limit(min(options.split_bytes, max(1, share)), rows)


def join_row_groups(groups: Iterable[SizedSplit], limit: _Limit) -> Iterator[SizedSplit]:
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
