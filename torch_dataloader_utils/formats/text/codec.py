"""From text files to rows: a parser reads each range."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from torch_dataloader_utils.columns.arrow import any_type, stacked, width
from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.formats.base import Codec, FilesToRead, Layout, Measures, RowGroups
from torch_dataloader_utils.formats.concurrency import OPEN_FILES
from torch_dataloader_utils.formats.read_cache import FooterStore
from torch_dataloader_utils.formats.text.exact_integers import LARGEST_EXACT, floats_of, may_be_rounded
from torch_dataloader_utils.formats.text.footer import TextFooter
from torch_dataloader_utils.formats.text.lines import Text
from torch_dataloader_utils.formats.text.shared_parsing import SharedParsing
from torch_dataloader_utils.storage.local_file import LocalFile, MappedFile


class Parser(Protocol):
    """Parses texts of one file into rows. An error is an UnreadableFileError with file and line.

    An integer that is read as a float which does not hold it is such an error, too, unless the user has given the type.
    """

    def tables(self, text: Text, shared: SharedParsing) -> Iterator[pa.Table]:
        """Yield the rows in one or more tables, each as soon as it is parsed."""

    def batches(self, text: Text, *, use_threads: bool) -> Iterator[pa.RecordBatch]:
        """Yield the rows, block by block."""


MakeParser: TypeAlias = Callable[[Sequence[str], pa.Schema, Collection[str]], Parser]
"""From a file's columns, the needed ones with their types, and those of these that may hold floats by its beginning,
to its parser."""

OFFSET_BYTES = 4

NESTED_GROWTH = 2
"""Numbers in lists have a few characters each, and take eight bytes."""


@dataclass(frozen=True, slots=True)
class _TextLayout(Layout):
    """A file's ranges, and about how large they are in memory."""

    footer: TextFooter
    stored: pa.Schema

    def measures(self) -> Measures:
        """Return about how large the ranges are in memory: all strings together at most as large as the text."""
        footer = self.footer
        widths = {column.name: width(column.type) for column in self.stored}
        sizes = tuple(stop - start for start, stop in footer.ranges)
        variable = [column for column in self.stored if not widths[column.name]]

        def largest(column: pa.Field) -> tuple[int, ...]:
            growth = footer.text_bytes * (NESTED_GROWTH if pa.types.is_nested(column.type) else 1) / len(variable)
            offsets = [OFFSET_BYTES * rows for rows in footer.expected_rows]
            return tuple(int(size * growth) + offset for size, offset in zip(sizes, offsets, strict=True))

        by_column = {column.name: largest(column) for column in variable}
        return Measures(sum(widths.values()), sizes, by_column, footer.expected_rows)

    def ranges(self, number: int) -> list[tuple[int, int]]:
        return [self.footer.ranges[number]]


class TextCodec(Codec):
    """Ranges of lines, parsed by pyarrow."""

    layout: Callable[[str], _TextLayout]

    def __init__(self, files: FilesToRead, footers: FooterStore, parser: MakeParser) -> None:
        self._files = files
        self._parser = parser
        self._shared = SharedParsing()
        self.layout = lru_cache(OPEN_FILES)(
            lambda path: _TextLayout(TextFooter.load(footers[path]), files.projection(path).stored)
        )

    def open(self, path: str, file: Any, local: LocalFile | None) -> _TextRowGroups:
        """Open a file."""
        shown = self._files.manifest.full_path(path)
        listed = self._files.files[path].modified
        if local is not None and listed is not None and local.modified != listed:
            raise UnreadableFileError(f"{shown} was rewritten since it was listed")
        footer, stored = self.layout(path).footer, self._files.projection(path).stored
        types = {column.name: column.type for column in footer.schema}
        inferred = {column.name: types.get(column.name, pa.null()) for column in stored}
        parser = self._parser(footer.schema.names, stored, [name for name in inferred if _are_floats(inferred[name])])
        widened = {column.name: inferred[column.name] for column in stored if inferred[column.name] != column.type}
        return _TextRowGroups(
            shown, footer, parser, file, widened, self._shared, is_mapped=isinstance(local, MappedFile)
        )


@dataclass(frozen=True, slots=True)
class _TextRowGroups(RowGroups):
    """An open text file."""

    shown: str
    footer: TextFooter
    parser: Parser
    file: pa.NativeFile
    widened: Mapping[str, pa.DataType]
    shared: SharedParsing
    is_mapped: bool

    def read(self, number: int) -> pa.Table:
        return stacked([table for table, _ in self.tables(number)])

    def tables(self, number: int) -> Iterator[tuple[pa.Table, bool]]:
        for table, is_last in self.shared.tables(self.parser.tables(self._text(number), self.shared)):
            self._require_exact(table)
            yield table, is_last

    def batches(self, number: int, rows: int, *, use_threads: bool) -> Iterator[pa.RecordBatch]:
        for batch in self.parser.batches(self._text(number), use_threads=use_threads):
            self._require_exact(batch)
            for first in range(0, batch.num_rows, rows):
                yield batch.slice(first, rows)

    def _require_exact(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Raise if an integer that is read as a float, as the column is of floats elsewhere, may have changed."""
        for name, dtype in self.widened.items():
            if any(map(may_be_rounded, floats_of(rows[name], dtype, pa.types.is_integer))):
                msg = f"{self.shown}: column {name!r} begins with integers here, and is of floats in the dataset, "
                msg += f"which do not hold each integer of {LARGEST_EXACT} or more; set its type by format_options"
                raise UnreadableFileError(msg)

    def _text(self, number: int) -> Text:
        start, stop = (0, self.footer.size) if self.is_mapped else self.footer.ranges[number]
        self.file.seek(start)
        return range_of(self.shown, self.footer, number, self.file.read_buffer(stop - start))


def _are_floats(inferred: pa.DataType) -> bool:
    """Whether values may be floats, by what a file's beginning has of a column: not if it has integers alone."""
    return any_type(inferred, pa.types.is_floating) or not any_type(inferred, pa.types.is_integer)


def range_of(shown: str, footer: TextFooter, number: int, content: pa.Buffer) -> Text:
    """Return a range of a file, which messages name as shown; the content is the whole file, or only that range."""
    start, stop = footer.ranges[number]
    is_last = number == len(footer.ranges) - 1
    if content.size < footer.size:
        return Text(shown, content, footer.compression, start, None, is_last)
    return Text(shown, content.slice(start, stop - start), footer.compression, start, content.slice(0, start), is_last)
