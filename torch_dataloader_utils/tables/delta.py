"""Delta Lake tables: a pinned version's data files, its partition values, mapped columns and deletion vectors.

The protocol is at https://github.com/delta-io/delta/blob/master/PROTOCOL.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.dataset.discovery import Annotations, Request, open_files
from torch_dataloader_utils.dataset.file_set import FileSet
from torch_dataloader_utils.dataset.structured import StructuredDataset
from torch_dataloader_utils.errors import ColumnError
from torch_dataloader_utils.formats.opened_files import OpenedFiles
from torch_dataloader_utils.formats.parquet.format import Parquet
from torch_dataloader_utils.formats.schema import table_column_type
from torch_dataloader_utils.loader.arguments import PathLike, refuse_path_options, require_count, require_options
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader
from torch_dataloader_utils.storage.listing import list_known
from torch_dataloader_utils.storage.redaction import Redactor

try:
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError
except ImportError as error:
    raise ImportError("DeltaDataset needs deltalake: pip install deltalake") from error


READER_VERSION = 3
"""The newest reader version of the protocol. From this version on, a table names the features that it needs."""

FEATURES = frozenset(
    {
        "columnMapping",
        "deletionVectors",
        "timestampNtz",
        "typeWidening",
        "typeWidening-preview",
        "v2Checkpoint",
        "vacuumProtocolCheck",
        "variantType",  # only a column of that type is refused, when it is requested
        "variantType-preview",
    }
)
"""The reader features that this module supports."""

ANSI = re.compile(r"\x1b\[[0-9;]*m")
BACKTRACE = "\n   0: "
"""How the backtrace begins that deltalake appends to its messages."""

LOCAL_URL = re.compile(r"file:/(?!/)")
"""How a path of this machine begins that Java writes as a URL."""

ESCAPED = re.compile(rb"(?:\\u00[0-9A-Fa-f]{2})+")
"""How the protocol writes the bytes of a partition's value. deltalake returns this text as the bytes (seen in 1.6)."""

MAPPING = "delta.columnMapping.mode"
MAPPING_VERSION = 2
"""The reader version that added mapped columns, before features had names."""
PHYSICAL_NAME = "delta.columnMapping.physicalName"
FIELD_ID = "delta.columnMapping.id"


class DeltaDataset(StructuredDataset):
    """Batches of the rows of one version of a Delta Lake table; otherwise like `StructuredDataset`."""

    @classmethod
    def create_dataloader(  # type: ignore[override] # a table replaces the path
        cls,
        table: PathLike,
        *,
        version: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        delta_options: Mapping[str, str] | None = None,
        **options: Any,
    ) -> tuple[StructuredDataLoader, DeltaDataset]:
        """Open one version of a table and make the loader of this rank's batches.

        All arguments are checked first. Then the table's log is read, once. Workers get the list of files, not the
        table.

        Args:
            table: The table's directory: a path or URL that both deltalake and fsspec support.
            version: The version to read; None for the latest. A state records the version, and loads only where the
                same version is read. To resume when the table has newer versions, pass the state's ``version``.
            storage_options: fsspec's options for the storage of the files.
            delta_options: deltalake's options for the same storage, to read the log.
            **options: The parameters of `StructuredDataset.create_dataloader`, except `path`, `format`, `partitioning`
                and `manifest`, which the table determines.

        Returns:
            The loader and the dataset. Both have `state_dict` and `load_state_dict`.

        Raises:
            TypeError: If there is no such parameter, or an argument has the wrong type.
            ValueError: If an argument's value makes no sense.
            FileNotFoundError: If there is no such table, or a file is missing.
            UnreadableFileError: If the log, a deletion vector or a footer cannot be read, there is no such version, or
                the table needs a reader feature that is not supported; the message names it.
            ColumnError: If a column does not exist, or cannot be delivered as it is stored.
        """
        refuse_path_options(options, "the table")
        files = VersionFiles.parse(table, version, storage_options, delta_options)
        loader, dataset = super().create_dataloader(files, storage_options=storage_options, **options)
        return loader, cast("DeltaDataset", dataset)


