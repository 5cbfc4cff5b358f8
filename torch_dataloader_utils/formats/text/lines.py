"""Ranges of whole lines of a text, and errors that name file and line."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from torch_dataloader_utils.errors import UnreadableFileError

CHUNK = 1 << 20
"""Bytes of a text that are looked at together."""

SCANNED = 1 << 18
"""Bytes of a text that are scanned together: few, so that they are in the processor's cache."""

LINE_BYTES = 1 << 12
"""Bytes of a text in which the end of a line is looked for at a time."""

MOST_SHOWN = 500
"""How many characters of what is wrong a message shows."""


@dataclass(frozen=True, slots=True)
class Text:
    """A range of lines of a file, or all of it: the stored bytes, and where they begin.

    Attributes:
        file: The file, as messages name it.
        before: The bytes before them, if they are in memory: errors count their lines.
        is_last: Whether nothing follows them in the file.
    """

    file: str
    content: pa.Buffer
    compression: str | None = None
    start: int = 0
    before: pa.Buffer | None = None
    is_last: bool = True

    def open(self) -> pa.NativeFile:
        """Open it for reading. Reading a truncated stream is an OSError."""
        reader = pa.BufferReader(self.content)
        return reader if self.compression is None else pa.CompressedInputStream(reader, self.compression)

    def lines(self, longest: int | None = None) -> Iterator[bytes]:
        """Yield its lines, each with its end. Of the first that is longer than `longest` the end may be missing."""
        parts: list[bytes] = []  # of the line that has begun
        length = 0
        with self.open() as stream:
            while (longest is None or length <= longest) and (content := stream.read(CHUNK)):
                *lines, rest = content.split(b"\n")
                for line in lines:
                    yield b"".join([*parts, line, b"\n"])
                    parts, length = [], 0
                parts.append(rest)
                length += len(rest)
        if length:
            yield b"".join(parts)

    def error(self, line: int | None, what: str) -> UnreadableFileError:
        """Return the error that says what is wrong with a line, counted from 1 at the text's beginning."""
        if len(what) > MOST_SHOWN:  # both ends: the last words may say what to do
            what = f"{what[: MOST_SHOWN // 2]} ... {what[-MOST_SHOWN // 2 :]}"
        if line is None:
            return UnreadableFileError(f"{self.file}: {what}")
        if self.start and self.before is None:
            return UnreadableFileError(f"{self.file}, line {line} after byte {self.start}: {what}")
        if self.before is not None:
            line += line_ends(self.before)
        return UnreadableFileError(f"{self.file}, line {line}: {what}")


def line_ends(content: pa.Buffer) -> int:
    """Return how many lines end in some bytes."""
    count = 0
    with pa.BufferReader(content) as reader:
        while part := reader.read(CHUNK):
            count += part.count(b"\n")
    return count


def last_line_end(content: pa.Buffer, start: int, stop: int) -> int:
    """Return where the last line that ends within a part of some bytes ends; the part's start if none does."""
    while stop > start:
        first = max(start, stop - LINE_BYTES)
        found = bytes(content[first:stop]).rfind(b"\n")
        if found >= 0:
            return first + found + 1
        stop = first
    return start


def may_exceed(content: pa.Buffer, size: int) -> bool:
    """Whether a line of plain text may have more bytes than a size: it would hold one of these windows without its end.

    False is certain.
    """
    step = max(1, size // 2)
    return any(_goes_on(content, start, start + step) for start in range(0, content.size - step + 1, step))


def _goes_on(content: pa.Buffer, start: int, stop: int) -> bool:
    """Whether no line ends within a part of some bytes."""
    parts = range(start, stop, LINE_BYTES)
    return not any(b"\n" in bytes(content[first : min(stop, first + LINE_BYTES)]) for first in parts)


def pieces(content: pa.Buffer, sizes: Iterator[int]) -> Iterator[pa.Buffer]:
    """Yield plain text in pieces of whole lines, of about a size each. The last one is not much smaller.

    A piece is longer if no line ends within it.
    """
    start = 0
    while start < content.size:
        size = next(sizes)
        stop = content.size
        if start + size + size // 2 < stop:
            stop = last_line_end(content, start, start + size)
            stop = stop if stop > start else content.size
        yield content.slice(start, stop - start)
        start = stop


class WatchedText(io.RawIOBase):
    """A text as it is read; counts a character, unless that is empty, and notes whether there are zero bytes.

    What is read at once never ends between a carriage return and a line feed, however much is asked for: pyarrow's
    parser of CSV drops a line feed at the beginning of such a block, also that of a quoted value (seen in 26.0).
    """

    def __init__(self, stream: pa.NativeFile, quote: bytes) -> None:
        self._stream = stream
        self._quote = quote
        self.quotes = 0
        self.has_zeros = False
        self._has_ended = False
        self._kept = b""

    def end(self) -> None:
        """Let it end here: who reads gets nothing more."""
        self._has_ended = True

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Read bytes."""
        if self._has_ended:
            return b""
        content: bytes = self._kept + self._stream.read(max(0, size - len(self._kept)) if size >= 0 else None)
        self._kept = b""
        if len(content) > 1 and content.endswith(b"\r"):
            following = self._stream.read(1)
            if following == b"\n":
                content, self._kept = content[:-1], b"\r\n"
            else:
                self._kept = following
        if 0 <= size < len(content):
            content, self._kept = content[:size], content[size:] + self._kept
        self._watch(content, len(content))
        return content

    def watch(self, content: pa.Buffer) -> WatchedText:
        """Take note of the next bytes of a text without reading them, and return this.

        The interpreter is held meanwhile: to take it back for each part takes longer, where other threads run Python.
        """
        whole, part = memoryview(content), bytearray(min(SCANNED, content.size))
        for start in range(0, len(whole), SCANNED):
            size = min(SCANNED, len(whole) - start)
            part[:size] = whole[start : start + size]
            self._watch(part, size)
        return self

    def _watch(self, content: bytes | bytearray, size: int) -> None:
        """Take note of the first bytes."""
        if self._quote and content.find(self._quote, 0, size) >= 0:  # most have none, and to look is faster
            self.quotes += content.count(self._quote, 0, size)
        self.has_zeros = self.has_zeros or content.find(0, 0, size) >= 0
