"""How many rows of each file some states record: as done, under way, and twice. Pure.

All ranges are row numbers of one axis, on which the files stand one after the other, so that a million of them are
counted by NumPy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from torch_dataloader_utils.checkpoint.saved_state import SavedBaseline, SavedState
from torch_dataloader_utils.planning.manifest import Split
from torch_dataloader_utils.planning.plan import Shard
from torch_dataloader_utils.planning.row_ranges import FileRows, Windows, size_of
from torch_dataloader_utils.planning.shuffle import rows_of_splits

Integers = npt.NDArray[np.int64]


class Axis:
    """The rows of files, one file after the other.

    Attributes:
        paths: The files.
        bounds: The number of each file's first row, and of the end of the last.
    """

    def __init__(self, files: Sequence[FileRows]) -> None:
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
        twice: Recorded as delivered more often than once, each further time.
        repeated: Delivered once more because ranks are balanced by repeating rows.
    """

    done: Integers
    under_way: Integers
    twice: Integers
    repeated: Integers

    def summed(self) -> RowCounts:
        """Return the sums over all files, as the counts of one."""
        sums = (column.sum(keepdims=True) for column in (self.done, self.under_way, self.twice, self.repeated))
        return RowCounts(*sums)


@dataclass(slots=True)
class _Partial:
    """A shard that is recorded as in progress, and each window of it."""

    shard: Shard
    windows: list[tuple[int, int]] = field(default_factory=list)
    repeated: list[tuple[int, int]] = field(default_factory=list)


def count_rows(states: Sequence[SavedState], axis: Axis, *, is_exact: bool) -> RowCounts:
    """Count the rows that states record, and the earlier progress that they share.

    `is_exact` says that windows count rows as files have them: that no filter drops rows, and rows are counted. The
    splits of all states are of the files of the axis.
    """
    claims: list[SavedState | SavedBaseline] = [*states]
    for baseline in (state.baseline for state in states):
        if baseline is not None and baseline not in claims:
            claims.append(baseline)
    depth = Depth(*_ranges(claims, axis))
    zeros = [np.zeros(len(axis.paths), dtype=np.int64) for _ in range(2)]
    counts = RowCounts(depth.covered(axis.bounds), zeros[0], depth.further(axis.bounds), zeros[1])
    seed = states[0].settings["shuffle_seed"] if states[0].settings["shuffle_buffer_size"] is not None else None
    for partial in _partial_shards(claims, axis):
        _add(counts, partial, axis, depth, seed=seed, epoch=states[0].epoch, is_exact=is_exact)
    over = np.maximum(counts.done + counts.under_way - axis.rows, 0)  # shards that overlap in part, of two plans
    counts.under_way -= over
    counts.twice += over
    return counts


def ends_in(states: Sequence[SavedState]) -> dict[str, int]:
    """Return the files of which states record ranges by path, each with the largest end of these ranges."""
    ends: dict[str, int] = {}
    for state in states:
        earlier = () if state.baseline is None else state.baseline.in_progress
        for split in (split for shard in (*state.completed, *state.in_progress, *earlier) for split in shard.splits):
            ends[split.path] = max(ends.get(split.path, 0), split.row_offset + split.row_length)
    return ends


def _ranges(claims: Iterable[SavedState | SavedBaseline], axis: Axis) -> tuple[Integers, Integers]:
    """Return the first rows and the ends of all ranges that are recorded as done."""
    starts, stops = [], []
    for claim in claims:
        numbers = np.asarray(claim.completed_rows, dtype=np.int64)
        completed = claim.completed if isinstance(claim, SavedState) else ()
        by_path = axis.ranges_of([split for shard in completed for split in shard.splits])
        starts += [numbers[::2], by_path[0]]
        stops += [numbers[1::2], by_path[1]]
    return np.concatenate(starts), np.concatenate(stops)


def _partial_shards(claims: Iterable[SavedState | SavedBaseline], axis: Axis) -> Iterable[_Partial]:
    """Return the shards that are recorded as in progress, each once."""
    found: dict[tuple[Split, ...], _Partial] = {}
    for saved in (shard for claim in claims for shard in claim.in_progress):
        splits = saved.splits or tuple(axis.splits_of(saved.rows))
        partial = found.setdefault(splits, _Partial(Shard(splits, saved.rounds, saved.missing)))
        (partial.repeated if saved.repeats else partial.windows).extend(saved.windows)
    return found.values()


def _add(
    counts: RowCounts,
    partial: _Partial,
    axis: Axis,
    depth: Depth,
    *,
    seed: int | None,
    epoch: int,
    is_exact: bool,
) -> None:
    """Add a shard in progress to the counts of its files."""
    shard = partial.shard
    once, more = _overlapping(partial.windows)
    is_whole = once == ((0, shard.rows),)

    def rows_of(windows: Windows) -> Integers:
        """Return how many rows of each split some windows have."""
        lengths = np.array([split.row_length for split in shard.splits], dtype=np.int64)
        lengths[list(shard.missing)] = 0
        if not is_exact or windows == ((0, shard.rows),):
            return lengths * bool(windows)
        found = list(rows_of_splits(shard, chain.from_iterable(windows), seed=seed, epoch=epoch))
        sums = np.zeros(len(shard.splits), dtype=np.int64)
        for start, stop in zip(found[::2], found[1::2], strict=True):
            sums += stop - start
        return sums

    delivered, again, repeated = rows_of(once), rows_of(more), rows_of(_overlapping(partial.repeated)[0])
    for number, split in enumerate(shard.splits):
        file = axis.number_of(split.path)
        start, stop = (part[0] for part in axis.ranges_of([split]))
        done = min(int(depth.covered(np.array([start, stop]))[0]), int(delivered[number]))
        (counts.done if is_whole else counts.under_way)[file] += delivered[number] - done
        counts.twice[file] += done + again[number]
        counts.repeated[file] += repeated[number]


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


def rows_recorded(state: SavedState) -> int:
    """Return the number of rows that a rank's own progress records."""
    by_number = sum(state.completed_rows[1::2]) - sum(state.completed_rows[::2])
    by_path = sum(split.row_length for shard in state.completed for split in shard.splits)
    return by_number + by_path + sum(size_of(shard.windows) for shard in state.in_progress if not shard.repeats)
