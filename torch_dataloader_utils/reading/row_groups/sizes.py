"""How large row groups are, stored and in memory, as far as is known before they are decoded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pyarrow as pa

from torch_dataloader_utils.columns.arrow import has_fixed_width, is_bytes, row_bytes, width
from torch_dataloader_utils.formats.base import Codec, Measures
from torch_dataloader_utils.formats.opened_files import OpenedFiles
from torch_dataloader_utils.formats.read_cache import SizeEstimates
from torch_dataloader_utils.reading.row_groups.file_row_group import FileRowGroup
from torch_dataloader_utils.reading.row_groups.selection import RowSelection
from torch_dataloader_utils.reading.work import Wait

REPEATED_BYTES = 1 << 20
"""Strings that take no more, even if each row had all values of their dictionary, are read with others in any case."""


class RowGroupSizes:
    """The sizes of the row groups that a reader reads, in the columns that it reads.

    Args:
        files: The files.
        codec: Knows their layouts. Where a file's footer has yet to come, it is waited for.
        estimates: What was learned from decoded rows.
        selection: Knows the deleted rows, and the columns that are added.
        fetches: Whether the bytes of a file, by its path, are fetched before they are decoded.
        on_wait: Called with each wait for a footer.

    Attributes:
        has_fixed_widths: Whether all columns are of fixed width.
        has_single_values: Whether each column is of fixed width, or of strings or binary.
    """

    def __init__(
        self,
        files: OpenedFiles,
        codec: Codec,
        estimates: SizeEstimates,
        selection: RowSelection,
        *,
        fetches: Callable[[str], bool],
        on_wait: Callable[[Wait], object],
    ) -> None:
        self.has_fixed_widths = all(map(has_fixed_width, files.needed.types))
        self.has_single_values = all(has_fixed_width(dtype) or is_bytes(dtype) for dtype in files.needed.types)
        self._files = files
        self._codec = codec
        self._estimates = estimates
        self._selection = selection
        self._fetches = fetches
        self._on_wait = on_wait
        self._measures: dict[str, Measures] = {}  # by path: small, and needed in any order
        self._added_bytes: dict[str, float] = {}

    def stored_bytes(self, group: FileRowGroup) -> int:
        """Return the compressed bytes that reading a row group takes from storage."""
        return sum(self._measures_of(group.path).stored[number] for number in group.numbers)

    def fetched_bytes(self, group: FileRowGroup) -> int:
        """Return the bytes that are in memory before a row group is decoded."""
        return self.stored_bytes(group) if self._fetches(group.path) else 0

    def are_known(self, group: FileRowGroup) -> bool:
        """Whether the row group's size in memory can be estimated well.

        Text tells its size. Other formats' footers tell too little of columns of no fixed width, so some rows of all of
        these columns have to be decoded first.
        """
        measures = self._measures_of(group.path)
        return measures.rows is not None or self._estimates.knows(measures.variable)

    def are_usual(self, group: FileRowGroup) -> bool:
        """Whether a row group will be about as large as is estimated: other ones were decoded that are like it."""
        if self._measures_of(group.path).rows is not None:  # text
            return True
        return self.are_as_before(group) if self.has_single_values else self.are_known(group)

    def are_as_before(self, group: FileRowGroup) -> bool:
        """Whether the strings of a row group are about as large as those that were decoded, as far as its footer tells.

        A large one that all rows have is in a dictionary, which takes little in the file.
        """
        rows = self._selection.stored_rows(group)
        return all(
            rows * stored <= REPEATED_BYTES or self._estimates.are_as_before(name, rows, stored)
            for name, stored in self._stored_of(group)
        )

    def expected_rows(self, group: FileRowGroup) -> int:
        """Return the rows of a row group; an estimate where they are not counted."""
        expected = self._measures_of(group.path).rows
        return group.unfiltered if expected is None else sum(expected[number] for number in group.numbers)

    def decoded_bytes(self, group: FileRowGroup) -> int:
        """Return how large a row group will be in memory: exact for numbers, for other types by what was decoded.

        Deleted rows count: they are decoded before they are left out.
        """
        measures = self._measures_of(group.path)
        rows = self.expected_rows(group) + len(self._selection.deleted(group))
        size = rows * (measures.row_bytes + self._added_bytes_of(group.path))
        for name, sizes in measures.variable.items():
            size += max(rows * self._estimates.expected(name), sum(sizes[number] for number in group.numbers))
        return max(1, int(size))

    @property
    def widths(self) -> list[float] | None:
        """Bytes of a row in each column that is read, and in those that are added; None if one has no fixed width."""
        added = self._selection.schema.types[len(self._files.schema) :]
        return list(map(width, [*self._files.needed.types, *added])) if self.has_fixed_widths else None

    def learn(self, group: FileRowGroup, table: pa.Table, first: int) -> None:
        """Learn from decoded rows of a row group, from its stored row `first` on."""
        self._estimates.learn(table)
        rows = self._selection.stored_rows(group)
        if len(table) and first + len(table) == rows and self.has_single_values and not self.has_fixed_widths:
            for name, stored in self._stored_of(group):
                self._estimates.learn_stored(name, stored, row_bytes(table[name]) * rows)

    def _stored_of(self, group: FileRowGroup) -> Iterator[tuple[str, int]]:
        """Yield the columns of no fixed width, and what a row group takes of each in its file."""
        for name, sizes in self._measures_of(group.path).variable.items():
            yield name, sum(sizes[number] for number in group.numbers)

    def _added_bytes_of(self, path: str) -> float:
        """Return what a row takes in columns that the file does not have."""
        if path not in self._added_bytes:
            sources = self._files.projection(path).sources
            missing = [field for field, source in zip(self._files.needed, sources, strict=True) if source is None]
            self._added_bytes[path] = sum(width(field.type) for field in missing) + self._selection.added_bytes
        return self._added_bytes[path]

    def _measures_of(self, path: str) -> Measures:
        measures = self._measures.get(path)
        if measures is None:
            began = time.perf_counter()
            measures = self._measures[path] = self._codec.layout(path).measures()
            ended = time.perf_counter()
            self._on_wait(Wait(began, ended, ended))
        return measures
