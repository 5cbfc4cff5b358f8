"""Balancing: streams of different lengths to ranks that make the same steps. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import TypeAlias

from torch_dataloader_utils.planning.plan import BalancedStreams, ShardSlice

Streams: TypeAlias = tuple[tuple[ShardSlice, ...], ...]
"""The slices of each worker of a rank."""


def balance(ranks: Sequence[Sequence[Sequence[ShardSlice]]], batch_size: int, *, pad: bool) -> BalancedStreams:
    """Shorten the streams that are too long, and append their last rows to others.

    All ranks get the same number of rows. Step t of a rank comes from its worker t modulo workers, and all steps but
    the last have a full batch: this gives each worker's number of rows. A stream keeps its first rows.

    With `pad`, the first rows of the epoch are repeated for ranks that would have one row less than others. Without it,
    the surplus rows of the others are dropped. `ranks` has for each rank and worker its slices before balancing.
    """
    num_ranks = len(ranks)
    slices = [part for streams in ranks for stream in streams for part in stream]
    total = _rows(slices)
    rows = -(-total // num_ranks) if pad else total // num_ranks
    wanted = [_rows_of_worker(rows, batch_size, worker, len(ranks[0])) for worker in range(len(ranks[0]))]
    surplus: deque[ShardSlice] = deque()
    kept = [[_keep(stream, count, surplus) for stream, count in zip(streams, wanted, strict=True)] for streams in ranks]
    missing = num_ranks * rows - total
    with_rows = [part for part in slices if part.rows]  # a shard of counted documents may give no sequence
    first_slices = deque(islice(cycle(with_rows), max(0, missing)))  # each of them has at least one row
    repeated = tuple(replace(part, repeats=True) for part in _take(first_slices, missing))
    repeats = deque(repeated)
    for streams in kept:
        for stream, count in zip(streams, wanted, strict=True):
            for source in (surplus, repeats):
                stream.extend(_take(source, count - _rows(stream)))
    balanced = tuple(tuple(map(tuple, streams)) for streams in kept)
    return BalancedStreams(balanced, dropped=tuple(surplus), repeated=repeated)


def deal(slices: Sequence[ShardSlice], num_ranks: int, wanted: Sequence[int]) -> tuple[Streams, ...]:
    """Deal slices to the workers of all ranks, each of which wants so many rows on every rank; all rows are wanted.

    Slice i goes to rank i modulo ranks, and there to the next worker. A stream keeps its first rows; what it has beyond
    its number goes to streams that lack rows.
    """
    surplus: deque[ShardSlice] = deque()
    step = num_ranks * len(wanted)
    kept = [
        [_keep(slices[rank + num_ranks * worker :: step], rows, surplus) for worker, rows in enumerate(wanted)]
        for rank in range(num_ranks)
    ]
    for streams in kept:
        for stream, count in zip(streams, wanted, strict=True):
            stream.extend(_take(surplus, count - _rows(stream)))
    return tuple(tuple(map(tuple, streams)) for streams in kept)


def _rows(slices: Iterable[ShardSlice]) -> int:
    return sum(part.rows for part in slices)


def _rows_of_worker(rows: int, batch_size: int, worker: int, workers: int) -> int:
    """Return the number of a rank's rows that are in the steps of a worker."""
    full, rest = divmod(rows, batch_size)
    in_full_steps = batch_size * len(range(worker, full, workers))
    return in_full_steps + (rest if full % workers == worker else 0)


def _keep(stream: Iterable[ShardSlice], rows: int, surplus: deque[ShardSlice]) -> list[ShardSlice]:
    """Return the first rows of a stream, and append the others to the surplus."""
    others = deque(stream)
    kept = _take(others, rows)
    surplus += others
    return kept


def _take(slices: deque[ShardSlice], rows: int) -> list[ShardSlice]:
    """Remove so many rows from the beginning of the slices, or all where there are fewer, and return them."""
    taken = []
    while rows > 0 and slices:
        part = slices.popleft()
        if part.rows > rows:
            middle = part.start + rows
            slices.appendleft(replace(part, start=middle))
            part = replace(part, stop=middle)
        taken.append(part)
        rows -= part.rows
    return taken
