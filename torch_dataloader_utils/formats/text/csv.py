"""CSV by pyarrow.csv: whole ranges with threads, or block by block. Errors name file and line."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from torch_dataloader_utils.columns.arrow import sliced
from torch_dataloader_utils.columns.arrow_memory import memory_pool
from torch_dataloader_utils.errors import ColumnError, nearest
from torch_dataloader_utils.formats.recognition import ENDINGS
from torch_dataloader_utils.formats.schema import FileSchema, unified
from torch_dataloader_utils.formats.text import csv_options
from torch_dataloader_utils.formats.text.csv_lines import LONGEST_HEADER, ZERO, CsvLines
from torch_dataloader_utils.formats.text.exact_integers import (
    DIGITS,
    are_large,
    bounds,
    integer_of,
    is_rounded,
    may_be_rounded,
    rounded,
)
from torch_dataloader_utils.formats.text.format import BLOCK_BYTES, Sample, TextFormat
from torch_dataloader_utils.formats.text.lines import CHUNK, Text, WatchedText, may_exceed, pieces
from torch_dataloader_utils.formats.text.shared_parsing import SharedParsing, piece_sizes
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.stored_file import StoredFile

UNCUTTABLE = ("escape_char", "newlines_in_values", "skip_rows", "skip_rows_after_names")
"""Options with which a line end may not end a row, or a file's first line may not be its beginning."""

SPELLINGS = ("null_values", "true_values", "false_values", "timestamp_parsers", "strings_can_be_null")
"""Options that say which values are spelled in which way."""

PARSED_TYPES = (
    pa.types.is_integer,
    pa.types.is_float32,
    pa.types.is_float64,
    pa.types.is_boolean,
    pa.types.is_date,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
)
"""Types of which a value is parsed, or is a text as it stands."""

LONG_INTEGER = rf"^\s*[-+]?[0-9]{{{DIGITS},}}\s*$"

LEAST_ASSUMED = 1 << 18
"""Bytes of a piece of text of which to assume that no null is spelled out: to check that of few takes longer."""


