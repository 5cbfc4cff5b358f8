"""Rows of tables, also of those without columns."""

from __future__ import annotations

import pyarrow as pa
import pytest

from torch_dataloader_utils.columns.arrow import sliced


@pytest.mark.parametrize("columns", [["x"], []])
@pytest.mark.parametrize(("start", "stop"), [(0, None), (3, None), (10, None), (0, 0), (2, 5), (8, 20), (5, 2)])
def test_a_part_of_a_table_has_as_many_rows_as_that_part_of_a_list(columns, start, stop):
    table = pa.table({"x": range(10)}).select(columns)
    part = sliced(table, start, stop)
    assert len(part) == len(range(10)[start:stop])
    assert part.column_names == columns
    if columns:
        assert part["x"].to_pylist() == list(range(10)[start:stop])
