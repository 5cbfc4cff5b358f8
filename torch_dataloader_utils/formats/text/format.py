"""What CSV and JSON Lines share: reading a file's beginning, cutting files, counting rows.

Text has no footer. So a footer is made of what has to be known of a file without reading it again. Text is plain, or
compressed by gzip or zstd, which its first bytes show.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import pyarrow as pa

from torch_dataloader_utils.errors import UnreadableFileError, nearest
from torch_dataloader_utils.formats.base import (
    Codec,
    ColumnsToCount,
    Described,
    FilesToRead,
    Footer,
    Format,
    KnownFooters,
)
from torch_dataloader_utils.formats.concurrency import read_concurrently
from torch_dataloader_utils.formats.read_cache import FooterStore
from torch_dataloader_utils.formats.recognition import format_hint
from torch_dataloader_utils.formats.schema import FileSchema
from torch_dataloader_utils.formats.text.codec import Parser, TextCodec, range_of
from torch_dataloader_utils.formats.text.footer import DIGEST_BYTES, Cutting, TextFooter, cuts, digest_of
from torch_dataloader_utils.planning.manifest import TEXT, DataFile, RowGroup
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.listing import Listing
from torch_dataloader_utils.storage.stored_file import StoredFile

BLOCK_BYTES = 1 << 20
"""How much pyarrow parses at a time by default: columns are inferred from the first of these blocks."""

BOM = b"\xef\xbb\xbf"
"""The byte order mark that UTF-8 may begin with."""

SKIPPABLE = [bytes([number]) + b"\x2a\x4d\x18" for number in range(0x50, 0x60)]
"""How a frame begins that zstd skips: pzstd begins its files with one (RFC 8878, section 3.1.2)."""

MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", **dict.fromkeys(SKIPPABLE, "zstd")}
SUFFIXES = {".gz": "gzip", ".zst": "zstd"}

MOST_TEXT: dict[str | None, int] = {None: 1, "gzip": 1032, "zstd": 32768}
"""How many bytes of text a stored byte can hold, at most: it bounds the rows of a file whose rows are not counted.

