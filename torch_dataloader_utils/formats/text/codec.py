"""The way from text files to rows: each range given to a parser."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.columns.arrow import width
from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.formats.base import Codec, Layout, Measures, OpenedFiles
from torch_dataloader_utils.formats.concurrency import OPEN_FILES
from torch_dataloader_utils.formats.read_cache import FooterStore
from torch_dataloader_utils.formats.text.footer import TextFooter
from torch_dataloader_utils.formats.text.lines import Text
from torch_dataloader_utils.storage.filesystem import LocalFile

__all__ = ["Parser", "TextCodec", "range_of"]


class Parser(Protocol):
    """Makes rows of texts of one file. Whatever is wrong is an UnreadableFileError with file and line."""

    def table(self, text: Text) -> pa.Table:
        """Return all rows."""

    def batches(self, text: Text, *, use_threads: bool) -> Iterator[pa.RecordBatch]:
        """Yield the rows, block by block."""


MakeParser: TypeAlias = Callable[[Sequence[str], pa.Schema], Parser]
"""Given a file's columns, and those that are needed with their types, returns what makes rows of its texts."""


LARGEST_EXACT = 2**53
"""Below it every integer is a float64 without loss."""


OFFSET_BYTES = 4


NESTED_GROWTH = 2
"""Numbers in lists are some characters each, and eight bytes."""


class _TextLayout(Layout):
    """Where a file's ranges lie, and about how large they become."""

    def __init__(self, footer: TextFooter, stored: pa.Schema) -> None:
        self.footer = footer
        self._stored = stored

    def measures(self) -> Measures:
        """Return about how large the ranges become: texts, all together, no larger than what they are read of."""
        footer = self.footer
        widths = {column.name: width(column.type) for column in self._stored}
        sizes = tuple(stop - start for start, stop in footer.ranges)
        variable = [column for column in self._stored if not widths[column.name]]

        def largest(column: pa.Field) -> tuple[int, ...]:
            growth = footer.text_bytes * (NESTED_GROWTH if pa.types.is_nested(column.type) else 1) / len(variable)
            offsets = [OFFSET_BYTES * rows for rows in footer.expected_rows]
            return tuple(int(size * growth) + offset for size, offset in zip(sizes, offsets, strict=True))

        return Measures(
            row_bytes=sum(widths.values()),
            stored=sizes,
            variable={column.name: largest(column) for column in variable},
            rows=footer.expected_rows,
        )

    def ranges(self, number: int) -> list[tuple[int, int]]:
        return [self.footer.ranges[number]]


class TextCodec(Codec):
    """Ranges of lines, parsed by pyarrow.

    Args:
        files: The data files.
        footers: Their footers.
        parser: Makes a file's parser.
    """

    def __init__(self, files: OpenedFiles, footers: FooterStore, parser: MakeParser) -> None:
        self._files = files
        self._parser = parser
        self._layout = lru_cache(OPEN_FILES)(
            lambda path: _TextLayout(TextFooter.load(footers[path]), files.projection(path).stored)
        )

    def layout(self, path: str) -> _TextLayout:
        """Return where in a file its ranges lie."""
        return self._layout(path)

    def open(self, path: str, file: Any, local: LocalFile | None) -> _TextRowGroups:
        """Open a file."""
        shown = self._files.manifest.full_path(path)
        listed = self._files.files[path].modified
        if local is not None and listed is not None and local.modified != listed:
            msg = f"{shown} was rewritten since it was listed"
            raise UnreadableFileError(msg)
        footer, stored = self._layout(path).footer, self._files.projection(path).stored
        parser = self._parser(footer.schema.names, stored)
        own = {column.name: column.type for column in footer.schema}
        widened = [
            column.name
            for column in stored
            if pa.types.is_floating(column.type) and pa.types.is_integer(own.get(column.name, pa.null()))
        ]
        return _TextRowGroups(shown, footer, parser, file, widened, is_local=local is not None)


@dataclass(frozen=True, slots=True)
class _TextRowGroups:
    """An open text file."""

    shown: str
    footer: TextFooter
    parser: Parser
    file: pa.NativeFile
    widened: Sequence[str]
    is_local: bool

    def read(self, number: int) -> pa.Table:
        table = self.parser.table(self._text(number))
        self._require_exact(table)
        return table

    def batches(self, number: int, rows: int, *, use_threads: bool) -> Iterator[pa.RecordBatch]:
        for batch in self.parser.batches(self._text(number), use_threads=use_threads):
            self._require_exact(batch)
            for first in range(0, batch.num_rows, rows):
                yield batch.slice(first, rows)

    def close(self) -> None:
        """Nothing is open but the file itself."""

    def _require_exact(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Raise where an integer, read as a float for other files' sake, may have become another number."""
        for name in self.widened:
            bounds = pc.min_max(rows[name])
            if any(abs(bound.as_py() or 0) >= LARGEST_EXACT for bound in bounds.values()):
                msg = (
                    f"{self.shown}: column {name!r} begins with integers here, and is of floats in the dataset, which "
                )
                msg += f"do not hold each integer of {LARGEST_EXACT} or more; its type may be told by format_options"
                raise UnreadableFileError(msg)

    def _text(self, number: int) -> Text:
        start, stop = (0, self.footer.size) if self.is_local else self.footer.ranges[number]
        self.file.seek(start)
        return range_of(self.shown, self.footer, number, self.file.read_buffer(stop - start))


def range_of(shown: str, footer: TextFooter, number: int, content: pa.Buffer) -> Text:
    """Return a range of a file.

    Args:
        shown: The file, for people.
        footer: What is known of it.
        number: The range.
        content: The whole file, or that range alone.
    """
    start, stop = footer.ranges[number]
    is_last = number == len(footer.ranges) - 1
    if content.size < footer.size:
        return Text(shown, content, footer.compression, start, None, is_last)
    return Text(shown, content.slice(start, stop - start), footer.compression, start, content.slice(0, start), is_last)
