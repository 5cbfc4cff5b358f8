"""What CSV and JSON Lines share: what a file's beginning says, where it is cut, rows counted or not, lines in errors.

Text has no footer. So one is made of what it takes to know a file without reading it again: its ranges, cut at line
ends, the columns that its beginning shows, and the rows of each range where they are counted.
"""

from __future__ import annotations

import base64
import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.formats.compression import (
    MOST_TEXT,
    compression_of,
    decompressed_head,
    opened,
)
from torch_dataloader_utils.formats.fetching import OPEN_FILES
from torch_dataloader_utils.formats.layout import width
from torch_dataloader_utils.formats.projections import FileSchema
from torch_dataloader_utils.formats.source import (
    Codec,
    Described,
    Footer,
    Format,
    KnownFooters,
    Layout,
    Measures,
    Source,
)
from torch_dataloader_utils.listing import Listing
from torch_dataloader_utils.model import TEXT, DataFile, RowGroup
from torch_dataloader_utils.storage import LocalFile, Storage, StoredFile

__all__ = ["Cutting", "Parser", "Sample", "Text", "TextFormat"]

T = TypeVar("T")
U = TypeVar("U")

BLOCK_BYTES = 1 << 20
"""How much pyarrow parses at a time unless told otherwise: columns are inferred from the first of these blocks."""

LARGEST_RANGE = 16 << 20
"""Files larger than this are cut, so that several workers share one and little is read again after a resume."""

SMALLEST_RANGE = 64 * 1024
"""Files are cut no finer for the sake of mixing rows, unless the buffer holds fewer rows than such a range."""

RANGES_OF_A_BUFFER = 8
DIGEST_BYTES = 64 * 1024
FILES_AT_ONCE = 16
"""How many files are looked at side by side where the storage does not answer at once."""

CHUNK = 1 << 20


# A text and what is wrong with it ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """A range of lines of a file, or all of it.

    Attributes:
        file: The file, for people.
        content: The stored bytes.
        compression: How they are compressed, or None.
        start: Where they begin in the file.
        before: The bytes before them, where they are at hand: for the numbers of lines in errors.
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
        """Return the error that says what is wrong with a line, counted from 1 at the beginning of this text."""
        if line is None:
            return UnreadableFileError(f"{self.file}: {what}")
        if self.start and self.before is None:
            return UnreadableFileError(f"{self.file}, line {line} after byte {self.start}: {what}")
        if self.before is not None:
            parts = range(0, self.before.size, CHUNK)
            line += sum(self.before.slice(first, CHUNK).to_pybytes().count(b"\n") for first in parts)
        return UnreadableFileError(f"{self.file}, line {line}: {what}")


@dataclass(frozen=True, slots=True)
class Sample:
    """What a file's beginning shows.

    Attributes:
        schema: Its columns.
        rows: The rows it has.
        bytes: The bytes of text that these are.
    """

    schema: pa.Schema
    rows: int
    bytes: int


class Parser(Protocol):
    """Makes rows of texts of one file. Whatever is wrong is an UnreadableFileError with file and line."""

    def table(self, text: Text) -> pa.Table:
        """Return all rows."""

    def batches(self, text: Text, *, use_threads: bool) -> Iterator[pa.RecordBatch]:
        """Yield the rows, block by block."""


