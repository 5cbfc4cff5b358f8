"""Stored text: plain, or compressed by gzip or zstd, which its first bytes show.

The largest ratio of compression bounds the rows of a file whose rows are not counted. Deflate: two bits for at most
258 bytes, which is 1032 to 1 (https://zlib.net/zlib_tech.html). Zstandard: a block of at most 128 KiB from a header of
three bytes and the byte that it repeats (RFC 8878, sections 3.1.1.2.2 and 3.1.1.2.4), which is 32768 to 1.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import pyarrow as pa

from torch_dataloader_utils.errors import UnreadableFileError

__all__ = ["MOST_TEXT", "Decompressed", "compression_of", "decompressed_head", "opened"]

MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}

SUFFIXES = {".gz": "gzip", ".zst": "zstd"}

MOST_TEXT: dict[str | None, int] = {None: 1, "gzip": 1032, "zstd": 32768}
"""How many bytes of text a stored byte can hold, at most."""

CHUNK = 64 * 1024


def compression_of(head: bytes, name: str) -> str | None:
    """Return how a file is compressed; None if it is not.

    Args:
        head: Its first bytes.
        name: Its name, as messages have it.

    Raises:
        UnreadableFileError: If the name says that it is compressed, and it is not.
    """
    found = next((known for magic, known in MAGIC.items() if head.startswith(magic)), None)
    claimed = next((known for suffix, known in SUFFIXES.items() if name.lower().endswith(suffix)), None)
    if claimed not in (None, found):
        msg = f"{name} is no {claimed} file: it begins with {head[:4]!r}"
        raise UnreadableFileError(msg)
    return found


def opened(content: pa.Buffer, compression: str | None) -> pa.NativeFile:
    """Open stored bytes as text. Reading a truncated stream is an OSError."""
    reader = pa.BufferReader(content)
    return reader if compression is None else pa.CompressedInputStream(reader, compression)


def decompressed_head(head: bytes, compression: str | None, size: int, *, is_all: bool) -> tuple[bytes, bool, int]:
    """Return the beginning of a text.

    Args:
        head: The file's first bytes.
        compression: How it is compressed, or None.
        size: How many bytes of text to return.
        is_all: Whether `head` is the whole file.

    Returns:
        The text, whether it is the whole text, and about how many stored bytes it took.
    """
    if compression is None:
        return head[:size], is_all and len(head) <= size, min(size, len(head))
    raw = pa.BufferReader(head)
    stream = pa.CompressedInputStream(raw, compression)
    parts, length = [], 0
    try:
        while length < size and (part := stream.read(CHUNK)):
            parts.append(part)
            length += len(part)
    except OSError:
        if is_all:
            raise
        return b"".join(parts), False, len(head)
    return b"".join(parts), is_all and length < size, raw.tell()


class Decompressed(io.RawIOBase):
    """A text that is decompressed as it is read; notes which bytes it has.

    Args:
        stream: The text.
        quote: A character to count; empty for none.
    """

    def __init__(self, stream: pa.NativeFile, quote: bytes) -> None:
        self._stream = stream
        self._quote = quote
        self.quotes = 0
        self.has_zeros = False

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Read bytes."""
        content: bytes = self._stream.read(size if size >= 0 else None)
        self.quotes += content.count(self._quote) if self._quote else 0
        self.has_zeros = self.has_zeros or 0 in content
        return content

    def chunks(self, size: int) -> Iterator[bytes]:
        """Yield all of it."""
        while content := self.read(size):
            yield content
