"""Filters: row groups are ruled out by statistics only where no row of them could pass."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from support import batches_of, open_loader

from torch_dataloader_utils import UnreadableFileError
from torch_dataloader_utils.formats import filters as pruning

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


S, I = pc.field("s"), pc.field("i")  # noqa: E741 - an integer
COMPUTED = {
    "numbers of some texts": pc.if_else(S == "n/a", None, S).cast(pa.int64()) > 5,
    "floats of integers that they round": I.cast(pa.float32(), safe=False) < 10,
}


@pytest.mark.parametrize("rows", [1, 4], ids=["a row in each row group", "all rows in one"])
@pytest.mark.parametrize("name", COMPUTED)
def test_a_filter_that_statistics_cannot_be_put_into_keeps_the_rows_that_it_keeps(tmp_path, name, rows):
    table = pa.table({"s": ["5", "n/a", "7", "9"], "i": pa.array([2**63, 5, 7, 0], pa.uint64()), "x": [0, 1, 2, 3]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=rows)
    loader, _ = open_loader(tmp_path, columns=["x"], filters=COMPUTED[name], output_format="dict")
    assert [row for batch in loader for row in batch["x"]] == table.filter(COMPUTED[name])["x"].to_pylist()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_filter_that_fails_for_a_row_names_its_row_group(tmp_path, rows):
    pq.write_table(pa.table({"s": ["5", "7", "n/a"]}), tmp_path / "a.parquet", row_group_size=rows)
    loader, _ = open_loader(tmp_path, filters=S.cast(pa.int64()) > 5)
    with pytest.raises(UnreadableFileError, match=rf"row group {2 // rows} of .*a\.parquet: .*'n/a'"):
        list(loader)


def test_a_filter_that_fails_for_a_partition_names_its_file(tmp_path):
    for value in ("1", "x"):
        (tmp_path / f"p={value}").mkdir()
        pq.write_table(pa.table({"x": [0, 1]}), tmp_path / f"p={value}" / "a.parquet")
    loader, _ = open_loader(tmp_path, partitioning="hive", filters=pc.field("p").cast(pa.int64()) == 1)
    with pytest.raises(UnreadableFileError, match=r"p=x/a\.parquet: .*'x'"):
        list(loader)


ZEROS = [[0.0, 0.0], [-0.0, np.nan, 0.0], [0.0, None], [0.0, 1.0], [5.0, 6.0]]


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
@pytest.mark.parametrize("wanted", [[0.0], [-0.0], [0.0, 5.0], [-3.0, 0.0, None], [7.0]])
def test_a_row_group_of_zeros_is_read_where_a_set_holds_zero_whatever_statistics_say(tmp_path, kind, wanted):
    tables = [pa.table({"x": pa.array(values, kind)}) for values in ZEROS]
    for number, table in enumerate(tables):
        pq.write_table(table, tmp_path / f"{number}.parquet")
    filters = X.isin(pa.array(wanted, kind))
    whole = pa.concat_tables(tables).append_column("row", pa.array(range(11)))
    loader, dataset = open_loader(tmp_path, filters=filters, output_format="dict")
    assert [row for batch in loader for row in batch["row"]] == whole.filter(filters)["row"].to_pylist()
    if wanted == [7.0]:
        # Old releases of pyarrow (17) rule out a set only by row groups that have nothing but one value.
        assert dataset.get_metrics()["row_groups_pruned"] in (2, len(ZEROS))


@pytest.mark.parametrize("filters", [X.isin([0.0, 3.0]), X.isin([0.0, 3.0]) & pc.field("half").is_valid()])
def test_other_columns_may_have_statistics_that_python_cannot_hold(tmp_path, filters):
    columns = {
        "x": [0.0, 1.0],
        "nanoseconds": pa.array([1, 2], pa.timestamp("ns")),
        "half": pa.array(np.array([1, 2], np.float16)),
        "span": pa.array([1, 3], pa.duration("ns")),
        "far": pa.array([10**8, 10**8], pa.date32()),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    loader, _ = open_loader(tmp_path, columns=["x"], filters=filters)
    assert [value for batch in loader for value in batch["x"].tolist()] == [0.0]


def test_a_filter_is_not_tried_with_every_column_of_a_wide_table(tmp_path, monkeypatch):
    pq.write_table(pa.table({f"c{number}": [1, 2] for number in range(500)}), tmp_path / "wide.parquet")
    tried = []
    bound_type = pruning._bound_type
    monkeypatch.setattr(pruning, "_bound_type", lambda *given: tried.append(given) or bound_type(*given))
    loader, dataset = open_loader(tmp_path, columns=["c0"], filters=pc.field("c1") < 2)
    assert batches_of(loader) == [[0]]
    assert dataset._opened_files.filter_columns == ("c1",)
    assert len(tried) < 10


@pytest.mark.parametrize(
    ("name", "groups"), [("integers alone", [1, 2]), ("greater", [1, 2]), ("both columns", [1, 2])]
)
def test_row_groups_that_statistics_rule_out_are_not_read(data, name, groups):
    loader, dataset = open_loader(data, filters=FILTERS[name])
    batches_of(loader)
    footer = pq.read_metadata(data / "part.parquet")
    chunks = [footer.row_group(group).column(column) for group in groups for column in range(footer.num_columns)]
    assert dataset.get_metrics()["bytes_read"] == sum(chunk.total_compressed_size for chunk in chunks)


def test_a_column_that_may_hold_nan_does_not_keep_the_others_from_ruling_row_groups_out(data):
    footer = pq.read_metadata(data / "part.parquet")
    loader, dataset = open_loader(data, filters=(X != 1.0) & (N > 7))
    assert sorted(row for batch in batches_of(loader) for row in batch) == [8, 9, 10, 11]
    assert dataset.get_metrics()["bytes_read"] == sum(
        footer.row_group(2).column(column).total_compressed_size for column in range(footer.num_columns)
    )


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(12, 40))])
def test_no_filter_of_columns_with_nan_loses_or_adds_a_row(tmp_path, seed):
    chance = np.random.default_rng(seed)
    columns = {
        name: np.where(chance.random(60) < share, np.nan, chance.integers(0, 6, 60) + np.repeat(range(6), 10))
        for name, share in (("x", 0.3), ("y", 0.1), ("z", 1.0 if seed % 7 == 0 else 0.0))
    }
    table = pa.table({**columns, "n": np.arange(60), "row_number": np.arange(60)})
    pq.write_table(table, tmp_path / "part.parquet", row_group_size=10)

    def term():
        field, value = pc.field(str(chance.choice(["x", "y", "z", "n"]))), float(chance.integers(0, 12))
        one = [field > value, field < value, field == value, field != value, ~(field > value), pc.is_nan(field)]
        return one[chance.integers(0, 5 if "n" in str(field) else 6)]

    whole = term()
    for _ in range(chance.integers(0, 4)):
        whole = (whole & term()) if chance.random() < 0.5 else (whole | term())
        whole = ~whole if chance.random() < 0.3 else whole
    loader, _ = open_loader(tmp_path, filters=whole)
    delivered = [int(row) for batch in loader for row in batch["row_number"]]
    assert delivered == table.filter(whole)["row_number"].to_pylist()
