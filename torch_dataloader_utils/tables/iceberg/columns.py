"""Columns by field id: a table's column may have another name in a file that was written before a rename."""

from __future__ import annotations

import struct
from typing import Any
from uuid import UUID

import pyarrow as pa
from pyiceberg.avro.decoder import new_decoder
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.name_mapping import parse_mapping_from_json
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DoubleType, ListType, MapType, NestedField, StructType

from torch_dataloader_utils.columns.arrow import children
from torch_dataloader_utils.errors import ColumnError
from torch_dataloader_utils.formats.schema import table_column_type

FIELD_ID = b"PARQUET:field_id"
"""The key of a field's id in the metadata that pyarrow reads from a Parquet file."""

NAME_MAPPING = "schema.name-mapping.default"
"""The table's property that maps names to ids, for files without ids."""


def rounded_columns(metadata: TableMetadata) -> dict[int, str]:
    """Return the columns, by their ids, whose values pyiceberg rounds where a table is partitioned by them.

    Its compiled decoder reads doubles as floats of 32 bits (seen in 0.12).
    """
    if new_decoder(struct.pack("<d", 0.1)).read_double() == 0.1:  # noqa: PLR2004 - not to be rounded
        return {}
    schema = metadata.schema()
    ids = {part.source_id for spec in metadata.partition_specs for part in spec.fields}
    names = {one: schema.find_column_name(one) for one in sorted(ids)}
    return {
        one: name for one, name in names.items() if name is not None and isinstance(schema.find_type(one), DoubleType)
    }


class TableColumns:
    """The columns of a table: those of the current schema of its metadata."""

    def __init__(self, metadata: TableMetadata) -> None:
        table = metadata.schema()
        arrow = schema_to_pyarrow(table)
        self._fields = {column.name: column for column in table.fields}
        self.schema = pa.schema([(column.name, table_column_type(column.type)) for column in arrow])
        self._rounded = frozenset(rounded_columns(metadata).values())
        mapping = metadata.properties.get(NAME_MAPPING)
        self._mapped = None if mapping is None else tuple(parse_mapping_from_json(mapping))
        ids = {column.field_id: column.name for column in table.fields}
        self._identities: dict[int, dict[str, int]] = {
            spec.spec_id: {
                ids[part.source_id]: index
                for index, part in enumerate(spec.fields)
                if isinstance(part.transform, IdentityTransform) and part.source_id in ids
            }
            for spec in metadata.partition_specs
        }
        defaults = {column.name: column.initial_default for column in table.fields}
        self._defaults = {name: value for name, value in defaults.items() if value is not None}
        names: set[str] = {*self._defaults, *(name for indices in self._identities.values() for name in indices)}
        self.constant_schema = pa.schema([column for column in self.schema if column.name in names])

    def constants(self, file: DataFile) -> tuple[Any, ...]:
        """Return the values of columns that a file does not store: its partition's values, or the columns' defaults.

        A partition's null is such a value: planning compares filters with it, too.
        """
        indices = self._identities[file.spec_id]
        return tuple(self._constant(column, file, indices.get(column.name)) for column in self.constant_schema)

    def _constant(self, column: pa.Field, file: DataFile, index: int | None) -> Any:
        value = self._defaults.get(column.name) if index is None else file.partition[index]
        value = value.bytes if isinstance(value, UUID) else value
        try:
            pa.scalar(value, column.type)
        except (pa.ArrowException, TypeError) as error:
            msg = f"column {column.name!r} is {value!r} in all of {file.file_path}, which is not {column.type}: {error}"
            raise ColumnError(msg) from None
        return value

    def rounded_in(self, file: DataFile) -> list[str]:
        """Return the columns for which a file's partition has a value that pyiceberg rounds."""
        indices = self._identities[file.spec_id]
        return [name for name, index in indices.items() if name in self._rounded and file.partition[index] is not None]

    def name_in_file(self, stored: pa.Schema, column: str) -> str | None:
        """Return the name that a table's column has among the stored ones of a file, or None if it is not there.

        Raises:
            ColumnError: If neither the file's columns have ids nor the table maps names to ids; or if the column has
                nested fields that differ from the file's.
        """
        wanted = self._fields[column]
        has_ids = any(map(_has_ids, stored))
        if has_ids:
            found = next((field for field in stored if _id_of(field) == wanted.field_id), None)
        elif self._mapped is None:
            msg = f"column {column!r}: the file's columns have no field ids (it has {', '.join(stored.names[:50])}), "
            msg += f"and the table has no property {NAME_MAPPING!r} that maps names to ids: set it, or rewrite the file"
            raise ColumnError(msg)
        else:
            names: list[str] = next((field.names for field in self._mapped if field.field_id == wanted.field_id), [])
            found = next((field for field in stored if field.name in names), None)
        if found is None:
            return None
        _require_same_fields(wanted, found, column, by_id=has_ids)
        return str(found.name)


def _has_ids(column: pa.Field) -> bool:
    return _id_of(column) is not None or any(map(_has_ids, children(column.type)))


def _id_of(column: pa.Field) -> int | None:
    field_id = (column.metadata or {}).get(FIELD_ID)
    return None if field_id is None else int(field_id)


def _require_same_fields(wanted: NestedField, found: pa.Field, column: str, *, by_id: bool) -> None:
    """Raise if nested fields of a column were renamed, added, dropped or reordered."""
    dtype = wanted.field_type
    if isinstance(dtype, StructType):
        inner = list(dtype.fields)
    elif isinstance(dtype, ListType):
        inner = [dtype.element_field]
    elif isinstance(dtype, MapType):
        inner = [dtype.key_field, dtype.value_field]
    else:
        return
    stored = children(found.type)
    same = len(stored) == len(inner)
    if isinstance(dtype, StructType):
        same = same and [field.name for field in stored] == [field.name for field in inner]
    if by_id:
        same = same and [_id_of(field) for field in stored] == [field.field_id for field in inner]
    if not same:
        now = ", ".join(f"{field.name} (id {field.field_id})" for field in inner)
        then = ", ".join(f"{field.name} (id {_id_of(field)})" for field in stored)
        msg = f"column {column!r} has the fields {now} in the table but {then} in the file: fields within a column "
        msg += "that were renamed, added, dropped or moved are not supported; choose `columns` without it"
        raise ColumnError(msg)
    for field, other in zip(inner, stored, strict=True):
        _require_same_fields(field, other, column, by_id=by_id)
