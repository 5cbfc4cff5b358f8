"""A table of a catalog: one snapshot of it, pinned, and the files in that snapshot's metadata.

The format of the metadata is at https://iceberg.apache.org/spec/.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchIdentifierError, NoSuchNamespaceError, NoSuchTableError
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression
from pyiceberg.expressions.parser import parse as parse_filter
from pyiceberg.expressions.visitors import bind, expression_evaluator, extract_field_ids, inclusive_projection
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import expression_to_pyarrow
from pyiceberg.manifest import DataFileContent, FileFormat, ManifestContent
from pyiceberg.schema import Schema
from pyiceberg.table import DataScan, FileScanTask, Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from torch_dataloader_utils.dataset.discovery import Annotations, Request, open_files
from torch_dataloader_utils.dataset.file_set import FileSet
from torch_dataloader_utils.dataset.options import Filters
from torch_dataloader_utils.dataset.structured import StructuredDataset
from torch_dataloader_utils.errors import ColumnError, UnreadableFileError
from torch_dataloader_utils.formats.opened_files import OpenedFiles
from torch_dataloader_utils.formats.parquet.format import Parquet
from torch_dataloader_utils.loader.arguments import refuse_path_options, require_count
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader
from torch_dataloader_utils.storage.listing import list_known
from torch_dataloader_utils.storage.redaction import Redactor
from torch_dataloader_utils.tables.iceberg.columns import TableColumns, rounded_columns
from torch_dataloader_utils.tables.iceberg.deletes import read_deletes
from torch_dataloader_utils.tables.iceberg.filters import weaker_filter

SHOWN = 5
"""Number of snapshots that a message shows."""

SHOWABLE = frozenset({"name", "type", "uri", "warehouse"})
"""The properties of a catalog that are not secret, except for parts of a URL."""


class IcebergDataset(StructuredDataset):
    """Batches of the rows of one snapshot of an Iceberg table; otherwise like `StructuredDataset`."""

    @classmethod
    def create_dataloader(  # type: ignore[override] # a table replaces the path
        cls,
        table: str,
        *,
        catalog_config: Mapping[str, Any],
        snapshot_id: int | None = None,
        scan_filter: str | BooleanExpression | None = None,
        filters: Filters | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> tuple[StructuredDataLoader, IcebergDataset]:
        """Open one snapshot of a table and make the loader of this rank's batches.

        All arguments are checked first. Then the table is loaded from the catalog, once. Workers get the list of files,
        not the catalog.

        Args:
            table: The table's name in the catalog, such as ``"db.events"``.
            catalog_config: The arguments of ``pyiceberg.catalog.load_catalog``, such as ``{"type": "sql", "uri":
                ...}``. They appear in no state, message or log, and are not sent to workers.
            snapshot_id: The snapshot to read; None for the table's current one. A state records the snapshot, and loads
                only where the same snapshot is read. To resume when the table has newer snapshots, pass the state's
                ``snapshot_id``. As in all of Iceberg, a requested snapshot has the columns of its time, the current
                one has those of the table.
            scan_filter: Which rows to deliver, as a ``pyiceberg.expressions`` expression or a string such as
                ``"day >= '2024-02-29'"``. It rules out files and partitions. A row is delivered if it matches both
                this filter and `filters`.
            filters: Which rows to deliver, as with `StructuredDataset.create_dataloader`. Comparisons of a column with
                a value, ``isin``, ``is_null`` and ``is_valid``, joined by ``&`` and ``|``, also rule out files and
                partitions. Files that the table's metadata rule out have no row ids.
            storage_options: fsspec's options for the storage of the files: the catalog's properties are used for
                metadata only.
            **options: The parameters of `StructuredDataset.create_dataloader`, except `path`, `format`, `partitioning`
                and `manifest`, which the table determines.

        Returns:
            The loader and the dataset. Both have `state_dict` and `load_state_dict`.

        Raises:
            TypeError: If there is no such parameter, or an argument has the wrong type.
            ValueError: If there is no such snapshot, or an argument's value makes no sense.
            FileNotFoundError: If there is no such table, or it has no snapshot yet, or a file is missing.
            UnreadableFileError: If the catalog, the metadata, a delete file or a footer cannot be read, or the table
                has equality deletes or files that are not Parquet, which are not supported.
            ColumnError: If a column does not exist, or cannot be delivered as it is stored.
        """
        refuse_path_options(options, "the table")
        files = CatalogTable.parse(table, catalog_config, snapshot_id, scan_filter, storage_options)
        loader, dataset = super().create_dataloader(files, filters=filters, storage_options=storage_options, **options)
        return loader, cast("IcebergDataset", dataset)


def _require_config(value: object) -> None:
    """Raise unless the value is a dictionary. The message does not show it: it may hold a secret."""
    if not isinstance(value, Mapping):
        raise TypeError(f"catalog_config is {type(value).__name__}, expected a dictionary of load_catalog's arguments")


def _parse_scan_filter(scan_filter: object) -> BooleanExpression:
    """Return the argument as an expression, or raise."""
    if isinstance(scan_filter, BooleanExpression):
        return scan_filter
    if not isinstance(scan_filter, str):
        raise TypeError(f"scan_filter={scan_filter!r}: expected a pyiceberg expression or a string such as 'x > 3'")
    try:
        return parse_filter(scan_filter)
    except Exception as error:  # noqa: BLE001 - pyparsing's own exceptions
        raise ValueError(f"scan_filter={scan_filter!r} cannot be parsed: {error}") from None


@dataclass(frozen=True, slots=True)
class CatalogTable(FileSet):
    """A table that is loaded from its catalog when its files are opened.

    `config` has the arguments of ``load_catalog``; `scan_filter` is as the user wrote it.
    """

    name: str
    config: Mapping[str, Any] = field(repr=False)
    snapshot_id: int | None
    scan_filter: str | BooleanExpression | None
    storage_options: Mapping[str, Any] | None = field(repr=False)

    @classmethod
    def parse(
        cls,
        table: str,
        catalog_config: Mapping[str, Any],
        snapshot_id: int | None,
        scan_filter: str | BooleanExpression | None,
        storage_options: Mapping[str, Any] | None,
    ) -> CatalogTable:
        """Check the arguments that say which table to open."""
        _require_name(table)
        _require_config(catalog_config)
        if snapshot_id is not None:
            snapshot_id = require_count(snapshot_id, "snapshot_id", least=None)
        if scan_filter is not None:
            _parse_scan_filter(scan_filter)
        return cls(table, catalog_config, snapshot_id, scan_filter, storage_options)

    @property
    def is_filtered(self) -> bool:
        """Whether there is a scan filter."""
        return self.scan_filter is not None

    def open(self, request: Request) -> OpenedFiles:
        """Load the table, pin a snapshot, and open its files."""
        files = self._pinned()
        if self.scan_filter is None:
            return files.open(request, AlwaysTrue())
        row_filter = self._row_filter(files.schema)
        if request.filters is not None:
            row_filter &= request.filters
        return files.open(replace(request, filters=row_filter), _parse_scan_filter(self.scan_filter))

    def _pinned(self) -> SnapshotFiles:
        """Load the table from the catalog and pin a snapshot."""
        config = self.config
        secrets = {name: value for name, value in config.items() if name not in SHOWABLE}
        redactor = Redactor(secrets, [str(config[name]) for name in ("uri", "warehouse") if config.get(name)])
        with redactor.errors(lambda: f"the table {self.name!r}", ValueError, TypeError, ImportError):
            try:
                with closing(load_catalog(**config)) as catalog:
                    loaded = catalog.load_table(self.name)
            except (NoSuchTableError, NoSuchNamespaceError, NoSuchIdentifierError):
                raise FileNotFoundError(f"the table {self.name!r} is not in the catalog") from None
            snapshot = _snapshot(loaded, self.name, self.snapshot_id)
            metadata = loaded.metadata
            if self.snapshot_id is not None and snapshot.schema_id is not None:
                metadata = metadata.model_copy(update={"current_schema_id": snapshot.schema_id})
            return SnapshotFiles(self.name, metadata, snapshot, loaded.io, redactor, self.storage_options)

    def _row_filter(self, schema: Schema) -> pc.Expression:
        """Return the scan filter as pyarrow's expression, or raise a ColumnError if it does not fit the columns."""
        try:
            bound = bind(schema, _parse_scan_filter(self.scan_filter), case_sensitive=True)
            return expression_to_pyarrow(bound, schema)
        except (ValueError, TypeError, NotImplementedError, pa.ArrowException) as error:
            msg = f"scan_filter={self.scan_filter!s:.200} does not fit the columns of {self.name!r}: {error}"
            raise ColumnError(msg) from None


