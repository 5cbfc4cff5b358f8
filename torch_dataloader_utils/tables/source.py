"""`Source`: how users describe a source of a mixture, by path or as a table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch_dataloader_utils.dataset.file_set import FileSet, PathSet
from torch_dataloader_utils.dataset.options import Filters, parse_filters
from torch_dataloader_utils.dataset.partitions import Partitioning
from torch_dataloader_utils.dataset.sources import SourceDescription
from torch_dataloader_utils.dataset.transforms import parse_transform
from torch_dataloader_utils.formats.base import Format
from torch_dataloader_utils.formats.opened_files import FILTER_UNKNOWN
from torch_dataloader_utils.formats.registry import FORMATS, FormatName, choose_format
from torch_dataloader_utils.formats.row_transform import UNKNOWN, Transform
from torch_dataloader_utils.formats.text.footer import LARGEST_RANGE, Cutting
from torch_dataloader_utils.loader.arguments import (
    PathLike,
    parse_columns,
    parse_paths,
    require_choice,
    require_flag,
    require_options,
)
from torch_dataloader_utils.storage.redaction import Redactor

if TYPE_CHECKING:
    from pyiceberg.expressions import BooleanExpression

UNCOUNTED = "these files do not tell how many rows they have"


class Source(SourceDescription):
    """A source of a mixture: files given by path, or a table (`iceberg`, `delta`). Frozen.

    All arguments are checked at once, and nothing is accessed before `MixedDataset.create_dataloader`. They mean what
    they mean for one dataset.

    Args:
        path: A file, a directory (searched in depth), a glob, or a list of them; any URL that fsspec supports.
        format: The file format, as in `StructuredDataset.create_dataloader`.
        format_options: Options of pyarrow's parser.
        columns: Columns to deliver, in this order; None for all. The columns of all sources become one schema, as those
            of files do: a column that a source lacks is null in its rows.
        filters: Which rows to deliver. Needs `count_rows`.
        transform: A function from a table of these rows to the table that is delivered in their place, as in
            `StructuredDataset.create_dataloader`. Needs `count_rows`. What it returns is a row of the mixture.
        transform_id: What you call this transform. States record it, and load only where it is the same. Counts of a
            transform without an id are in no `manifest`.
        storage_options: fsspec's options for the storage of this source, credentials included.
        partitioning: Which directories become columns.
        manifest: The result of `MixedDataset.dump_manifest` for this source, or of `StructuredDataset.dump_manifest`.
        count_rows: Whether to count, once, when the mixture is made, the rows that only reading tells: all rows of text
            files, and those that a filter keeps, or a transform makes, of each row group. A mixture has to know them.
            `manifest` holds what was counted.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument's value makes no sense.
    """

    __slots__ = ()

    def __init__(
        self,
        path: PathLike | Sequence[PathLike],
        format: FormatName = "parquet",  # noqa: A002 - as in `StructuredDataset.create_dataloader`
        *,
        format_options: Mapping[str, Any] | None = None,
        columns: Sequence[str] | None = None,
        filters: Filters | None = None,
        transform: Transform | None = None,
        transform_id: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        partitioning: Partitioning | None = None,
        manifest: bytes | None = None,
        count_rows: bool = False,
    ) -> None:
        names = parse_columns(columns, None)
        require_options(storage_options, "storage_options")
        new_format = partial(
            choose_format,
            require_choice(format, "format", FORMATS),
            format_options,
            count_rows=require_flag(count_rows, "count_rows"),
            names_columns=columns is not None,
        )
        given = {
            "path": path,
            "storage_options": storage_options,
            "partitioning": partitioning,
            "manifest": manifest,
        }
        file_format = new_format(cutting=Cutting(LARGEST_RANGE))
        PathSet.parse(given, file_format)  # raises what the arguments have wrong
        text = Redactor(storage_options or {}, paths := parse_paths(path)).clean(", ".join(paths))
        kept = parse_filters(filters)
        unknown = None if file_format.unknown_rows is None else UNCOUNTED
        if kept is not None and not count_rows:
            unknown = FILTER_UNKNOWN
        made = parse_transform({"transform": transform, "transform_id": transform_id, "fingerprint": False})
        if made is not None and not count_rows:
            unknown = UNKNOWN
        files = partial(_path_set, given, new_format)
        super().__init__(text, files, names, kept, count_rows, unknown, manifest, made)

    @classmethod
    def iceberg(
        cls,
        table: str,
        *,
        catalog_config: Mapping[str, Any],
        snapshot_id: int | None = None,
        scan_filter: str | BooleanExpression | None = None,
        columns: Sequence[str] | None = None,
        filters: Filters | None = None,
        transform: Transform | None = None,
        transform_id: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        count_rows: bool = False,
    ) -> Source:
        """Return a source that is one snapshot of an Iceberg table.

        Args:
            table: The table's name in the catalog, such as ``"db.events"``.
            catalog_config: The arguments of ``pyiceberg.catalog.load_catalog``.
            snapshot_id: The snapshot to read; None for the table's current one.
            scan_filter: Which rows to deliver, as a ``pyiceberg.expressions`` expression or a string. Needs
                `count_rows`.
            columns: Columns to deliver, in this order; None for all.
            filters: Which rows to deliver. Needs `count_rows`.
            transform: What makes other rows of the rows, as in `StructuredDataset.create_dataloader`. Needs
                `count_rows`.
            transform_id: What you call this transform. States record it.
            storage_options: fsspec's options for the storage of the files.
            count_rows: Whether to count the rows that the filters leave, or the transform makes.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument's value makes no sense.
            ImportError: If pyiceberg is missing.
        """
        tables = import_module("torch_dataloader_utils.tables.iceberg.table")  # pyiceberg is an extra
        files = tables.CatalogTable.parse(table, catalog_config, snapshot_id, scan_filter, storage_options)
        require_options(storage_options, "storage_options")
        made = parse_transform({"transform": transform, "transform_id": transform_id, "fingerprint": False})
        return cls._of_table(repr(table), files, columns, filters, made, count_rows=count_rows)

    @classmethod
    def delta(
        cls,
        table: PathLike,
        *,
        version: int | None = None,
        columns: Sequence[str] | None = None,
        filters: Filters | None = None,
        transform: Transform | None = None,
        transform_id: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        delta_options: Mapping[str, str] | None = None,
        count_rows: bool = False,
    ) -> Source:
        """Return a source that is one version of a Delta Lake table.

        Args:
            table: The table's directory: a path or URL that both deltalake and fsspec support.
            version: The version to read; None for the latest.
            columns: Columns to deliver, in this order; None for all.
            filters: Which rows to deliver. Needs `count_rows`.
            transform: What makes other rows of the rows, as in `StructuredDataset.create_dataloader`. Needs
                `count_rows`.
            transform_id: What you call this transform. States record it.
            storage_options: fsspec's options for the storage of the files.
            delta_options: deltalake's options for the same storage, to read the log.
            count_rows: Whether to count the rows that the filter leaves, or the transform makes.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument's value makes no sense.
            ImportError: If deltalake is missing.
        """
        tables = import_module("torch_dataloader_utils.tables.delta")  # deltalake is an extra
        require_options(storage_options, "storage_options")
        files = tables.VersionFiles.parse(table, version, storage_options, delta_options)
        text = Redactor(storage_options or {}, [os.fspath(table)]).clean(os.fspath(table))
        made = parse_transform({"transform": transform, "transform_id": transform_id, "fingerprint": False})
        return cls._of_table(text, files, columns, filters, made, count_rows=count_rows)

    @classmethod
    def _of_table(
        cls,
        text: str,
        files: FileSet,
        columns: Sequence[str] | None,
        filters: Filters | None,
        transform: tuple[Transform, str | None] | None,
        *,
        count_rows: bool,
    ) -> Source:
        kept = parse_filters(filters)
        counts = require_flag(count_rows, "count_rows")
        unknown = FILTER_UNKNOWN if (kept is not None or files.is_filtered) and not counts else None
        if transform is not None and not counts:
            unknown = UNKNOWN
        source = cls.__new__(cls)
        new_files, names = partial(_of_any_cutting, files), parse_columns(columns, None)
        SourceDescription.__init__(source, text, new_files, names, kept, counts, unknown, None, transform)
        return source


def _path_set(given: Mapping[str, Any], new_format: Any, cutting: Cutting) -> PathSet:
    file_format: Format = new_format(cutting=cutting)
    return PathSet.parse(given, file_format)


def _of_any_cutting(files: FileSet, cutting: Cutting) -> FileSet:  # noqa: ARG001 - tables have no text files
    return files
