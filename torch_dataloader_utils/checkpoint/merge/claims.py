"""Rows that several ranks record, and an earlier elastic load: no two may record the same one. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from torch_dataloader_utils.checkpoint.compare import require_possible_windows
from torch_dataloader_utils.checkpoint.saved_state import SavedShard
from torch_dataloader_utils.errors import RankMismatchError, cut, shown
from torch_dataloader_utils.planning.excluded import ExcludedRows
from torch_dataloader_utils.planning.manifest import Layout, Split
from torch_dataloader_utils.planning.plan import DeliveredBaseline, PartialShard, Shard
from torch_dataloader_utils.planning.row_ranges import Coverage, RowRange, first_overlap, gaps, merged, merged_splits


class Claims:
    """What ranks record.

    Row numbers in their states refer to the files of the layout. Excluded rows were left out of the shards.
    `is_open_ended` says that only reading tells how many rows shards deliver.
    """

    def __init__(self, layout: Layout, left_out: ExcludedRows, *, is_open_ended: bool) -> None:
        self._layout = layout
        self._is_open_ended = is_open_ended
        self._left_out = left_out
        self._done: list[tuple[Split, str]] = []
        self._shards: dict[tuple[Split, ...], Shard] = {}
        self._windows: dict[tuple[Split, ...], list[tuple[int, int, str]]] = defaultdict(list)

    def claim(self, claimant: str, done: Iterable[Split], partial: Iterable[SavedShard]) -> None:
        """Add what a rank records: whole row groups, and parts of shards."""
        self._done += [(split, claimant) for split in done]
        for saved in partial:
            if saved.repeats:  # the rank whose rows were repeated records them as well
                continue
            recorded = saved.partial(self._layout, self._left_out, is_open_ended=self._is_open_ended)
            require_possible_windows([recorded])
            shard = recorded.shard
            self._shards[shard.splits] = shard
            self._windows[shard.splits] += [(start, stop, claimant) for start, stop in saved.windows]

    def require_apart(self, recorded_as: str) -> None:
        """Raise if a row is recorded twice."""
        ranges = [RowRange.of(split, claimant) for split, claimant in self._done]
        for splits, windows in self._windows.items():
            claimants = " and ".join(dict.fromkeys(claimant for *_, claimant in windows))
            ranges += [RowRange.of(split, claimants) for split in splits]
            within = [RowRange("the shard", *window) for window in windows]
            where = f"of the shard that begins with row {splits[0].row_offset} of {cut(splits[0].path)}"
            _require_apart(within, where, recorded_as)
        _require_apart(ranges, "", recorded_as)

    def united(self) -> tuple[tuple[Split, ...], tuple[PartialShard, ...]]:
        """Return all of it together: row ranges, neighbours merged, and the shards of which there are parts."""
        done = [split for split, _ in self._done]
        partial = []
        for splits, shard in self._shards.items():
            windows = merged((start, stop) for start, stop, _ in self._windows[splits])
            if gaps(windows, shard.rows):
                partial.append(PartialShard(shard, windows))
            else:
                done += shard.present
        return tuple(merged_splits(done)), tuple(sorted(partial, key=lambda partial: partial.shard.splits))


def with_rows(
    baseline: DeliveredBaseline, whole: Iterable[Split], partial: Iterable[PartialShard]
) -> DeliveredBaseline:
    """Return a baseline with more rows: row ranges, and parts of shards. It may have them already."""
    done = [*baseline.done, *whole]
    covered = Coverage(done)
    shards = {part.shard.splits: part for part in baseline.partial}
    for part in partial:
        known = shards.get(part.shard.splits)
        windows = part.windows if known is None else merged([*known.windows, *part.windows])
        shards[part.shard.splits] = replace(part, windows=windows)
    left = []
    for part in shards.values():
        if all(map(covered.covers, part.shard.present)):
            continue
        if gaps(part.windows, part.shard.rows):
            left.append(part)
        else:
            done += part.shard.present
    in_order = sorted(left, key=lambda part: part.shard.splits)
    return replace(baseline, done=tuple(merged_splits(done)), partial=tuple(in_order))


def _require_apart(ranges: Iterable[RowRange], where: str, recorded_as: str) -> None:
    overlap = first_overlap(ranges)
    if overlap is not None:
        (path, _, _, claimant), (_, start, _, other) = overlap
        where = where or f"of {cut(path)}"
        msg = f"the states overlap: {claimant} and {other} both record row {shown(start)} {where} as "
        raise RankMismatchError(f"{msg}{recorded_as}; give the states that all ranks saved at one checkpoint")
