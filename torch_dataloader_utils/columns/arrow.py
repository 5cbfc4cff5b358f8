"""Arrow tables and types: slices in memory of their own, widths of values, columns found by name.

pyarrow's `take` and `filter` give wrong values, silently, for slices of fixed-size lists inside fixed-size lists: they
leave out a part of the offset (seen in 17.0 and in 26.0). `concat_arrays` is right, and copies even a single one.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from torch_dataloader_utils.errors import ColumnError, nearest

__all__ = ["copied", "require_column", "stacked", "takeable", "width"]


def copied(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a copy that keeps nothing else in memory."""
    return pa.chunked_array([pa.concat_arrays(column.chunks)] if column.num_chunks else [], column.type)


def stacked(tables: Sequence[pa.Table]) -> pa.Table:
    """Return tables as one. pyarrow forgets how many rows there are where they have no columns."""
    if tables[0].num_columns:
        return pa.concat_tables(tables)
    return pa.table({"": pa.nulls(sum(map(len, tables)))}).select([])


def takeable(table: pa.Table) -> pa.Table:
    """Return a table of which rows may be taken, or filtered."""
    for place, column in enumerate(table.columns):
        if _is_misread(column.type) and any(chunk.offset for chunk in column.chunks):
            table = table.set_column(place, table.schema.field(place), copied(column))
    return table


def _is_misread(kind: pa.DataType) -> bool:
    """Whether there are fixed-size lists in fixed-size lists, at any depth."""
    if pa.types.is_fixed_size_list(kind) and pa.types.is_fixed_size_list(kind.value_type):
        return True
    return (
        any(_is_misread(kind.field(number).type) for number in range(kind.num_fields)) if _has_fields(kind) else False
    )


def _has_fields(kind: pa.DataType) -> bool:
    return bool(pa.types.is_nested(kind) or pa.types.is_fixed_size_list(kind))


def width(kind: pa.DataType) -> float:
    """Return the bytes that a value of a type takes in memory; 0 where that differs from value to value.

    Booleans, bits in Arrow, take a byte as they are decoded, and one in tensors and arrays.
    """
    if pa.types.is_boolean(kind):
        return 1
    if pa.types.is_fixed_size_list(kind):
        size: int = kind.list_size
        return size * width(kind.value_type)
    if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
        return 0
    try:
        return float(kind.bit_width) / 8
    except ValueError:
        return 0


def require_column(name: str, schema: pa.Schema, where: str) -> None:
    """Raise a ColumnError, with the nearest match, unless there is one column of a name."""
    count = schema.names.count(name)
    if count == 1:
        return
    if count > 1:
        msg = f"column {name!r}{where} stands {count} times in the file's schema, so it cannot be delivered by name"
        raise ColumnError(msg)
    hint = nearest(name, schema.names, cutoff=0.0) if schema.names else ""
    msg = f"there is no column {name!r}{where}{hint} (columns: {', '.join(schema.names[:50])})"
    raise ColumnError(msg)
