"""What all states of an epoch have in common, computed once: a state is saved often, and has to take little time. Pure.

A stream delivers its slices in order, so that what it has delivered is always the beginning of one sequence. The row
numbers of that sequence are computed once, and a state takes those of them that are delivered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_dataloader_utils.checkpoint.checksum import numbers_digest
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.planning.manifest import Manifest, Split
from torch_dataloader_utils.planning.plan import Shard, ShardSlice
from torch_dataloader_utils.planning.row_ranges import merged_row_numbers

Integers: TypeAlias = npt.NDArray[np.int64]

MOST_SPLITS = 6_250
"""Above this many completed splits, a state records them as row numbers, however short their paths are."""


class _Stream(NamedTuple):
    """A stream's slices.

    Attributes:
        splits_before: For each slice, and for the end, the splits of whole shards before it.
        parts: Indices of the slices that are not whole shards.
        starts: For each split of the whole shards, where its first row is among the bounds of all splits.
        stops: The same of its end.
    """

    splits_before: Integers
    parts: tuple[int, ...]
    starts: Integers
    stops: Integers


class EpochRecord:
    """What the states of an epoch record of a rank's streams, and of what was delivered before an elastic load.

    It is made of any progress of the epoch, and serves all that have the same planned slices and the same baseline.
    """

    def __init__(self, manifest: Manifest, progress: Progress) -> None:
        self._manifest = manifest
        self._planned = [stream.planned for stream in progress.streams]
        self._baseline = progress.baseline
        self._skipped: tuple[Progress, dict[str, Any]] | None = None
        self._taken: dict[str, Any] | None = None

    def taken_rows(self, dump: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what states of a mixture record of the rows that earlier epochs have taken."""
        if self._taken is None:
            self._taken = dump()
        return copy.deepcopy(self._taken)

    def skipped_rows(self, progress: Progress, dump: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what states record of skipped rows. It changes only once these are delivered after the last step."""
        if progress.restored is not None:
            return dump()
        known = self._skipped
        if known is None or known[0].skips is not progress.skips or known[0].restores != progress.restores:
            known = self._skipped = progress, dump()
        return copy.deepcopy(known[1])

    def is_of(self, progress: Progress) -> bool:
        """Whether it was made for the planned slices and the baseline of this progress."""
        if self._baseline is not progress.baseline or len(self._planned) != len(progress.streams):
            return False
        return all(own is stream.planned for own, stream in zip(self._planned, progress.streams, strict=True))

    def prepare(self) -> None:
        """Compute now what states would compute when they first need it."""
        _ = self.baseline_digest, self._manifest.written_lengths, self._is_large and self._streams

    @cached_property
    def baseline_rows(self) -> list[int]:
        """The baseline's completed rows: row numbers of the whole manifest, start, stop, start, stop, ..., sorted."""
        return merged_row_numbers(self._manifest, () if self._baseline is None else self._baseline.done)

    @cached_property
    def baseline_digest(self) -> bytes:
        """Digest of these row numbers."""
        return numbers_digest(self.baseline_rows)

    def has_many(self, progress: Progress) -> bool:
        """Whether more than `MOST_SPLITS` splits are completed."""
        has_begun = any(stream.reached[0] for stream in progress.streams)
        return has_begun and self._is_large and sum(count for _, count, _ in self._reached(progress)) > MOST_SPLITS

    def delivered_parts(self, progress: Progress) -> list[ShardSlice]:
        """Return the delivered slices that are not whole shards. Only where `has_many`."""
        parts = []
        for (own, _, slices), stream in zip(self._reached(progress), progress.streams, strict=True):
            parts += [stream.planned[index] for index in own.parts if index < slices]
            part = stream.reached[1]
            parts += [] if part is None else [part]
        return parts

    def unfinished_rows(self, progress: Progress) -> dict[Shard, list[int]]:
        """Return the row numbers of planned shards that are partly delivered, in the order of their splits.

        There are none where the epoch has few splits: they are then computed as quickly when they are needed.
        """
        if not self._is_large:
            return {}
        found = {}
        for (own, count, slices), planned in zip(self._reached(progress), self._planned, strict=True):
            if slices < len(planned) and planned[slices].is_whole:
                shard = planned[slices].shard
                splits = slice(count, count + len(shard.splits))
                bounds = self._bounds[own.starts[splits]], self._bounds[own.stops[splits]]
                found[shard] = np.column_stack(bounds).ravel().tolist()
        return found

    def completed_rows(self, progress: Progress, others: Iterable[Shard]) -> Integers:
        """Return the rows of delivered slices that are whole shards, and of other shards. Only where `has_many`.

        They are row numbers of the whole manifest: start, stop, start, stop, ..., sorted, neighbours merged.
        """
        numbers = self._row_numbers([split for shard in others for split in shard.splits])
        starts, stops = (np.searchsorted(self._bounds, bounds) for bounds in numbers)
        reached = list(self._reached(progress))
        is_bound = np.zeros(len(self._bounds), dtype=bool)
        for places in (starts, *(own.starts[:count] for own, count, _ in reached)):
            is_bound[places] = True
        for places in (stops, *(own.stops[:count] for own, count, _ in reached)):
            is_bound[places] ^= True  # where one range ends and the next begins is no bound
        return self._bounds[is_bound]

    # Computed once ---------------------------------------------------------------------------------------------------

    @cached_property
    def _is_large(self) -> bool:
        counts = accumulate(len(part.shard.splits) for planned in self._planned for part in planned)
        return any(count > MOST_SPLITS for count in counts)

    @cached_property
    def _bounds(self) -> Integers:
        """Where any split begins or ends, in rising order."""
        parts = [part.shard for planned in self._planned for part in planned if not part.is_whole]
        splits = [split for shard in parts if not shard.missing for split in shard.splits]
        of_streams = chain.from_iterable(self._numbers_of_streams)
        return np.unique(np.concatenate([*of_streams, *self._row_numbers(splits)]))

    @cached_property
    def _numbers_of_streams(self) -> list[tuple[Integers, Integers]]:
        """The first row and the end of each split of each stream's whole shards."""
        streams = ([part.shard for part in planned if part.is_whole] for planned in self._planned)
        return [self._row_numbers([split for shard in shards for split in shard.splits]) for shards in streams]

    @cached_property
    def _streams(self) -> list[_Stream]:
        streams = []
        for planned, (starts, stops) in zip(self._planned, self._numbers_of_streams, strict=True):
            counts = [len(part.shard.splits) if part.is_whole else 0 for part in planned]
            parts = tuple(index for index, count in enumerate(counts) if not count)
            places = np.searchsorted(self._bounds, starts), np.searchsorted(self._bounds, stops)
            streams.append(_Stream(np.cumsum([0, *counts]), parts, *places))
        del self._numbers_of_streams  # the places stand for them
        return streams

    def _reached(self, progress: Progress) -> Iterator[tuple[_Stream, int, int]]:
        """Yield each stream, its completed splits of whole shards, and its completed slices."""
        for own, stream in zip(self._streams, progress.streams, strict=True):
            slices, _ = stream.reached
            yield own, int(own.splits_before[slices]), slices

    def _row_numbers(self, splits: Sequence[Split]) -> tuple[Integers, Integers]:
        first = self._manifest.first_rows
        starts = np.fromiter((first[split.path] + split.row_offset for split in splits), np.int64, len(splits))
        return starts, starts + np.fromiter((split.row_length for split in splits), np.int64, len(splits))
