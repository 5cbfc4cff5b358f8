"""Row groups that pyarrow proves a filter rules out, by the statistics in footers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from torch_dataloader_utils.formats.base import FileCase
from torch_dataloader_utils.formats.filters import all_of, rules_out
from torch_dataloader_utils.formats.parquet.footer import leaves_of, parse_footer, schema_of
from torch_dataloader_utils.formats.recognition import PARQUET_MAGIC

MOST_NAN_COLUMNS = 3
"""For up to this many columns in which NaN may pass a filter, all combinations of NaN and no NaN are examined."""


def select_row_groups(
    footers: Iterable[bytes], filters: pc.Expression, needed: pa.Schema, cases: Iterable[FileCase]
) -> tuple[tuple[int, ...], ...] | None:
    """Return, for each file, the row groups whose statistics do not rule out a row that a filter keeps.

    `needed` are the columns that the filter needs, and `cases` what else is known of each file. The numbers of row
    groups are ascending. None where statistics cannot rule out any.
    """
    nan_tests = _nan_tests(filters, needed)
    if nan_tests is None:
        return None
    guarantees = [
        all_of(chosen) for count in range(len(nan_tests) + 1) for chosen in itertools.combinations(nan_tests, count)
    ]
    zeros = _columns_kept_as_zero(filters, needed)
    return tuple(
        _selected(footer, filters, needed, guarantees, case=case, zeros=zeros)
        for footer, case in zip(footers, cases, strict=True)
    )


def _nan_tests(filters: pc.Expression, needed: pa.Schema) -> list[pc.Expression] | None:
    """Return, for each column in which a NaN may pass a filter, the condition that it is NaN.

    Statistics leave NaN out, so they say nothing about rows with a NaN. None where the columns are unknown, as inside
    nested types, or too many.
    """
    kept = []
    for column in needed:
        if pa.types.is_nested(column.type) or isinstance(column.type, pa.BaseExtensionType):
            return None
        if pa.types.is_floating(column.type) and not rules_out(filters, needed, _equals(column, float("nan"))):
            kept.append(_equals(column, float("nan")))
    return kept if len(kept) <= MOST_NAN_COLUMNS else None


def _columns_kept_as_zero(filters: pc.Expression, needed: pa.Schema) -> list[str]:
    """Return the columns in which a zero may pass a filter although pyarrow rules it out by statistics.

    Parquet writes -0.0 as the least zero and 0.0 as the greatest. pyarrow takes them for different values when it
    compares statistics with a set (seen in 17.0 and in 26.0).
    """
    if "is_in(" not in str(filters):
        return []
    floats = [column for column in needed if pa.types.is_floating(column.type)]
    return [
        column.name
        for column in floats
        if not all(rules_out(filters, needed, _equals(column, zero)) for zero in (0.0, -0.0))
    ]


def _equals(column: pa.Field, value: float) -> pc.Expression:
    own = np.float16(value) if pa.types.is_float16(column.type) else value  # old releases of pyarrow take no others
    return pc.field(column.name) == pa.scalar(own, column.type)


def _selected(
    footer: bytes,
    filters: pc.Expression,
    needed: pa.Schema,
    guarantees: Iterable[pc.Expression | None],
    *,
    case: FileCase,
    zeros: Sequence[str],
) -> tuple[int, ...]:
    """Return the row groups that may hold a row for the filter, if any of the guarantees is true."""
    selected: set[int] = set()
    if zeros and case.comparable:
        selected.update(_groups_of_zeros(footer, zeros))
    for of_nan in guarantees:
        fragment = _fragment(footer, all_of((of_nan, case.guarantee)))
        if not case.comparable:
            return tuple(group.id for group in fragment.row_groups)
        # Types that pyarrow cannot compare with statistics, and values of which it cannot compute the filter.
        with contextlib.suppress(pa.ArrowNotImplementedError, pa.ArrowInvalid):
            fragment = fragment.subset(filters, schema=needed)
        selected.update(group.id for group in fragment.row_groups)
    return tuple(sorted(selected))


def _groups_of_zeros(footer: bytes, columns: Sequence[str]) -> Iterator[int]:
    """Yield the row groups that may have only zeros in one of some columns, apart from NaN and null."""
    metadata = parse_footer(footer)
    leaves = leaves_of(schema_of(metadata).to_arrow_schema(), metadata.num_columns)
    numbers = [leaves[name][0] for name in columns if name in leaves]
    for group in range(metadata.num_row_groups):
        of_columns = [metadata.row_group(group).column(number).statistics for number in numbers]
        if any(found is not None and found.has_min_max and _is_zero(found) for found in of_columns):
            yield group


def _is_zero(statistics: pq.Statistics) -> bool:
    """Whether the least and the greatest value are zero. Of floats of 16 bits pyarrow gives the bytes."""
    least, greatest = statistics.min, statistics.max
    if isinstance(least, bytes):
        least, greatest = (np.frombuffer(value, "<f2")[0] for value in (least, greatest))
    return bool(least == 0 == greatest)


def _fragment(footer: bytes, guarantee: pc.Expression | None) -> Any:
    file = pa.BufferReader(PARQUET_MAGIC + footer)
    return pads.ParquetFileFormat().make_fragment(file, partition_expression=guarantee)
