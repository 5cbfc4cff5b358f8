"""Row ranges: of files, of the whole manifest, and which of them others cover. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import add
from typing import TypeAlias

from torch_dataloader_utils.planning.manifest import Manifest, Split
from torch_dataloader_utils.planning.plan import Shard

__all__ = ["Coverage", "FileRows", "Windows", "gaps", "merged", "merged_row_numbers", "row_numbers", "splits_of_rows"]


FileRows: TypeAlias = tuple[str, int]
"""A file's path and its number of rows."""


Windows: TypeAlias = tuple[tuple[int, int], ...]
"""Start and stop of each window of a shard's rows, rising, not touching one another."""


def row_numbers(manifest: Manifest, splits: Iterable[Split]) -> list[int]:
    """Return splits as places among all rows of the manifest: start, stop, start, stop, ..., in the splits' order."""
    first = manifest.first_rows
    bounds = [(start := first[split.path] + split.row_offset, start + split.row_length) for split in splits]
    return [number for bound in bounds for number in bound]


def merged_row_numbers(manifest: Manifest, splits: Sequence[Split]) -> list[int]:
    """Return splits that do not overlap as row numbers, sorted, with neighbouring ranges made one."""
    first = manifest.first_rows
    starts = [first[split.path] + split.row_offset for split in splits]
    stops = map(add, starts, [split.row_length for split in splits])
    return sorted(set(starts).symmetric_difference(stops))  # where one ends and the next begins is no bound


def splits_of_rows(files: Sequence[FileRows], rows: Sequence[int]) -> Iterator[Split]:
    """Turn row numbers back into ranges of files; a range that spans files becomes one for each."""
    if not rows:
        return
    stops = list(accumulate(count for _, count in files))
    for start, stop in zip(rows[::2], rows[1::2], strict=True):
        for number in range(bisect_right(stops, start), len(stops)):
            path, count = files[number]
            first = stops[number] - count
            if first >= stop:
                break
            begin, end = max(start, first), min(stop, stops[number])
            if begin < end:
                yield Split(path, begin - first, end - begin)


def merged(windows: Iterable[tuple[int, int]]) -> Windows:
    """Return windows in order, those that touch or overlap made one."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(windows):
        if joined and joined[-1][1] >= start:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


def gaps(windows: Windows, rows: int) -> Windows:
    """Return what windows leave of a shard's rows."""
    bounds = [0, *(bound for window in windows for bound in window), rows]
    return tuple((start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True) if start < stop)


class Coverage:
    """The completed ranges of every file, merged, and where they lie."""

    def __init__(self, splits: Iterable[Split]) -> None:
        self._ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for split in sorted(splits):
            ranges = self._ranges[split.path]
            stop = split.row_offset + split.row_length
            if ranges and ranges[-1][1] == split.row_offset:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((split.row_offset, stop))

    def covers(self, split: Split) -> bool:
        """Whether the whole of a split lies in one merged range."""
        return self._range_of(split) is not None

    def without(self, shards: Iterable[Shard]) -> Split | None:
        """Return the first recorded range that is no union of these shards' splits, or None."""
        held: dict[tuple[str, int], int] = defaultdict(int)
        for split in (split for shard in shards for split in shard.splits):
            place = self._range_of(split)
            if place is not None:
                held[split.path, place] += split.row_length
        for path, ranges in self._ranges.items():
            for place, (start, stop) in enumerate(ranges):
                if held[path, place] != stop - start:
                    return Split(path, start, stop - start)
        return None

    def _range_of(self, split: Split) -> int | None:
        ranges = self._ranges.get(split.path, [])
        place = bisect_right(ranges, (split.row_offset, float("inf"))) - 1
        inside = place >= 0 and split.row_offset + split.row_length <= ranges[place][1]
        return place if inside else None
