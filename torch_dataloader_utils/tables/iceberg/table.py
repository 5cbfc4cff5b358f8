"""A table of a catalog: one snapshot of it, pinned, and the files that its metadata names.

What the metadata means is said by https://iceberg.apache.org/spec/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchIdentifierError, NoSuchNamespaceError, NoSuchTableError
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression
from pyiceberg.expressions.parser import parse as parse_filter
from pyiceberg.expressions.visitors import bind, expression_evaluator, inclusive_projection
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import expression_to_pyarrow
from pyiceberg.manifest import DataFileContent, FileFormat, ManifestContent
from pyiceberg.schema import Schema
from pyiceberg.table import DataScan, FileScanTask, Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from torch_dataloader_utils.dataset.discovery import Annotations, open_files
from torch_dataloader_utils.dataset.file_set import FileSet
from torch_dataloader_utils.dataset.structured import StructuredDataset
from torch_dataloader_utils.errors import ColumnError, UnreadableFileError
from torch_dataloader_utils.formats.base import OpenedFiles
from torch_dataloader_utils.formats.parquet.format import Parquet
from torch_dataloader_utils.loader.arguments import refuse_path_options, require_count, require_options
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.listing import list_known
from torch_dataloader_utils.storage.redaction import Redactor
from torch_dataloader_utils.tables.iceberg.columns import TableColumns
from torch_dataloader_utils.tables.iceberg.deletes import DeleteFile, Deletions, read_deletes
from torch_dataloader_utils.tables.iceberg.filters import weaker_filter

__all__ = ["IcebergDataset", "SnapshotFiles"]


SHOWN = 5
"""How many snapshots a message shows."""


SHOWABLE = frozenset({"name", "type", "uri", "warehouse"})
"""What a catalog is configured by that is no secret, apart from what a URL may hold."""


class IcebergDataset(StructuredDataset):
    """Batches of the rows of one snapshot of an Iceberg table; all else is as with `StructuredDataset`."""

    @classmethod
    def create_dataloader(  # type: ignore[override] # a table stands in the path's place
        cls,
        table: str,
        *,
        catalog_config: Mapping[str, Any],
        snapshot_id: int | None = None,
        scan_filter: str | BooleanExpression | None = None,
        filters: pc.Expression | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> tuple[StructuredDataLoader, IcebergDataset]:
        """Open one snapshot of a table and make the loader of this rank's batches.

        The catalog is asked here, once: for the table, whose metadata then name the files. Workers are told of files
        and know no catalog.

        Args:
            table: The table's name in the catalog, such as ``"db.events"``.
            catalog_config: What ``pyiceberg.catalog.load_catalog`` takes, such as ``{"type": "sql", "uri": ...}``. It
                appears in no state, message or log, and is not sent to workers.
            snapshot_id: The snapshot to read; None for the table's current one. A state records it, and can be loaded
                only where the same is read: pass the state's ``snapshot_id`` to resume on a table that has moved on. As
                everywhere in Iceberg, a snapshot that is asked for has the columns of its time, the current one those
                of the table.
            scan_filter: Which rows to deliver, as a ``pyiceberg.expressions`` expression or its text, such as
                ``"day >= '2024-02-29'"``; files and partitions are ruled out by it. Rows are delivered that match it
                and `filters`.
            filters: Which rows to deliver, as with `StructuredDataset.create_dataloader`. Comparisons of a column with
                a value, ``isin``, ``is_null`` and ``is_valid``, joined by ``&`` and ``|``, rule out files and
                partitions, too. Files that are ruled out before they are looked at have no row ids.
            storage_options: fsspec's options for the storage of the files: what the catalog is configured with is
                used for metadata alone.
            **options: All that `StructuredDataset.create_dataloader` takes but `path`, `format`, `partitioning` and
                `manifest`, which the table stands for.

        Returns:
            The loader and the dataset. Both have `state_dict` and `load_state_dict`.

        Raises:
            FileNotFoundError: If there is no such table, or nothing has been written to it, or a file is missing.
            UnreadableFileError: If the catalog, the metadata, a delete file or a footer cannot be read, or the table
                has equality deletes or files that are not Parquet, which are not supported.
            ColumnError: If a column does not exist, or cannot be delivered as it is stored.
            ValueError: If there is no such snapshot, or an argument's value makes no sense.
            TypeError: If an argument has the wrong type.
        """
        refuse_path_options(options, "the table")
        _require_config(catalog_config)
        require_options(storage_options, "storage_options")
        if snapshot_id is not None:
            snapshot_id = require_count(snapshot_id, "snapshot_id", least=None)
        files = _load(table, catalog_config, snapshot_id, storage_options)
        if scan_filter is not None:
            files = files.filtered(scan_filter)
            own = cast("pc.Expression", files.row_filter)
            filters = own if filters is None else own & filters
        loader, dataset = super().create_dataloader(files, filters=filters, **options)
        return loader, cast("IcebergDataset", dataset)


def _require_config(value: object) -> None:
    """Raise unless the value is a dictionary; it may be a secret and is not shown."""
    if not isinstance(value, Mapping):
        msg = f"catalog_config is {type(value).__name__}, expected what load_catalog takes, as a dictionary"
        raise TypeError(msg)


def _load(
    table: str, config: Mapping[str, Any], snapshot_id: int | None, storage_options: Mapping[str, Any] | None
) -> SnapshotFiles:
    """Ask the catalog for a table and pin a snapshot of it."""
    secrets = {name: value for name, value in config.items() if name not in SHOWABLE}
    redactor = Redactor(secrets, [str(config[name]) for name in ("uri", "warehouse") if config.get(name)])
    with redactor.errors(lambda: f"the table {table!r}", ValueError, TypeError, ImportError):
        try:
            with closing(load_catalog(**config)) as catalog:
                loaded = catalog.load_table(table)
        except (NoSuchTableError, NoSuchNamespaceError, NoSuchIdentifierError):
            msg = f"the table {table!r} is not in the catalog"
            raise FileNotFoundError(msg) from None
        snapshot = _snapshot(loaded, table, snapshot_id)
        metadata = loaded.metadata
        if snapshot_id is not None and snapshot.schema_id is not None:
            metadata = metadata.model_copy(update={"current_schema_id": snapshot.schema_id})
        return SnapshotFiles(table, metadata, snapshot, loaded.io, redactor, storage_options)


def _snapshot(loaded: Table, table: str, snapshot_id: int | None) -> Snapshot:
    current = loaded.current_snapshot()
    if snapshot_id is None:
        if current is None:
            msg = f"the table {table!r} has no snapshot: nothing has been written to it"
            raise FileNotFoundError(msg)
        return current
    found = loaded.snapshot_by_id(snapshot_id)
    if found is None:
        known = [str(one.snapshot_id) for one in loaded.snapshots()]
        latest = f"its latest are {', '.join(known[-SHOWN:])}" if known else "it has none"
        msg = f"snapshot_id={snapshot_id}: the table {table!r} has no such snapshot, or has it no more; {latest}"
        raise ValueError(msg)
    return found


@dataclass(frozen=True, slots=True)
class SnapshotFiles(FileSet):
    """The files of a table's snapshot.

    Attributes:
        table: The table's name.
        metadata: Its metadata; the current schema is the one to read by.
        snapshot: The snapshot.
        io: pyiceberg's way to the files that hold metadata.
        redactor: Keeps what the catalog is configured with out of messages.
        storage_options: fsspec's options for the files that hold rows.
        scan_filter: Which rows to deliver, as pyiceberg says it.
        row_filter: The same as pyarrow says it, or None for all.
    """

    table: str
    metadata: TableMetadata = field(repr=False)
    snapshot: Snapshot
    io: FileIO = field(repr=False)
    redactor: Redactor = field(repr=False)
    storage_options: Mapping[str, Any] | None = field(repr=False)
    scan_filter: BooleanExpression = field(default_factory=AlwaysTrue)
    row_filter: pc.Expression | None = None

    @property
    def schema(self) -> Schema:
        """The columns to read by, with their ids."""
        return self.metadata.schema()

    def filtered(self, scan_filter: str | BooleanExpression) -> SnapshotFiles:
        """Return the files that may hold a row for a filter.

        Raises:
            TypeError: If it is no filter.
            ValueError: If it cannot be parsed.
            ColumnError: If it does not fit the table's columns.
        """
        if not isinstance(scan_filter, (str, BooleanExpression)):
            msg = f"scan_filter={scan_filter!r}: expected a pyiceberg expression or its text, such as 'x > 3'"
            raise TypeError(msg)
        try:
            parsed = parse_filter(scan_filter) if isinstance(scan_filter, str) else scan_filter
        except Exception as error:  # noqa: BLE001 - pyparsing's own kinds
            msg = f"scan_filter={scan_filter!r} cannot be parsed: {error}"
            raise ValueError(msg) from None
        try:
            bound = bind(self.schema, parsed, case_sensitive=True)
            row_filter = expression_to_pyarrow(bound, self.schema)
        except (ValueError, TypeError, NotImplementedError, pa.ArrowException) as error:
            msg = f"scan_filter={scan_filter!s:.200} does not fit the columns of {self.table!r}: {error}"
            raise ColumnError(msg) from None
        return replace(self, scan_filter=parsed, row_filter=row_filter)

    def open(
        self,
        columns: Sequence[str] | None,
        filters: pc.Expression | None,
        refuses_nulls: Callable[[pa.Field], bool],
    ) -> OpenedFiles:
        """Plan the scan, read the delete files and the footers of the files that are left."""
        tasks = self._plan(filters)
        deletes = list(dict.fromkeys(file for task in tasks for file in task.delete_files))
        urls = [self.metadata.location, *(file.file_path for file in (*(task.file for task in tasks), *deletes))]
        storage, (root, *locations) = Storage.for_urls(urls, self.storage_options)
        sizes = [(location, task.file.file_size_in_bytes) for location, task in zip(locations, tasks, strict=False)]
        listing = list_known(storage, sizes, root)
        by_location = dict(zip(locations, tasks, strict=False))
        files = {file.path: by_location[file.location] for file in listing.files}
        places = dict(zip(deletes, locations[len(tasks) :], strict=True))
        deletions = {
            path: Deletions(task.file.file_path, tuple(DeleteFile.of(file, places[file]) for file in task.delete_files))
            for path, task in files.items()
        }
        table_columns = TableColumns(self.metadata)
        return open_files(
            storage,
            listing,
            Parquet(),
            columns=columns,
            filters=filters,
            refuses_nulls=refuses_nulls,
            annotations=Annotations(
                schema=table_columns.schema,
                name_in_file=table_columns.name_in_file,
                constant_schema=table_columns.constant_schema,
                constants={path: table_columns.constants(task.file) for path, task in files.items()},
                deleted=read_deletes(storage, deletions),
                pin={"snapshot_id": self.snapshot.snapshot_id},
            ),
        )

    def _plan(self, filters: pc.Expression | None) -> list[FileScanTask]:
        """Return the data files that may hold a row for the filters, each with the delete files that apply to it."""
        with self.redactor.errors(lambda: f"the table {self.table!r}"):
            try:
                tasks = self._planned(filters)
            except ValueError:
                self._refuse_equality_deletes()
                raise
            for task in tasks:
                self._require_readable(task)
        return tasks

    def _planned(self, filters: pc.Expression | None) -> list[FileScanTask]:
        """Let pyiceberg plan.

        It works out, too, what a filter leaves to look at in each file, and fails at that where a partition is null and
        the filter asks for its order. So then it is asked for less, and the partitions are looked at here.
        """
        row_filter = self.scan_filter
        if filters is not None:
            row_filter = And(row_filter, weaker_filter(filters, self.schema))
        scan = DataScan(self.metadata, self.io, snapshot_id=self.snapshot.snapshot_id)
        try:
            return list(scan.filter(row_filter).plan_files())
        except TypeError:
            if filters is None:
                raise
        specs = self.metadata.partition_specs
        partitioned = {self.schema.find_column_name(one.source_id) for spec in specs for one in spec.fields}
        tasks = scan.filter(weaker_filter(filters, self.schema, unordered=partitioned)).plan_files()
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
        """Name a file of equality deletes, of which pyiceberg says only that there are some."""
        for manifest in self.snapshot.manifests(self.io):
            if manifest.content == ManifestContent.DELETES:
                for entry in manifest.fetch_manifest_entry(self.io):
                    self._refuse_content(entry.data_file.content, entry.data_file.file_path)

    def _refuse_content(self, content: DataFileContent, path: str) -> None:
        if content == DataFileContent.EQUALITY_DELETES:
            msg = (
                f"the table {self.table!r} deletes rows by equality, in {path}, which is not supported: let its writer "
                "compact the table (such as Spark's rewrite_data_files), or write deletes by position"
            )
            raise UnreadableFileError(msg)

    def _require_readable(self, task: FileScanTask) -> None:
        if task.file.file_format != FileFormat.PARQUET:
            msg = f"{task.file.file_path} of the table {self.table!r} is {task.file.file_format.name}, not Parquet"
            raise UnreadableFileError(msg)
        for file in task.delete_files:
            self._refuse_content(file.content, file.file_path)