Deflate: two bits for at most 258 bytes, which is 1032 to 1 (https://zlib.net/zlib_tech.html). Zstandard: a block of at
most 128 KiB from a header of three bytes and the byte that it repeats (RFC 8878, sections 3.1.1.2.2 and 3.1.1.2.4),
which is 32768 to 1.
"""

HEAD_CHUNK = 64 * 1024
"""Bytes that are decompressed together of a file's beginning: few, for its beginning may be all that is wanted."""

MOST_HEAD_BYTES = 1 << 28
"""How much of a file's beginning is looked at, at most, where rows are skipped: it is in memory."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a file's beginning shows: columns, how many rows it has, and how many bytes of text these have."""

    schema: pa.Schema
    rows: int
    bytes: int


@dataclass(frozen=True)
class TextFormat(Format):
    """A format of lines.

    Attributes:
        options: The user's options for pyarrow's parser.
        cutting: How finely large files are cut.
        counts: Whether rows are counted when the dataset is opened.
        blank: The characters of lines that are not rows.
    """

    blank: ClassVar[bytes] = b"\r\n"

    options: Mapping[str, Any]
    cutting: Cutting
    counts: bool

    @property
    def unknown_rows(self) -> str | None:
        """Why it is unknown how many rows the files have; None if they were counted."""
        if self.counts:
            return None
        return f"{self.name} files do not tell how many rows they have (count_rows=True counts them, once)"

    @property
    def options_digest(self) -> str | None:
        """Digest of the options and of whether rows are counted, because that changes what a state's numbers mean."""
        options = json.dumps({key: _plain(value) for key, value in sorted(self.options.items())})
        digest = hashlib.blake2b(options.encode(), digest_size=8).hexdigest()
        return f"{digest} counted" if self.counts else digest

    @property
    def block_bytes(self) -> int:
        """How much is parsed at a time."""
        return int(self.options.get("block_size") or BLOCK_BYTES)

    @property
    def head_bytes(self) -> int:
        """How much of a file's beginning is looked at: the first block, and what shows that others follow it."""
        return 2 * self.block_bytes

    def needs_rows(self, schema: pa.Schema) -> bool:  # noqa: ARG002 - of a format that needs them
        """Whether the first row, which may be far from a file's beginning, has to be found to know its columns."""
        return False

    @abstractmethod
    def sample(self, file: str, content: bytes, *, is_all: bool) -> Sample:
        """Return what the beginning of a file, or its whole text, shows. Messages name the file as given."""

    @abstractmethod
    def can_cut(self, storage: Storage, file: StoredFile, head: bytes) -> bool:
        """Whether every line end of a plain file, which begins with `head`, is the end of a row."""

    @abstractmethod
    def counting_parser(self, names: Sequence[str]) -> Parser:
        """Return a parser of texts of a file with these columns that keeps as little as counting rows needs."""

    @abstractmethod
    def parser(self, names: Sequence[str], stored: pa.Schema, floats: Collection[str]) -> Parser:
        """Return the parser of texts of a file with these columns, of which some are needed: see `MakeParser`."""

    @abstractmethod
    def unified(self, schemas: Sequence[FileSchema]) -> list[pa.Schema]:
        """Return the columns of each file, with the types that they are read in. No two of the schemas are equal."""

    def describe(
        self,
        storage: Storage,
        listing: Listing,
        known: KnownFooters | None,
        columns_to_count: ColumnsToCount,  # noqa: ARG002 - only reading shows nulls
    ) -> Described:
        """Read each file's beginning, cut the file and, if requested, count its rows; once."""
        files = listing.files
        if known is not None:
            footers = [self._known(storage, file, known.footers.get(file.path, b"")) for file in files]
        else:
            footers = list(read_concurrently(partial(self._read, storage), files, storage))
            if self.counts:
                footers = self._counted(storage, files, footers)
        self._require_shuffleable(storage, files, footers)
        columns = [footer.schema.serialize().to_pybytes() for footer in footers]
        distinct: dict[bytes, FileSchema] = {}
        for file, footer, key in zip(files, footers, columns, strict=True):
            distinct.setdefault(key, FileSchema(storage.display(file.location), footer.schema))
        schemas = dict(zip(distinct, self.unified(list(distinct.values())), strict=True))
        described = zip(files, footers, columns, strict=True)
        return Described([self._described(file, footer, schemas[key]) for file, footer, key in described])

    def codec(
        self,
        files: FilesToRead,
        footers: FooterStore,
        encodable: Collection[str] = (),  # noqa: ARG002 - these files have no dictionaries that could be kept
    ) -> Codec:
        """Return what opens files for one reader."""
        return TextCodec(files, footers, self.parser)

    # What a file is -------------------------------------------------------------------------------------------------

    @property
    def _made_by(self) -> str:
        """Digest of everything that a footer depends on."""
        return hashlib.blake2b(repr((self.name, self.options_digest, self.cutting)).encode(), digest_size=8).hexdigest()

    def _known(self, storage: Storage, file: StoredFile, content: bytes) -> TextFooter:
        try:
            footer = TextFooter.load(content)
        except (ValueError, KeyError, TypeError, pa.ArrowException):
            footer = None
        if footer is None or footer.size != file.size or footer.made_by != self._made_by:
            msg = f"the manifest says of {storage.display(file.location)} what was found with another format, other "
            msg += "format_options, count_rows, split_bytes or shuffle_buffer_size: open the dataset with those, or "
            msg += "without the manifest"
            raise ValueError(msg)
        return footer

    def _read(self, storage: Storage, file: StoredFile) -> TextFooter:
        """Return the footer of a file."""
        shown = storage.display(file.location)
        if not file.size:
            raise UnreadableFileError(f"{shown} is empty: it has not even a line of {self.name}")
        head = storage.read(file, 0, min(file.size, max(DIGEST_BYTES, self.head_bytes)))
        try:
            footer = self._footer(storage, file, head, self.head_bytes)
        except UnreadableFileError as error:
            hint = format_hint(file.path, self.name, begin=head)
            if not hint:
                raise
            raise UnreadableFileError(f"{error}{hint}") from None
        step = self.cutting.step(footer.row_bytes, counted=self.counts)
        if footer.compression is not None or file.size <= step or not self.can_cut(storage, file, head):
            return footer
        return replace(footer, starts=tuple(cuts(storage, file, step)))

    def _footer(self, storage: Storage, file: StoredFile, head: bytes, size: int) -> TextFooter:
        """Return what a file's beginning shows, as the footer of a file in one range. `size` is how much to look at."""
        shown = storage.display(file.location)
        compression = compression_of(head, shown)
        is_all = len(head) == file.size
        try:
            text, is_all, stored = decompressed_head(head, compression, size, is_all=is_all)
        except OSError as error:
            raise UnreadableFileError(f"{shown} is cut short or damaged: {error}") from None
        if not text.removeprefix(BOM).strip(self.blank):
            what = "is empty: it has not even" if is_all else f"begins with {len(text)} bytes without"
            raise UnreadableFileError(f"{shown} {what} a line of {self.name}")
        sample = self.sample(shown, text, is_all=is_all)
        if not sample.rows and not is_all and self.needs_rows(sample.schema):
            if size >= MOST_HEAD_BYTES:
                msg = f"{shown} begins with {len(text)} bytes of which format_options skip all rows, so the types of "
                msg += "its columns are not known: pass format_options={'column_types': {...}} with all of them"
                raise UnreadableFileError(msg)
            size *= 4
            return self._footer(storage, file, storage.read(file, 0, min(file.size, max(DIGEST_BYTES, size))), size)
        text_bytes = len(text) / max(1, stored)
        return TextFooter(
            made_by=self._made_by,
            digest=digest_of(storage, file, head),
            size=file.size,
            schema=sample.schema,
            compression=compression,
            starts=() if is_all and not sample.rows else (0,),
            row_bytes=max(1e-6, sample.bytes / max(1, sample.rows) / text_bytes),
            text_bytes=text_bytes,
        )

    def _counted(
        self, storage: Storage, files: Sequence[StoredFile], footers: Sequence[TextFooter]
    ) -> list[TextFooter]:
        """Count the rows of all ranges of all files."""
        described = zip(files, footers, strict=True)
        ranges = [(file, footer, number) for file, footer in described for number in range(len(footer.ranges))]

        def count(part: tuple[StoredFile, TextFooter, int]) -> int:
            file, footer, number = part
            shown = storage.display(file.location)
            parser = self.counting_parser(footer.schema.names)

            def rows_in(content: pa.Buffer) -> int:
                text = range_of(shown, footer, number, content)
                return sum(batch.num_rows for batch in parser.batches(text, use_threads=False))

            with storage.errors(file.location):
                if storage.maps(file):
                    mapped = storage.open_mapped(file)
                    rows = rows_in(mapped.file.read_buffer(mapped.size))
                    mapped.require_unchanged()
                    return rows
                start, stop = footer.ranges[number]
                content = pa.py_buffer(storage.read(file, start, stop))
                if content.size != stop - start:
                    msg = f"{shown} changed since it was listed: {content.size} bytes came back of {stop - start}"
                    raise UnreadableFileError(msg)
                return rows_in(content)

        counted = read_concurrently(count, ranges, storage)
        return [replace(footer, rows=tuple(next(counted) for _ in footer.ranges)) for footer in footers]

    def _require_shuffleable(
        self, storage: Storage, files: Sequence[StoredFile], footers: Sequence[TextFooter]
    ) -> None:
        """Raise if uncounted rows cannot be shuffled: each range is shuffled whole, so it must fit into the buffer."""
        most = self.cutting.buffer_rows
        if most is None or self.counts:
            return
        for file, footer in zip(files, footers, strict=True):
            if len(footer.ranges) != 1:
                continue
            (start, stop), rows = footer.ranges[0], footer.expected_rows[0]
            is_large = rows > 1 and (stop - start) * footer.text_bytes > self.cutting.split_bytes
            if rows > most or is_large:
                msg = f"{storage.display(file.location)} has about {rows} rows and cannot be cut (it is compressed, or "
                msg += f"may hold quoted line ends): to shuffle its rows with shuffle_buffer_size={most} and "
                msg += f"split_bytes={self.cutting.split_bytes}, pass count_rows=True"
                raise ValueError(msg)

    def _described(self, file: StoredFile, footer: TextFooter, schema: pa.Schema) -> Footer:
        groups = tuple(self._row_groups(footer))
        content = DataFile(file.path, file.size, TEXT + footer.digest, groups, file.etag, file.modified)
        return Footer(content, schema, (), footer.dump())

    def _row_groups(self, footer: TextFooter) -> Iterator[RowGroup]:
        """Yield the ranges. Where rows are not counted, a range has as many as its text can have bytes."""
        for (start, stop), expected in zip(footer.ranges, footer.expected_rows, strict=True):
            size = max(1, int((stop - start) * footer.text_bytes))
            if footer.rows is not None:
                yield RowGroup(expected, size)
                continue
            most = MOST_TEXT[footer.compression] * (stop - start)
            rows = min(expected, most)
            if self.cutting.buffer_rows is not None:  # only rounds could shuffle more, and they need the number of rows
                rows, size = min(rows, self.cutting.buffer_rows), min(size, self.cutting.split_bytes)
            yield RowGroup(most, size, rows)


def _plain(value: Any) -> Any:
    """Return an option's value as JSON can hold it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in sorted(value.items())}
    if isinstance(value, pa.Schema):
        return [[column.name, str(column.type)] for column in value]
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)


def require_known_options(options: Iterable[str], known: Sequence[str], ours: Mapping[str, str], format_: str) -> None:
    """Raise if users cannot set an option, which `ours` gives the reason for, or there is no such option."""
    for name in options:
        if name in ours:
            raise ValueError(f"format_options[{name!r}] cannot be set: {ours[name]}")
        if name not in known:
            raise ValueError(f"format_options has no {name!r} for {format_}{nearest(name, known)}")


def compression_of(head: bytes, name: str) -> str | None:
    """Return how a file is compressed, by its first bytes; None if it is not.

    Raises:
        UnreadableFileError: If the name says that it is compressed, and it is not.
    """
    found = next((known for magic, known in MAGIC.items() if head.startswith(magic)), None)
    claimed = next((known for suffix, known in SUFFIXES.items() if name.lower().endswith(suffix)), None)
    if claimed not in (None, found):
        raise UnreadableFileError(f"{name} is no {claimed} file: it begins with {head[:4]!r}")
    return found


def decompressed_head(head: bytes, compression: str | None, size: int, *, is_all: bool) -> tuple[bytes, bool, int]:
    """Return the beginning of a text, of about `size` bytes.

    `head` is the file's first bytes; `is_all` says that it is the whole file.

    Returns:
        The text, whether it is the whole text, and about how many stored bytes it took.
    """
    if compression is None:
        return head[:size], is_all and len(head) <= size, min(size, len(head))
    raw = pa.BufferReader(head)
    stream = pa.CompressedInputStream(raw, compression)
    parts, length = [], 0
    try:
        while length < size and (part := stream.read(HEAD_CHUNK)):
            parts.append(part)
            length += len(part)
    except OSError:
        if is_all:
            raise
        return b"".join(parts), False, len(head)
    return b"".join(parts), is_all and length < size, raw.tell()
