"""What is known of a text file once its beginning was read, in place of the footer that it does not have.

Its ranges, cut at line ends; the columns that its beginning shows; the rows of each range, if they are counted.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property

import pyarrow as pa

from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.stored_file import StoredFile

DIGEST_BYTES = 64 * 1024
"""How much of a file's beginning, and of its end, identifies its content."""

LARGEST_RANGE = 16 << 20
"""Larger files are cut, so that several workers share a file and little is read again after a resume."""

SMALLEST_RANGE = 64 * 1024
"""Row-level shuffle cuts files no finer than this, unless the buffer holds fewer rows than such a range."""

RANGES_OF_A_BUFFER = 8


@dataclass(frozen=True)
class TextFooter:
    """What is known of a file once its beginning was read.

    Attributes:
        made_by: Digest of the options that it depends on.
        digest: Digest of the file's first and last bytes.
        schema: The columns that its beginning shows.
        starts: Where its ranges begin.
        row_bytes: About how many stored bytes a row takes.
        text_bytes: About how many bytes of text a stored byte holds.
        rows: The rows of each range, if they are counted.
    """

    made_by: str
    digest: str
    size: int
    schema: pa.Schema
    compression: str | None
    starts: tuple[int, ...]
    row_bytes: float
    text_bytes: float
    rows: tuple[int, ...] | None = None

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Where each range begins and ends; empty if the file has no row."""
        return tuple(zip(self.starts, (*self.starts[1:], self.size), strict=False))

    @cached_property
    def expected_rows(self) -> tuple[int, ...]:
        """The rows of each range, or about how many they are."""
        if self.rows is not None:
            return self.rows
        return tuple(max(1, round((stop - start) / self.row_bytes)) for start, stop in self.ranges)

    def dump(self) -> bytes:
        """Return it as bytes."""
        schema = base64.b64encode(self.schema.serialize().to_pybytes()).decode()
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps({**values, "schema": schema}).encode()

    @classmethod
    def load(cls, content: bytes) -> TextFooter:
        """Return what `dump` made bytes of."""
        values = json.loads(content)
        values["schema"] = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(values["schema"])))
        values["starts"] = tuple(values["starts"])
        values["rows"] = None if values["rows"] is None else tuple(values["rows"])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Cutting:
    """How finely large files are cut: by the bytes of a shard, and the rows that are shuffled together, at most.

    `buffer_rows` is None without row-level shuffle.
    """

    split_bytes: int
    buffer_rows: int | None = None

    def step(self, row_bytes: float, *, counted: bool) -> int:
        """Return about how many bytes a range of a file has.

        A range whose rows are not counted cannot be divided into rounds. So, for row-level shuffle, a buffer must hold
        several whole ranges.
        """
        step = min(self.split_bytes, LARGEST_RANGE)
        if self.buffer_rows is not None and not counted:
            buffer = self.buffer_rows * row_bytes
            fine = max(buffer / RANGES_OF_A_BUFFER, min(SMALLEST_RANGE, buffer / 2))
            step = min(self.split_bytes // 2, step, int(fine))
        return max(1, step)


def digest_of(storage: Storage, file: StoredFile, head: bytes) -> str:
    """Return a digest of a file's first and last bytes, 16 hexadecimal characters."""
    begin = max(0, file.size - DIGEST_BYTES)
    tail = head[begin:] if len(head) == file.size else storage.read(file, begin, file.size)
    return hashlib.blake2b(head[:DIGEST_BYTES] + tail, digest_size=8).hexdigest()


def cuts(storage: Storage, file: StoredFile, step: int) -> Iterator[int]:
    """Yield where the ranges of a file begin: each after the first line end at or after a multiple of the step."""
    last = 0
    yield 0
    for wanted in range(step, file.size, step):
        if wanted <= last:
            continue
        last = _line_end(storage, file, wanted - 1)
        if last >= file.size:
            return
        yield last


def _line_end(storage: Storage, file: StoredFile, begin: int) -> int:
    """Return the offset after the first line end at or after another offset; the file's end if there is none."""
    while begin < file.size:
        content = storage.read(file, begin, min(file.size, begin + DIGEST_BYTES))
        found = content.find(b"\n")
        if found >= 0:
            return begin + found + 1
        if not content:
            break
        begin += len(content)
    return file.size
