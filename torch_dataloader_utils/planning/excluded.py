"""Excluded rows: ranges of each file, and since which epoch they are excluded. Pure.

In the epoch in which rows are excluded, and in those before it, plans keep them: batches are cut first, and then lose
them. From the next epoch on plans leave them out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_dataloader_utils.planning.manifest import Manifest, Split

Bounds: TypeAlias = npt.NDArray[np.int64]
"""Start, stop, start, stop, ... of ranges of rows, rising; no two ranges touch."""

Flags: TypeAlias = npt.NDArray[np.bool_]

NO_BOUNDS: Bounds = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class ExcludedRows:
    """Rows of files, as ranges of row numbers in each file, by relative path. Deleted rows of tables have no number.

    Attributes:
        bounds: The ranges of each file that has any.
    """

    bounds: Mapping[str, Bounds] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.bounds)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExcludedRows) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """Digest of the files and their ranges (blake2b, 32 hexadecimal characters)."""
        digest = hashlib.blake2b(digest_size=16)
        for path in sorted(self.bounds):
            digest.update(f"{len(path.encode())}:{path}:{len(self.bounds[path])}\n".encode())
            digest.update(self.bounds[path].astype("<i8").tobytes())
        return digest.hexdigest()

    @cached_property
    def _rows_before(self) -> dict[str, Bounds]:
        """For each file, the excluded rows before each of its ranges, and those of all."""
        return {path: np.cumsum([0, *np.diff(bounds)[::2]]) for path, bounds in self.bounds.items()}

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(int(rows[-1]) for rows in self._rows_before.values())

    def before(self, path: str, row: int) -> int:
        """Return how many of a file's rows before a row are excluded."""
        bounds = self.bounds.get(path)
        if bounds is None:
            return 0
        passed = int(np.searchsorted(bounds, row, side="right"))
        within = row - int(bounds[passed - 1]) if passed % 2 else 0
        return int(self._rows_before[path][passed // 2]) + within

    def within(self, split: Split, start: int = 0, stop: int | None = None) -> int:
        """Return how many rows of a split are excluded, or of its rows from `start` to `stop`."""
        if split.path not in self.bounds:
            return 0
        stop = split.row_length if stop is None else stop
        return self.before(split.path, split.row_offset + stop) - self.before(split.path, split.row_offset + start)

    def left(self, split: Split) -> int:
        """Return how many rows of a split are not excluded."""
        return split.row_length - self.within(split)

    def flags(self, path: str, start: int, stop: int) -> Flags:
        """Return for each of a file's rows from `start` to `stop` whether it is excluded."""
        changes = np.zeros(stop - start + 1, dtype=np.int8)
        bounds = self.bounds.get(path, NO_BOUNDS)
        first, last = np.searchsorted(bounds, start, side="right") // 2 * 2, np.searchsorted(bounds, stop, side="left")
        own = bounds[first : last + last % 2]
        changes[np.maximum(own[::2] - start, 0)] = 1
        changes[np.minimum(own[1::2] - start, stop - start)] = -1
        flags: Flags = np.cumsum(changes[:-1], dtype=np.int8).astype(bool)
        return flags

    def contains(self, path: str, rows: npt.NDArray[np.int64]) -> Flags:
        """Return for each of some row numbers of a file whether the row is excluded."""
        flags: Flags = np.searchsorted(self.bounds.get(path, NO_BOUNDS), rows, side="right") % 2 == 1
        return flags

    def union(self, other: ExcludedRows) -> ExcludedRows:
        """Return the rows of both."""
        return self._combined(other, np.logical_or)

    def minus(self, other: ExcludedRows) -> ExcludedRows:
        """Return the rows that the other does not have."""
        return self._combined(other, lambda own, others: own & ~others)

    def both(self, other: ExcludedRows) -> ExcludedRows:
        """Return the rows that both have."""
        return self._combined(other, np.logical_and)

    def without_files(self, paths: Iterable[str]) -> ExcludedRows:
        """Return the rows of all other files."""
        gone = frozenset(paths)
        return ExcludedRows({path: bounds for path, bounds in self.bounds.items() if path not in gone})

    def _combined(self, other: ExcludedRows, choose: Callable[[Flags, Flags], Flags]) -> ExcludedRows:
        combined = {
            path: _combine(self.bounds.get(path, NO_BOUNDS), other.bounds.get(path, NO_BOUNDS), choose)
            for path in {**self.bounds, **other.bounds}
        }
        return ExcludedRows({path: bounds for path, bounds in combined.items() if len(bounds)})

    @classmethod
    def of(cls, numbers: Mapping[str, Any]) -> ExcludedRows:
        """Return rows given as numbers of each file, in any order; a `range` takes no memory for each of them."""
        bounds = {path: bounds_of(rows) for path, rows in numbers.items()}
        return cls({path: of_file for path, of_file in bounds.items() if len(of_file)})

    # As row numbers of the whole manifest --------------------------------------------------------------------------

    def row_numbers(self, manifest: Manifest) -> Bounds:
        """Return the ranges as row numbers of the whole manifest: start, stop, start, stop, ..., rising."""
        first = manifest.first_rows
        parts = [self.bounds[path] + first[path] for path in sorted(self.bounds, key=first.__getitem__)]
        numbers = np.concatenate([NO_BOUNDS, *parts])
        touch = np.zeros(len(numbers) + 1, dtype=bool)  # where one file's range ends and the next file's begins
        touch[1:-1] = numbers[1:] == numbers[:-1]
        touching: Flags = touch[1:] | touch[:-1]
        return np.delete(numbers, np.flatnonzero(touching))

    @classmethod
    def of_row_numbers(cls, numbers: Bounds, files: Sequence[tuple[str, int]]) -> ExcludedRows:
        """Turn row numbers back into ranges of files. `files` are the paths and rows to which the numbers refer."""
        stops = np.cumsum([0, *(rows for _, rows in files)])
        begin = np.searchsorted(numbers, stops[:-1], side="right")
        end = np.searchsorted(numbers, stops[1:], side="left")
        bounds = {}
        for index in np.flatnonzero((end > begin) | (begin % 2 == 1)).tolist():
            path, rows = files[index]
            inside = numbers[begin[index] : end[index]] - stops[index]
            whole = [[0] if begin[index] % 2 else [], inside, [rows] if end[index] % 2 else []]
            bounds[path] = np.concatenate(whole).astype(np.int64)
        return cls({path: of_file for path, of_file in bounds.items() if of_file[-1] > of_file[0]})


NONE_EXCLUDED = ExcludedRows()


def bounds_of(numbers: Any) -> Bounds:
    """Return the ranges of row numbers, which come in any order, and perhaps more than once."""
    if isinstance(numbers, range) and abs(numbers.step) == 1 and numbers:
        return np.array([min(numbers[0], numbers[-1]), max(numbers[0], numbers[-1]) + 1], dtype=np.int64)
    rows = _distinct(np.asarray(numbers, dtype=np.int64))
    if not len(rows):
        return NO_BOUNDS
    breaks = np.flatnonzero(np.diff(rows) > 1)
    starts, stops = rows[np.concatenate([[0], breaks + 1])], rows[np.concatenate([breaks, [-1]])] + 1
    bounds: Bounds = np.stack([starts, stops], axis=1).reshape(-1)
    return bounds


def _distinct(numbers: Bounds) -> Bounds:
    """Return the distinct numbers, rising: `numpy.unique` of millions takes 50 times as long in some releases."""
    numbers = np.sort(numbers)
    return numbers[np.concatenate([[True], numbers[1:] != numbers[:-1]])] if len(numbers) else numbers


def _combine(own: Bounds, others: Bounds, choose: Callable[[Flags, Flags], Flags]) -> Bounds:
    """Return the ranges of the rows that are chosen by whether they are in two sequences of ranges."""
    points = _distinct(np.concatenate([own, others]))
    inside = [np.searchsorted(bounds, points, side="right") % 2 == 1 for bounds in (own, others)]
    chosen = np.concatenate([[False], choose(inside[0], inside[1])])
    bounds: Bounds = points[chosen[1:] != chosen[:-1]]
    return bounds


@dataclass(frozen=True, slots=True)
class EpochExclusions:
    """What is excluded in an epoch.

    Attributes:
        left_out: Rows that the epoch's plan leaves out.
        removed: Rows that the plan keeps, and that batches lose after they are cut.
        left_out_by: Digests of the expressions by which rows are left out before they are counted.
        removed_by: Digests of those by which batches lose rows after they are cut.
    """

    left_out: ExcludedRows = NONE_EXCLUDED
    removed: ExcludedRows = NONE_EXCLUDED
    left_out_by: tuple[str, ...] = ()
    removed_by: tuple[str, ...] = ()

    @property
    def unknown_rows(self) -> str | None:
        """Why only reading tells how many rows are left; None where their number is known."""
        return "only reading tells how many rows the excluded expression leaves" if self.left_out_by else None


NOTHING_EXCLUDED = EpochExclusions()


@dataclass(frozen=True, slots=True)
class ExcludedExpression:
    """An expression by which rows are excluded.

    Attributes:
        digest: Digest of the serialised expression.
        text: The expression as users read it.
        epoch: The epoch in which it was excluded.
    """

    digest: str
    text: str
    epoch: int


@dataclass(frozen=True, eq=False)
class Exclusions:
    """All that a run excludes.

    Attributes:
        rows: The excluded rows, by the epoch in which they were excluded, rising. No row is there twice.
        expressions: The expressions by which rows are excluded, each once.
    """

    rows: dict[int, ExcludedRows] = field(default_factory=dict)
    expressions: tuple[ExcludedExpression, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rows or self.expressions)

    @cached_property
    def digest(self) -> str | None:
        """Digest of all of it (blake2b, 32 hexadecimal characters); None for nothing."""
        if not self:
            return None
        rows = [(epoch, rows.digest) for epoch, rows in self.rows.items()]
        expressions = sorted((expression.epoch, expression.digest) for expression in self.expressions)
        return hashlib.blake2b(repr((rows, expressions)).encode(), digest_size=16).hexdigest()

    @cached_property
    def _unions(self) -> list[ExcludedRows]:
        """The rows of the first epochs together: of none, of one, of two, ..."""
        return _unions(self.rows.values())

    @cached_property
    def _later_unions(self) -> list[ExcludedRows]:
        """The rows of the last epochs together: of all, of all but the first, ..., of none."""
        return _unions(reversed(self.rows.values()))[::-1]

    @property
    def all_rows(self) -> ExcludedRows:
        """All excluded rows."""
        return self._unions[-1]

    def in_epoch(self, epoch: int) -> EpochExclusions:
        """Return what is excluded in an epoch, before and after its batches are cut."""
        earlier_epochs = sum(since < epoch for since in self.rows)
        left_out, removed = self._unions[earlier_epochs], self._later_unions[earlier_epochs]
        left_out_by, removed_by = (
            tuple(sorted(one.digest for one in self.expressions if (one.epoch < epoch) == earlier))
            for earlier in (True, False)
        )
        return EpochExclusions(left_out, removed, left_out_by, removed_by)

    def joined(self, other: Exclusions, epoch: int) -> Exclusions:
        """Exclude in an epoch all that another run excludes. What was excluded before stays as it is."""
        joined = self.with_rows(other.all_rows, epoch)
        for expression in other.expressions:
            joined = joined.with_expression(replace(expression, epoch=epoch))
        return joined

    def with_rows(self, rows: ExcludedRows, epoch: int) -> Exclusions:
        """Exclude more rows in an epoch. Rows that were excluded before stay as they are."""
        new = rows.minus(self.all_rows)
        if not new:
            return self
        together = {**self.rows, epoch: self.rows.get(epoch, NONE_EXCLUDED).union(new)}
        return replace(self, rows={since: together[since] for since in sorted(together)})

    def with_expression(self, expression: ExcludedExpression) -> Exclusions:
        """Exclude rows by one more expression. One that was there before stays as it is."""
        if any(known.digest == expression.digest for known in self.expressions):
            return self
        return replace(self, expressions=(*self.expressions, expression))

    def without_files(self, paths: Iterable[str]) -> Exclusions:
        """Return what is excluded of other files. Expressions hold for all files."""
        gone = frozenset(paths)
        rows = {since: rows.without_files(gone) for since, rows in self.rows.items()}
        return replace(self, rows={since: of_files for since, of_files in rows.items() if of_files})


NO_EXCLUSIONS = Exclusions()


def _unions(rows: Iterable[ExcludedRows]) -> list[ExcludedRows]:
    return list(accumulate(rows, lambda union, more: union.union(more) if union else more, initial=NONE_EXCLUDED))
