"""Parquet files to a source: their footers read and checked, their manifest made."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.errors import ColumnError
from torch_dataloader_utils.formats.footers import FOOTER_THREADS, Footer, FooterReader, NullCount
from torch_dataloader_utils.formats.pruning import filter_columns, require_column, select_row_groups, takes_nulls
from torch_dataloader_utils.formats.sidecar import Footers, Sidecar, read_sidecar
from torch_dataloader_utils.listing import Listing
from torch_dataloader_utils.model import Manifest
from torch_dataloader_utils.storage import Storage, StoredFile

__all__ = ["SUFFIXES", "AnnouncedNulls", "KnownFooters", "ParquetSource", "delivered_type", "open_parquet"]

SUFFIXES = (".parquet", ".parq", ".pq")
"""Endings of the names of Parquet files."""

FOOTERS_IN_A_ROW = 50
QUICK_SEC = 0.0005
"""Where the median of some footers takes longer than this, they wait for their storage."""


@dataclass(frozen=True, slots=True)
class AnnouncedNulls:
    """Nulls that a footer announces, in a column that cannot be delivered with them, and where."""

    path: str
    found: NullCount


@dataclass(frozen=True)
class ParquetSource:
    """A dataset's Parquet files, their footers read and checked.

    Attributes:
        storage: Where the files lie.
        manifest: The files by content.
        schema: The columns to deliver, in order, with their types; all nullable, as files may differ in that alone.
        filter: Which rows to deliver, or None for all.
        filter_columns: The columns that the filter needs.
        selection: For each file the row groups that may hold such rows, by their statistics; None if that is all.
        announced_nulls: Where the footers announce nulls that cannot be delivered, and the filter does not take.
        files: The files as the storage lists them, by path.
        footers: Their footers by path, as far as they were read.
        sidecar: The footer of the `_metadata` file that described them, if one did.
        row_bytes: The most that a row has taken in memory, by column, of those that have no fixed width: filled by
            whoever reads.
    """

    storage: Storage
    manifest: Manifest
    schema: pa.Schema
    filter: pc.Expression | None
    filter_columns: tuple[str, ...]
    selection: tuple[tuple[int, ...], ...] | None
    announced_nulls: tuple[AnnouncedNulls, ...]
    files: dict[str, StoredFile] = field(repr=False)
    footers: dict[str, bytes] = field(repr=False)
    sidecar: bytes | None = field(repr=False)
    row_bytes: dict[str, float] = field(default_factory=dict, repr=False)

    @cached_property
    def filter_digest(self) -> str | None:
        """Digest of the serialised filter, 16 hexadecimal characters: its text leaves too much out."""
        if self.filter is None:
            return None
        serialised = self.filter.__reduce__()[1][0]
        return hashlib.blake2b(bytes(serialised), digest_size=8).hexdigest()

    def reading_footers(self) -> Footers:
        """Return the files' footers, those that are not known read and checked when they are first needed."""
        return Footers(self.storage, self.files, {file.path: file for file in self.manifest.files}, self.footers)


@dataclass(frozen=True, slots=True)
class KnownFooters:
    """Footers that were read before: each file's, by path, or that of the `_metadata` file that describes them all."""

    footers: Mapping[str, bytes]
    sidecar: bytes | None = None


def open_parquet(
    storage: Storage,
    listing: Listing,
    *,
    columns: Sequence[str] | None = None,
    filters: pc.Expression | None = None,
    refuses_nulls: Callable[[pa.Field], bool] = lambda _: False,
    known: KnownFooters | None = None,
) -> ParquetSource:
    """Read every file's footer, once, or `_metadata` if there is one, and check columns and filter against them.

    Args:
        storage: Where the files lie.
        listing: The files.
        known: What another source read, so that nothing has to be; or None.
        columns: The columns to deliver; None for all.
        filters: Which rows to deliver; None for all.
        refuses_nulls: Tells the columns that cannot be delivered with nulls.

    Returns:
        The source.

    Raises:
        UnreadableFileError: If a footer cannot be read; the message names the file.
        ColumnError: If a column is missing or has another type in one file than in another, or the filter does not
            fit the columns.
    """

    def counts_nulls(column: pa.Field) -> bool:
        return (columns is None or column.name in columns) and refuses_nulls(column)

    footers, sidecar = _footers(FooterReader(storage, counts_nulls), storage, listing, known)
    manifest = Manifest(listing.root, tuple(footer.file for footer in footers))
    whole = footers[0].schema
    filtering = () if filters is None else filter_columns(filters, whole)
    delivered = whole.names if columns is None else list(columns)
    for name in delivered:
        require_column(name, whole, "")
    needed = list(dict.fromkeys([*delivered, *filtering]))
    for footer in footers[1:]:
        _require_same(manifest, footer.file.path, footer.schema, whole, needed, all_columns=columns is None)
    contents = {footer.file.path: footer.content for footer in footers if footer.content is not None}
    selection = None
    if filters is not None and sidecar is not None:
        selection = sidecar.select_row_groups([file.path for file in listing.files], filters, whole, filtering)
    elif filters is not None:
        selection = select_row_groups(contents.values(), filters, whole, filtering)
    taken = {name for name in filtering if filters is not None and takes_nulls(filters, whole, filtering, name)}
    source = ParquetSource(
        storage=storage,
        manifest=manifest,
        schema=pa.schema([pa.field(name, delivered_type(whole.field(name).type)) for name in delivered]),
        filter=filters,
        filter_columns=filtering,
        selection=selection,
        announced_nulls=tuple(_announced_nulls(manifest, footers, selection, set(delivered) - taken)),
        files={file.path: file for file in listing.files},
        footers=contents,
        sidecar=None if sidecar is None else sidecar.content,
    )
    if sidecar is not None and selection is not None:
        _require_described(source, selection)
    return source


