"""Iceberg tables in a real SQL catalog and a real warehouse, and delete files, which pyiceberg does not write."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    schema_to_pyarrow,
)
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
)
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update.snapshot import _FastAppendFiles
from pyiceberg.typedef import Record
from pyroaring import BitMap64
from sqlalchemy import NullPool, create_engine

PATH_ID, POS_ID = 2147483546, 2147483545
"""Ids of the columns of a position delete file: https://iceberg.apache.org/spec/#position-delete-files."""

POSITION_DELETES = pa.schema(
    [
        pa.field("file_path", pa.string(), nullable=False, metadata={"PARQUET:field_id": str(PATH_ID)}),
        pa.field("pos", pa.int64(), nullable=False, metadata={"PARQUET:field_id": str(POS_ID)}),
    ]
)


def config_of(directory: Path, **more: str) -> dict[str, str]:
    """Return what opens the catalog of a directory."""
    return {
        "name": "tests",
        "type": "sql",
        "uri": f"sqlite:///{directory}/catalog.db",
        "warehouse": f"file://{directory}/warehouse",
        **more,
    }


def open_catalog(directory: Path, **more: str) -> Catalog:
    """Open the catalog of a directory. It keeps no connection to its database, which somebody would have to close."""
    catalog = load_catalog(**config_of(directory, **more))
    catalog.close()
    catalog.engine = create_engine(catalog.engine.url, poolclass=NullPool)
    return catalog


def new_catalog(directory: Path, **more: str) -> Catalog:
    """Make a catalog with the namespace ``db``."""
    (directory / "warehouse").mkdir(parents=True)
    catalog = open_catalog(directory, **more)
    catalog.create_namespace("db")
    return catalog


def append_rows(table: Table, rows: pa.Table, partition: Record | None = None, group_rows: int = 7) -> str:
    """Write a data file of some row groups by the table's current schema, commit it, and return its URL.

    Args:
        table: The table.
        rows: Its rows; columns that the table has beside them are left out of the file.
        partition: The partition that they are of, by the table's current specification.
        group_rows: Rows of a row group.
    """
    schema = table.schema()
    arrow = pa.schema([field for field in schema_to_pyarrow(schema) if field.name in rows.column_names])
    sink = pa.BufferOutputStream()
    pq.write_table(rows.select(arrow.names).cast(arrow), sink, row_group_size=group_rows, store_schema=False)
    content = sink.getvalue().to_pybytes()
    statistics = data_file_statistics_from_parquet_metadata(
        pq.read_metadata(pa.BufferReader(content)),
        compute_statistics_plan(schema, table.properties),
        parquet_path_to_id_mapping(schema),
    )
    file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=_written(table, content, "parquet"),
        file_format=FileFormat.PARQUET,
        partition=partition or Record(),
        file_size_in_bytes=len(content),
        **statistics.to_serialized_dict(),
    )
    file.spec_id = table.spec().spec_id
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as append:
        append.append_data_file(file)
    table.refresh()
    return str(file.file_path)


def next_url(table: Table, ending: str) -> str:
    """Return where the next file of a table is written: their order is that in which they were."""
    return f"{table.location()}/data/{len(WRITTEN):06d}.{ending}"


WRITTEN: list[str] = []


def _written(table: Table, content: bytes, ending: str) -> str:
    url = next_url(table, ending)
    with table.io.new_output(url).create() as file:
        file.write(content)
    WRITTEN.append(url)
    return url


def write_position_deletes(table: Table, places: Mapping[str, Sequence[int]]) -> tuple[str, int, int]:
    """Write a position delete file, and return its URL, its size and its rows."""
    rows = sorted((path, place) for path, found in places.items() for place in found)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(list(zip(*rows, strict=True)), schema=POSITION_DELETES), sink, row_group_size=7)
    content = sink.getvalue().to_pybytes()
    return _written(table, content, "parquet"), len(content), len(rows)


def write_deletion_vectors(table: Table, places: Mapping[str, Sequence[int]]) -> tuple[str, int, int]:
    """Write a Puffin file of deletion vectors, by https://iceberg.apache.org/puffin-spec/, and return the same."""
    content = b"PFA1"
    blobs = []
    for url, found in places.items():
        vector = b"\xd1\xd3\x39\x64" + BitMap64(found).serialize()
        blob = len(vector).to_bytes(4, "big") + vector + zlib.crc32(vector).to_bytes(4, "big")
        blobs.append(
            f'{{"type": "deletion-vector-v1", "fields": [2147483645], "snapshot-id": -1, "sequence-number": -1, '
            f'"offset": {len(content)}, "length": {len(blob)}, '
            f'"properties": {{"referenced-data-file": "{url}", "cardinality": "{len(found)}"}}}}'
        )
        content += blob
    footer = f'{{"blobs": [{", ".join(blobs)}]}}'.encode()
    content += b"PFA1" + footer + len(footer).to_bytes(4, "little") + bytes(4) + b"PFA1"
    return _written(table, content, "puffin"), len(content), sum(map(len, places.values()))


def delete_rows(
    table: Table,
    places: Mapping[str, Sequence[int]],
    *,
    vectors: bool = False,
    content: DataFileContent = DataFileContent.POSITION_DELETES,
    partition: Record | None = None,
) -> str:
    """Commit a delete file, and return its path.

    Args:
        table: The table.
        places: The deleted rows of each data file, as the table calls it.
        vectors: Whether to write deletion vectors.
        content: What the manifest says that the file is.
        partition: The partition of the data files.
    """
    path, size, rows = (write_deletion_vectors if vectors else write_position_deletes)(table, places)
    file = DataFile.from_args(
        content=content,
        file_path=path,
        file_format=FileFormat.PUFFIN if vectors else FileFormat.PARQUET,
        partition=partition or Record(),
        record_count=rows,
        file_size_in_bytes=size,
        equality_ids=[1] if content == DataFileContent.EQUALITY_DELETES else None,
    )
    file.spec_id = table.spec().spec_id
    with table.transaction() as transaction:
        _AppendDeletes(file, operation=Operation.OVERWRITE, transaction=transaction, io=table.io).commit()
    table.refresh()
    return path


def data_files(table: Table) -> list[str]:
    """Return the data files of the current snapshot, in the order of their paths."""
    return sorted(task.file.file_path for task in table.scan().plan_files())


class _DeleteManifestWriter(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


class _AppendDeletes(_FastAppendFiles):
    """Adds a manifest of one delete file to those that are there."""

    def __init__(self, file: DataFile, **options: Any) -> None:
        super().__init__(**options)
        self._file = file

    def _manifests(self) -> list[ManifestFile]:
        metadata = self._transaction.table_metadata
        output = self.new_manifest_output()
        with _DeleteManifestWriter(metadata.spec(), metadata.schema(), output, self._snapshot_id, "null") as writer:
            writer.add_entry(
                ManifestEntry.from_args(
                    status=ManifestEntryStatus.ADDED, snapshot_id=self._snapshot_id, data_file=self._file
                )
            )
        return [writer.to_manifest_file(), *self._existing_manifests()]
