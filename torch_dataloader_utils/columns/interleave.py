"""Rows of several sources put together step by step, each row copied once to its place.

The columns of a block of steps are made first. The rows of each source are written into them as they are read, so that
nothing else of a source has to stay in memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torch_dataloader_utils.columns.arrow import takeable
from torch_dataloader_utils.columns.arrow_memory import new_array
from torch_dataloader_utils.columns.convert import Columns, ColumnSlice, copy_rows, join, taken
from torch_dataloader_utils.columns.ragged import Ragged, concat
from torch_dataloader_utils.columns.selection import take_rows
from torch_dataloader_utils.columns.shared import joined_lists

Counts: TypeAlias = npt.NDArray[np.int64]
Array: TypeAlias = npt.NDArray[Any]
Place: TypeAlias = tuple[int | slice, slice] | Counts
"""Places of rows in a block: steps and the rows in each of them, or the numbers of the block's rows."""


class StepLayout:
    """Where the rows of each source are in a block of steps: each step has those of the sources one after the other.

    `counts` has the rows of each source, a column, in each step, a row.
    """

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self.rows = int(counts.sum())
        self._is_regular = len(counts) > 0 and bool((counts == counts[0]).all())
        self._before = np.concatenate([[0], np.cumsum(counts[0])]).tolist()
        self._places: dict[int, Counts] = {}

    def write(self, target: Array, source: int, first: int, rows: Array) -> None:
        """Copy rows of a source, of which `first` are before them in the block, to their places."""
        target = self.by_step(target)
        for place, part in self.places(source, first, len(rows)):
            put(target, place, rows[part])

    def by_step(self, target: Array) -> Array:
        """Return a block's rows as `put` takes them: where steps are alike, of shape (steps, rows of a step, ...)."""
        return target.reshape(len(self.counts), -1, *target.shape[1:]) if self._is_regular else target

    def places(self, source: int, first: int, count: int) -> list[tuple[Place, slice]]:
        """Return where so many rows of a source go, part by part; `first` of its rows are before them in the block."""
        if not count:
            return []
        if not self._is_regular:
            return [(self._places_of(source)[first : first + count], slice(0, count))]
        begin, end = self._before[source : source + 2]
        size = end - begin
        step, done = divmod(first, size)
        found: list[tuple[Place, slice]] = []
        head = min(count, size - done) if done else 0
        if head:
            found.append(((step, slice(begin + done, begin + done + head)), slice(0, head)))
            step += 1
        whole, tail = divmod(count - head, size)
        if whole:  # whole steps at once
            found.append(((slice(step, step + whole), slice(begin, end)), slice(head, count - tail)))
        if tail:
            found.append(((step + whole, slice(begin, begin + tail)), slice(count - tail, count)))
        return found

    def _places_of(self, source: int) -> Counts:
        """Return the place of each row of a source in the block."""
        if source not in self._places:
            own = self.counts[:, source]
            begins = (np.cumsum(self.counts.ravel()) - self.counts.ravel()).reshape(self.counts.shape)[:, source]
            self._places[source] = np.arange(own.sum()) + np.repeat(begins - (np.cumsum(own) - own), own)
        return self._places[source]

    def order(self) -> Counts:
        """Return, for each row of the block, where it is in the rows of all sources one after the other."""
        order = np.empty(self.rows, dtype=np.int64)
        first = 0
        for source, rows in enumerate(self.counts.sum(axis=0).tolist()):
            self.write(order, source, 0, np.arange(first, first + rows))
            first += rows
        return order


def put(target: Array, place: Place, rows: Array) -> None:
    """Copy rows to one of their places."""
    if isinstance(place, tuple):
        steps = target[place]
        steps[...] = rows.reshape(steps.shape)
    else:
        target[place] = rows


class Interleaved:
    """The columns of a block of steps, of which the rows of sources are added part by part."""

    def __init__(self, counts: Counts) -> None:
        self._layout = StepLayout(counts)
        self._added = [0] * counts.shape[1]
        self._dense: dict[str, Array] = {}
        self._by_step: dict[str, Array] = {}
        self._others: dict[int, list[Columns]] = {}
        self._names: tuple[str, ...] = ()

    def add(self, source: int, part: ColumnSlice, *, is_whole: bool) -> None:
        """Add the next rows of a source.

        `is_whole` says that the part is all that the block has of its columns, whose memory may stay until the block is
        complete.
        """
        first = self._added[source]
        self._added[source] += part.stop - part.start
        if isinstance(part.columns, pa.Table):
            self._others.setdefault(source, []).append(join([part]) if is_whole else copy_rows(part))
            return
        self._names = tuple(part.columns)
        others = {}
        places = [
            (place, slice(part.start + rows.start, part.start + rows.stop))
            for place, rows in self._layout.places(source, first, part.stop - part.start)
        ]
        by_step = self._by_step
        for name, values in part.columns.items():
            if isinstance(values, np.ndarray):
                target = by_step.get(name)
                if target is None:
                    target = self._new_target(name, values)
                for place, rows in places:
                    put(target, place, values[rows])
            else:
                others[name] = values
        if others:
            part = replace(part, columns=others)
            self._others.setdefault(source, []).append(join([part]) if is_whole else copy_rows(part))

    def _new_target(self, name: str, like: Array) -> Array:
        rows = self._dense[name] = new_array((self._layout.rows, *like.shape[1:]), like.dtype)
        target = self._by_step[name] = self._layout.by_step(rows)
        return target

    def columns(self) -> Columns:
        """Return the columns, once all rows are added. They keep nothing in memory of what was added."""
        in_order = [parts for _, parts in sorted(self._others.items())]
        if in_order and isinstance(in_order[0][0], pa.Table):
            return _in_order(pa.concat_tables([table for parts in in_order for table in parts]), self._layout)
        found: dict[str, Any] = dict(self._dense)
        for name in in_order[0][0] if in_order else ():
            parts = [[columns[name] for columns in of_source] for of_source in in_order]
            if isinstance(parts[0][0], Ragged):
                found[name] = self._ragged([concat(of_source) for of_source in parts])
            else:
                whole = joined_lists(name, [values for of_source in parts for values in of_source])
                found[name] = taken(whole, self._layout.order())
        return {name: found[name] for name in self._names}

    def _ragged(self, parts: list[Ragged]) -> Ragged:
        """Interleave rows of different lengths: one part of each source that has rows, in order."""
        given = [source for source, rows in enumerate(self._added) if rows]
        lengths = np.empty(self._layout.rows, dtype=np.int64)
        ends = self._layout.counts[:, given].cumsum(axis=0)
        bounds = []
        for source, part, of_steps in zip(given, parts, ends.T, strict=True):
            offsets = part.offsets - part.offsets[0]
            self._layout.write(lengths, source, 0, np.diff(offsets))
            bounds.append(offsets[np.concatenate([[0], of_steps])].tolist())
        values = [
            part.values[bound[step] : bound[step + 1]]
            for step in range(len(ends))
            for part, bound in zip(parts, bounds, strict=True)
        ]
        return replace(parts[0], values=concat(values), offsets=np.concatenate([[0], np.cumsum(lengths)]))


def _in_order(table: pa.Table, layout: StepLayout) -> pa.Table:
    return take_rows(takeable(table), pa.array(layout.order()))
