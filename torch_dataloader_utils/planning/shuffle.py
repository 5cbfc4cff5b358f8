"""The random order of an epoch's row groups, and of the rows in a shard. Pure."""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import accumulate

import numpy as np
import numpy.random  # import it before workers are forked: each worker would import it at its first use
import numpy.typing as npt

from torch_dataloader_utils.planning.manifest import SizedSplit, Split
from torch_dataloader_utils.planning.plan import Shard, ShardSlice

KEYED_BY = 2
"""A part of all keys: the planning algorithm that introduced them. Algorithms that keep these orders keep it."""

FEWEST_BY_HIGHEST_BITS = 4096
"""Fewer values are sorted all at once: their radix sort has costs that do not depend on their number."""

MEASURED_VALUES = 8192
MEASUREMENTS = 3
"""How many values are sorted to find the faster way, and how often in each way: the shortest time counts."""

TIMES_FASTER = 2
"""How many times faster the sort by the highest bits has to be: of more values, other sorts gain on it."""


def round_bounds(shard: Shard, number: int) -> list[tuple[int, int]]:
    """Return for each split of a shard the rows that a round shuffles: start and stop within the split."""
    return [
        (split.row_length * number // shard.rounds, split.row_length * (number + 1) // shard.rounds)
        for split in shard.splits
    ]


def left_bounds(shard: Shard, number: int) -> list[tuple[int, int]]:
    """Return the same bounds counted in the rows of each split that are not excluded."""
    bounds = round_bounds(shard, number)
    if not shard.excluded:
        return bounds
    return [
        (start - shard.excluded.within(split, 0, start), stop - shard.excluded.within(split, 0, stop))
        for split, (start, stop) in zip(shard.splits, bounds, strict=True)
    ]


def permutation(rows: int, *, seed: int, epoch: int, shard: Shard, number: int = 0) -> npt.NDArray[np.intp]:
    """Return the order in which a row-level shuffle delivers the rows of a shard, or of one of its rounds.

    It is the stable argsort of 64 random bits for each row, from Philox (Salmon et al., "Parallel random numbers: as
    easy as 1, 2, 3", 2011) keyed by the seed, the epoch, the shard's content and the round. Raw bits of a counter-based
    generator are the same on every machine and in every NumPy release; distributions built on them may change.

    `rows` counts the rows that passed the filter and are not excluded, and those of missing splits; `number` is the
    round. The order is a permutation of ``0..rows-1``, as int64.
    """
    content = shard.content() + (f"\0round {number}".encode() if number else b"")
    key = hashlib.blake2b(content, key=epoch_key("rows", seed, epoch), digest_size=16).digest()
    return stable_argsort(lambda: numpy.random.Philox(key=int.from_bytes(key, "little")).random_raw(rows))


def delivery_order(shard_slice: ShardSlice, *, seed: int | None, epoch: int) -> npt.NDArray[np.intp]:
    """Return the rows that a slice delivers, in their order, where no filter drops any.

    They are int64 row numbers in the sequence of all splits of the shard, missing splits included. Without row-level
    shuffle the seed is None.
    """
    parts = [np.empty(0, dtype=np.intp)]
    for number, first in rounds_of(shard_slice):
        rows = round_order(shard_slice.shard, number, seed=seed, epoch=epoch)
        parts.append(rows[max(0, shard_slice.start - first) : shard_slice.stop - first])
    return np.concatenate(parts)


def rounds_of(shard_slice: ShardSlice) -> Iterator[tuple[int, int]]:
    """Yield the rounds that hold rows of a slice, each with the rows that the shard delivers before it."""
    shard = shard_slice.shard

    number = bisect_right(range(shard.rounds), shard_slice.start, key=lambda number: rows_before(shard, number)) - 1
    while number < shard.rounds and (first := rows_before(shard, number)) < shard_slice.stop:
        yield number, first
        number += 1


def rows_before(shard: Shard, number: int) -> int:
    """Return how many rows a shard delivers before a round."""
    if not number:  # the only round of most shards, which may have many splits
        return 0
    starts = (start for start, _ in left_bounds(shard, number))
    return sum(start for index, start in enumerate(starts) if index not in shard.missing)


def round_order(shard: Shard, number: int, *, seed: int | None, epoch: int) -> npt.NDArray[np.intp]:
    """Return the rows that a round of a shard delivers: see `delivery_order`."""
    starts = np.cumsum([0, *map(shard.excluded.left, shard.splits)])
    bounds = left_bounds(shard, number)
    rows = np.concatenate([np.arange(*bound) + begin for begin, bound in zip(starts, bounds, strict=False)])
    if seed is not None:
        rows = rows[permutation(len(rows), seed=seed, epoch=epoch, shard=shard, number=number)]
    if shard.missing:
        rows = rows[~np.isin(np.searchsorted(starts[1:], rows, side="right"), shard.missing)]
    return _with_excluded(shard, rows)


def _with_excluded(shard: Shard, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Return the numbers of rows among all rows of a shard's splits, given those among the rows not excluded."""
    if not shard.excluded:
        return rows
    spans = ((split.path, split.row_offset, split.row_offset + split.row_length) for split in shard.splits)
    return np.flatnonzero(~np.concatenate([shard.excluded.flags(*span) for span in spans]))[rows]


def rows_of_splits(
    shard: Shard, positions: Iterable[int], *, seed: int | None, epoch: int
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield, for each of rising positions, how many rows of each split the shard delivers before it.

    No filter drops any. Only the rounds that contain a position are drawn, so that time and memory do not depend on the
    number of rows of the others.
    """
    lengths = list(map(shard.excluded.left, shard.splits))
    present = np.ones(len(lengths), dtype=np.int64)
    present[list(shard.missing)] = 0

    def before(number: int) -> npt.NDArray[np.int64]:
        return np.array([start for start, _ in left_bounds(shard, number)], dtype=np.int64) * present

    number, drawn = -1, np.empty(0, dtype=np.int64)
    for position in positions:
        found = bisect_right(range(shard.rounds), position, key=lambda number: int(before(number).sum())) - 1
        if found != number:
            number, counts, taken = found, before(found), 0
            first, in_round = int(counts.sum()), [stop - start for start, stop in left_bounds(shard, number)]
            if seed is not None:
                drawn = np.repeat(np.arange(len(lengths)), in_round)
                drawn = drawn[permutation(len(drawn), seed=seed, epoch=epoch, shard=shard, number=number)]
                drawn = drawn[present[drawn] == 1]
        if seed is None:
            own = in_round * present
            yield counts + np.clip(position - first - (np.cumsum(own) - own), 0, own)
            continue
        counts = counts + np.bincount(drawn[taken : position - first], minlength=len(lengths))
        taken = position - first
        yield counts


def delivered_rows(slices: Iterable[ShardSlice], *, seed: int | None, epoch: int) -> Iterator[tuple[str, int]]:
    """Yield the rows that slices deliver, each as its file's relative path and its number in the file."""
    for shard_slice in slices:
        splits = shard_slice.shard.splits
        starts = [0, *accumulate(split.row_length for split in splits)]
        for row in delivery_order(shard_slice, seed=seed, epoch=epoch).tolist():
            index = bisect_right(starts, row) - 1
            yield splits[index].path, splits[index].row_offset + row - starts[index]


def stable_argsort(draw: Callable[[], npt.NDArray[np.uint64]]) -> npt.NDArray[np.intp]:
    """Return the same as NumPy's stable argsort of random values, in a fraction of its time and memory.

    The lowest bits of each value are replaced by its index, then the values are sorted: that is faster than sorting
    indices by value. The few values that agree in all other bits are put in order afterwards. `draw` returns the
    values, the same each time, in an array that may be overwritten.
    """
    keyed = draw()
    count = len(keyed)
    if count < 2:  # noqa: PLR2004 - nothing to sort
        return np.arange(count)
    lowest = np.uint64((1 << (count - 1).bit_length()) - 1)
    scratch = np.arange(count, dtype=np.uint64)
    keyed &= ~lowest
    keyed |= scratch
    if count >= FEWEST_BY_HIGHEST_BITS and is_faster_by_highest_bits():
        keyed, scratch = sorted_by_highest_bits(keyed, scratch), keyed
    else:
        keyed.sort()
    differing = np.bitwise_xor(keyed[1:], keyed[:-1], out=scratch[1:])
    ties = np.flatnonzero(differing <= lowest) if differing.min() <= lowest else None
    del scratch, differing  # the values may be drawn again
    keyed &= lowest
    order: npt.NDArray[np.intp] = keyed.view(np.int64).astype(np.intp, copy=False)
    if ties is not None:
        places = np.union1d(ties, ties + 1)
        rows = order[places]
        order[places] = rows[np.lexsort((rows, draw()[rows]))]
    return order


def sorted_by_highest_bits(values: npt.NDArray[np.uint64], out: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Sort random values into another array of the same size, and return it.

    By their highest 16 bits first, for which NumPy has a radix sort. What is left is nearly sorted, for which its
    stable sort of other integers is made (Timsort).
    """
    highest = np.right_shift(values, np.uint64(48), out=out).astype(np.uint16)
    np.take(values, highest.argsort(kind="stable"), out=out, mode="clip")
    out.sort(kind="stable")
    return out


@cache
def is_faster_by_highest_bits() -> bool:
    """Whether this processor sorts random values faster so than all bits at once: measured once, in a millisecond.

    NumPy sorts 64 bits by vector instructions where the processor has them. On AMD's Zen 4 those for 512 bits take five
    times as long as those for 256 (seen in 2.4).
    """
    values = numpy.random.Philox(key=0).random_raw(MEASURED_VALUES)
    out = np.empty_like(values)

    def seconds(sort: Callable[[], object]) -> float:
        began = time.perf_counter()
        sort()
        return time.perf_counter() - began

    by_highest = min(seconds(lambda: sorted_by_highest_bits(values, out)) for _ in range(MEASUREMENTS))
    return TIMES_FASTER * by_highest < min(seconds(lambda: np.sort(values)) for _ in range(MEASUREMENTS))


def epoch_key(purpose: str, seed: int, epoch: int) -> bytes:
    """Return the key of an epoch's hashes for one purpose, 32 bytes."""
    return hashlib.blake2b(f"{KEYED_BY}|{purpose}|{seed}|{epoch}".encode(), digest_size=32).digest()


def shuffled(splits: Iterable[SizedSplit], seed: int, epoch: int) -> list[SizedSplit]:
    """Put splits into the random order of an epoch."""
    key = epoch_key("shards", seed, epoch)

    def drawn(group: SizedSplit) -> tuple[bytes, Split]:
        return hashlib.blake2b(group.split.content(), key=key, digest_size=16).digest(), group.split

    return sorted(splits, key=drawn)
