"""Row ranges: of files, of the whole manifest, and which of them others cover. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import add

from torch_dataloader_utils.model import Manifest, Shard, Split

__all__ = ["Coverage", "merged_row_numbers", "row_numbers", "splits_of_rows"]


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


def splits_of_rows(manifest: Manifest, rows: Sequence[int]) -> Iterator[Split]:
    """Turn row numbers back into ranges of files; a range that spans files becomes one for each."""
    stops = list(accumulate(file.rows for file in manifest.files))
    for start, stop in zip(rows[::2], rows[1::2], strict=True):
        for number in range(bisect_right(stops, start), len(stops)):
            file = manifest.files[number]
            first = stops[number] - file.rows
            if first >= stop:
                break
            begin, end = max(start, first), min(stop, stops[number])
            if begin < end:
                yield Split(file.path, begin - first, end - begin)


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
