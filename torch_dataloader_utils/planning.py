"""From a manifest and options to an epoch's plan. Pure: no I/O, no clock, no process state.

Every rank and worker that computes a plan from the same manifest and options gets the same one, on any machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.random  # loaded here, for every forked worker would load it anew at its first use
import numpy.typing as npt

from torch_dataloader_utils.model import Manifest, Plan, Shard, SizedSplit, Split

__all__ = ["PLAN_ALGORITHM", "PlanOptions", "make_plan", "permutation", "stable_argsort"]

PLAN_ALGORITHM = 1
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
    """

    split_bytes: int
    split_rows: int | None = None
    shuffle: bool = False
    shuffle_seed: int = 42
    shuffle_buffer_size: int | None = None

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
) -> Plan:
    """Plan an epoch.

    Args:
        manifest: The data files.
        options: What else the plan depends on.
        epoch: The epoch, from 0.
        num_ranks: Number of ranks.
        num_workers: Number of worker processes of each rank; 0 means the rank's own process.
        selection: For each file the row groups, by number and in order, that may hold rows to deliver; None for all.

    Returns:
        The plan: every selected row group in exactly one shard.
    """
    groups = list(_row_groups(manifest, selection))
    streams = num_ranks * max(1, num_workers)
    least = streams if options.mixes_rows else streams * SHARDS_PER_STREAM
    limit = _first_limit(groups, options, least)
    shuffled = _shuffle_key(options.shuffle_seed, epoch) if options.shuffle else None
    while True:
        splits = groups if options.mixes_rows else list(_join(groups, limit))
        if shuffled is not None:
            splits = sorted(splits, key=lambda one: (shuffled(one.split), one.split))
        shards = tuple(_bundle(splits, limit))
        if len(shards) >= min(least, len(groups)):
            return Plan(epoch=epoch, num_ranks=num_ranks, num_workers=num_workers, shards=shards)
        limit = limit.lowered()


def permutation(rows: int, *, seed: int, epoch: int, shard: Shard) -> npt.NDArray[np.intp]:
    """Return the order in which a shard's rows are delivered when rows are mixed.

    The stable argsort of 64 random bits for each row, from Philox (Salmon et al., "Parallel random numbers: as easy
    as 1, 2, 3", 2011) keyed by the seed, the epoch and the shard's content. Raw bits of a counter-based generator are
    the same on every machine and in every NumPy, which the distributions built on them need not be.

    Args:
        rows: Number of rows to order: those of the shard that a filter left.
        seed: The shuffle seed.
        epoch: The epoch.
        shard: The shard.

    Returns:
        int64 of shape ``(rows,)``: a permutation of ``0..rows-1``.
    """
    key = hashlib.blake2b(shard.content(), key=_key("rows", seed, epoch), digest_size=16).digest()
    return stable_argsort(numpy.random.Philox(key=int.from_bytes(key, "little")).random_raw(rows))


def stable_argsort(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    """Return NumPy's stable argsort of values that are hardly ever equal, in a fraction of its time."""
    order = np.argsort(values)  # the same unless there are equal values
    ordered = values[order]
    return np.argsort(values, kind="stable") if np.any(ordered[1:] == ordered[:-1]) else order


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
        row_share = -(-sum(one.split.row_length for one in groups) // least)
        rows = min(options.shuffle_buffer_size, max(1, row_share), *([] if rows is None else [rows]))
    return _Limit(min(options.split_bytes, max(1, share)), rows)


def _join(groups: Iterable[SizedSplit], limit: _Limit) -> Iterator[SizedSplit]:
    """Join neighbouring row groups of a file into splits."""
    held: SizedSplit | None = None
    for one in groups:
        joined = held and _joined(held, one)
        if joined and limit.holds(joined.bytes, joined.split.row_length):
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
    return SizedSplit(Split(one.split.path, one.split.row_offset, rows), one.bytes + other.bytes)


def _bundle(splits: Iterable[SizedSplit], limit: _Limit) -> Iterator[Shard]:
    """Bundle neighbouring splits into shards."""
    held: list[Split] = []
    size = rows = 0
    for one in splits:
        if held and not limit.holds(size + one.bytes, rows + one.split.row_length):
            yield Shard(tuple(held))
            held, size, rows = [], 0, 0
        held.append(one.split)
        size += one.bytes
        rows += one.split.row_length
    if held:
        yield Shard(tuple(held))


def _key(purpose: str, seed: int, epoch: int) -> bytes:
    return hashlib.blake2b(f"{PLAN_ALGORITHM}|{purpose}|{seed}|{epoch}".encode(), digest_size=32).digest()


def _shuffle_key(seed: int, epoch: int) -> Callable[[Split], bytes]:
    key = _key("shards", seed, epoch)
    return lambda split: hashlib.blake2b(split.content(), key=key, digest_size=16).digest()
