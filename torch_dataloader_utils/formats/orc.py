"""ORC: stripes with their row counts, read from the file's tail, and decoded by pyarrow.

The layout (stripes, footer, postscript, its length in the last byte) and the numbers of the fields are those of the
Apache ORC specification, https://orc.apache.org/specification/ORCv1/, and of its protobuf schema, ``orc_proto.proto``.
pyarrow returns the decompressed footer, but not what it says of stripes. So those few fields are parsed here.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.orc as pa_orc

from torch_dataloader_utils.columns.arrow import width
from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.formats.base import (
    Codec,
    ColumnsToCount,
    Described,
    FilesToRead,
    Footer,
    Format,
    KnownFooters,
    Layout,
    Measures,
    RowGroups,
)
from torch_dataloader_utils.formats.concurrency import OPEN_FILES, read_each
from torch_dataloader_utils.formats.read_cache import FooterStore
from torch_dataloader_utils.formats.recognition import ENDINGS, ORC_MAGIC, format_hint
from torch_dataloader_utils.planning.manifest import DataFile, RowGroup
from torch_dataloader_utils.storage.byte_ranges import SparseFile
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.listing import Listing
from torch_dataloader_utils.storage.local_file import LocalFile
from torch_dataloader_utils.storage.stored_file import StoredFile

TAIL_BYTES = 16 * 1024
"""How much of a file's end ORC's reader requests first."""

FOOTER_LENGTH, METADATA_LENGTH = 1, 5
"""Fields of the postscript."""

FOOTER, STRIPES = 2, 3
"""The footer in the whole tail, and the stripes in the footer."""

STRIPE_OFFSET, INDEX_LENGTH, DATA_LENGTH, STRIPE_FOOTER_LENGTH, STRIPE_ROWS = range(1, 6)
"""Fields of a stripe."""


@dataclass(frozen=True, slots=True)
class Stripe:
    """A stripe: the range of its bytes, and its rows."""

    start: int
    stop: int
    rows: int


@dataclass(frozen=True)
class Tail:
    """The end of an ORC file, parsed: the bytes that ORC's reader needs to open it, and the size of the whole file."""

    content: bytes
    size: int

    @cached_property
    def file(self) -> pa_orc.ORCFile:
        """The file, without its stripes."""
        sparse = SparseFile(self.size)
        sparse.add(self.size - len(self.content), self.content)
        return pa_orc.ORCFile(pa.PythonFile(sparse, mode="r"))

    @cached_property
    def stripes(self) -> tuple[Stripe, ...]:
        """The stripes, in order."""
        footer = _fields(self.file.reader.serialized_file_tail())[FOOTER][0]
        return tuple(_stripe(_fields(stripe)) for stripe in _fields(footer)[STRIPES])


def _stripe(fields: Mapping[int, Sequence[Any]]) -> Stripe:
    start = _number(fields, STRIPE_OFFSET)
    length = sum(_number(fields, field) for field in (INDEX_LENGTH, DATA_LENGTH, STRIPE_FOOTER_LENGTH))
    return Stripe(start, start + length, _number(fields, STRIPE_ROWS))


def _number(fields: Mapping[int, Sequence[Any]], field: int) -> int:
    return int(fields[field][0]) if fields[field] else 0


