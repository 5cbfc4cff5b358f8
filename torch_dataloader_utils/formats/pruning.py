"""Filters: which columns they need, and which row groups they rule out by statistics, by pyarrow's own reasoning."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import operator
import re
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from torch_dataloader_utils.errors import ColumnError
from torch_dataloader_utils.formats.footers import MAGIC
from torch_dataloader_utils.formats.source import FileCase

__all__ = ["filter_columns", "require_column", "rules_out", "select_row_groups", "takes_nulls"]

MOST_NAN_COLUMNS = 3
"""Up to this many columns in which NaN passes a filter, each case of NaN and no NaN is looked at."""


def require_column(name: str, schema: pa.Schema, where: str) -> None:
    """Raise a ColumnError, with the nearest match, unless there is one column of a name."""
    count = schema.names.count(name)
    if count == 1:
        return
    if count > 1:
        msg = f"column {name!r}{where} stands {count} times in the file's schema, so it cannot be delivered by name"
        raise ColumnError(msg)
    alike = [other for other in schema.names if other.lower() == name.lower()]
    nearest = alike or difflib.get_close_matches(name, schema.names, n=1, cutoff=0.0)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    msg = f"there is no column {name!r}{where}{hint} (columns: {', '.join(schema.names[:50])})"
    raise ColumnError(msg)


def filter_columns(filters: pc.Expression, schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns that a filter needs: those without which pyarrow cannot bind it."""
    if re.search(r"\bFieldPath\(\d+\)", str(filters)):
        msg = f"the filter {filters!s:.200} names a column by its place, which differs between files: use its name"
        raise ColumnError(msg)
    try:
        kind = _bound_type(filters, schema)
    except (pa.ArrowException, TypeError) as error:
        raise _filter_error(filters, schema, error) from None
    if not pa.types.is_boolean(kind):
        msg = f"the filter {filters!s:.200} gives {kind}, not true or false: compare it with something"
        raise ColumnError(msg)
    names = _needed(filters, schema)
    all_null = reduce(operator.and_, (pc.field(name).is_null() for name in names), pc.scalar(value=True))
    try:
        rules_out(filters, schema, names, all_null)
    except pa.ArrowInvalid as error:  # one that needs more than its own row, such as a sum
        raise _filter_error(filters, schema, error) from None
    return names