def _footers(
    reader: FooterReader, storage: Storage, listing: Listing, known: KnownFooters | None
) -> tuple[list[Footer], Sidecar | None]:
    """Return what is known of each file, and the `_metadata` file if it is known by that."""
    sidecar = None
    if known is not None and known.sidecar is not None:
        sidecar = Sidecar(known.sidecar)
    elif known is None and listing.sidecar is not None:
        sidecar = read_sidecar(storage, listing.sidecar, listing.files)
    if sidecar is not None:
        return list(sidecar.describe(listing.files, reader)), sidecar
    if known is not None:
        return [reader.parse(file, known.footers[file.path]) for file in listing.files], None
    return list(_each(reader.read, listing.files, at_once=storage.is_local)), None


def _require_described(source: ParquetSource, selection: Sequence[Sequence[int]]) -> None:
    """Read the footers of files of which nobody will read a row: what rules them out must be true of them."""
    footers = source.reading_footers()
    paths = [file.path for file, selected in zip(source.manifest.files, selection, strict=True) if not selected]
    try:
        footers.expect(paths)
        for path in paths:
            footers[path]
    finally:
        footers.close()


def _each(read: Callable[[StoredFile], Footer], files: Sequence[StoredFile], *, at_once: bool) -> Iterator[Footer]:
    """Read footers one by one as long as the storage answers at once, for threads would only be in one another's way.

    Args:
        read: Reads one.
        files: The files.
        at_once: Whether to try that.
    """
    start = 0
    while at_once and start < len(files):
        seconds = []
        for file in files[start : start + FOOTERS_IN_A_ROW]:
            began = time.perf_counter()
            yield read(file)
            seconds.append(time.perf_counter() - began)
        at_once = statistics.median(seconds) < QUICK_SEC
        start += FOOTERS_IN_A_ROW
    if start < len(files):
        with ThreadPoolExecutor(FOOTER_THREADS, thread_name_prefix="footers") as threads:
            yield from threads.map(read, files[start:])


def _announced_nulls(
    manifest: Manifest, footers: Sequence[Footer], selection: Sequence[Sequence[int]] | None, columns: set[str]
) -> Iterator[AnnouncedNulls]:
    for number, footer in enumerate(footers):
        for found in footer.nulls:
            if found.column in columns and (selection is None or found.row_group in selection[number]):
                yield AnnouncedNulls(manifest.full_path(footer.file.path), found)


def _require_same(
    manifest: Manifest, path: str, schema: pa.Schema, whole: pa.Schema, needed: Sequence[str], *, all_columns: bool
) -> None:
    """Raise unless a file has the needed columns with the first file's types."""
    if schema is whole or schema.equals(whole):
        return
    here, first = manifest.full_path(path), manifest.full_path(manifest.files[0].path)
    surplus = [name for name in schema.names if name not in whole.names] if all_columns else []
    for name in [*needed, *surplus]:
        one, other = schema.get_all_field_indices(name), whole.get_all_field_indices(name)
        if len(one) != 1 or len(other) != 1:
            holding, lacking = (here, first) if one else (first, here)
            msg = f"column {name!r} is in {holding} but not in {lacking}: choose `columns` that all files have"
            raise ColumnError(msg)
        if schema.field(one[0]).type != whole.field(other[0]).type:
            kinds = f"{schema.field(one[0]).type} in {here} but {whole.field(other[0]).type} in {first}"
            msg = f"column {name!r} is {kinds}: write the files with one type, or choose `columns` without it"
            raise ColumnError(msg)


def delivered_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that a column is delivered in: its own, but for views, which pyarrow cannot filter."""
    views = {"string_view": pa.string(), "binary_view": pa.binary()}
    return views.get(str(kind), kind)