def _require_name(table: object) -> None:
    if not isinstance(table, str):
        msg = (
            f"table={table!r} is {type(table).__name__}, expected the table's name in the catalog, such as 'db.events'"
        )
        raise TypeError(msg)


def _snapshot(loaded: Table, table: str, snapshot_id: int | None) -> Snapshot:
    current = loaded.current_snapshot()
    if snapshot_id is None:
        if current is None:
            raise FileNotFoundError(f"the table {table!r} has no snapshot: nothing has been written to it")
        return current
    found = loaded.snapshot_by_id(snapshot_id)
    if found is None:
        known = [str(snapshot.snapshot_id) for snapshot in loaded.snapshots()]
        latest = f"its latest are {', '.join(known[-SHOWN:])}" if known else "it has none"
        msg = f"snapshot_id={snapshot_id}: the table {table!r} has no such snapshot, or no longer has it; {latest}"
        raise ValueError(msg)
    return found


@dataclass(frozen=True, slots=True)
class SnapshotFiles:
    """The files of a table's snapshot.

    The metadata's current schema defines the columns. `io` is pyiceberg's access to the files of metadata, and
    `redactor` keeps the catalog's properties out of messages.
    """

    table: str
    metadata: TableMetadata = field(repr=False)
    snapshot: Snapshot
    io: FileIO = field(repr=False)
    redactor: Redactor = field(repr=False)
    storage_options: Mapping[str, Any] | None = field(repr=False)

    @property
    def schema(self) -> Schema:
        """The table's columns, with their field ids."""
        return self.metadata.schema()

    def open(self, request: Request, scan_filter: BooleanExpression) -> OpenedFiles:
        """Plan the scan, and read the delete files and the footers of the files that it leaves.

        The scan filter is in addition to the request's filter, in pyiceberg's terms.
        """
        tasks = self._plan(request.filters, scan_filter)
        deletes = dict.fromkeys(file for task in tasks for file in task.delete_files)
        urls = [file.file_path for file in (*(task.file for task in tasks), *deletes)]
        urls_of_all = [self.metadata.location, *urls]
        with request.opened_storage(urls_of_all, self.storage_options) as (storage, (root, *found)):
            locations = dict(zip(urls, found, strict=True))
            sizes = [(location, task.file.file_size_in_bytes) for location, task in zip(found, tasks, strict=False)]
            listing = list_known(storage, sizes, root)
            by_location = dict(zip(found, tasks, strict=False))
            files = {file.path: by_location[file.location] for file in listing.files}
            columns = TableColumns(self.metadata)
            annotations = Annotations(
                schema=columns.schema,
                name_in_file=columns.name_in_file,
                constant_schema=columns.constant_schema,
                constants={path: columns.constants(task.file) for path, task in files.items()},
                deleted=read_deletes(storage, files, locations),
                pin={"snapshot_id": self.snapshot.snapshot_id},
            )
            opened = open_files(storage, listing, Parquet(), request, annotations=annotations)
            for path, task in files.items():
                for column in columns.rounded_in(task.file):
                    number = opened.needed.get_field_index(column)
                    if number >= 0 and opened.projection(path).sources[number] is None:
                        msg = f"column {column!r} is not in {task.file.file_path}, but in its partition, and pyiceberg "
                        msg += "rounds doubles there to 32 bits: rewrite the file, or choose `columns` without it"
                        raise ColumnError(msg)
            return opened

    def _plan(self, filters: pc.Expression | None, scan_filter: BooleanExpression) -> list[FileScanTask]:
        """Return the data files that may hold a row for the filters, each with the delete files that apply to it."""
        with self.redactor.errors(lambda: f"the table {self.table!r}"):
            try:
                tasks = self._planned(filters, scan_filter)
            except ValueError:
                self._refuse_equality_deletes()
                raise
            for task in tasks:
                self._require_readable(task)
        return tasks

    def _planned(self, filters: pc.Expression | None, scan_filter: BooleanExpression) -> list[FileScanTask]:
        """Let pyiceberg plan the scan.

        pyiceberg also computes what part of a filter remains to be tested in each file. It fails at that, with a
        TypeError, where a partition value is null and the filter compares it by order. Then it gets a weaker filter,
        and the partitions are tested here.
        """
        rounded = rounded_columns(self.metadata)
        ids = extract_field_ids(bind(self.schema, scan_filter, case_sensitive=True))
        # The request's filter has the scan filter, too. So nothing is lost without what pyiceberg would plan wrongly.
        row_filter = AlwaysTrue() if rounded.keys() & ids else scan_filter
        if filters is not None:
            row_filter = And(row_filter, weaker_filter(filters, self.schema, left_out=rounded.values()))
        scan = DataScan(self.metadata, self.io, snapshot_id=self.snapshot.snapshot_id)
        try:
            return list(scan.filter(row_filter).plan_files())
        except TypeError:
            if filters is None:
                raise
        specs = self.metadata.partition_specs
        partitioned = {self.schema.find_column_name(part.source_id) for spec in specs for part in spec.fields}
        weakest = weaker_filter(filters, self.schema, left_out=rounded.values(), unordered=partitioned)
        tasks = scan.filter(weakest).plan_files()
        may_match = {
            spec.spec_id: expression_evaluator(
                Schema(*spec.partition_type(self.schema).fields),
                inclusive_projection(self.schema, spec)(row_filter),
                case_sensitive=True,
            )
            for spec in specs
        }
        return [task for task in tasks if may_match[task.file.spec_id](task.file.partition)]

    def _refuse_equality_deletes(self) -> None:
        """Raise an error that names a file of equality deletes: pyiceberg's error does not."""
        for manifest in self.snapshot.manifests(self.io):
            if manifest.content == ManifestContent.DELETES:
                for entry in manifest.fetch_manifest_entry(self.io):
                    self._refuse_content(entry.data_file.content, entry.data_file.file_path)

    def _refuse_content(self, content: DataFileContent, path: str) -> None:
        if content == DataFileContent.EQUALITY_DELETES:
            msg = f"the table {self.table!r} deletes rows by equality, in {path}, which is not supported: let its "
            msg += "writer compact the table (such as Spark's rewrite_data_files), or write deletes by position"
            raise UnreadableFileError(msg)

    def _require_readable(self, task: FileScanTask) -> None:
        if task.file.file_format != FileFormat.PARQUET:
            msg = f"{task.file.file_path} of the table {self.table!r} is {task.file.file_format.name}, not Parquet"
            raise UnreadableFileError(msg)
        for file in task.delete_files:
            self._refuse_content(file.content, file.file_path)
