"""Row groups bundled into the shards of an epoch, in its order. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch_dataloader_utils.planning.manifest import SizedSplit, Split
from torch_dataloader_utils.planning.plan import PlanOptions, Shard, ShardSlice
from torch_dataloader_utils.planning.shuffle import shuffled

SHARDS_PER_STREAM = 4
"""Least number of shards of a stream, where there are enough row groups, so that all end at about the same time."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """The largest split or shard of more than one row group."""

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
    limit = _Limit(options.split_bytes, options.shuffle_buffer_size)
    groups = shuffled(groups, options.shuffle_seed, epoch)
    large = [group for group in groups if not limit.holds(group.bytes, group.rows)]
    if not large:
        return _in_memory(groups, options, streams)
    interleaved = list(_interleaved(large, options, streams))
    small = [group for group in groups if limit.holds(group.bytes, group.rows)]
    bundled = _in_memory(small, options, max(0, streams - len(interleaved)))
    order = {group.split: number for number, group in enumerate(groups)}
    return sorted([*interleaved, *bundled], key=lambda shard: order[shard.splits[0]])


def given_shards(
    bundles: Iterable[Sequence[SizedSplit]], groups: Iterable[SizedSplit], options: PlanOptions
) -> Iterator[Shard]:
    """Yield the shards of a split strategy, without the row groups that are not to be delivered."""
    wanted = {group.split for group in groups}
    for bundle in bundles:
        left = [group for group in bundle if group.split in wanted]
        if left and options.shuffle_buffer_size is not None:
            yield in_rounds(left, options.shuffle_buffer_size, options.split_bytes)
        elif left:
            yield _joined_shard(left)


def _in_files(groups: Sequence[SizedSplit], options: PlanOptions, epoch: int, streams: int) -> list[Shard]:
    """Bundle neighbouring row groups. Each stream gets several shards if there are enough row groups."""
    least = min(streams * SHARDS_PER_STREAM, len(groups))
    limit = _first_limit(groups, options, max(1, least))
    if streams > 1 and not options.shuffle:
        shards = list(_bundle_evenly(groups, limit, streams))
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


def _bundle_evenly(groups: Sequence[SizedSplit], limit: _Limit, streams: int) -> Iterator[Shard]:
    """Bundle the row groups of one file after the other into shards of about equally many rows.

    The number of shards is a multiple of the number of streams, so that each stream gets equally many.
    """
    total = sum(group.rows for group in groups)
    size = sum(group.bytes for group in groups)
    count = max(-(-size // limit.bytes), -(-total // limit.rows) if limit.rows else 1)
    count = -(-count // streams) * streams
    held: list[SizedSplit] = []
    held_bytes = held_rows = rows = closed = 0
    for group in groups:
        fits = limit.holds(held_bytes + group.bytes, held_rows + group.rows)
        # A row group belongs to the next shard if its middle is beyond that shard's ideal beginning.
        if held and (not fits or (2 * rows + group.rows) * count >= 2 * (closed + 1) * total):
            yield _joined_shard(held)
            held = []
            held_bytes = held_rows = 0
            closed = max(closed + 1, rows * count // total)
        held.append(group)
        held_bytes += group.bytes
        held_rows += group.rows
        rows += group.rows
    if held:
        yield _joined_shard(held)


def _joined_shard(groups: Sequence[SizedSplit]) -> Shard:
    """Return the shard of these row groups, with neighbours joined."""
    unlimited = _Limit(sum(group.bytes for group in groups), None)
    return Shard(tuple(joined.split for joined in join_row_groups(groups, unlimited)))


def balanced_shards(shards: Sequence[Shard], carried: Sequence[ShardSlice], streams: int) -> list[Shard]:
    """Return randomly ordered shards in an order that gives streams about equally many rows.

    Beginning with the largest, each shard goes to the stream that has the fewest rows and may still have a shard
    (Graham, "Bounds on multiprocessing timing anomalies", 1969). Each stream keeps its shards in their random order.
    """
    begin, count = len(carried), len(shards)
    quotas = [len(range(begin + (stream - begin) % streams, begin + count, streams)) for stream in range(streams)]
    rows = [sum(part.expected_rows for part in carried[stream::streams]) for stream in range(streams)]
    sizes = [ShardSlice(shard).expected_rows for shard in shards]
    waiting = [(rows[stream], stream) for stream in range(streams) if quotas[stream]]
    heapq.heapify(waiting)
    assigned: list[list[int]] = [[] for _ in range(streams)]
    for index in sorted(range(count), key=lambda index: -sizes[index]):
        held, stream = heapq.heappop(waiting)
        assigned[stream].append(index)
        if len(assigned[stream]) < quotas[stream]:
            heapq.heappush(waiting, (held + sizes[index], stream))
    indices = [iter(sorted(of_stream)) for of_stream in assigned]
    return [shards[next(indices[position % streams])] for position in range(begin, begin + count)]


def _in_memory(groups: Sequence[SizedSplit], options: PlanOptions, least: int) -> list[Shard]:
    """Bundle randomly ordered row groups into shards that fit the shuffle buffer: `least` of them, or more.

    There are fewer where there are not so many row groups.
    """
    limit = _first_limit(groups, options, max(1, least))
    while len(shards := list(_bundle(groups, limit))) < min(least, len(groups)):
        limit = limit.lowered()
    return shards


def _interleaved(groups: Sequence[SizedSplit], options: PlanOptions, streams: int) -> Iterator[Shard]:
    """Bundle row groups that are too large to be shuffled at once into shards that are shuffled in rounds.

    A shard has as many row groups as it may, but so few that each stream gets a shard. Their sizes are about equal.
    """
    assert options.shuffle_buffer_size is not None  # noqa: S101 - only a row-level shuffle calls this
    most = min(options.shuffle_interleave, -(-len(groups) // streams))
    count = -(-len(groups) // most)
    count = min(len(groups), -(-count // streams) * streams)
    total = sum(group.rows for group in groups)
    held: list[SizedSplit] = []
    rows = closed = 0
    for number, group in enumerate(groups):
        held.append(group)
        rows += group.rows
        others = len(groups) - number - 1  # if these are just enough for the other shards, this shard ends here
        if others <= max(0, count - closed - 1) or len(held) == most or rows * count >= (closed + 1) * total:
            yield in_rounds(held, options.shuffle_buffer_size, options.split_bytes)
            held = []
            closed += 1


def in_rounds(groups: Sequence[SizedSplit], most_rows: int, most_bytes: int) -> Shard:
    """Return a shard of which each round has at most so many rows and bytes, or one row of each row group more."""
    rows, size = sum(group.rows for group in groups), sum(group.bytes for group in groups)
    rounds = max(-(-rows // most_rows), -(-size // most_bytes))
    return Shard(tuple(group.split for group in groups), rounds=min(rounds, rows))


def _first_limit(groups: Sequence[SizedSplit], options: PlanOptions, least: int) -> _Limit:
    """Lower the limits so far that all row groups would make `least` shards of equal size."""
    share = -(-sum(group.bytes for group in groups) // least)
    rows = options.split_rows
    if options.shuffle_buffer_size is not None:
        row_share = -(-sum(group.rows for group in groups) // least)
        rows = min(options.shuffle_buffer_size, max(1, row_share), *([] if rows is None else [rows]))
    return _Limit(min(options.split_bytes, max(1, share)), rows)


def join_row_groups(groups: Iterable[SizedSplit], limit: _Limit) -> Iterator[SizedSplit]:
    """Join neighbouring row groups of a file into splits."""
    held: SizedSplit | None = None
    for group in groups:
        joined = held and _joined(held, group)
        if joined and limit.holds(joined.bytes, joined.rows):
            held = joined
            continue
        if held:
            yield held
        held = group
    if held:
        yield held


def _joined(group: SizedSplit, following: SizedSplit) -> SizedSplit | None:
    path, start, rows = group.split.path, group.split.row_offset, group.split.row_length
    if (path, start + rows) != (following.split.path, following.split.row_offset):
        return None
    split = Split(path, start, rows + following.split.row_length)
    return SizedSplit(split, group.bytes + following.bytes, group.rows + following.rows)


def _bundle(splits: Iterable[SizedSplit], limit: _Limit) -> Iterator[Shard]:
    """Bundle neighbouring splits into shards."""
    held: list[Split] = []
    size = rows = 0
    for sized in splits:
        if held and not limit.holds(size + sized.bytes, rows + sized.rows):
            yield Shard(tuple(held))
            held, size, rows = [], 0, 0
        held.append(sized.split)
        size += sized.bytes
        rows += sized.rows
    if held:
        yield Shard(tuple(held))
