"""The random order of an epoch: of its row groups, and of the rows inside a shard. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.random  # loaded here, for every forked worker would load it anew at its first use
import numpy.typing as npt

from torch_dataloader_utils.planning.manifest import SizedSplit, Split
from torch_dataloader_utils.planning.plan import PLAN_ALGORITHM, Shard, ShardSlice

__all__ = ["delivery_order", "epoch_key", "permutation", "round_bounds", "shuffled", "stable_argsort"]


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
        rows: Number of rows to order: those that a filter left, and those of missing splits.
        seed: The shuffle seed.
        epoch: The epoch.
        shard: The shard.
        number: The round.

    Returns:
        int64 of shape ``(rows,)``: a permutation of ``0..rows-1``.
    """
    content = shard.content() + (f"\0round {number}".encode() if number else b"")
    key = hashlib.blake2b(content, key=epoch_key("rows", seed, epoch), digest_size=16).digest()
    return stable_argsort(numpy.random.Philox(key=int.from_bytes(key, "little")).random_raw(rows))


def delivery_order(shard_slice: ShardSlice, *, seed: int | None, epoch: int) -> npt.NDArray[np.intp]:
    """Return which rows a slice delivers, in their order, where no filter takes any.

    Args:
        shard_slice: The shard_slice.
        seed: The shuffle seed, or None where rows are not mixed.
        epoch: The epoch.

    Returns:
        int64 of shape ``(rows,)``: places among all rows of the shard's splits, those of missing ones included.
    """
    shard = shard_slice.shard
    starts = np.cumsum([0, *(split.row_length for split in shard.splits)])
    parts, first = [np.empty(0, dtype=np.intp)], 0
    for number in range(shard.rounds):
        bounds = round_bounds(shard, number)
        count = sum(stop - start for place, (start, stop) in enumerate(bounds) if place not in shard.missing)
        if first < shard_slice.stop and first + count > shard_slice.start:
            rows = np.concatenate([np.arange(*bound) + begin for begin, bound in zip(starts, bounds, strict=False)])
            if seed is not None:
                rows = rows[permutation(len(rows), seed=seed, epoch=epoch, shard=shard, number=number)]
            if shard.missing:
                rows = rows[~np.isin(np.searchsorted(starts[1:], rows, side="right"), shard.missing)]
            parts.append(rows[max(0, shard_slice.start - first) : shard_slice.stop - first])
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


def epoch_key(purpose: str, seed: int, epoch: int) -> bytes:
    """Return the key of an epoch's hashes for one purpose, 32 bytes."""
    return hashlib.blake2b(f"{PLAN_ALGORITHM}|{purpose}|{seed}|{epoch}".encode(), digest_size=32).digest()


def shuffled(splits: Iterable[SizedSplit], seed: int, epoch: int) -> list[SizedSplit]:
    """Put splits into the random order of an epoch."""
    key = epoch_key("shards", seed, epoch)

    def drawn(one: SizedSplit) -> tuple[bytes, Split]:
        return hashlib.blake2b(one.split.content(), key=key, digest_size=16).digest(), one.split

    return sorted(splits, key=drawn)
