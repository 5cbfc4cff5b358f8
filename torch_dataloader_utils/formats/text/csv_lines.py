"""The lines of CSV: which line a row begins in, and what is wrong with it. Knows quoted line ends."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa

from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.formats.text import csv_options
from torch_dataloader_utils.formats.text.format import BLOCK_BYTES
from torch_dataloader_utils.formats.text.lines import Text, WatchedText

LONGEST_HEADER = 1 << 16
"""Bytes of a first line in which names may be quoted, as pyarrow and others write them."""

ZERO = "holds a zero byte: the file is damaged, or no text"
NOT_CLOSED = "a quoted value is not closed: the file is cut short, or a quote is too many"

MESSAGE = re.compile(
    r"(?:In CSV column #(?P<column>\d+): )?(?:CSV parse error: )?(?:Row #(?P<row>\d+): )?(?P<what>.*)", re.DOTALL
)
"""pyarrow's message for a text that it cannot parse."""


class CsvLines:
    """Finds the lines of rows; knows quoted line ends. `names` returns the file's columns."""

    def __init__(self, options: Mapping[str, Any], names: Callable[[], Sequence[str]]) -> None:
        self._options = options
        self._names = names
        self._quote = csv_options.quote_of(options)
        self._delimiter = str(options.get("delimiter") or ",").encode()
        escape = options.get("escape_char") or ""
        self._escaped = re.compile(re.escape(str(escape).encode()) + b".", re.DOTALL) if escape else None

    @contextlib.contextmanager
    def errors(self, text: Text, again: Callable[[Text], None] | None = None) -> Iterator[None]:
        """Turn pyarrow's errors into errors that name file and line.

        `again` parses the text again, so that pyarrow says which row is wrong; None where it says so in any case.
        """
        try:
            yield
        except pa.ArrowInvalid as error:
            raise self._located(text, error, again) from None
        except pa.ArrowNotImplementedError as error:
            raise text.error(None, f"format_options['column_types'] has a type that is not parsed: {error}") from None
        except pa.ArrowKeyError as error:
            raise text.error(None, f"its columns differ from those that it was listed with: {error}") from None
        except UnicodeDecodeError as error:
            what = f"the name of a column, or a value, is not valid {error.encoding}: {error.reason}"
            raise text.error(None, f"{what}; set the encoding by format_options={{'encoding': ...}}") from None
        except OSError as error:
            raise text.error(None, f"it is cut short or damaged: {error}") from None

    def _located(self, text: Text, error: Exception, again: Callable[[Text], None] | None) -> UnreadableFileError:
        if "straddling object" in str(error):
            return self._too_long(text)
        if str(error).startswith("Could not skip"):
            what = "format_options['skip_rows'] skips more lines than the file has, or than are parsed at a time: "
            return text.error(None, f"{what}pass format_options={{'block_size': ...}} in bytes, more than they take")
        found = MESSAGE.fullmatch(str(error))
        if again is not None and (found is None or found["row"] is None):
            try:
                again(text)
            except pa.ArrowInvalid as detailed:
                found = MESSAGE.fullmatch(str(detailed)) or found
        what = str(error) if found is None else found["what"]
        if found is not None and found["column"] is not None:
            column = self._names()[int(found["column"])]
            advice = "'encoding': ..." if "UTF8" in what else f"'column_types': {{{column!r}: ...}}"
            what = f"column {column!r}: {what}; set it by format_options={{{advice}}}"
        row = found["row"] if found is not None else None
        return text.error(None if row is None else self.line_of(text, int(row)), what)

    def _too_long(self, text: Text) -> UnreadableFileError:
        """Return the error of a row that is longer than a block. A line that is longer is not read to its end."""
        size = int(self._options.get("block_size") or BLOCK_BYTES)
        begin, inside, long = 0, False, None
        skipped = self._skipped(text)
        for number, line in enumerate(self._plain_lines(text, size), 1):
            begin = begin if inside else number
            if len(line) > size:
                long, inside = begin, False
                break
            inside = number > skipped and self._ends_inside(line, inside=inside)
        if inside:
            return text.error(begin, NOT_CLOSED)
        what = "a row is longer than what is parsed at a time: pass format_options={'block_size': ...} in bytes"
        return text.error(long, what)

    def require_sound(self, text: Text, watched: WatchedText) -> None:
        """Raise if a text holds zero bytes, or ends within a quoted value: pyarrow accepts both."""
        if not csv_options.is_ascii_like(self._options):
            return
        if watched.has_zeros:
            line = next(number for number, line in enumerate(text.lines(), 1) if 0 in line)
            raise text.error(line, ZERO)
        quotes = watched.quotes
        if quotes:
            quotes -= sum(line.count(self._quote) for line in islice(self._plain_lines(text), self._skipped(text)))
        opened = self._left_open(text) if quotes % 2 else None
        if opened is not None:
            raise text.error(opened, NOT_CLOSED)

    def header(self, content: bytes) -> bytes:
        """Return the first line of a text, unless it has more than `LONGEST_HEADER` bytes, or a value goes on after it.

        One byte more than those is enough of the text.
        """
        line, end, _ = content.partition(b"\n")
        if not end or len(line) > LONGEST_HEADER or b"\r" in line[:-1] or self._ends_inside(line, inside=False):
            return b""
        return line

    def line_of(self, text: Text, row: int) -> int | None:
        """Return the line that a row begins in, both counted from 1, with the header and skipped lines."""
        rows, inside = 0, False
        skipped = self._skipped(text)
        takes_empty = self._options.get("ignore_empty_lines") is False
        for number, line in enumerate(self._plain_lines(text), 1):
            is_skipped = number <= skipped
            rows += is_skipped or (not inside and (takes_empty or bool(line.strip(b"\r\n"))))
            if rows == row:
                return number
            inside = not is_skipped and self._ends_inside(line, inside=inside)
        return None

    def line_of_values(self, text: Text, number: int) -> int | None:
        """Return the line that a row begins in. Rows are counted from 0, without a header and what is skipped."""
        before = 0
        if not text.start:
            has_header = not self._options.get("column_names") and not self._options.get("autogenerate_column_names")
            before = self._skipped(text) + has_header + int(self._options.get("skip_rows_after_names") or 0)
        return self.line_of(text, before + number + 1)

    def _left_open(self, text: Text) -> int | None:
        """Return the line of the value that the text ends within; None if it does not end within a value."""
        begin, inside = 0, False
        skipped = self._skipped(text)
        for number, line in enumerate(self._plain_lines(text), 1):
            begin = begin if inside else number
            inside = number > skipped and self._ends_inside(line, inside=inside)
        return begin if inside else None

    def _skipped(self, text: Text) -> int:
        """Return how many lines are skipped at the beginning, whatever they hold."""
        return 0 if text.start else int(self._options.get("skip_rows") or 0)

    def _plain_lines(self, text: Text, longest: int | None = None) -> Iterable[bytes]:
        if csv_options.is_ascii_like(self._options):
            return text.lines(longest)
        content = text.open().read().decode(csv_options.encoding_of(self._options), errors="replace")
        return [line.encode() for line in content.splitlines(keepends=True)]

    def _ends_inside(self, line: bytes, *, inside: bool) -> bool:
        """Whether a quoted value continues after a line. As in pyarrow, a quote opens a value only at its beginning."""
        if not self._quote or (not inside and self._quote not in line):
            return False
        if self._escaped is not None:
            line = self._escaped.sub(b"xx", line)
        doubled = self._quote * 2 if self._options.get("double_quote", True) else None
        position = 0
        if not inside:
            inside = line.startswith(self._quote)
            position = len(self._quote) if inside else 0
        while True:
            if inside:
                position = line.find(self._quote, position)
                if position < 0:
                    return True
                if doubled and line.startswith(doubled, position):
                    position += len(doubled)
                    continue
                position += len(self._quote)
            position = line.find(self._delimiter, position)
            if position < 0:
                return False
            position += len(self._delimiter)
            inside = line.startswith(self._quote, position)
            position += len(self._quote) if inside else 0
