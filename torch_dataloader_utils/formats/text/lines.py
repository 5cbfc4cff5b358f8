"""Ranges of whole lines of a text, and errors that name file and line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.formats.text.compression import opened

__all__ = ["Text"]

CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Text:
    """A range of lines of a file, or all of it.

    Attributes:
        file: The file, as messages name it.
        content: The stored bytes.
        compression: How they are compressed, or None.
        start: Where they begin in the file.
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
        """Open it for reading."""
        return opened(self.content, self.compression)

    def chunks(self) -> Iterator[bytes]:
        """Yield its bytes."""
        with self.open() as stream:
            while content := stream.read(CHUNK):
                yield content

    def lines(self) -> Iterator[bytes]:
        """Yield its lines, each with its end."""
        rest = b""
        for content in self.chunks():
            *lines, rest = (rest + content).split(b"\n")
            yield from (line + b"\n" for line in lines)
        if rest:
            yield rest

    def error(self, line: int | None, what: str) -> UnreadableFileError:
        """Return the error that says what is wrong with a line, counted from 1 at the text's beginning."""
        if line is None:
            return UnreadableFileError(f"{self.file}: {what}")
        if self.start and self.before is None:
            return UnreadableFileError(f"{self.file}, line {line} after byte {self.start}: {what}")
        if self.before is not None:
            with pa.BufferReader(self.before) as before:
                while content := before.read(CHUNK):
                    line += content.count(b"\n")
        return UnreadableFileError(f"{self.file}, line {line}: {what}")