def _needed(filters: pc.Expression, schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns without which a filter cannot be bound. Of those, its text holds the names."""
    text = str(filters)
    named = pa.schema([column for column in schema if column.name in text])
    if not _binds(filters, named):
        named = schema
    return tuple(name for number, name in enumerate(named.names) if not _binds(filters, named.remove(number)))


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
    kinds = [f"{column.name!r} is {column.type}" for column in schema if _is_named(column.name, str(filters))]
    return ColumnError(f"the filter {shown} does not fit the columns: {', '.join(kinds) or 'none of them'}; {text}")


def _is_named(column: str, filters: str) -> bool:
    """Whether a column's name is in the text of a filter, and not as part of another name or as a text."""
    return re.search(rf'(?<![\w"]){re.escape(column)}(?![\w"])', filters) is not None


def _binds(filters: pc.Expression, schema: pa.Schema) -> bool:
    try:
        _bound_type(filters, schema)
    except pa.ArrowException:
        return False
    return True


def _bound_type(filters: pc.Expression, schema: pa.Schema) -> pa.DataType:
    dataset = pads.dataset(schema.empty_table())
    return dataset.scanner(columns={"keep": filters}).projected_schema.field("keep").type


def _columns_kept_as_nan(filters: pc.Expression, schema: pa.Schema, columns: Sequence[str]) -> list[str] | None:
    """Return the columns in which a NaN may pass a filter; None where that cannot be told, as inside nested types.

    Statistics leave NaN out, so they say nothing of such rows.
    """
    kept = []
    for name in columns:
        kind = schema.field(name).type
        if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
            return None
        if pa.types.is_floating(kind) and not rules_out(filters, schema, columns, _is_nan(name, kind)):
            kept.append(name)
    return kept if len(kept) <= MOST_NAN_COLUMNS else None


def _is_nan(name: str, kind: pa.DataType) -> pc.Expression:
    return pc.field(name) == pa.scalar(float("nan"), kind)


def rules_out(filters: pc.Expression, schema: pa.Schema, columns: Sequence[str], guarantee: pc.Expression) -> bool:
    """Whether no row of which the guarantee holds passes a filter, by pyarrow's own reasoning."""
    sink = pa.BufferOutputStream()
    row = pa.table({name: pa.nulls(1, schema.field(name).type) for name in columns})
    pq.write_table(row, sink, write_statistics=False)
    written = bytes(sink.getvalue())
    footer = written[-int.from_bytes(written[-8:-4], "little") - 8 :]
    return not _fragment(footer, guarantee).subset(filters).row_groups


def select_row_groups(
    footers: Iterable[bytes],
    filters: pc.Expression,
    schema: pa.Schema,
    columns: Sequence[str],
    cases: Iterable[FileCase],
) -> tuple[tuple[int, ...], ...] | None:
    """Return, for each file, the row groups whose statistics do not rule out a row that a filter keeps.

    Args:
        footers: The files' Parquet footers.
        filters: The filter.
        schema: The dataset's columns.
        columns: The columns that the filter needs.
        cases: What else is known of each file.

    Returns:
        Numbers of row groups, rising; None where statistics cannot rule out any.
    """
    nan_columns = _columns_kept_as_nan(filters, schema, columns)
    if nan_columns is None:
        return None
    guarantees = [
        reduce(operator.and_, (_is_nan(name, schema.field(name).type) for name in chosen)) if chosen else None
        for count in range(len(nan_columns) + 1)
        for chosen in itertools.combinations(nan_columns, count)
    ]
    zeros = _columns_kept_as_zero(filters, schema, columns)
    return tuple(
        _selected(footer, filters, schema, guarantees, case=case, zeros=zeros)
        for footer, case in zip(footers, cases, strict=True)
    )


def _columns_kept_as_zero(filters: pc.Expression, schema: pa.Schema, columns: Sequence[str]) -> list[str]:
    """Return the columns in which a zero may pass a filter, and pyarrow may not see it by statistics.

    Parquet writes -0.0 as the least of zeros and 0.0 as the greatest. pyarrow takes them for different values where it
    looks for one in a set (seen in 17.0 and in 26.0).
    """
    if "is_in(" not in str(filters):
        return []
    floats = [name for name in columns if pa.types.is_floating(schema.field(name).type)]
    return [
        name
        for name in floats
        if not all(
            rules_out(filters, schema, columns, pc.field(name) == pa.scalar(zero, schema.field(name).type))
            for zero in (0.0, -0.0)
        )
    ]


def _selected(
    footer: bytes,
    filters: pc.Expression,
    schema: pa.Schema,
    guarantees: Iterable[pc.Expression | None],
    *,
    case: FileCase,
    zeros: Sequence[str],
) -> tuple[int, ...]:
    """Return the row groups that may hold a row for the filter under any of the guarantees; each stands for a case."""
    selected: set[int] = set()
    if zeros and case.comparable:
        whole = _fragment(footer, case.guarantee)
        selected.update(group.id for group in whole.row_groups if any(_is_zero(group, name) for name in zeros))
    for of_nan in guarantees:
        guarantee = _both(of_nan, case.guarantee)
        fragment = _fragment(footer, guarantee)
        if not case.comparable:
            return tuple(group.id for group in fragment.row_groups)
        with contextlib.suppress(pa.ArrowNotImplementedError):  # types that pyarrow cannot compare with statistics
            fragment = fragment.subset(filters, schema=schema)
        selected.update(group.id for group in fragment.row_groups)
    return tuple(sorted(selected))


def _is_zero(group: Any, column: str) -> bool:
    """Whether a row group has zeros alone in a column, beside NaN and null."""
    bounds = (group.statistics or {}).get(column)
    return bounds is not None and bounds["min"] == 0 == bounds["max"]


def _both(one: pc.Expression | None, other: pc.Expression | None) -> pc.Expression | None:
    return other if one is None else one if other is None else one & other


def takes_nulls(filters: pc.Expression, schema: pa.Schema, columns: Sequence[str], column: str) -> bool:
    """Whether a filter takes every row in which a column is null."""
    return column in columns and rules_out(filters, schema, columns, pc.field(column).is_null())


def _fragment(footer: bytes, guarantee: pc.Expression | None = None) -> Any:
    return pads.ParquetFileFormat().make_fragment(pa.BufferReader(MAGIC + footer), partition_expression=guarantee)