@dataclass(frozen=True, slots=True)
class VersionFiles(FileSet):
    """The files of a table's version, None for the latest. The URL is the table's directory."""

    url: str
    version: int | None
    storage_options: Mapping[str, Any] | None = field(repr=False)
    delta_options: Mapping[str, str] | None = field(repr=False)

    @classmethod
    def parse(
        cls,
        table: PathLike,
        version: int | None,
        storage_options: Mapping[str, Any] | None,
        delta_options: Mapping[str, str] | None,
    ) -> VersionFiles:
        """Check the arguments that say which table to open."""
        require_options(delta_options, "delta_options")
        if version is not None:
            version = require_count(version, "version", least=0)
        return cls(_url_of(table), version, storage_options, delta_options)

    def open(self, request: Request) -> OpenedFiles:
        """Read the log, and the footers of its files."""
        redactor = Redactor({**(self.storage_options or {}), **(self.delta_options or {})}, [self.url])
        with redactor.errors(lambda: f"the table {self.url}"):
            log = _read_log(self.url, self.version, self.delta_options)
        urls = [self.url, *(_file_url(self.url, path) for path in log.sizes)]
        with request.opened_storage(urls, self.storage_options) as (storage, (root, *locations)):
            listing = list_known(storage, list(zip(locations, log.sizes.values(), strict=True)), root)
            by_location = dict(zip(locations, log.sizes, strict=True))
            files = {file.path: by_location[file.location] for file in listing.files}
            annotations = Annotations(
                schema=log.columns.schema,
                name_in_file=log.columns.name_in_file,
                constant_schema=log.columns.partition_schema,
                constants={path: log.partitions[name] for path, name in files.items()},
                deleted={path: log.deleted[name] for path, name in files.items() if name in log.deleted},
                pin={"version": log.version},
            )
            return open_files(storage, listing, Parquet(), request, annotations=annotations)


def _url_of(table: object) -> str:
    """Return a table's directory as it was given, or raise a TypeError."""
    url = os.fspath(table) if isinstance(table, (str, os.PathLike)) else None
    if not isinstance(url, str):
        raise TypeError(f"table={table!r} is {type(table).__name__}, expected the path or URL of a table's directory")
    return url


def _file_url(table: str, path: str) -> str:
    """Return a file's URL. Its path in the log is URL-encoded, and relative to the table or a whole URL."""
    plain = unquote(path)
    if LOCAL_URL.match(plain):
        return plain.replace(":", "://", 1)
    if "://" in plain or plain.startswith("/"):
        return plain
    if table.startswith("file:"):
        table = unquote(table)
    return posixpath.join(table, plain)


def _require_plain(url: str) -> None:
    """Raise if deltalake would read the log of another directory: it decodes a name once too often (seen in 1.6)."""
    is_url = "://" in url and not url.startswith("file:")
    name = url if is_url else os.path.realpath(unquote(url.removeprefix("file:")) if url.startswith("file:") else url)
    read = unquote(name)
    if os.sep == "/" and not is_url:
        read = read.replace("\\", "/")
    if read != name:
        raise OSError(f"the table {url} cannot be read: in place of {name}, deltalake would read {read}: rename it")


def _absolute_url(path: str) -> str:
    """Return the URL that deltalake makes of a path in the log, if that is absolute; else the path."""
    if LOCAL_URL.match(path):
        return path.replace(":", "://", 1)
    return f"file://{path}" if path.startswith("/") else path


@dataclass(frozen=True, slots=True)
class _Log:
    """A version of a table, as its log describes it. Files are named by the paths in the log.

    Attributes:
        sizes: The files' sizes in bytes.
        partitions: The values of the partition columns in each file.
        deleted: The numbers of deleted rows, ascending, of the files that have deleted rows.
    """

    version: int
    columns: _Columns
    sizes: Mapping[str, int]
    partitions: Mapping[str, tuple[Any, ...]]
    deleted: Mapping[str, npt.NDArray[np.int64]]