@dataclass(frozen=True)
class Csv(TextFormat):
    """Comma-separated values, as pyarrow.csv reads them."""

    name: ClassVar[str] = "csv"
    suffixes: ClassVar[tuple[str, ...]] = ENDINGS["csv"]
    types_option: ClassVar[str | None] = "column_types"

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", csv_options.checked(self.options))

    @property
    def head_bytes(self) -> int:
        """How much is looked at: pyarrow counts a block's bytes in UTF-8, of which other encodings may take more."""
        return super().head_bytes * csv_options.width_of(self.options)

    def needs_rows(self, schema: pa.Schema) -> bool:
        """Whether rows are skipped after the names, and tell types that the user has not given."""
        given = csv_options.column_types(self.options)
        return bool(self.options.get("skip_rows_after_names")) and any(name not in given for name in schema.names)

    def sample(self, file: str, content: bytes, *, is_all: bool) -> Sample:
        """Return the columns that pyarrow infers from the first block with rows."""
        is_ascii_like, end = csv_options.is_ascii_like(self.options), len(content)
        if is_all and is_ascii_like and not content.endswith((b"\n", b"\r")):
            content, end = content + b"\n", end + 1  # pyarrow does not see a header that has no line end
        elif not is_all and is_ascii_like:  # pyarrow parses the last line as well, where the first block has no row
            end = csv_options.end_of_lines(content, end) or end
        elif not is_all:
            content = csv_options.without_cut_line(content, self.options)
            end = len(content)
        text = Text(file, pa.py_buffer(content)[:end])  # without a copy: a large one takes longer than to look at it
        lines = CsvLines(self.options, partial(self._names, text))
        if is_ascii_like and (zero := content.find(0, 0, end)) >= 0:
            raise text.error(content.count(b"\n", 0, zero) + 1, ZERO)
        with lines.errors(text):
            block = text.content[: self._end_of_first_block(content, end, lines)]
            schema, rows = self._inferred(block)
            if not rows and block.size < end:
                schema, rows = self._inferred(text.content)
        given = csv_options.column_types(self.options)
        for column in schema:
            if pa.types.is_binary(column.type) and column.name not in given and self.options.get("check_utf8", True):
                as_text = CsvParser(self.options, schema.names, pa.schema([(column.name, pa.string())]))
                next(as_text.batches(text, use_threads=False), None)  # names the line that is not valid text
        return Sample(schema, rows, min(end, self.head_bytes // 2))

    def _end_of_first_block(self, content: bytes, end: int, lines: CsvLines) -> int:
        """Return where the whole lines of the first block end, or all content where a line end may not end a row.

        Given more than these lines, pyarrow would parse a second block before it returns what it infers of the first.
        """
        stop, quote = min(self.block_bytes, end), csv_options.quote_of(self.options)
        if not _is_cuttable(self.options):
            return end
        if quote and content.find(quote, 0, stop) >= 0:  # most have none, and to look is faster than to count
            header = lines.header(content[: LONGEST_HEADER + 1])
            if content.count(quote, 0, stop) > header.count(quote):
                return end
        return csv_options.end_of_lines(content, stop) or end

    def _inferred(self, content: pa.Buffer) -> tuple[pa.Schema, int]:
        """Return the columns that pyarrow infers from the first block with rows, and how many rows that has."""
        read = csv_options.read_options(self.options, use_threads=False)
        convert = csv_options.convert_options(self.options)
        reader = csv.open_csv(pa.BufferReader(content), read, self._parse_options(), convert)
        reader.schema.names  # noqa: B018 - they may be no text
        return reader.schema, next((batch.num_rows for batch in reader), 0)

    def _names(self, text: Text) -> list[str]:
        """Return the columns of a file, even if its values cannot be parsed."""
        unchecked = csv.ConvertOptions(column_types={}, check_utf8=False)
        reader = csv.open_csv(text.open(), csv_options.read_options(self.options), self._parse_options(), unchecked)
        return list(reader.schema.names)

    def _parse_options(self) -> csv.ParseOptions:
        """Return pyarrow's options for a file's beginning: skipped rows are whole ones, as where the file is read."""
        newlines = bool(self.options.get("skip_rows_after_names"))
        return csv_options.parse_options({"newlines_in_values": newlines, **self.options})

    def can_cut(self, storage: Storage, file: StoredFile, head: bytes) -> bool:
        """Whether no value can hold a line end, because no value is quoted."""
        if not _is_cuttable(self.options):
            return False
        quote = csv_options.quote_of(self.options)
        if not quote:
            return True
        if not storage.is_local:
            return False
        if quote in head:
            return False
        starts = range(len(head), file.size, CHUNK)
        return not any(quote in storage.read(file, start, min(file.size, start + CHUNK)) for start in starts)

    def unified(self, schemas: Sequence[FileSchema]) -> list[pa.Schema]:
        """Return each file's columns with the types of all files together.

        Columns without a value are strings, unless the user has given another type.
        """
        whole, given = unified(schemas), csv_options.column_types(self.options)
        for name in given:
            if name not in whole.schema.names:
                msg = f"format_options['column_types'] names {name!r}, which no file has"
                raise ColumnError(f"{msg}{nearest(name, whole.schema.names)}")
        typed = [column for column in whole.schema if column.name not in whole.problems]
        untyped = {column.name for column in typed if pa.types.is_null(column.type) and column.name not in given}
        types = {column.name: pa.string() if column.name in untyped else column.type for column in typed}
        return [
            pa.schema([column.with_type(types.get(column.name, column.type)) for column in file.schema])
            for file in schemas
        ]

    def counting_parser(self, names: Sequence[str]) -> CsvParser:
        """Return the parser that counts rows: every row is parsed, and its first column read as bytes."""
        return CsvParser(self.options, names, pa.schema([(names[0], pa.binary())]))

    def parser(self, names: Sequence[str], stored: pa.Schema, floats: Collection[str]) -> CsvParser:
        """Return the parser of a file's texts."""
        given = csv_options.column_types(self.options)
        own = [name for name in floats if name not in given and pa.types.is_floating(stored.field(name).type)]
        return CsvParser(self.options, names, stored, own)


def _is_cuttable(options: Mapping[str, Any]) -> bool:
    """Whether every line end ends a row where no value is quoted."""
    return csv_options.is_ascii_like(options) and not any(options.get(name) for name in UNCUTTABLE)


def _spelled_nulls_fail(options: Mapping[str, Any], columns: pa.Schema) -> bool:
    """Whether each value that is null by default, but the empty one, is an error or NaN where it is not known as null.

    In columns of text such a value is no null, unless the user wants that.
    """
    if any(options.get(name) is not None for name in SPELLINGS):
        return False
    return all(any(is_type(column.type) for is_type in PARSED_TYPES) for column in columns)


class _NotOfLinesError(Exception):
    """Not each line of a text is a row, as far as can be seen."""


class CsvParser:
    """Parses ranges of a file, whose columns are named, into rows of the needed columns.

    `floats` are those columns whose types were inferred to be floats.
    """

    def __init__(
        self, options: Mapping[str, Any], names: Sequence[str], stored: pa.Schema, floats: Collection[str] = ()
    ) -> None:
        self._options = options
        self._names = own_names = list(names)
        self._stored = stored
        self._floats = floats
        self._given_names = {"column_names": self._names, "autogenerate_column_names": False}
        self._block_bytes = int(options.get("block_size") or BLOCK_BYTES)
        self._lines = CsvLines(options, lambda: own_names)  # of `self` it would be a cycle
        # Without the name of a column pyarrow would read all columns.
        read = stored if len(stored) else pa.schema([(self._names[0], pa.binary())])
        types = {column.name: column.type for column in read}
        self._new_convert = partial(
            csv_options.convert_options, options, column_types=types, include_columns=read.names
        )
        self._convert = self._new_convert()
        self._may_assume_no_nulls = _spelled_nulls_fail(options, read)

    def tables(self, text: Text, shared: SharedParsing) -> Iterator[pa.Table]:
        """Yield the rows, piece by piece as long as each line is a row.

        What is wrong with a piece is found out from the whole text, which tells the line.
        """
        done = 0
        if text.compression is None and _is_cuttable(self._options) and not shared.quotes_values:
            try:
                for table in self._pieces(text, shared):
                    done += table.num_rows
                    yield table
            except (_NotOfLinesError, pa.ArrowException, UnicodeDecodeError):
                pass
            else:
                return
        yield sliced(self._table(text), done)

    def _pieces(self, text: Text, shared: SharedParsing) -> Iterator[pa.Table]:
        """Yield the rows of a text, piece by piece, up to a _NotOfLinesError where a line may not be a row."""
        parse = csv_options.parse_options(self._options)
        names = self._given_names if text.start else {}
        watched = WatchedText(text.open(), csv_options.quote_of(self._options))
        most_quotes, exact = self._quotes_of_header(text), set[str]()
        for piece in pieces(text.content, piece_sizes(text, self._block_bytes)):
            watched.watch(piece)
            if watched.quotes > most_quotes:
                shared.quotes_values = True
                raise _NotOfLinesError
            # pyarrow may refuse a line that is longer than a block: that depends on where its blocks begin.
            if watched.has_zeros or may_exceed(piece, self._block_bytes):
                raise _NotOfLinesError
            # Texts of less than a block take more time without Arrow's threads: seen with 400 files of 80 KB.
            use_threads = shared.uses_threads or piece.size < self._block_bytes
            read = csv_options.read_options(self._options, use_threads=use_threads, **names)
            table, doubtful = self._parsed(piece, read, parse, shared)
            self._require_exact(text, doubtful, exact)
            yield table.select(self._stored.names)
            names = self._given_names

    def _parsed(
        self, piece: pa.Buffer, read: csv.ReadOptions, parse: csv.ParseOptions, shared: SharedParsing
    ) -> tuple[pa.Table, set[str]]:
        """Return the rows of a piece, and their doubtful columns.

        First they are parsed as though no null were spelled out, which takes an eighth less time.
        """
        if self._may_assume_no_nulls and piece.size >= LEAST_ASSUMED and not shared.spells_nulls:
            convert = self._new_convert(null_values=[""])
            with contextlib.suppress(pa.ArrowInvalid):
                table = csv.read_csv(pa.BufferReader(piece), read, parse, convert, memory_pool=memory_pool())
                floats = (
                    name
                    for name, kind in zip(table.column_names, table.schema.types, strict=True)
                    if pa.types.is_floating(kind)
                )
                found = {name: bounds(table[name]) for name in floats}
                if not any(math.isnan(least) for least, _ in found.values()):
                    return table, {name for name in self._floats if are_large(*found[name])}
            shared.spells_nulls = True
        table = csv.read_csv(pa.BufferReader(piece), read, parse, self._convert, memory_pool=memory_pool())
        return table, self._doubtful(table)

    def _table(self, text: Text) -> pa.Table:
        """Return all rows."""
        watched = self._watched(text)
        with self._lines.errors(text, self._serially):
            stream = self._stream(text, watched)
            opened = text.open() if stream is None else _buffered(stream)
            table = csv.read_csv(opened, *self._settings(text, watched, stream), memory_pool=memory_pool())
        self._lines.require_sound(text, watched)
        self._require_exact(text, self._doubtful(table), set())
        return table.select(self._stored.names)

    def batches(self, text: Text, *, use_threads: bool) -> Iterator[pa.RecordBatch]:
        """Yield the rows, block by block."""
        watched = self._watched(text)
        with self._lines.errors(text, self._serially):
            stream = self._stream(text, watched)
            opened = text.open() if stream is None else _buffered(stream)
            reader = csv.open_csv(
                opened, *self._settings(text, watched, stream, use_threads=use_threads), memory_pool=memory_pool()
            )
            exact = set[str]()
            try:
                for batch in reader:
                    self._require_exact(text, self._doubtful(batch), exact)
                    yield batch.select(self._stored.names)
            finally:
                _read_no_more(reader, stream)
        self._lines.require_sound(text, watched)

    def _require_exact(self, text: Text, doubtful: set[str], exact: set[str]) -> None:
        """Raise if a float of these columns stands for an integer that it does not hold.

        `exact` are the columns of the whole text of which it is known that none does.
        """
        names = sorted(doubtful - exact)
        exact |= doubtful
        if not names:
            return
        as_text = CsvParser(self._options, self._names, pa.schema([(name, pa.string()) for name in names]))
        rows = 0
        for batch in as_text.batches(text, use_threads=False):
            for name in names:
                is_long = pc.match_substring_regex(batch[name], LONG_INTEGER).fill_null(False)  # noqa: FBT003
                for place in np.flatnonzero(is_long).tolist():
                    value = integer_of(batch[name][place].as_py())
                    if is_rounded(value):
                        line = self._lines.line_of_values(text, rows + place)
                        raise text.error(line, rounded(name, value, f"'column_types': {{{name!r}: ...}}"))
            rows += batch.num_rows

    def _doubtful(self, rows: pa.Table | pa.RecordBatch) -> set[str]:
        """Return the columns with floats so large that they may stand for integers which they do not hold."""
        return {name for name in self._floats if may_be_rounded(rows[name])}

    def _serially(self, text: Text) -> None:
        """Parse in a single thread: only then does pyarrow say which row is wrong."""
        for _ in csv.open_csv(text.open(), *self._settings(text, use_threads=False)):
            pass

    def _stream(self, text: Text, watched: WatchedText) -> WatchedText | None:
        """Return what a text is read from by calls of Python; None where pyarrow reads it from memory.

        That is a watched text where it has yet to be read, or else one that keeps line ends within quoted values whole.
        """
        if not csv_options.is_ascii_like(self._options):
            encoding = csv_options.encoding_of(self._options)
            return WatchedText(pa.transcoding_input_stream(text.open(), encoding, "utf8"), b"")
        if text.compression is not None:
            return watched
        if not self._may_hold_line_ends(text, watched) or not _splits_line_end(text.content, self._block_bytes):
            return None
        return WatchedText(text.open(), b"")

    def _settings(
        self,
        text: Text,
        watched: WatchedText | None = None,
        stream: WatchedText | None = None,
        *,
        use_threads: bool = True,
    ) -> tuple[csv.ReadOptions, csv.ParseOptions, csv.ConvertOptions]:
        """Return pyarrow's options for a text; only a text from the file's beginning has a header.

        Where no value holds a line end, pyarrow cuts a text into blocks in less time.
        """
        given: dict[str, Any] = dict(self._given_names if text.start else {})
        if stream is not None:
            given["encoding"] = "utf8"  # as which it is read
        newlines = not text.start and text.is_last and self._may_hold_line_ends(text, watched)
        parse = csv_options.parse_options({"newlines_in_values": newlines, **self._options})
        return csv_options.read_options(self._options, use_threads=use_threads, **given), parse, self._convert

    def _may_hold_line_ends(self, text: Text, watched: WatchedText | None) -> bool:
        """Whether a value of a text may hold a line end, as far as was seen of it."""
        if watched is None or text.compression is not None or not _is_cuttable(self._options):
            return True
        return watched.quotes > self._quotes_of_header(text)

    def _quotes_of_header(self, text: Text) -> int:
        header = self._lines.header(bytes(text.content[: LONGEST_HEADER + 1]))
        quote = csv_options.quote_of(self._options)
        return header.count(quote) if quote else 0

    def _watched(self, text: Text) -> WatchedText:
        """Return a text that is watched as it is read; one that is not compressed was read to its end already."""
        watched = WatchedText(text.open(), csv_options.quote_of(self._options))
        return watched if text.compression is not None else watched.watch(text.content)


def _splits_line_end(content: pa.Buffer, block_bytes: int) -> bool:
    """Whether a block of so many bytes ends between a carriage return and a line feed."""
    characters = np.frombuffer(content, dtype=np.uint8)
    begun = characters[block_bytes::block_bytes]
    before = characters[block_bytes - 1 :: block_bytes][: len(begun)]
    return bool(((before == ord("\r")) & (begun == ord("\n"))).any())


def _read_no_more(reader: csv.CSVStreamingReader, stream: WatchedText | None) -> None:
    """Wait until Arrow's thread, which reads ahead, has read the end.

    That thread calls Python if it reads from a stream. If it did so while the interpreter ends, the process would be
    aborted.
    """
    if stream is not None:
        stream.end()
        with contextlib.suppress(pa.ArrowException, OSError, StopIteration):
            while True:
                reader.read_next_batch()


def _buffered(stream: WatchedText) -> pa.NativeFile:
    """Return a stream for Arrow, which gets what a call reads at once, as a copy.

    Without the copy Arrow's threads would call Python to free it. With a buffer of one byte nothing is put together.
    """
    return pa.BufferedInputStream(pa.PythonFile(stream, mode="r"), 1)
