"""Split strategies: how users bundle and order row groups, and the check that every row is in one shard. Pure."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

from torch_dataloader_utils.planning.manifest import Manifest, SizedSplit, Split
from torch_dataloader_utils.planning.plan import PlanOptions, Shard


class SplitStrategy(Protocol):
    """Turns a dataset's files into the shards of an epoch.

    Every rank and every resumed run has to get the same shards: a strategy depends on nothing but its arguments.
    """

    def shards(self, manifest: Manifest, epoch: int) -> Iterable[Shard]:
        """Return the epoch's shards, in the order in which ranks and workers receive them.

        Args:
            manifest: The files. ``manifest.files`` are sorted by path; of each, ``path`` (relative to the root),
                ``rows`` and ``row_groups`` (each with ``rows`` and ``bytes``, uncompressed) are known. For text whose
                rows are not counted, bytes stand for rows.
            epoch: The epoch, from 0.

        Returns:
            Shards, each of whole row groups (``Split(path, row_offset, row_length)``, which may span several); every
            row of the manifest in exactly one of them. The planner later removes row groups that a filter rules out.
        """


def require_strategy(value: object, options: PlanOptions) -> None:
    """Raise unless a value is a strategy, and no other option decides what a strategy decides."""
    if isinstance(value, type) or not callable(getattr(value, "shards", None)):
        msg = f"split_strategy={value!r:.80} has no method shards(manifest, epoch)"
        msg += ": make an object of this class" if isinstance(value, type) else ""
        raise TypeError(msg)
    if options.shuffle and not options.shuffles_rows:
        msg = "split_strategy decides the order of shards: leave out shuffle=True, or set shuffle_buffer_size to "
        msg += "shuffle the rows of each shard"
        raise ValueError(msg)
    if options.split_rows is not None:
        msg = f"split_rows={options.split_rows} has no meaning with a split_strategy, which decides the shards"
        raise ValueError(msg)


def name_of(strategy: SplitStrategy) -> str:
    """Return the name of a strategy's class."""
    return f"{type(strategy).__module__}.{type(strategy).__qualname__}"


def digest_of(strategy: SplitStrategy, shards: Iterable[Sequence[SizedSplit]]) -> str:
    """Return what states record of a strategy: its class, and a digest of an epoch's shards."""
    digest = hashlib.blake2b(digest_size=8)
    for shard in shards:
        digest.update(b"\n\n" + b"\n".join(group.split.content() for group in shard))
    return f"{name_of(strategy)} {digest.hexdigest()}"


def bundled_by(strategy: SplitStrategy, manifest: Manifest, epoch: int) -> list[list[SizedSplit]]:
    """Return the row groups of each shard of an epoch.

    Raises:
        TypeError: If the strategy returns something other than shards.
        ValueError: If a shard is not a union of row groups, or a row is in no shard or in several; the message names
            the first.
    """
    files = {
        file.path: _Groups([group for group in groups if group.split.row_length])
        for file, groups in zip(manifest.files, manifest.row_group_splits, strict=True)
    }
    homes: dict[Split, int] = {}
    shards = []
    returned: object = strategy.shards(manifest, epoch)
    if not isinstance(returned, Iterable):
        raise TypeError(f"split_strategy {name_of(strategy)} returned {returned!r:.80}, expected shards")
    for number, shard in enumerate(returned):
        if not isinstance(shard, Shard):
            msg = f"split_strategy {name_of(strategy)} returned {shard!r:.80} as shard {number}, expected a Shard"
            raise TypeError(msg)
        try:
            groups = _groups_of_shard(shard, files)
            for group in groups:
                _claim(group.split, number, homes)
        except ValueError as problem:
            raise _refused(strategy, epoch, f"shard {number} {problem}") from None
        if groups:
            shards.append(groups)
    missing = [group.split for groups in files.values() for group in groups.all if group.split not in homes]
    if missing:
        more = f" and {len(missing) - 1} more row groups" if len(missing) > 1 else ""
        raise _refused(strategy, epoch, f"no shard holds rows {_range(missing[0])}{more}")
    return shards


class _Groups:
    """The row groups of a file, and where they begin."""

    def __init__(self, groups: Sequence[SizedSplit]) -> None:
        self.all = groups
        self.bounds = [*accumulate((group.split.row_length for group in groups), initial=0)]


def _groups_of_shard(shard: Shard, files: Mapping[str, _Groups]) -> list[SizedSplit]:
    """Return the row groups that make up a shard."""
    if not shard.splits or shard != Shard(shard.splits):
        raise ValueError("is not a plain bundle of splits")
    return [group for split in shard.splits for group in _groups_of(split, files)]


def _groups_of(split: Any, files: Mapping[str, _Groups]) -> Sequence[SizedSplit]:
    """Return the row groups that make up a split."""
    if type(split) is not Split or {type(split.row_offset), type(split.row_length)} != {int}:
        raise ValueError(f"holds {split!r:.80}, expected a Split of a path and two integers")
    if split.path not in files:
        raise ValueError(f"names {split.path!r}, which is not a file of the dataset")
    bounds, stop_row = files[split.path].bounds, split.row_offset + split.row_length
    if bounds == [split.row_offset] == [stop_row]:
        return []  # the whole of a file without rows
    start, stop = bisect_left(bounds, split.row_offset), bisect_left(bounds, stop_row)
    if start >= stop or stop == len(bounds) or (bounds[start], bounds[stop]) != (split.row_offset, stop_row):
        near = ", ".join(map(str, bounds[max(0, start - 1) : start + 3]))
        msg = f"has rows {_range(split)}, which are not whole row groups: near them, row groups begin at {near}"
        raise ValueError(msg)
    return files[split.path].all[start:stop]


def _claim(split: Split, number: int, homes: dict[Split, int]) -> None:
    if split in homes:
        raise ValueError(f"holds rows {_range(split)}, which shard {homes[split]} holds already")
    homes[split] = number


def _range(split: Split) -> str:
    return f"{split.row_offset} to {split.row_offset + split.row_length} of {split.path}"


def _refused(strategy: SplitStrategy, epoch: int, problem: str) -> ValueError:
    return ValueError(
        f"split_strategy {name_of(strategy)} in epoch {epoch}: {problem}; every row has to be in exactly one shard"
    )
