"""Columns that are in dictionaries in a file: which are read as such, and whether Arrow has returned them whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torch_dataloader_utils.columns.arrow import nbytes
from torch_dataloader_utils.formats.parquet.footer import row_groups_of
from torch_dataloader_utils.formats.parquet.page_header import dictionary_values

Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)

STRINGS = (pa.string(), pa.binary())
"""What Arrow reads dictionaries of."""

LEAST_ROWS = 4_096
"""So many rows or more in a row group, on average, and a dictionary takes less time than to look up the values."""

LARGE_DICTIONARY = 256 << 10
"""A dictionary of more bytes takes too long to copy, and to make objects of, where few rows at a time are read."""

PACKED = 8
"""So many times what it takes when it is compressed a dictionary is taken to have, where no less is known."""

UNTOLD = -(1 << 62)
"""More than any sum of numbers of values can make up for."""

BEYOND_DICTIONARY = "Index not in dictionary bounds"
"""What Arrow says of damaged files where it looks up values."""

LENGTH_BYTES = 4
"""What a string takes in a file, without its characters, unless it is in a dictionary."""

WITH_DICTIONARY = frozenset({"PLAIN", "RLE", "BIT_PACKED", "PLAIN_DICTIONARY", "RLE_DICTIONARY"})
"""The encodings that a column chunk may have with a dictionary, where Arrow can read all of it as a dictionary."""


class StoredDictionaries:
    """What a footer says of the dictionaries of its columns; `columns` has each with its leaves, by name.

    Attributes:
        categories: The columns that are dictionaries in Arrow's schema, too.
    """

    def __init__(self, metadata: pq.FileMetaData, columns: Mapping[str, tuple[pa.Field, Sequence[int]]]) -> None:
        self._metadata = metadata
        self._strings = {name: leaves[0] for name, (field, leaves) in columns.items() if field.type in STRINGS}
        self._known: dict[int, tuple[bool, bool]] = {}
        self._values: dict[tuple[int, int], int] = {}
        self.categories = [name for name, (field, _) in columns.items() if pa.types.is_dictionary(field.type)]

    def encoded(self, chosen: Mapping[str, str], decided: dict[str, bool]) -> dict[str, int]:
        """Return the columns to read as dictionaries, and their leaves: of strings or binary that the file has so.

        `chosen` are the names of columns that may be, and what each is called in `decided`: whether it is read so. The
        first file decides, by how many values it has for its rows. Arrow keeps a dictionary of few values in a part of
        the time in which it looks up the value of each row, and makes one of other values in twice that time.
        """
        found = {}
        for stored, leaf in self._strings.items():
            if stored not in chosen:
                continue
            if leaf not in self._known:
                self._known[leaf] = self._found(leaf)
            has_dictionaries, has_few_values = self._known[leaf]
            if has_dictionaries and decided.setdefault(chosen[stored], has_few_values):
                found[stored] = leaf
        return found

    def _found(self, leaf: int) -> tuple[bool, bool]:
        """Whether strings of a leaf can well be read as dictionaries, and whether these have few values."""
        chunks = [group.column(leaf) for group in row_groups_of(self._metadata)]
        chunks = [chunk for chunk in chunks if chunk.num_values]
        if sum(chunk.num_values for chunk in chunks) < LEAST_ROWS * max(1, len(chunks)):
            return False, False
        return all(map(_has_dictionary, chunks)), all(map(_has_few_values, chunks))

    def values(self, file: pa.NativeFile, number: int, leaf: int) -> int:
        """Return how many values the dictionary of a row group has, which is read once; `UNTOLD` if it does not say."""
        if (number, leaf) not in self._values:
            chunk = self._metadata.row_group(number).column(leaf)
            found = dictionary_values(file, chunk) if chunk.num_values else 0
            self._values[number, leaf] = UNTOLD if found is None else found
        return self._values[number, leaf]


def _has_dictionary(chunk: pq.ColumnChunkMetaData) -> bool:
    """Whether strings are in a dictionary that is not large, at least the first ones, and Arrow reads it as one.

    A large one may have values of which no others are made, or is of as many values as fit in, before those outside it.
    """
    if not (chunk.has_dictionary_page and WITH_DICTIONARY.issuperset(chunk.encodings)):
        return False
    page = chunk.data_page_offset - (chunk.dictionary_page_offset or chunk.data_page_offset)
    others = chunk.total_compressed_size - page  # they take no less when they are decompressed
    return bool(min(PACKED * page, chunk.total_uncompressed_size - others) <= LARGE_DICTIONARY)


def _has_few_values(chunk: pq.ColumnChunkMetaData) -> bool:
    """Whether strings take less than their lengths alone would outside a dictionary."""
    return bool(chunk.total_uncompressed_size < LENGTH_BYTES * chunk.num_values)


@dataclass(frozen=True, slots=True)
class ReadDictionaries:
    """The columns of an open file that Arrow returns as dictionaries.

    Arrow does not look whether a dictionary has the values that the indices of a damaged file mean. Of a value that is
    twice in a dictionary it returns one, so that the indices behind it mean the next value (seen in 26.0).

    Attributes:
        stored: What the file's footer says of them.
        encoded: Those that are read so, and their leaves; of others the file says that they are.
    """

    file: pa.NativeFile
    stored: StoredDictionaries
    encoded: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.encoded) + len(self.stored.categories)

    def are_whole(self, rows: Rows, numbers: Iterable[int]) -> bool:
        """Whether rows, the first ones of row groups or all, have the dictionaries that the file has."""
        if not self.encoded:
            return self._have_values(rows)
        try:
            # One call for all columns: Arrow lets go of Python's lock, and to get that back takes long.
            rows.select(list(self.encoded)).validate(full=True)
        except pa.ArrowInvalid:
            return False
        return self._have_values(rows) and all(
            sum(len(chunk.dictionary) for chunk in _chunks(rows, name))
            == sum(self.stored.values(self.file, number, leaf) for number in numbers)
            for name, leaf in self.encoded.items()
        )

    def are_large(self, rows: Rows) -> bool:
        """Whether some dictionary that need not be read takes long to copy."""
        chunks = chain.from_iterable(_chunks(rows, name) for name in self.encoded)
        return any(nbytes(chunk.dictionary) > LARGE_DICTIONARY for chunk in chunks)

    def required(self, rows: Rows) -> Rows:
        """Return rows if the dictionaries have their values."""
        if not self._have_values(rows, self.encoded):
            raise pa.ArrowInvalid(BEYOND_DICTIONARY)
        return rows

    def _have_values(self, rows: Rows, also: Iterable[str] = ()) -> bool:
        return all(
            map(_has_values, chain.from_iterable(_chunks(rows, name) for name in (*also, *self.stored.categories)))
        )


def _chunks(rows: Rows, name: str) -> Sequence[pa.DictionaryArray]:
    """Return the chunks of a column; none if it is no dictionary."""
    column = rows.column(name)
    if not pa.types.is_dictionary(column.type):
        return []
    return column.chunks if isinstance(column, pa.ChunkedArray) else [column]


def _has_values(chunk: pa.DictionaryArray) -> bool:
    ends = [end.as_py() for end in pc.min_max(chunk.indices).values()]
    return None in ends or 0 <= min(ends) <= max(ends) < len(chunk.dictionary)
