"""Columns by field id: what a table's columns are called in a file, whatever they were called when it was written."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.name_mapping import parse_mapping_from_json
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import ListType, MapType, NestedField, StructType

from torch_dataloader_utils.errors import ColumnError
from torch_dataloader_utils.formats.schema import children, table_column_type

__all__ = ["TableColumns"]


FIELD_ID = b"PARQUET:field_id"
"""Where pyarrow notes the id that a Parquet file gives a field."""


NAME_MAPPING = "schema.name-mapping.default"
"""The table's property that gives names ids, for files without."""


class TableColumns:
    """The columns of a table.

    Args:
        metadata: The table's metadata; the columns are those of its current schema.
    """

    def __init__(self, metadata: TableMetadata) -> None:
        table = metadata.schema()
        arrow = schema_to_pyarrow(table)
        self._fields = {column.name: column for column in table.fields}
        self.schema = pa.schema([(column.name, table_column_type(column.type)) for column in arrow])
        mapping = metadata.properties.get(NAME_MAPPING)
        self._mapped = None if mapping is None else tuple(parse_mapping_from_json(mapping))
        ids = {column.field_id: column.name for column in table.fields}
        self._identities: dict[int, dict[str, int]] = {
            spec.spec_id: {
                ids[one.source_id]: place
                for place, one in enumerate(spec.fields)
                if isinstance(one.transform, IdentityTransform) and one.source_id in ids
            }
            for spec in metadata.partition_specs
        }
        defaults = {column.name: column.initial_default for column in table.fields}
        self._defaults = {name: value for name, value in defaults.items() if value is not None}
        names: set[str] = {*self._defaults, *(name for places in self._identities.values() for name in places)}
        self.constant_schema = pa.schema([column for column in self.schema if column.name in names])

    def constants(self, file: DataFile) -> tuple[Any, ...]:
        """Return the values that columns have in a file which does not hold them: its partition's, or the default."""
        places = self._identities[file.spec_id]
        return tuple(self._constant(column, file, places.get(column.name)) for column in self.constant_schema)

    def _constant(self, column: pa.Field, file: DataFile, place: int | None) -> Any:
        value = None if place is None else file.partition[place]
        if value is None:
            value = self._defaults.get(column.name)
        value = value.bytes if isinstance(value, UUID) else value
        try:
            pa.scalar(value, column.type)
        except (pa.ArrowException, TypeError) as error:
            msg = f"column {column.name!r} is {value!r} in all of {file.file_path}, which is no {column.type}: {error}"
            raise ColumnError(msg) from None
        return value

    def name_in_file(self, own: pa.Schema, column: str) -> str | None:
        """Return a file's name of a column of the table, or None if it has none.

        Args:
            own: The file's columns.
            column: The table's name of it.

        Raises:
            ColumnError: If the file's columns have no ids and the table gives names none, or it is a column of nested
                fields that are not those that the file has.
        """
        wanted = self._fields[column]
        if any(map(_has_ids, own)):
            found = next((one for one in own if _id_of(one) == wanted.field_id), None)
            if found is not None:
                _require_same(wanted, found, column, by_id=True)
            return None if found is None else found.name
        if self._mapped is None:
            msg = (
                f"column {column!r}: the file's columns have no field ids (it has {', '.join(own.names[:50])}), and "
                f"the table has no property {NAME_MAPPING!r} that gives names ids: set it, or write the file anew"
            )
            raise ColumnError(msg)
        own_names: list[str] = next((one.names for one in self._mapped if one.field_id == wanted.field_id), [])
        found = next((one for one in own if one.name in own_names), None)
        if found is not None:
            _require_same(wanted, found, column, by_id=False)
        return None if found is None else found.name


def _has_ids(column: pa.Field) -> bool:
    return _id_of(column) is not None or any(map(_has_ids, children(column.type)))


def _id_of(column: pa.Field) -> int | None:
    text = (column.metadata or {}).get(FIELD_ID)
    return None if text is None else int(text)


def _require_same(wanted: NestedField, found: pa.Field, column: str, *, by_id: bool) -> None:
    """Raise if nested fields of a column were renamed, added, dropped or put in another order."""
    kind = wanted.field_type
    if isinstance(kind, StructType):
        inner = list(kind.fields)
    elif isinstance(kind, ListType):
        inner = [kind.element_field]
    elif isinstance(kind, MapType):
        inner = [kind.key_field, kind.value_field]
    else:
        return
    own = children(found.type)
    same = len(own) == len(inner)
    if isinstance(kind, StructType):
        same = same and [one.name for one in own] == [one.name for one in inner]
    if by_id:
        same = same and [_id_of(one) for one in own] == [one.field_id for one in inner]
    if not same:
        now = ", ".join(f"{one.name} (id {one.field_id})" for one in inner)
        then = ", ".join(f"{one.name} (id {_id_of(one)})" for one in own)
        msg = (
            f"column {column!r} has the fields {now} in the table but {then} in the file: fields within a column that "
            "were renamed, added, dropped or moved are not supported; choose `columns` without it"
        )
        raise ColumnError(msg)
    for one, other in zip(inner, own, strict=True):
        _require_same(one, other, column, by_id=by_id)
