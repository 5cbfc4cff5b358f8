"""Rows that become Python objects, of which several rows share one: strings that have few values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torch_dataloader_utils.columns.arrow import ROWS_OF_A_VALUE, has_few_values, joined, without_dictionary
from torch_dataloader_utils.columns.python_lists import list_maker
from torch_dataloader_utils.errors import ColumnError

Objects: TypeAlias = npt.NDArray[np.object_]
Numbers: TypeAlias = npt.NDArray[np.integer[Any]]

OBJECT_BYTES = 64
"""About what a string or bytes takes in Python beside its characters, with the reference to it."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Rows of a column, not yet split into batches, each of which is a list.

    Attributes:
        objects: The objects that the rows have, and None for null; perhaps others, too.
        numbers: The place of each row's object among them.
        objects_bytes: About how much memory the objects take.
    """

    objects: Objects
    numbers: Numbers
    objects_bytes: int

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.numbers.nbytes + self.objects_bytes

    def slice(self, start: int, stop: int) -> Shared:
        """Return some of the rows, without a copy."""
        return replace(self, numbers=self.numbers[start:stop])

    def of_numbers(self, numbers: Numbers) -> Shared:
        """Return rows that have these of the objects."""
        return replace(self, numbers=numbers)

    def batches(self, sizes: Sequence[int]) -> Iterator[list[Any]]:
        """Yield the rows as lists of these sizes."""
        for size, stop in zip(sizes, accumulate(sizes), strict=True):
            yield self.objects.take(self.numbers[stop - size : stop]).tolist()

    def has_few_objects(self) -> bool:
        """Whether the objects take little beside the rows."""
        return ROWS_OF_A_VALUE * len(self.objects) <= len(self)

    def copied(self) -> Shared:
        """Return a copy with the objects of its rows alone."""
        is_used = np.zeros(len(self.objects), np.bool_)
        is_used[self.numbers] = True
        places = np.cumsum(is_used, dtype=np.int32) - np.int32(1)
        objects = self.objects[is_used]
        size = self.objects_bytes * len(objects) // max(1, len(self.objects))
        return Shared(objects, places[self.numbers], size)


def shared(name: str, column: pa.ChunkedArray) -> Shared | pa.ChunkedArray:
    """Return a column of dictionaries of few values as rows that share objects, and another column without dictionary.

    So is a column of which some value is no object of Python. Where a list is made of it, that is an error.
    """
    if not has_few_values(column):
        return without_dictionary(column)
    made = list_maker(name, column.type.value_type)
    objects: list[Any] = []
    parts: list[Numbers] = []
    size = 0
    for chunk in column.chunks:
        first, indices, dictionary = len(objects), chunk.indices, chunk.dictionary
        try:
            objects += [*made(pa.chunked_array([dictionary])), None]
        except ColumnError:
            return without_dictionary(column)
        if indices.null_count:
            indices = indices.cast(pa.int64()).fill_null(len(dictionary))
        numbers = indices.to_numpy()
        parts.append(np.add(numbers, first, dtype=np.int32) if first or numbers.dtype != np.int32 else numbers)
        size += dictionary.nbytes + OBJECT_BYTES * len(dictionary)
    return Shared(_array_of(objects), parts[0] if len(parts) == 1 else np.concatenate(parts), size)


def joined_lists(name: str, parts: Sequence[Shared | pa.ChunkedArray]) -> Shared | pa.ChunkedArray:
    """Return the rows of columns of which lists are made, one after the other."""
    if not any(isinstance(part, Shared) for part in parts):
        return joined(parts)
    rows = [part if isinstance(part, Shared) else _with_own_objects(name, part) for part in parts]
    if all(part.objects is rows[0].objects for part in rows):
        return rows[0].of_numbers(np.concatenate([part.numbers for part in rows]))
    starts = accumulate((len(part.objects) for part in rows), initial=0)
    numbers = [np.add(part.numbers, start, dtype=np.int32) for part, start in zip(rows, starts, strict=False)]
    objects = np.concatenate([part.objects for part in rows])
    return Shared(objects, np.concatenate(numbers), sum(part.objects_bytes for part in rows))


def _with_own_objects(name: str, column: pa.ChunkedArray) -> Shared:
    """Return rows of which each has an object of its own."""
    objects = _array_of(list_maker(name, column.type)(column))
    return Shared(objects, np.arange(len(objects), dtype=np.int32), column.nbytes + OBJECT_BYTES * len(objects))


def _array_of(objects: list[Any]) -> Objects:
    array = np.empty(len(objects), np.object_)
    array[:] = objects
    return array