def _fields(message: bytes) -> Mapping[int, list[Any]]:
    """Return the fields of a protobuf message by number: integers, and the bytes of fields that have a length.

    See https://protobuf.dev/programming-guides/encoding/.
    """
    fields: dict[int, list[Any]] = defaultdict(list)
    offset = 0
    while offset < len(message):
        key, offset = _varint(message, offset)
        wire_type = key & 7
        if wire_type == 0:
            value, offset = _varint(message, offset)
            fields[key >> 3].append(value)
        elif wire_type in (1, 5):  # eight bytes, four bytes: no field that is needed here
            offset += 8 if wire_type == 1 else 4
        elif wire_type == 2:  # noqa: PLR2004 - the specification's number for a field that has a length
            length, offset = _varint(message, offset)
            if offset + length > len(message):
                raise ValueError("its tail is cut short")
            fields[key >> 3].append(message[offset : offset + length])
            offset += length
        else:
            raise ValueError(f"its tail has a field of an unknown wire type, {wire_type}")
    return fields


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while offset < len(message):
        byte = message[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004 - the last byte of a number has no highest bit
            return value, offset
        shift += 7
    raise ValueError("its tail is cut short")


@dataclass(frozen=True, slots=True)
class Orc(Format):
    """Apache ORC: https://orc.apache.org."""

    name: ClassVar[str] = "orc"
    suffixes: ClassVar[tuple[str, ...]] = ENDINGS["orc"]

    def describe(
        self,
        storage: Storage,
        listing: Listing,
        known: KnownFooters | None,
        columns_to_count: ColumnsToCount,  # noqa: ARG002 - tails do not say where nulls are
    ) -> Described:
        """Read every file's tail, once."""
        schemas: dict[bytes, pa.Schema] = {}

        def read(file: StoredFile) -> Footer:
            content = _read_tail(storage, file) if known is None else known.footers[file.path]
            return _parsed(storage, file, content, schemas)

        return Described(list(read_each(read, listing.files, storage)))

    def codec(
        self,
        files: FilesToRead,
        footers: FooterStore,
        encodable: Collection[str] = (),  # noqa: ARG002 - these files have no dictionaries that could be kept
    ) -> Codec:
        """Return what opens the files for one reader."""
        return _OrcCodec(files, footers)


def _read_tail(storage: Storage, file: StoredFile) -> bytes:
    """Return the bytes that ORC's reader needs to open a file: mostly in one request."""
    name = storage.display(file.location)
    if file.size < len(ORC_MAGIC) + 1:
        msg = f"{name} is not an ORC file: it has only {file.size} bytes{format_hint(file.path, 'orc')}"
        raise UnreadableFileError(msg)
    tail = storage.read(file, max(0, file.size - TAIL_BYTES), file.size)
    length = tail[-1]
    if tail[-1 - len(ORC_MAGIC) : -1] != ORC_MAGIC:
        msg = f"{name} is no complete ORC file: it ends in {tail[-1 - len(ORC_MAGIC) : -1]!r}, not in {ORC_MAGIC!r}"
        msg += format_hint(file.path, "orc", end=tail)
        raise UnreadableFileError(msg)
    with storage.errors_at(f"the tail of {name}"):
        postscript = _fields(tail[-1 - length : -1])
        needed = 1 + length + _number(postscript, FOOTER_LENGTH) + _number(postscript, METADATA_LENGTH)
        if needed > file.size:
            raise ValueError(f"its tail would be {needed} bytes of {file.size}")
    if needed > len(tail):
        tail = storage.read(file, file.size - needed, file.size - len(tail)) + tail
    return tail


def _parsed(storage: Storage, file: StoredFile, content: bytes, schemas: dict[bytes, pa.Schema]) -> Footer:
    with storage.errors_at(f"the tail of {storage.display(file.location)}"):
        tail = Tail(content, file.size)
        schema = tail.file.schema.remove_metadata()
        list(schema.names)  # a name that is not UTF-8 is an error
        stripes = tail.stripes
        if any(stripe.rows < 0 or not 0 <= stripe.start <= stripe.stop <= file.size for stripe in stripes):
            raise ValueError("a stripe is outside of it")
        if sum(stripe.rows for stripe in stripes) != tail.file.nrows or len(stripes) != tail.file.nstripes:
            raise ValueError(f"its stripes do not add up to {tail.file.nrows} rows")
    schema = schemas.setdefault(schema.serialize().to_pybytes(), schema)  # equal ones are one object
    groups = tuple(RowGroup(stripe.rows, stripe.stop - stripe.start) for stripe in stripes)
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    return Footer(DataFile(file.path, file.size, digest, groups, file.etag, file.modified), schema, (), content)


class _OrcCodec(Codec):
    """Stripes decoded by pyarrow."""

    def __init__(self, files: FilesToRead, footers: FooterStore) -> None:
        self._files = files
        self._footers = footers
        self.layout = lru_cache(OPEN_FILES)(
            lambda path: _OrcLayout(Tail(footers[path], files.files[path].size).stripes, files.projection(path).stored)
        )

    def tail(self, path: str) -> bytes:
        return self._footers[path]

    def open(self, path: str, file: Any, local: LocalFile | None) -> _Stripes:
        if local is not None and not local.ends_with(self._footers[path]):
            raise UnreadableFileError(f"{self._files.manifest.full_path(path)} was rewritten since it was listed")
        return _Stripes(pa_orc.ORCFile(file), self._files.projection(path).stored.names)


@dataclass(frozen=True, slots=True)
class _OrcLayout(Layout):
    """The stripes of a file. A stripe is fetched as a whole, because only its own footer says where its columns are."""

    stripes: tuple[Stripe, ...]
    stored: pa.Schema

    def measures(self) -> Measures:
        widths = {column.name: width(column.type) for column in self.stored}
        sizes = tuple(stripe.stop - stripe.start for stripe in self.stripes)
        variable = {name: sizes for name, bytes_of_a_value in widths.items() if not bytes_of_a_value}
        return Measures(sum(widths.values()), sizes, variable)

    def ranges(self, number: int) -> list[tuple[int, int]]:
        return [(self.stripes[number].start, self.stripes[number].stop)]


@dataclass(frozen=True, slots=True)
class _Stripes(RowGroups):
    """An open ORC file, and the columns that are needed of it."""

    file: pa_orc.ORCFile
    columns: list[str]

    def read(self, number: int) -> pa.Table:
        return pa.Table.from_batches([self._stripe(number)]).select(self.columns)

    def batches(self, number: int, rows: int, *, use_threads: bool) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        stripe = self._stripe(number).select(self.columns)
        for start in range(0, stripe.num_rows, rows):
            yield stripe.slice(start, rows)

    def _stripe(self, number: int) -> pa.RecordBatch:
        """Read the needed columns of a stripe, or all columns where pyarrow cannot select them by name."""
        names = self.columns or self.file.schema.names[:1]
        by_name = not any("." in name for name in names)  # pyarrow takes the part after a dot for a field of a struct
        return self.file.read_stripe(number, columns=names if by_name else None)
