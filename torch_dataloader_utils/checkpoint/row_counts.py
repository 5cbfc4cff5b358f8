"""How many rows of each file some states record: as done, under way, and twice. Pure.

All ranges are row numbers of one axis, on which the files stand one after the other, so that a million of them are
counted by NumPy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain

import numpy as np
import numpy.typing as npt

from torch_dataloader_utils.checkpoint.saved_state import SavedBaseline, SavedRows, SavedShard, SavedState
from torch_dataloader_utils.planning.excluded import EpochExclusions, ExcludedRows
from torch_dataloader_utils.planning.ledger.shard_order import ShardOrders
from torch_dataloader_utils.planning.manifest import Layout, Split
from torch_dataloader_utils.planning.mixture.source_paths import MIXTURE_KEY
from torch_dataloader_utils.planning.plan import TO_THE_END, Shard
from torch_dataloader_utils.planning.row_ranges import Windows, known_size_of, merged
from torch_dataloader_utils.planning.shuffle import rows_of_splits

Integers = npt.NDArray[np.int64]

Ranges = tuple[Integers, Integers]
"""The first rows of ranges, and their ends."""


class Axis:
    """The rows of files, one file after the other.

    Attributes:
        paths: The files.
        bounds: The number of each file's first row, and of the end of the last.
    """

    def __init__(self, files: Layout) -> None:
        self.paths = tuple(path for path, _ in files)
        self.bounds: Integers = np.cumsum([0, *(rows for _, rows in files)], dtype=np.int64)
        self._numbers = {path: number for number, path in enumerate(self.paths)}

    @property
    def rows(self) -> Integers:
        """Number of rows of each file."""
        return np.diff(self.bounds)

    def number_of(self, path: str) -> int:
        """Return a file's place among the files."""
        return self._numbers[path]

    def ranges_of(self, splits: Sequence[Split]) -> tuple[Integers, Integers]:
        """Return the first rows and the ends of splits of these files."""
        files = np.fromiter((self._numbers[split.path] for split in splits), np.int64, len(splits))
        starts = self.bounds[files] + np.fromiter((split.row_offset for split in splits), np.int64, len(splits))
        return starts, starts + np.fromiter((split.row_length for split in splits), np.int64, len(splits))

    def splits_of(self, numbers: Sequence[int]) -> Iterator[Split]:
        """Yield ranges, given as start, stop, start, stop, ..., by file."""
        for start, stop in zip(numbers[::2], numbers[1::2], strict=True):
            first = start
            while first < stop:
                file = bisect_right(self.bounds, first) - 1
                end = min(stop, int(self.bounds[file + 1]))
                yield Split(self.paths[file], first - int(self.bounds[file]), end - first)
                first = end


class Depth:
    """How often each row of an axis is in some ranges."""

    def __init__(self, starts: Integers, stops: Integers) -> None:
        self._bounds = np.sort(np.concatenate([starts, stops, np.zeros(1, dtype=np.int64)]))
        begun = np.searchsorted(np.sort(starts), self._bounds, side="right")
        depth = begun - np.searchsorted(np.sort(stops), self._bounds, side="right")
        self._once, self._more = np.minimum(depth, 1), np.maximum(depth - 1, 0)
        lengths = np.diff(self._bounds)
        self._covered = np.concatenate([[0], np.cumsum(lengths * self._once[:-1])])
        self._further = np.concatenate([[0], np.cumsum(lengths * self._more[:-1])])

    def covered(self, bounds: Integers) -> Integers:
        """Return for each of the intervals between some rows how many of its rows are in any range."""
        return self._between(bounds, self._covered, self._once)

    def further(self, bounds: Integers) -> Integers:
        """Return for each of the intervals how often its rows are in a second, third, ... range."""
        return self._between(bounds, self._further, self._more)

    def _between(self, bounds: Integers, sums: Integers, weights: Integers) -> Integers:
        places = np.searchsorted(self._bounds, bounds, side="right") - 1
        before = sums[places] + (bounds - self._bounds[places]) * weights[places]
        counts: Integers = np.diff(before)
        return counts