# A footer ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextFooter:
    """What is known of a file once its beginning was read.

    Attributes:
        made_by: Digest of the options that it depends on.
        digest: Digest of the file's first and last bytes.
        size: The file's size.
        schema: The columns that its beginning shows.
        compression: How it is compressed, or None.
        starts: Where its ranges begin.
        row_bytes: About how many stored bytes a row takes.
        text_bytes: About how many bytes of text a stored byte is.
        rows: The rows of each range, where they are counted.
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
        """Where each range begins and ends."""
        return tuple(zip(self.starts, (*self.starts[1:], self.size), strict=True))

    @cached_property
    def expected_rows(self) -> tuple[int, ...]:
        """The rows of each range, or about how many they are."""
        if self.rows is not None:
            return self.rows
        return tuple(max(1, round((stop - start) / self.row_bytes)) for start, stop in self.ranges)

    def dump(self) -> bytes:
        """Return it as bytes."""
        schema = base64.b64encode(self.schema.serialize().to_pybytes()).decode()
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return json.dumps({**values, "schema": schema}).encode()

    @classmethod
    def load(cls, content: bytes) -> TextFooter:
        """Return what `dump` made bytes of."""
        values = json.loads(content)
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(values["schema"])))
        rows = values["rows"]
        return cls(
            **{
                **values,
                "schema": schema,
                "starts": tuple(values["starts"]),
                "rows": None if rows is None else tuple(rows),
            }
        )


@dataclass(frozen=True, slots=True)
class Cutting:
    """How finely large files are cut.

    Attributes:
        split_bytes: Bytes of a shard, at most.
        buffer_rows: Rows that are mixed with one another, at most; None where rows are not mixed.
    """

    split_bytes: int
    buffer_rows: int | None = None

    def step(self, row_bytes: float, *, counted: bool) -> int:
        """Return how long the ranges of a file are, about.

        Where rows are mixed and not counted, nothing tells where a part of a range ends: so a buffer holds some ranges,
        each of them whole.
        """
        step = min(self.split_bytes, LARGEST_RANGE)
        if self.buffer_rows is not None and not counted:
            buffer = self.buffer_rows * row_bytes
            fine = max(buffer / RANGES_OF_A_BUFFER, min(SMALLEST_RANGE, buffer / 2))
            step = min(self.split_bytes // 2, step, int(fine))
        return max(1, step)


# The format ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextFormat(Format):
    """A format of lines.

    Attributes:
        options: What pyarrow's parser is told, by the names of its options.
        cutting: How finely large files are cut.
        counts: Whether rows are counted when the dataset is opened.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    cutting: Cutting = field(default_factory=lambda: Cutting(LARGEST_RANGE))
    counts: bool = False

    @property
    def unknown_rows(self) -> str | None:
        """Why the files do not tell how many rows they have; None where they were counted."""
        if self.counts:
            return None
        return f"{self.name} files do not tell how many rows they have (count_rows=True counts them, once)"

    @property
    def options_digest(self) -> str | None:
        """Digest of the options, and whether rows are counted: states of the two speak of other things."""
        told = json.dumps({key: _plain(value) for key, value in sorted(self.options.items())})
        digest = hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
        return f"{digest} counted" if self.counts else digest

    @property
    def block_bytes(self) -> int:
        """How much is parsed at a time."""
        return int(self.options.get("block_size") or BLOCK_BYTES)

    @abstractmethod
    def sample(self, text: Text, *, is_all: bool) -> Sample:
        """Return what a file's beginning shows.

        Args:
            text: The beginning.
            is_all: Whether there is no more.
        """

    @abstractmethod
    def can_cut(self, storage: Storage, file: StoredFile) -> bool:
        """Whether every line end of a plain file is the end of a row."""

    @abstractmethod
    def counter(self, names: Sequence[str]) -> Callable[[Text], int]:
        """Return what counts the rows of texts of a file, by the parser that reads them.

        Args:
            names: The file's columns.
        """

    @abstractmethod
    def parser(self, names: Sequence[str], stored: pa.Schema) -> Parser:
        """Return what makes rows of texts of a file.

        Args:
            names: The file's columns.
            stored: Those that are needed, with their types.
        """

    @abstractmethod
    def unified(self, schemas: Sequence[FileSchema]) -> list[pa.Schema]:
        """Return the columns of each file, with the types that they are read in."""

    def describe(
        self,
        storage: Storage,
        listing: Listing,
        known: KnownFooters | None,
        counts_nulls: Callable[[pa.Field], bool],  # noqa: ARG002 - only reading tells of nulls
    ) -> Described:
        """Read each file's beginning, find where to cut it, count its rows if asked to; once."""
        files = listing.files
        if known is not None:
            footers = [self._known(storage, file, known.footers[file.path]) for file in files]
        else:
            footers = list(_side_by_side(partial(self._read, storage), files, storage))
            if self.counts:
                footers = self._counted(storage, files, footers)
        self._require_mixable(storage, files, footers)
        shown = [storage.display(file.location) for file in files]
        schemas = self.unified([FileSchema(*one) for one in zip(shown, _shared(footers), strict=True)])
        return Described(
            [
                Footer(self._data_file(file, footer), schema, (), footer.dump())
                for file, footer, schema in zip(files, footers, schemas, strict=True)
            ]
        )

    def codec(self, source: Source) -> Codec:
        """Return the way to the rows for one that reads."""
        return _TextCodec(source, self)

    # What a file is -------------------------------------------------------------------------------------------------

    @property
    def _made_by(self) -> str:
        """Digest of all that a footer depends on."""
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
        """Return what is to be known of a file."""
        shown = storage.display(file.location)
        if not file.size:
            msg = f"{shown} is empty: it has not even a line of {self.name}"
            raise UnreadableFileError(msg)
        head = storage.read(file, 0, min(file.size, max(DIGEST_BYTES, 2 * self.block_bytes)))
        compression = compression_of(head, shown)
        is_all = len(head) == file.size
        try:
            text, is_all, stored = decompressed_head(head, compression, 2 * self.block_bytes, is_all=is_all)
        except OSError as error:
            msg = f"{shown} is cut short or damaged: {error}"
            raise UnreadableFileError(msg) from None
        if not text.strip(b"\r\n"):
            msg = f"{shown} is empty: it has not even a line of {self.name}"
            raise UnreadableFileError(msg)
        sample = self.sample(Text(shown, pa.py_buffer(text)), is_all=is_all)
        text_bytes = len(text) / max(1, stored)
        footer = TextFooter(
            made_by=self._made_by,
            digest=_digest(storage, file, head),
            size=file.size,
            schema=sample.schema,
            compression=compression,
            starts=() if is_all and not sample.rows else (0,),
            row_bytes=max(1e-6, sample.bytes / max(1, sample.rows) / text_bytes),
            text_bytes=text_bytes,
        )
        step = self.cutting.step(footer.row_bytes, counted=self.counts)
        if compression is not None or file.size <= step or not self.can_cut(storage, file):
            return footer
        return replace(footer, starts=tuple(_cuts(storage, file, step)))

    def _counted(
        self, storage: Storage, files: Sequence[StoredFile], footers: Sequence[TextFooter]
    ) -> list[TextFooter]:
        """Count the rows of all ranges of all files."""
        ranges = [
            (file, footer, number)
            for file, footer in zip(files, footers, strict=True)
            for number in range(len(footer.ranges))
        ]

        def count(one: tuple[StoredFile, TextFooter, int]) -> int:
            file, footer, number = one
            start, stop = footer.ranges[number]
            shown = storage.display(file.location)
            with storage.errors(file.location):
                if storage.is_local:
                    local = storage.open_local(file)
                    text = _text(shown, footer, number, _whole(local))
                    rows = self.counter(footer.schema.names)(text)
                    local.require_unchanged()
                    return rows
                content = pa.py_buffer(storage.read(file, start, stop))
                if content.size != stop - start:
                    msg = f"{shown} changed since it was listed: {content.size} bytes came back of {start} to {stop}"
                    raise UnreadableFileError(msg)
                text = Text(shown, content, footer.compression, start, None, number == len(footer.ranges) - 1)
                return self.counter(footer.schema.names)(text)

        counted = _side_by_side(count, ranges, storage)
        return [replace(footer, rows=tuple(next(counted) for _ in footer.ranges)) for footer in footers]

    def _require_mixable(self, storage: Storage, files: Sequence[StoredFile], footers: Sequence[TextFooter]) -> None:
        """Raise if uncounted rows cannot be mixed: a range is mixed whole, so it has to fit into the buffer."""
        most = self.cutting.buffer_rows
        if most is None or self.counts:
            return
        for file, footer in zip(files, footers, strict=True):
            for (start, stop), rows in zip(footer.ranges, footer.expected_rows, strict=True):
                size = (stop - start) * footer.text_bytes
                if len(footer.ranges) == 1 and (rows > most or size > self.cutting.split_bytes):
                    msg = (
                        f"{storage.display(file.location)} has about {rows} rows and cannot be cut (it is compressed, "
                    )
                    msg += f"or may hold quoted line ends): to mix its rows with shuffle_buffer_size={most} and "
                    msg += f"split_bytes={self.cutting.split_bytes}, pass count_rows=True"
                    raise UnreadableFileError(msg)

    def _data_file(self, file: StoredFile, footer: TextFooter) -> DataFile:
        return DataFile(
            file.path, file.size, TEXT + footer.digest, tuple(self._row_groups(footer)), file.etag, file.modified
        )

    def _row_groups(self, footer: TextFooter) -> Iterator[RowGroup]:
        """Yield the ranges; where rows are not counted each byte that a text can have stands for one."""
        for (start, stop), expected in zip(footer.ranges, footer.expected_rows, strict=True):
            size = max(1, int((stop - start) * footer.text_bytes))
            if footer.rows is not None:
                yield RowGroup(expected, size)
                continue
            most = MOST_TEXT[footer.compression] * (stop - start)
            rows = min(expected, most)
            if self.cutting.buffer_rows is not None:  # only rounds could mix more, and they need to know the rows
                rows, size = min(rows, self.cutting.buffer_rows), min(size, self.cutting.split_bytes)
            yield RowGroup(most, size, rows)


