"""The user's function that makes other rows of rows: called with Arrow tables, and held to the columns of the first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from torch_dataloader_utils.columns.arrow import copied, takeable, without_rows
from torch_dataloader_utils.errors import TransformError, shown

Transform: TypeAlias = Callable[[pa.Table], pa.Table]
"""A function from rows of a row group, as a table, to the rows that are delivered in their place."""

UNKNOWN = "only reading tells how many rows the transform makes"

NO_ROWS = "a table without rows, with which it is called once to learn its columns"


@dataclass(frozen=True, slots=True)
class RowTransform:
    """A user's transform, and the columns that it returns.

    Attributes:
        function: The function.
        id: What the user calls it, which states record; an empty string if it has no name.
        schema: The columns that it returns; all nullable.
        common: For a source of a mixture, the columns that all sources deliver, and their types. Those that the
            function does not return are null.
        constants: The values of those of them that are the same in all rows.
        row_id_column: The column of row ids that is delivered after the common ones, and that the function returns.
    """

    function: Transform = field(repr=False)
    id: str
    schema: pa.Schema
    common: pa.Schema | None = None
    constants: Mapping[str, int] = field(default_factory=dict)
    row_id_column: str | None = None

    @property
    def delivered_schema(self) -> pa.Schema:
        """The columns that are delivered, without the row ids of a mixture."""
        return self.schema if self.common is None else self.common

    @classmethod
    def opened(cls, function: Transform, transform_id: str | None, columns: pa.Schema) -> RowTransform:
        """Call a function with a table without rows of these columns, to learn what it returns.

        Raises:
            TransformError: If it fails, or what it returns cannot be delivered.
        """
        schema = _called(function, without_rows(columns), NO_ROWS).schema
        for name, count in Counter(schema.names).items():
            if count > 1:
                raise TransformError(f"transform: its table has {count} columns {name!r}: give each a name of its own")
        if not schema.names:
            raise TransformError(f"transform: for {NO_ROWS}, it returned one without columns")
        for column in schema:
            if pa.types.is_null(column.type) and (column.name, column.type) not in _fields(columns):
                msg = f"transform: for {NO_ROWS}, column {column.name!r} has the type null, which holds no value: give "
                raise TransformError(msg + "it its type, as in pa.array(values, pa.list_(pa.int32()))")
        return cls(function, transform_id or "", pa.schema(_fields(schema)))

    def apply(self, table: pa.Table, row_group: str) -> pa.Table:
        """Return what is delivered in place of rows of a row group, which messages name.

        Raises:
            TransformError: If the function fails, or returns other columns than before.
        """
        if not table.num_rows:
            return self._as_delivered(without_rows(self.schema))
        made = _called(self.function, table, f"rows of {row_group}")
        if _fields(made.schema) != _fields(self.schema):
            msg = (
                f"transform: for rows of {row_group}, it returned the columns {_text(made.schema)}, and for {NO_ROWS}, "
            )
            raise TransformError(f"{msg}{_text(self.schema)}: they have to be the same for all rows")
        return self._as_delivered(takeable(pa.table(_unshared(made, table), schema=self.schema)))

    def _as_delivered(self, table: pa.Table) -> pa.Table:
        """Return a table with the columns that all sources of a mixture deliver."""
        if self.common is None:
            return table
        row_ids = [] if self.row_id_column is None else [pa.field(self.row_id_column, pa.int64())]
        columns = []
        for column in (*self.common, *row_ids):
            if column.name in self.constants:
                columns.append(pa.array(np.full(len(table), self.constants[column.name], np.int64)))
            elif column.name in table.column_names:
                columns.append(table[column.name].cast(column.type))
            else:
                columns.append(pa.nulls(len(table), column.type))
        return pa.table(columns, schema=pa.schema([*self.common, *row_ids]))


def _called(function: Transform, table: pa.Table, rows: str) -> pa.Table:
    try:
        made: Any = function(table)
    except Exception as error:
        raise TransformError(f"transform: it failed for {rows}: {type(error).__name__}: {error}") from error
    if not isinstance(made, pa.Table):
        raise TransformError(f"transform: for {rows}, it returned {shown(made)}, expected a pyarrow.Table")
    return made


def _unshared(made: pa.Table, given: pa.Table) -> list[pa.ChunkedArray]:
    """Return columns that share no memory with one another, nor with what the function may have kept.

    Batches are written to, and an Arrow array that is made of a NumPy array is that array's memory. So only columns of
    the table that it was given stay as they are, once.
    """
    unused = {place for column in given.columns for place in _places(column)}
    columns = []
    for column in made.columns:
        places = _places(column)
        columns.append(column if places <= unused else copied(column))
        unused -= places
    return columns


def _places(column: pa.ChunkedArray) -> set[int]:
    """Return where the memory of a column begins."""
    return {
        buffer.address for chunk in column.chunks for buffer in chunk.buffers() if buffer is not None and buffer.size
    }


def _fields(schema: pa.Schema) -> list[tuple[str, pa.DataType]]:
    return [(column.name, column.type) for column in schema]


def _text(schema: pa.Schema) -> str:
    return ", ".join(f"{column.name!r} ({column.type})" for column in schema)