def _read_log(url: str, version: int | None, options: Mapping[str, str] | None) -> _Log:
    _require_plain(url)
    given = None if options is None else dict(options)
    with _explained(url, version, given):
        table = DeltaTable(url, version=version, storage_options=given)
        protocol = table.protocol()
    features = protocol.reader_features or ()
    unknown = sorted(set(features) - FEATURES)
    if unknown or protocol.min_reader_version > READER_VERSION:
        needed = ", ".join(unknown) or f"version {protocol.min_reader_version} of the protocol"
        raise OSError(f"the table {url} needs readers that support {needed}, which this package does not")
    with _explained(url, version, given):
        maps = protocol.min_reader_version == MAPPING_VERSION or "columnMapping" in features
        columns = _Columns.of(table, may_map=maps)
        added = pa.table(table.get_add_actions())
        vectors = pa.table(table.deletion_vectors()) if "deletionVectors" in features else None
    paths = added["path"].to_pylist()
    if len(set(paths)) != len(paths):
        raise OSError(f"the log of the table {url} has a file twice")
    names = columns.partition_schema.names
    values = [list(map(_plain_bytes, pc.struct_field(added["partition"], [name]).to_pylist())) for name in names]
    rows = zip(*values, strict=True) if values else ((),) * len(paths)
    return _Log(
        version=table.version(),
        columns=columns,
        sizes=dict(zip(paths, added["size_bytes"].to_pylist(), strict=True)),
        partitions=dict(zip(paths, rows, strict=True)),
        deleted={} if vectors is None else _deleted(vectors, table.table_uri, set(paths)),
    )


def _plain_bytes(value: Any) -> Any:
    """Return a partition's value; the bytes themselves where their text is escaped."""
    if isinstance(value, bytes) and ESCAPED.fullmatch(value):
        return bytes(int(code, 16) for code in value.decode().split("\\u")[1:])
    return value


@contextlib.contextmanager
def _explained(url: str, version: int | None, options: dict[str, str] | None) -> Iterator[None]:
    """Raise deltalake's errors with the table's name, and without the backtraces in their messages."""
    try:
        yield
    except TableNotFoundError:
        if version is not None and _has_log(url, options):
            msg = f"version {version} of the table {url} cannot be read: its log no longer has that version"
            raise OSError(msg) from None
        raise FileNotFoundError(f"there is no table {url}: no log of a Delta table was found") from None
    except BaseException as error:
        if not _is_of_deltalake(error):
            raise
        cause = " ".join(ANSI.sub("", str(error).partition(BACKTRACE)[0]).split())
        latest = _latest_version(url, options) if version is not None and "version" in cause else None
        if version is not None and latest is not None and latest < version:
            cause = f"its latest version is {latest}"
        msg = f"{'' if version is None else f'version {version} of '}the table {url} cannot be read: {cause}"
        raise OSError(msg) from None


def _latest_version(url: str, options: dict[str, str] | None) -> int | None:
    """Return a table's latest version; None if it cannot be read."""
    try:
        return int(DeltaTable(url, storage_options=options).version())
    except BaseException as error:
        if not _is_of_deltalake(error):
            raise
        return None


