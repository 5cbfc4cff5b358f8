"""Where the streams of a rank stand at the beginning of a step, and the steps between two such marks. Pure.

A skipped step keeps its number and its place in the epoch, and so does every other step: the rows of skipped steps
are between two marks in the planned streams, which stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch_dataloader_utils.planning.plan import ShardSlice

Place: TypeAlias = tuple[int, int]
"""How far a stream has come: index of its next slice, and the rows of that slice's shard before the next row.

The second number is 0 at the beginning of a slice, wherever its window begins.
"""

Streams: TypeAlias = Sequence[tuple[ShardSlice, ...]]
"""The planned slices of each stream of a rank."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The beginning of a step.

    Attributes:
        step: Number of the step.
        turn: The worker turn that makes it.
        places: How far each stream has come.
    """

    step: int
    turn: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class SkippedSteps:
    """Consecutive steps that are not handed over: from the beginning of one to the beginning of another."""

    begin: Mark
    end: Mark

    @property
    def steps(self) -> range:
        """The numbers of the steps."""
        return range(self.begin.step, self.end.step)

    def slices(self, planned: Streams) -> tuple[tuple[ShardSlice, ...], ...]:
        """Return for each stream the rows of these steps."""
        return tuple(map(between, planned, self.begin.places, self.end.places))


def between(planned: Sequence[ShardSlice], begin: Place, end: Place) -> tuple[ShardSlice, ...]:
    """Return the slices of a stream from one place to another."""
    if begin >= end:
        return ()
    (first, start), (last, stop) = begin, end
    slices = list(planned[first : last + (stop > 0)])
    if start:
        slices[0] = replace(slices[0], start=start)
    if stop:
        slices[-1] = replace(slices[-1], stop=stop)
    return tuple(slices)


def place_after(planned: Sequence[ShardSlice], begin: Place, rows: int) -> Place:
    """Return the place so many rows after another one, where no filter drops rows."""
    index, start = begin
    while index < len(planned):
        part = planned[index]
        start = max(start, part.start)
        if rows < part.stop - start:
            return index, 0 if start + rows == part.start else start + rows
        rows -= part.stop - start
        index, start = index + 1, 0
    return index, 0


def ends_of(planned: Streams) -> tuple[Place, ...]:
    """Return the places at which streams have ended."""
    return tuple((len(slices), 0) for slices in planned)


def rows_in(streams: Iterable[Iterable[ShardSlice]]) -> int:
    """Return the number of rows of all slices of some streams, where no filter drops any."""
    return sum(part.rows for slices in streams for part in slices)
