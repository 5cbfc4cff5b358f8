"""Filters: which columns they need, and what pyarrow proves that they rule out, whatever a file holds."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from torch_dataloader_utils.columns.arrow import require_column, without_rows
from torch_dataloader_utils.errors import ColumnError


def all_of(conditions: Iterable[pc.Expression | None]) -> pc.Expression | None:
    """Return the condition that all of these hold; None among them stands for no condition."""
    known = [condition for condition in conditions if condition is not None]
    return reduce(operator.and_, known) if known else None


def filter_columns(filters: pc.Expression, schema: pa.Schema) -> pa.Schema:
    """Return the columns that a filter needs: pyarrow cannot bind it without any one of them."""
    if _names_by_index(filters):
        msg = f"the filter {filters!s:.200} names a column by its index, which differs between files: use its name"
        raise ColumnError(msg)
    try:
        dtype = _bound_type(filters, schema)
    except (pa.ArrowException, TypeError) as error:
        raise _filter_error(filters, schema, error) from None
    if not pa.types.is_boolean(dtype):
        raise ColumnError(f"the filter {filters!s:.200} gives {dtype}, not true or false: compare it with something")
    needed = _needed(filters, schema)
    try:
        _proves_empty(filters, needed, all_of(pc.field(name).is_null() for name in needed.names))
    except pa.ArrowInvalid as error:  # a filter that needs more than one row, such as a sum
        raise _filter_error(filters, schema, error) from None
    return needed


def _names_by_index(filters: pc.Expression) -> bool:
    """Whether a filter names a column by its index, which pyarrow writes so and does not serialise."""
    if not re.search(r"\bFieldPath\(\d+\)", str(filters)):
        return False  # else it may also be a value, or the name of a column
    try:
        filters.__reduce__()
    except pa.ArrowNotImplementedError:
        return True
    return False


def _needed(filters: pc.Expression, schema: pa.Schema) -> pa.Schema:
    """Return the columns without which a filter cannot be bound. The filter's text has their names."""
    text = str(filters)
    named = pa.schema([column for column in schema if column.name in text])
    if not _binds(filters, named):
        named = schema
    return pa.schema([column for number, column in enumerate(named) if not _binds(filters, named.remove(number))])


def _filter_error(filters: pc.Expression, schema: pa.Schema, error: Exception) -> ColumnError:
    text = str(error).splitlines()[0]
    shown = f"{filters!s:.200}"
    marker = "FieldRef.Name("
    if "No match" in text and marker in text:
        name = text.split(marker, 1)[1].split(")", 1)[0]
        try:
            require_column(name, schema, f" for the filter {shown}")
        except ColumnError as missing:
            return missing
    dtypes = [f"{column.name!r} is {column.type}" for column in schema if _is_named(column.name, str(filters))]
    return ColumnError(f"the filter {shown} does not fit the columns: {', '.join(dtypes) or 'none of them'}; {text}")


def _is_named(column: str, filters: str) -> bool:
    """Whether a filter's text has a column's name, and not as part of another name or of a string."""
    return re.search(rf'(?<![\w"]){re.escape(column)}(?![\w"])', filters) is not None


def _binds(filters: pc.Expression, schema: pa.Schema) -> bool:
    try:
        _bound_type(filters, schema)
    except pa.ArrowException:
        return False
    return True


def _bound_type(filters: pc.Expression, schema: pa.Schema) -> pa.DataType:
    dataset = pads.dataset(without_rows(schema))
    return dataset.scanner(columns={"keep": filters}).projected_schema.field("keep").type


def rules_out(filters: pc.Expression, needed: pa.Schema, guarantee: pc.Expression | None) -> bool:
    """Whether pyarrow proves that no row for which the guarantee is true passes a filter that needs these columns.

    It proves nothing where it cannot compute the filter of what is guaranteed, such as a number of the text "n/a". The
    error is that of the row group then.
    """
    try:
        return _proves_empty(filters, needed, guarantee)
    except pa.ArrowInvalid:
        return False


def _proves_empty(filters: pc.Expression, needed: pa.Schema, guarantee: pc.Expression | None) -> bool:
    sink = pa.BufferOutputStream()
    row = pa.table({column.name: pa.nulls(1, column.type) for column in needed})
    pq.write_table(row, sink, write_statistics=False)
    written = pa.BufferReader(sink.getvalue())
    fragment = pads.ParquetFileFormat().make_fragment(written, partition_expression=guarantee)
    try:
        return not fragment.subset(filters).row_groups
    except pa.ArrowNotImplementedError:  # a guarantee that a list view is null (seen in 26.0)
        return False
