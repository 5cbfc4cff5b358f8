"""Delta Lake tables: a pinned version's data files, its partition values, mapped columns and deletion vectors.

What a table's log means is said by https://github.com/delta-io/delta/blob/master/PROTOCOL.md.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.dataset.discovery import Annotations, open_files
from torch_dataloader_utils.dataset.file_set import FileSet
from torch_dataloader_utils.dataset.structured import StructuredDataset
from torch_dataloader_utils.errors import ColumnError
from torch_dataloader_utils.formats.base import OpenedFiles
from torch_dataloader_utils.formats.parquet.format import Parquet
from torch_dataloader_utils.formats.schema import table_column_type
from torch_dataloader_utils.loader.arguments import PathLike, refuse_path_options, require_count, require_options
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.listing import list_known
from torch_dataloader_utils.storage.redaction import Redactor

__all__ = ["DeltaDataset"]


try:
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError
except ImportError as error:
    missing = 'DeltaDataset needs deltalake: pip install "torch-dataloader-utils[delta]"'
    raise ImportError(missing) from error


READER_VERSION = 3
"""The newest version of the protocol for readers: from this on a table names the features that it needs."""


FEATURES = frozenset(
    {
        "columnMapping",
        "deletionVectors",
        "timestampNtz",
        "typeWidening",
        "typeWidening-preview",
        "v2Checkpoint",
        "vacuumProtocolCheck",
        "variantType",  # columns of that type are refused one by one
        "variantType-preview",
    }
)
"""What a table may need of its readers."""


ANSI = re.compile(r"\x1b\[[0-9;]*m")


BACKTRACE = "\n   0: "


MAPPING = "delta.columnMapping.mode"


PHYSICAL_NAME = "delta.columnMapping.physicalName"


FIELD_ID = "delta.columnMapping.id"


class DeltaDataset(StructuredDataset):
    """Batches of the rows of one version of a Delta Lake table; all else is as with `StructuredDataset`."""

    @classmethod
    def create_dataloader(  # type: ignore[override] # a table stands in the path's place
        cls,
        table: PathLike,
        *,
        version: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        delta_options: Mapping[str, str] | None = None,
        **options: Any,
    ) -> tuple[StructuredDataLoader, DeltaDataset]:
        """Open one version of a table and make the loader of this rank's batches.

        The table's log is read here, once. Workers are told of files and know no table.

        Args:
            table: The table's directory: a path or URL that both deltalake and fsspec know.
            version: The version to read; None for the latest. A state records it, and can be loaded only where the
                same is read: pass the state's ``version`` to resume on a table that has moved on.
            storage_options: fsspec's options for the storage of the files.
            delta_options: deltalake's own options for the same storage, to read the log with.
            **options: All that `StructuredDataset.create_dataloader` takes but `path`, `format`, `partitioning` and
                `manifest`, which the table stands for.

        Returns:
            The loader and the dataset. Both have `state_dict` and `load_state_dict`.

        Raises:
            FileNotFoundError: If there is no such table, or a file is missing.
            UnreadableFileError: If the log, a deletion vector or a footer cannot be read, there is no such version, or
                the table needs a feature of its readers that is not supported; the message names it.
            ColumnError: If a column does not exist, or cannot be delivered as it is stored.
            ValueError: If an argument's value makes no sense.
            TypeError: If an argument has the wrong type.
        """
        refuse_path_options(options, "the table")
        require_options(storage_options, "storage_options")
        require_options(delta_options, "delta_options")
        if version is not None:
            version = require_count(version, "version", least=0)
        files = VersionFiles(os.fspath(table), version, storage_options, delta_options)
        loader, dataset = super().create_dataloader(files, **options)
        return loader, cast("DeltaDataset", dataset)


@dataclass(frozen=True, slots=True)
class VersionFiles(FileSet):
    """The files of a table's version.

    Attributes:
        url: The table's directory.
        version: The version; None for the latest.
        storage_options: fsspec's options.
        delta_options: deltalake's.
    """

    url: str
    version: int | None
    storage_options: Mapping[str, Any] | None = field(repr=False)
    delta_options: Mapping[str, str] | None = field(repr=False)

    def open(
        self,
        columns: Sequence[str] | None,
        filters: pc.Expression | None,
        refuses_nulls: Callable[[pa.Field], bool],
    ) -> OpenedFiles:
        """Read the log, and the footers of the files that it names."""
        redactor = Redactor({**(self.storage_options or {}), **(self.delta_options or {})}, [self.url])
        with redactor.errors(lambda: f"the table {self.url}"):
            log = _read_log(self.url, self.version, self.delta_options)
        urls = [self.url, *(_file_url(self.url, path) for path in log.sizes)]
        storage, (root, *locations) = Storage.for_urls(urls, self.storage_options)
        listing = list_known(storage, list(zip(locations, log.sizes.values(), strict=True)), root)
        by_location = dict(zip(locations, log.sizes, strict=True))
        files = {file.path: by_location[file.location] for file in listing.files}
        return open_files(
            storage,
            listing,
            Parquet(),
            columns=columns,
            filters=filters,
            refuses_nulls=refuses_nulls,
            annotations=Annotations(
                schema=log.columns.schema,
                name_in_file=log.columns.name_in_file,
                constant_schema=log.columns.partition_schema,
                constants={path: log.partitions[own] for path, own in files.items()},
                deleted={path: log.deleted[own] for path, own in files.items() if own in log.deleted},
                pin={"version": log.version},
            ),
        )


def _file_url(table: str, path: str) -> str:
    """Return where a file of a table lies: the log writes paths as parts of URLs, and of other tables whole ones."""
    plain = unquote(path)
    if "://" in plain or plain.startswith("/"):
        return plain
    if table.startswith("file:"):
        table = unquote(table)
    return posixpath.join(table, plain)


@dataclass(frozen=True, slots=True)
class _Log:
    """What a table's log says of a version, by the paths that it calls files.

    Attributes:
        version: The version.
        columns: The columns.
        sizes: The files' sizes in bytes.
        partitions: The values of the partition columns in each.
        deleted: The places of deleted rows, rising, of the files that have some.
    """

    version: int
    columns: _Columns
    sizes: Mapping[str, int]
    partitions: Mapping[str, tuple[Any, ...]]
    deleted: Mapping[str, npt.NDArray[np.int64]]


def _read_log(url: str, version: int | None, options: Mapping[str, str] | None) -> _Log:
    with _explained(url, version):
        table = DeltaTable(url, version=version, storage_options=None if options is None else dict(options))
        protocol = table.protocol()
    features = protocol.reader_features or ()
    unknown = sorted(set(features) - FEATURES)
    if unknown or protocol.min_reader_version > READER_VERSION:
        needed = ", ".join(unknown) or f"version {protocol.min_reader_version} of the protocol"
        msg = f"the table {url} needs readers that support {needed}, which this one does not"
        raise OSError(msg)
    with _explained(url, version):
        columns = _Columns.of(table)
        added = pa.table(table.get_add_actions())
        vectors = pa.table(table.deletion_vectors()) if "deletionVectors" in features else None
    paths = added["path"].to_pylist()
    if len(set(paths)) != len(paths):
        msg = f"the table {url} names a file twice"
        raise OSError(msg)
    values = [_values(added, name) for name in columns.partition_schema.names]
    rows = zip(*values, strict=True) if values else ((),) * len(paths)
    return _Log(
        version=table.version(),
        columns=columns,
        sizes=dict(zip(paths, added["size_bytes"].to_pylist(), strict=True)),
        partitions=dict(zip(paths, rows, strict=True)),
        deleted={} if vectors is None else _deleted(vectors, table.table_uri, set(paths)),
    )


@contextmanager
def _explained(url: str, version: int | None) -> Iterator[None]:
    """Say of deltalake's errors which table they are of, and leave out the traces that they have in them."""
    try:
        yield
    except TableNotFoundError:
        msg = f"the table {url} is not there: no log of a Delta table was found"
        raise FileNotFoundError(msg) from None
    except Exception as error:  # noqa: BLE001 - they are of many kinds
        text = " ".join(ANSI.sub("", str(error).partition(BACKTRACE)[0]).split())
        msg = f"{'' if version is None else f'version {version} of '}the table {url} cannot be read: {text}"
        raise OSError(msg) from None