@dataclass(slots=True)
class RowCounts:
    """For each file of an axis, numbers of rows.

    Attributes:
        done: Delivered with all rows of their shard.
        under_way: Delivered of unfinished shards; where it is not known which rows these were, all of such shards.
        skipped: Skipped with their steps, or to be skipped, and not delivered.
        excluded: Excluded in an earlier epoch, or in this one before they were delivered.
        twice: Recorded as delivered more often than once, each further time.
        repeated: Delivered once more because ranks are balanced by repeating rows.
    """

    done: Integers
    under_way: Integers
    skipped: Integers
    excluded: Integers
    twice: Integers
    repeated: Integers

    def summed(self) -> RowCounts:
        """Return the sums over all files, as the counts of one."""
        return RowCounts(*(getattr(self, one.name).sum(keepdims=True) for one in fields(self)))


@dataclass(slots=True)
class _Partial:
    """A shard that is recorded in parts, and each window of it: delivered or passed, repeated, skipped."""

    shard: Shard
    windows: list[tuple[int, int]] = field(default_factory=list)
    repeated: list[tuple[int, int]] = field(default_factory=list)
    skipped: list[tuple[int, int]] = field(default_factory=list)


def count_rows(states: Sequence[SavedState], axis: Axis, excluded: EpochExclusions, *, is_exact: bool) -> RowCounts:
    """Count the rows that states record, and the earlier progress that they share.

    Of the rows that were excluded in their epoch, `excluded` has those that were not delivered before.

    `is_exact` says that windows count rows as files have them: that no filter drops rows, that rows are counted, and
    that they are delivered themselves. The splits of all states are of the files of the axis.
    """
    return _Counting(states, axis, excluded, is_exact=is_exact).counts()


