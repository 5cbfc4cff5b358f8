"""Balancing: streams of different lengths to ranks that make the same steps. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle

from torch_dataloader_utils.planning.plan import BalancedStreams, ShardSlice

__all__ = ["balance"]


def balance(ranks: Sequence[Sequence[Sequence[ShardSlice]]], batch_size: int, *, pad: bool) -> BalancedStreams:
    """Shorten the streams that are too long, and append their last rows to others.

    All ranks get the same number of rows. Step t of a rank comes from its worker t modulo workers, and all steps but
    the last have a full batch: this gives each worker's number of rows. A stream keeps its first rows.

    Args:
        ranks: For each rank and worker its slices before balancing.
        batch_size: Rows of a step.
        pad: Whether the first rows of the epoch are repeated for ranks that would have one row less than others. If
            not, the surplus rows of the others are dropped.

    Returns:
        The streams, and the dropped or repeated rows.
    """
    num_ranks = len(ranks)
    slices = [shard_slice for streams in ranks for stream in streams for shard_slice in stream]
    total = sum(shard_slice.rows for shard_slice in slices)
    rows = -(-total // num_ranks) if pad else total // num_ranks
    wanted = [_rows_of_worker(rows, batch_size, worker, len(ranks[0])) for worker in range(len(ranks[0]))]
    surplus: deque[ShardSlice] = deque()
    kept = [[_keep(stream, count, surplus) for stream, count in zip(streams, wanted, strict=True)] for streams in ranks]
    missing = num_ranks * rows - total
    repeats = deque(_first_rows(slices, missing) if missing > 0 else ())
    repeated = tuple(repeats)
    for streams in kept:
        for stream, count in zip(streams, wanted, strict=True):
            short = count - sum(shard_slice.rows for shard_slice in stream)
            short = _fill(stream, short, surplus)
            _fill(stream, short, repeats)
    balanced = tuple(tuple(map(tuple, streams)) for streams in kept)
    return BalancedStreams(balanced, dropped=tuple(surplus), repeated=repeated)


def _rows_of_worker(rows: int, batch_size: int, worker: int, workers: int) -> int:
    """Return the number of a rank's rows that are in the steps of a worker."""
    full, rest = divmod(rows, batch_size)
    in_full_steps = batch_size * len(range(worker, full, workers))
    return in_full_steps + (rest if full % workers == worker else 0)


def _keep(stream: Iterable[ShardSlice], rows: int, surplus: deque[ShardSlice]) -> list[ShardSlice]:
    """Return the first rows of a stream, and append the others to the surplus."""
    kept = []
    for shard_slice in stream:
        first, others = _cut(shard_slice, rows)
        if first is not None:
            kept.append(first)
            rows -= first.rows
        if others is not None:
            surplus.append(others)
    return kept


def _fill(stream: list[ShardSlice], rows: int, surplus: deque[ShardSlice]) -> int:
    """Append surplus rows to a stream; return how many rows it still lacks."""
    while rows and surplus:
        first, others = _cut(surplus.popleft(), rows)
        if others is not None:
            surplus.appendleft(others)
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
    middle = shard_slice.start + rows
    return replace(shard_slice, stop=middle), replace(shard_slice, start=middle)


def _first_rows(slices: Sequence[ShardSlice], rows: int) -> Iterator[ShardSlice]:
    """Yield the first rows of the slices, and begin again with the first slice if that is not enough."""
    for shard_slice in cycle(slices):
        first, _ = _cut(shard_slice, rows)
        if first is None:
            return
        yield replace(first, repeats=True)
        rows -= first.rows