def _values(added: pa.Table, name: str) -> list[Any]:
    """Return the value that a partition column has in each file."""
    return pc.struct_field(added["partition"], [name]).to_pylist()  # type: ignore[no-any-return]


def _deleted(vectors: pa.Table, table: str, paths: set[str]) -> dict[str, npt.NDArray[np.int64]]:
    """Return the places of deleted rows, by the path of the file that has them.

    Args:
        vectors: Which rows of which files are kept, as deltalake says it.
        table: The table, as it does.
        paths: The table's files, as its log calls them.
    """
    root = table.rstrip("/") + "/"
    deleted = {}
    for url, kept in zip(vectors["filepath"].to_pylist(), vectors["selection_vector"], strict=True):
        path = url if url in paths else url.removeprefix(root)
        if path not in paths:
            msg = f"the table {table} has a deletion vector of {url}, which is none of its files"
            raise OSError(msg)
        deleted[path] = np.flatnonzero(~kept.values.to_numpy(zero_copy_only=False)).astype(np.int64)
    return deleted


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of a table, and what they are called in its files.

    Attributes:
        schema: The columns.
        partition_schema: Those of them that the table is partitioned by.
        fields: What the log says of each, by name.
        mapping: How files name columns: ``"none"``, ``"name"`` or ``"id"``.
    """

    schema: pa.Schema
    partition_schema: pa.Schema
    fields: Mapping[str, Mapping[str, Any]]
    mapping: str

    @classmethod
    def of(cls, table: DeltaTable) -> _Columns:
        """Return the columns of a table."""
        metadata = table.metadata()
        fields = {one["name"]: one for one in json.loads(table.schema().to_json())["fields"]}
        arrow = pa.schema(table.schema().to_arrow())
        schema = pa.schema([(one.name, table_column_type(one.type)) for one in arrow])
        partitions = [schema.field(name) for name in metadata.partition_columns]
        return cls(schema, pa.schema(partitions), fields, metadata.configuration.get(MAPPING, "none"))

    def name_in_file(self, own: pa.Schema, column: str) -> str | None:
        """Return a file's name of a column of the table, or None if it has none.

        Args:
            own: The file's columns.
            column: The table's name of it.

        Raises:
            ColumnError: If it is of a type, or is mapped in a way, that is not supported.
        """
        if column in self.partition_schema.names:
            return None  # its values are in the log
        described = self.fields[column]
        _require_plain(column, described["type"], mapped=self.mapping != "none")
        if self.mapping == "none":
            return column if column in own.names else None
        metadata = described["metadata"]
        if self.mapping == "name":
            name = metadata[PHYSICAL_NAME]
            return name if name in own.names else None
        wanted = str(metadata[FIELD_ID]).encode()
        return next((one.name for one in own if (one.metadata or {}).get(b"PARQUET:field_id") == wanted), None)


def _require_plain(column: str, kind: Any, *, mapped: bool) -> None:
    """Raise if a column is, or holds, a variant or nested fields that are called otherwise in files."""
    if kind == "variant":
        msg = f"column {column!r} is, or holds, a variant, which is not supported: choose `columns` without it"
        raise ColumnError(msg)
    if not isinstance(kind, dict):
        return
    for one in kind.get("fields", ()):
        if mapped and one["metadata"].get(PHYSICAL_NAME, one["name"]) != one["name"]:
            msg = (
                f"column {column!r} holds the field {one['name']!r}, which files call "
                f"{one['metadata'][PHYSICAL_NAME]!r}: mapped fields within a column are not supported; choose "
                "`columns` without it"
            )
            raise ColumnError(msg)
        _require_plain(column, one["type"], mapped=mapped)
    for part in ("elementType", "keyType", "valueType"):
        _require_plain(column, kind.get(part), mapped=mapped)