class _Counting:
    """Whole ranges are counted by how ranges cover one another, shards that are recorded in parts one by one.

    What states record as done was passed: rows of it that were skipped or excluded are recorded as such, too.
    """

    def __init__(self, states: Sequence[SavedState], axis: Axis, excluded: EpochExclusions, *, is_exact: bool) -> None:
        settings, self._is_exact, mixture = states[0].settings, is_exact, states[0].mixture
        self._epoch = states[0].epoch if mixture is None else MIXTURE_KEY
        self._seed = settings["shuffle_seed"] if settings["shuffle_buffer_size"] is not None else None
        self._axis, self._removed, self._orders = axis, excluded.removed, ShardOrders(self._seed, self._epoch)
        self._delivers = TO_THE_END if states[0].is_open_ended else None
        baselines: list[SavedBaseline] = []
        for baseline in (state.baseline for state in states):
            if baseline is not None and baseline not in baselines:
                baselines.append(baseline)
        passed = [SavedRows(one.completed, one.completed_rows, one.in_progress) for one in states]
        passed += [SavedRows((), one.completed_rows, one.in_progress) for one in baselines]
        passed += [] if mixture is None else [mixture.earlier, mixture.carried]
        skips = [state.skips for state in states if state.skips is not None]
        skipped = [one.rows for one in skips]
        if not any(one.restores for one in skips):  # else each rank records what it has left of them
            skipped += [one.skipped[0] for one in baselines if one.skipped is not None]
        self._done, self._skipped = _ranges(passed, axis), _ranges(skipped, axis)
        self._left_out = _excluded_ranges(excluded.left_out, axis)
        self._done_depth, self._skipped_depth = Depth(*self._done), Depth(*self._skipped)
        self._shards: dict[tuple[Split, ...], _Partial] = {}
        for rows in passed:
            self._collect(rows.in_progress, excluded.left_out, is_skipped=False)
        for rows in skipped:
            self._collect(rows.in_progress, excluded.left_out, is_skipped=True)

    def _collect(self, parts: Iterable[SavedShard], left_out: ExcludedRows, *, is_skipped: bool) -> None:
        for saved in parts:
            splits = saved.splits or tuple(self._axis.splits_of(saved.rows))
            shard = Shard(splits, saved.rounds, saved.missing, left_out, self._delivers)
            partial = self._shards.setdefault(splits, _Partial(shard))
            windows = partial.skipped if is_skipped else partial.repeated if saved.repeats else partial.windows
            windows += saved.windows

    def counts(self) -> RowCounts:
        """Return the counts."""
        axis = self._axis
        left_out = self._covered(self._left_out)
        skipped = self._covered(self._left_out, self._skipped)
        removed = _excluded_ranges(self._removed, axis)
        not_delivered = self._covered(self._left_out, self._skipped, removed)
        counts = RowCounts(
            done=self._covered(self._left_out, self._skipped, removed, self._done) - not_delivered,
            under_way=np.zeros_like(left_out),
            skipped=skipped - left_out,
            excluded=left_out + not_delivered - skipped,
            twice=self._done_depth.further(axis.bounds),
            repeated=np.zeros_like(left_out),
        )
        for partial in self._shards.values():
            self._add(counts, partial)
        over = np.maximum(counts.done + counts.under_way - axis.rows, 0)  # shards that overlap in part, of two plans
        counts.under_way -= over
        counts.twice += over
        return counts

    def _covered(self, *ranges: Ranges) -> Integers:
        """Return for each file the number of its rows that are in any of some ranges."""
        starts, stops = (np.concatenate(side) for side in zip(*ranges, strict=True))
        return Depth(starts, stops).covered(self._axis.bounds)

    def _add(self, counts: RowCounts, partial: _Partial) -> None:
        """Add a shard that is recorded in parts to the counts of its files."""
        shard = partial.shard
        once, more = _overlapping(partial.windows)
        skipped = merged(partial.skipped)
        is_done, was_skipped = (self._covers(depth, shard) for depth in (self._done_depth, self._skipped_depth))
        self._count(counts.repeated, shard, merged(partial.repeated))
        if was_skipped:
            return
        self._count(counts.skipped, shard, skipped)
        self._count_removed(counts.excluded, shard, skipped, sign=-1)  # they count as skipped
        self._count(counts.twice, shard, more)
        if is_done:
            self._count(counts.done, shard, skipped, sign=-1)
            self._count_removed(counts.done, shard, skipped)
            self._count(counts.twice, shard, once)
            return
        delivered = _without(once, skipped)
        column = counts.done if merged([*once, *skipped]) == ((0, shard.rows),) else counts.under_way
        of_splits = self._rows_of(shard, delivered)
        for number, split in enumerate(shard.splits):
            file, bounds = self._axis.number_of(split.path), self._axis.ranges_of([split])
            also_done = int(self._done_depth.covered(np.concatenate(bounds))[0])  # of another plan
            again = min(also_done, int(of_splits[number]))
            column[file] += of_splits[number] - again
            counts.twice[file] += again
        self._count_removed(column, shard, delivered, sign=-1)

    def _count_removed(self, column: Integers, shard: Shard, windows: Windows, sign: int = 1) -> None:
        """Add the rows of windows of a shard that were excluded before they were delivered to those of the files."""
        splits = [split for split in shard.present if windows and self._removed.within(split)]
        if splits and (not self._is_exact or windows == ((0, shard.rows),)):
            for split in splits:
                column[self._axis.number_of(split.path)] += sign * self._removed.within(split)
            return
        for window in windows if splits else ():
            files, rows = self._orders.of(shard).rows(*window)
            for path in {split.path for split in splits}:
                found = self._removed.contains(path, rows[files == path])
                column[self._axis.number_of(path)] += sign * np.count_nonzero(found)

    def _covers(self, depth: Depth, shard: Shard) -> bool:
        return all(
            depth.covered(np.concatenate(self._axis.ranges_of([split])))[0] == split.row_length
            for split in shard.present
        )

    def _count(self, column: Integers, shard: Shard, windows: Windows, sign: int = 1) -> None:
        """Add the rows of windows of a shard to those of the files."""
        if windows:
            for split, rows in zip(shard.splits, self._rows_of(shard, windows), strict=True):
                column[self._axis.number_of(split.path)] += sign * rows

    def _rows_of(self, shard: Shard, windows: Windows) -> Integers:
        """Return how many rows of each split some windows have."""
        lengths = np.array(list(map(shard.excluded.left, shard.splits)), dtype=np.int64)
        lengths[list(shard.missing)] = 0
        if not self._is_exact or windows == ((0, shard.rows),):
            return lengths * bool(windows)
        found = list(rows_of_splits(shard, chain.from_iterable(windows), seed=self._seed, epoch=self._epoch))
        sums = np.zeros(len(shard.splits), dtype=np.int64)
        for start, stop in zip(found[::2], found[1::2], strict=True):
            sums += stop - start
        return sums


