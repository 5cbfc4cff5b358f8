"""Filters: row groups are ruled out by statistics only where no row of them could pass."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from support import batches_of, open_loader

X, N = pc.field("x"), pc.field("n")

FILTERS = {
    "greater": X > 5,
    "not equal": X != 1.0,
    "not greater": ~(X > 0),
    "not equal, inverted": ~(X == 1.0),
    "nan": pc.is_nan(X),
    "not nan": ~pc.is_nan(X),
    "null or nan": X.is_null(nan_is_null=True),
    "either column": (X != 1.0) | (N > 5),
    "both columns": (X > 0.5) & (N > 5),
    "membership": ~X.isin([1.0]),
    "integers alone": N > 5,
}


@pytest.fixture
def data(tmp_path):
    x = np.array([1.0, 1, np.nan, np.nan, 2, 3, 4, 9, np.nan, np.nan, np.nan, 7])
    table = pa.table({"x": x, "n": np.arange(12)})
    pq.write_table(table, tmp_path / "part.parquet", row_group_size=4)
    return tmp_path


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("options", [{}, {"shuffle": True, "shuffle_buffer_size": 6}], ids=["in order", "mixed"])
def test_a_filter_keeps_the_rows_that_it_keeps_row_by_row(data, name, options):
    table = pq.read_table(data)
    kept = table.append_column("row", pa.array(range(12))).filter(FILTERS[name])["row"].to_pylist()
    loader, _ = open_loader(data, filters=FILTERS[name], batch_size=2, **options)
    assert sorted(row for batch in batches_of(loader) for row in batch) == kept


@pytest.mark.parametrize(
    ("name", "groups"), [("integers alone", [1, 2]), ("greater", [1, 2]), ("both columns", [1, 2])]
)
def test_row_groups_that_statistics_rule_out_are_not_read(data, name, groups):
    loader, dataset = open_loader(data, filters=FILTERS[name])
    batches_of(loader)
    footer = pq.read_metadata(data / "part.parquet")
    chunks = [footer.row_group(group).column(column) for group in groups for column in range(footer.num_columns)]
    assert dataset.get_metrics()["bytes_read"] == sum(chunk.total_compressed_size for chunk in chunks)
