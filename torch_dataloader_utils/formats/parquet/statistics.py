"""Row groups that pyarrow proves a filter rules out, by the statistics in footers."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from torch_dataloader_utils.formats.base import FileCase
from torch_dataloader_utils.formats.filters import rules_out
from torch_dataloader_utils.formats.recognition import PARQUET_MAGIC

__all__ = ["select_row_groups"]

MOST_NAN_COLUMNS = 3
"""For up to this many columns in which NaN may pass a filter, all combinations of NaN and no NaN are examined."""


def _columns_kept_as_nan(filters: pc.Expression, schema: pa.Schema, columns: Sequence[str]) -> list[str] | None:
    """Return the columns in which a NaN may pass a filter; None where this is unknown, as inside nested types.

    Statistics leave NaN out, so they say nothing about rows with a NaN.
    """
    kept = []
    for name in columns:
        dtype = schema.field(name).type
        if pa.types.is_nested(dtype) or isinstance(dtype, pa.BaseExtensionType):
            return None
        if pa.types.is_floating(dtype) and not rules_out(filters, schema, columns, _is_nan(name, dtype)):
            kept.append(name)
    return kept if len(kept) <= MOST_NAN_COLUMNS else None


def _is_nan(name: str, dtype: pa.DataType) -> pc.Expression:
    return pc.field(name) == pa.scalar(float("nan"), dtype)


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
        Numbers of row groups, ascending; None where statistics cannot rule out any.
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
    """Return the columns in which a zero may pass a filter although pyarrow rules it out by statistics.

    Parquet writes -0.0 as the least zero and 0.0 as the greatest. pyarrow takes them for different values when it
    compares statistics with a set (seen in 17.0 and in 26.0).
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
    """Return the row groups that may hold a row for the filter, if any of the guarantees is true."""
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
    """Whether a row group has only zeros in a column, apart from NaN and null."""
    bounds = (group.statistics or {}).get(column)
    return bounds is not None and bounds["min"] == 0 == bounds["max"]


def _both(one: pc.Expression | None, other: pc.Expression | None) -> pc.Expression | None:
    return other if one is None else one if other is None else one & other


def _fragment(footer: bytes, guarantee: pc.Expression | None = None) -> Any:
    return pads.ParquetFileFormat().make_fragment(
        pa.BufferReader(PARQUET_MAGIC + footer), partition_expression=guarantee
    )