def _plain(value: Any) -> Any:
    """Return an option's value as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in sorted(value.items())}
    if isinstance(value, pa.Schema):
        return [[column.name, str(column.type)] for column in value]
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)


def _shared(footers: Iterable[TextFooter]) -> list[pa.Schema]:
    """Return the files' columns; alike ones are one object."""
    schemas: dict[bytes, pa.Schema] = {}
    return [schemas.setdefault(footer.schema.serialize().to_pybytes(), footer.schema) for footer in footers]


def _side_by_side(action: Callable[[T], U], items: Sequence[T], storage: Storage) -> Iterator[U]:
    """Do something with many files at once: as many as there are processors, or as their storage has room for."""
    count = min(pa.cpu_count(), FILES_AT_ONCE) if storage.is_local else FILES_AT_ONCE
    if len(items) <= 1:
        yield from map(action, items)
        return
    with ThreadPoolExecutor(count, thread_name_prefix="footers") as threads:
        try:
            yield from threads.map(action, items)
        finally:
            threads.shutdown(cancel_futures=True)


def _digest(storage: Storage, file: StoredFile, head: bytes) -> str:
    """Return a digest of a file's first and last bytes, 16 hexadecimal characters."""
    begin = max(0, file.size - DIGEST_BYTES)
    tail = head[begin:] if len(head) == file.size else storage.read(file, begin, file.size)
    digest = hashlib.blake2b(head[:DIGEST_BYTES], digest_size=8)
    digest.update(tail)
    return digest.hexdigest()


