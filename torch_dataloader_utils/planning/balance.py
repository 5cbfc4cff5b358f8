"""Streams of different lengths to ranks that make the same steps. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle

from torch_dataloader_utils.planning.plan import BalancedStreams, ShardSlice

__all__ = ["balance"]


def balance(ranks: Sequence[Sequence[Sequence[ShardSlice]]], batch_size: int, *, pad: bool) -> BalancedStreams:
    """ColumnSlice streams, and put what is cut off behind others, so that every rank makes the same steps.

    All ranks get the same number of rows. Step t of a rank comes from its worker t modulo workers, and all steps but
    the last have a full batch; so each worker's number of rows is known. Streams keep the beginning of what they have.

    Args:
        ranks: For each rank and worker what it would walk.
        batch_size: Rows of a step.
        pad: Whether rows of the epoch's beginning are repeated for ranks that would have one row less than others; if
            not, the rows that others have more are left out.

    Returns:
        The streams, and what was dropped or repeated.
    """
    num_ranks = len(ranks)
    total = sum(shard_slice.rows for streams in ranks for stream in streams for shard_slice in stream)
    rows = -(-total // num_ranks) if pad else total // num_ranks
    wanted = [_rows_of_worker(rows, batch_size, worker, len(ranks[0])) for worker in range(len(ranks[0]))]
    loose: deque[ShardSlice] = deque()
    kept = [[_keep(stream, count, loose) for stream, count in zip(streams, wanted, strict=True)] for streams in ranks]
    everything = [shard_slice for streams in ranks for stream in streams for shard_slice in stream]
    missing = num_ranks * rows - total
    repeats = deque(_first_rows(everything, missing) if missing > 0 else ())
    repeated = tuple(repeats)
    for streams in kept:
        for stream, count in zip(streams, wanted, strict=True):
            short = count - sum(shard_slice.rows for shard_slice in stream)
            short = _fill(stream, short, loose)
            _fill(stream, short, repeats)
    balanced = tuple(tuple(map(tuple, streams)) for streams in kept)
    return BalancedStreams(balanced, dropped=tuple(loose), repeated=repeated)


def _rows_of_worker(rows: int, batch_size: int, worker: int, workers: int) -> int:
    """Return how many of a rank's rows are in the steps of one of its workers."""
    full, rest = divmod(rows, batch_size)
    own = batch_size * len(range(worker, full, workers))
    return own + (rest if full % workers == worker else 0)


def _keep(stream: Iterable[ShardSlice], rows: int, loose: deque[ShardSlice]) -> list[ShardSlice]:
    """Return the first rows of a stream, and put the others to those that are loose."""
    kept = []
    for shard_slice in stream:
        first, others = _cut(shard_slice, rows)
        if first is not None:
            kept.append(first)
            rows -= first.rows
        if others is not None:
            loose.append(others)
    return kept


def _fill(stream: list[ShardSlice], rows: int, loose: deque[ShardSlice]) -> int:
    """Put loose rows at the end of a stream; return how many it still lacks."""
    while rows and loose:
        first, others = _cut(loose.popleft(), rows)
        if others is not None:
            loose.appendleft(others)
        if first is not None:
            stream.append(first)
            rows -= first.rows
    return rows


def _cut(shard_slice: ShardSlice, rows: int) -> tuple[ShardSlice | None, ShardSlice | None]:
    """Return the first rows of a slice, and the others."""
    if rows <= 0:
        return None, shard_slice
    if rows >= shard_slice.rows:
        return shard_slice, None
    place = shard_slice.start + rows
    shard, stop = shard_slice.shard, shard_slice.stop
    return ShardSlice(shard, shard_slice.start, place, shard_slice.repeats), ShardSlice(
        shard, place, stop, shard_slice.repeats
    )


def _first_rows(slices: Sequence[ShardSlice], rows: int) -> Iterator[ShardSlice]:
    """Yield the first rows of the slices, all over again as often as it takes."""
    for shard_slice in cycle(slices):
        first, _ = _cut(shard_slice, rows)
        if first is None:
            return
        yield ShardSlice(first.shard, first.start, first.stop, repeats=True)
        rows -= first.rows