def _is_of_deltalake(error: BaseException) -> bool:
    """Whether deltalake may have raised an error: any exception, or what a panic of Rust becomes, which is none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _has_log(url: str, options: dict[str, str] | None) -> bool:
    """Whether there is a log of a table, whatever its versions."""
    with contextlib.suppress(Exception):  # of many classes, too: then it is not known, and the first message fits
        return bool(DeltaTable.is_deltatable(url, options))
    return False


def _deleted(vectors: pa.Table, table: str, paths: set[str]) -> dict[str, npt.NDArray[np.int64]]:
    """Return the numbers of deleted rows, by the path of their file in the log.

    `vectors` is deltalake's table of files with deleted rows: their URLs, and for each row whether it is kept. `table`
    is the table's URL, as deltalake spells it. Writers escape other characters in the log than deltalake in URLs.
    """
    root = unquote(table).rstrip("/") + "/"
    by_name = {unquote(_absolute_url(path)).removeprefix(root): path for path in paths}
    if len(by_name) < len(paths):
        raise OSError(f"the log of the table {table} names a file in two ways")
    deleted = {}
    for url, kept in zip(vectors["filepath"].to_pylist(), vectors["selection_vector"], strict=True):
        path = by_name.get(unquote(url).removeprefix(root))
        if path is None:
            raise OSError(f"the table {table} has a deletion vector of {url}, which is not one of its files")
        deleted[path] = np.flatnonzero(~kept.values.to_numpy(zero_copy_only=False)).astype(np.int64)
    return deleted


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of a table, and their names in its files.

    Attributes:
        fields: The log's description of each column, by name.
        mapping: How files identify columns: ``"none"``, ``"name"`` or ``"id"``.
    """

    schema: pa.Schema
    partition_schema: pa.Schema
    fields: Mapping[str, Mapping[str, Any]]
    mapping: str

    @classmethod
    def of(cls, table: DeltaTable, *, may_map: bool) -> _Columns:
        """Return the columns of a table. Its property of mapped columns counts only if its protocol has them."""
        metadata = table.metadata()
        fields = {field["name"]: field for field in json.loads(table.schema().to_json())["fields"]}
        arrow = pa.schema(table.schema().to_arrow())
        schema = pa.schema([(column.name, table_column_type(column.type)) for column in arrow])
        partitions = [schema.field(name) for name in metadata.partition_columns]
        mapping = metadata.configuration.get(MAPPING, "none") if may_map else "none"
        return cls(schema, pa.schema(partitions), fields, mapping)

    def name_in_file(self, stored: pa.Schema, column: str) -> str | None:
        """Return the name that a table's column has among the stored ones of a file, or None if it is not there.

        Raises:
            ColumnError: If its type, or the mapping of its nested fields, is not supported; or if columns are mapped by
                ids and the file's have none.
        """
        if column in self.partition_schema.names:
            return None  # its values are in the log
        description = self.fields[column]
        _require_supported(column, description["type"], mapped=self.mapping != "none")
        if self.mapping == "id":
            wanted = str(description["metadata"][FIELD_ID]).encode()
            ids = [(field.name, (field.metadata or {}).get(b"PARQUET:field_id")) for field in stored]
            if all(found is None for _, found in ids):
                msg = f"column {column!r}: the table finds columns by their ids, and the file's columns have none (it "
                msg += f"has {', '.join(stored.names[:50])}): rewrite the file"
                raise ColumnError(msg)
            return next((name for name, found in ids if found == wanted), None)
        name = column if self.mapping == "none" else description["metadata"][PHYSICAL_NAME]
        return name if name in stored.names else None


def _require_supported(column: str, dtype: Any, *, mapped: bool) -> None:
    """Raise if a column is, or contains, a variant, or contains nested fields whose names in files differ."""
    if dtype == "variant":
        msg = f"column {column!r} is, or contains, a variant, which is not supported: choose `columns` without it"
        raise ColumnError(msg)
    if not isinstance(dtype, dict):
        return
    for nested in dtype.get("fields", ()):
        physical = nested["metadata"].get(PHYSICAL_NAME, nested["name"])
        if mapped and physical != nested["name"]:
            msg = f"column {column!r} contains the field {nested['name']!r}, which files call {physical!r}: mapped "
            msg += "fields within a column are not supported; choose `columns` without it"
            raise ColumnError(msg)
        _require_supported(column, nested["type"], mapped=mapped)
    for part in ("elementType", "keyType", "valueType"):
        _require_supported(column, dtype.get(part), mapped=mapped)