def _cuts(storage: Storage, file: StoredFile, step: int) -> Iterator[int]:
    """Yield where the ranges of a file begin: each behind the first line end at or after a multiple of the step."""
    last = 0
    yield 0
    for wanted in range(step, file.size, step):
        if wanted <= last:
            continue
        place = _line_end(storage, file, wanted - 1)
        if place >= file.size:
            return
        yield place
        last = place


def _line_end(storage: Storage, file: StoredFile, begin: int) -> int:
    """Return the place behind the first line end from a place on; the file's end where there is none."""
    while begin < file.size:
        content = storage.read(file, begin, min(file.size, begin + DIGEST_BYTES))
        found = content.find(b"\n")
        if found >= 0:
            return begin + found + 1
        if not content:
            break
        begin += len(content)
    return file.size


# Reading -------------------------------------------------------------------------------------------------------------


class _TextLayout(Layout):
    """Where a file's ranges lie, and about how large they become."""

    def __init__(self, footer: TextFooter, stored: pa.Schema) -> None:
        self.footer = footer
        self._stored = stored

    def measures(self) -> Measures:
        footer = self.footer
        widths = {column.name: width(column.type) for column in self._stored}
        share = footer.text_bytes / max(1, len(footer.schema))
        sizes = tuple(stop - start for start, stop in footer.ranges)
        variable = tuple(int(size * share) for size in sizes)
        return Measures(
            row_bytes=sum(widths.values()),
            stored=sizes,
            variable={name: variable for name, size in widths.items() if not size},
            rows=footer.expected_rows,
        )

    def ranges(self, number: int) -> list[tuple[int, int]]:
        return [self.footer.ranges[number]]


class _TextCodec(Codec):
    """Ranges of lines, parsed by pyarrow."""

    def __init__(self, source: Source, file_format: TextFormat) -> None:
        self._source = source
        self._format = file_format
        self._layout = lru_cache(OPEN_FILES)(
            lambda path: _TextLayout(TextFooter.load(source.footers[path]), source.projection(path).stored)
        )

    def layout(self, path: str) -> _TextLayout:
        return self._layout(path)

    def open(self, path: str, file: Any, local: LocalFile | None) -> _TextRowGroups:
        shown = self._source.manifest.full_path(path)
        listed = self._source.files[path].modified
        if local is not None and listed is not None and local.modified != listed:
            msg = f"{shown} was written anew since it was listed"
            raise UnreadableFileError(msg)
        footer = self._layout(path).footer
        parser = self._format.parser(footer.schema.names, self._source.projection(path).stored)
        return _TextRowGroups(shown, footer, parser, file, is_local=local is not None)


@dataclass(frozen=True, slots=True)
class _TextRowGroups:
    """An open text file."""

    shown: str
    footer: TextFooter
    parser: Parser
    file: pa.NativeFile
    is_local: bool

    def read(self, number: int) -> pa.Table:
        return self.parser.table(self._text(number))

    def batches(self, number: int, rows: int, *, use_threads: bool) -> Iterator[pa.RecordBatch]:
        for batch in self.parser.batches(self._text(number), use_threads=use_threads):
            for first in range(0, batch.num_rows, rows):
                yield batch.slice(first, rows)

    def close(self) -> None:
        """Nothing is open but the file itself."""

    def _text(self, number: int) -> Text:
        if self.is_local:
            self.file.seek(0)
            return _text(self.shown, self.footer, number, self.file.read_buffer(self.footer.size))
        start, stop = self.footer.ranges[number]
        self.file.seek(start)
        content = self.file.read_buffer(stop - start)
        return Text(self.shown, content, self.footer.compression, start, None, number == len(self.footer.ranges) - 1)


def _whole(local: LocalFile) -> pa.Buffer:
    return local.file.read_buffer(local.size)


def _text(shown: str, footer: TextFooter, number: int, whole: pa.Buffer) -> Text:
    """Return a range of a file that is at hand as a whole."""
    start, stop = footer.ranges[number]
    content = whole.slice(start, stop - start)
    is_last = number == len(footer.ranges) - 1
    return Text(shown, content, footer.compression, start, whole.slice(0, start), is_last)
