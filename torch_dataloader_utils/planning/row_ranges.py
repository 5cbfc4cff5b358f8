"""Row ranges of files, of shards and of the whole manifest: merged, subtracted, checked for overlaps. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple, TypeAlias

from torch_dataloader_utils.planning.manifest import Layout, Manifest, Split
from torch_dataloader_utils.planning.plan import TO_THE_END, Shard

Windows: TypeAlias = tuple[tuple[int, int], ...]
"""Start and stop of each window of rows, in rising order; no two windows touch."""


class RowRange(NamedTuple):
    """Rows of a file, or of another sequence of rows, and who records them."""

    path: str
    start: int
    stop: int
    recorded_by: str = ""

    @classmethod
    def of(cls, split: Split, recorded_by: str = "") -> RowRange:
        """Return the rows of a split."""
        return cls(split.path, split.row_offset, split.row_offset + split.row_length, recorded_by)


def merged(windows: Iterable[tuple[int, int]]) -> Windows:
    """Return windows in order. Windows that touch or overlap become one."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(windows):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return tuple(joined)


def size_of(windows: Iterable[tuple[int, int]]) -> int:
    """Return the number of rows in windows that do not overlap."""
    return sum(stop - start for start, stop in windows)


def known_size_of(windows: Iterable[tuple[int, int]]) -> int:
    """Return the number of rows in windows that do not overlap, without those of which only reading tells the end."""
    return size_of(window for window in windows if window[1] != TO_THE_END)


def gaps(windows: Windows, rows: int) -> Windows:
    """Return the rows of a shard that its windows do not contain."""
    bounds = [0, *chain.from_iterable(windows), rows]
    return tuple((start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True) if start < stop)


def without(windows: Iterable[tuple[int, int]], others: Windows) -> Windows:
    """Return the parts of windows that other ones do not contain."""
    left: list[tuple[int, int]] = []
    for start, stop in windows:
        within = [(max(first, start), min(end, stop)) for first, end in others if first < stop and start < end]
        left += gaps(((0, start), *within), stop)
    return tuple(left)


def in_words(windows: Iterable[tuple[int, int]]) -> str:
    """Return windows as a message shows them: each by its first and its last number."""
    return ", ".join(str(start) if stop == start + 1 else f"{start} to {stop - 1}" for start, stop in windows)


def first_overlap(ranges: Iterable[RowRange]) -> tuple[RowRange, RowRange] | None:
    """Return the first two ranges, in sorted order, that share a row; None if no two ranges do."""
    for pair in pairwise(sorted(ranges)):
        (path, _, stop, _), (next_path, start, _, _) = pair
        if path == next_path and start < stop:
            return pair
    return None


def merged_splits(splits: Iterable[Split]) -> Iterator[Split]:
    """Yield splits in order. Neighbouring ranges of a file become one."""
    for path, windows in _merged_by_path(splits).items():
        for start, stop in windows:
            yield Split(path, start, stop - start)


def _merged_by_path(splits: Iterable[Split]) -> dict[str, Windows]:
    windows: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for split in splits:
        windows[split.path].append((split.row_offset, split.row_offset + split.row_length))
    return {path: merged(windows[path]) for path in sorted(windows)}


def row_numbers(manifest: Manifest, splits: Iterable[Split]) -> list[int]:
    """Return splits as row numbers of the whole manifest: start, stop, start, stop, ..., in the splits' order."""
    return list(chain.from_iterable(_numbered(manifest, splits)))


def merged_row_numbers(manifest: Manifest, splits: Iterable[Split]) -> list[int]:
    """Return splits that do not overlap as row numbers of the whole manifest, sorted, with neighbouring ranges merged.

    States may hold 100,000 of them, and are saved often: sets are twice as fast here as `merged`.
    """
    bounds = _numbered(manifest, splits)
    starts, stops = {start for start, _ in bounds}, (stop for _, stop in bounds)
    return sorted(starts.symmetric_difference(stops))  # where one range ends and the next begins is no bound


def _numbered(manifest: Manifest, splits: Iterable[Split]) -> list[tuple[int, int]]:
    first = manifest.first_rows
    return [(start := first[split.path] + split.row_offset, start + split.row_length) for split in splits]


def splits_of_rows(files: Layout, rows: Sequence[int]) -> Iterator[Split]:
    """Turn row numbers back into ranges of files. A range that spans files becomes one range for each file."""
    if not rows:
        return
    stops = files.stops
    for start, stop in zip(rows[::2], rows[1::2], strict=True):
        for number in range(bisect_right(stops, start), len(stops)):
            path, count = files[number]
            first = stops[number] - count
            if first >= stop:
                break
            begin, end = max(start, first), min(stop, stops[number])
            if begin < end:
                yield Split(path, begin - first, end - begin)


class Coverage:
    """The rows of each file that some splits cover."""

    def __init__(self, splits: Iterable[Split]) -> None:
        self._ranges = _merged_by_path(splits)

    def covers(self, split: Split) -> bool:
        """Whether all rows of a split are covered."""
        return self._index_of(split) is not None

    def without(self, shards: Iterable[Shard]) -> Split | None:
        """Return the first covered range that is not a union of these shards' splits, or None."""
        rows: dict[tuple[str, int], int] = defaultdict(int)
        for split in (split for shard in shards for split in shard.splits):
            index = self._index_of(split)
            if index is not None:
                rows[split.path, index] += split.row_length
        for path, ranges in self._ranges.items():
            for index, (start, stop) in enumerate(ranges):
                if rows[path, index] != stop - start:
                    return Split(path, start, stop - start)
        return None

    def _index_of(self, split: Split) -> int | None:
        """Return the index of the merged range that contains a split, or None."""
        ranges = self._ranges.get(split.path, ())
        index = bisect_right(ranges, (split.row_offset, float("inf"))) - 1
        inside = index >= 0 and split.row_offset + split.row_length <= ranges[index][1]
        return index if inside else None