def ends_in(states: Sequence[SavedState]) -> dict[str, int]:
    """Return the files of which states record ranges by path, each with the largest end of these ranges."""
    ends: dict[str, int] = {}
    for state in states:
        earlier = () if state.baseline is None else state.baseline.in_progress
        skips = [] if state.skips is None else [state.skips.rows]
        skips += [state.baseline.skipped[0]] if state.baseline is not None and state.baseline.skipped else []
        shards = [*state.completed, *state.in_progress, *earlier]
        of_mixture = [] if state.mixture is None else [state.mixture.carried, state.mixture.earlier]
        shards += [shard for rows in (*skips, *of_mixture) for shard in (*rows.completed, *rows.in_progress)]
        for split in (split for shard in shards for split in shard.splits):
            ends[split.path] = max(ends.get(split.path, 0), split.row_offset + split.row_length)
    return ends


def _ranges(recorded: Iterable[SavedRows], axis: Axis) -> Ranges:
    """Return the first rows and the ends of all whole ranges that are recorded."""
    none = np.empty(0, dtype=np.int64)
    starts, stops = [none], [none]
    for rows in recorded:
        numbers = np.asarray(rows.completed_rows, dtype=np.int64)
        by_path = axis.ranges_of([split for shard in rows.completed for split in shard.splits])
        starts += [numbers[::2], by_path[0]]
        stops += [numbers[1::2], by_path[1]]
    return np.concatenate(starts), np.concatenate(stops)


def _excluded_ranges(excluded: ExcludedRows, axis: Axis) -> Ranges:
    """Return the first rows and the ends of excluded rows."""
    none = np.empty(0, dtype=np.int64)
    bounds = [axis.bounds[axis.number_of(path)] + of_file for path, of_file in excluded.bounds.items()]
    return np.concatenate([none, *(own[::2] for own in bounds)]), np.concatenate([none, *(own[1::2] for own in bounds)])


def _without(windows: Windows, others: Windows) -> Windows:
    """Return the rows that are in some windows and not in others."""
    found = []
    for start, stop in windows:
        clipped = [(max(start, first), min(stop, last)) for first, last in others if first < stop and last > start]
        bounds = [start, *chain.from_iterable(clipped), stop]
        found += [(first, last) for first, last in zip(bounds[::2], bounds[1::2], strict=True) if first < last]
    return tuple(found)


def _overlapping(windows: Iterable[tuple[int, int]]) -> tuple[Windows, Windows]:
    """Return the rows that are in any window, and those that are in several."""
    changes: Mapping[int, int] = defaultdict(int)
    for start, stop in windows:
        changes[start] += 1  # type: ignore[index]
        changes[stop] -= 1  # type: ignore[index]
    once: list[tuple[int, int]] = []
    more: list[tuple[int, int]] = []
    depth, begun = 0, [0, 0]
    for place, change in sorted(changes.items()):
        for level, kept in enumerate((once, more)):
            if depth <= level < depth + change:
                begun[level] = place
            elif depth > level >= depth + change and begun[level] < place:
                kept.append((begun[level], place))
        depth += change
    return tuple(once), tuple(more)


def rows_recorded(state: SavedState, *, in_bytes: bool = False) -> int:
    """Return the number of rows that a rank's own progress records.

    In bytes, where the rows of text are not counted: all of each shard that it has begun.
    """
    by_number = sum(state.completed_rows[1::2]) - sum(state.completed_rows[::2])
    by_path = sum(split.row_length for shard in state.completed for split in shard.splits)
    in_progress = [shard for shard in state.in_progress if shard.windows and not shard.repeats]
    if not in_bytes:
        return by_number + by_path + sum(known_size_of(shard.windows) for shard in in_progress)
    by_number += sum(sum(shard.rows[1::2]) - sum(shard.rows[::2]) for shard in in_progress)
    return by_number + by_path + sum(split.row_length for shard in in_progress for split in shard.splits)
