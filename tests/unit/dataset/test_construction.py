"""What is wrong with arguments, columns or files is said by name before anything is delivered."""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support import DEFAULT_FILES, batches_of, examples, open_loader, rows_of, write_dataset

from torch_dataloader_utils import ColumnError, StructuredDataset, UnevenRanksWarning, UnreadableFileError
from torch_dataloader_utils.formats import cpus as rank_cpus
from torch_dataloader_utils.loader.arguments import parse_bytes

ROWS = sum(rows for rows, _ in DEFAULT_FILES)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A dataset that no test changes."""
    directory = tmp_path_factory.mktemp("data")
    write_dataset(directory)
    return directory


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch) -> None:
    """No rank but the one that a test sets."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


def rows_in(loader: Any) -> list[int]:
    return [row for batch in batches_of(loader) for row in batch]


def deliver_into(rows: list[int], loader: Any) -> None:
    for batch in loader:
        rows += rows_of(batch)


def rows_recorded(state: dict[str, Any]) -> int:
    """The number of rows that a state says are delivered."""
    done = sum(split["row_length"] for shard in state["completed_shards"] for split in shard["splits"])
    return done + sum(shard["rows_delivered"] for shard in state["in_progress"])


# Arguments ---------------------------------------------------------------------------------------------------------

WRONG_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"batch_size": 0}, ValueError, "batch_size=0: at least 1 is needed"),
    ({"batch_size": -1}, ValueError, "batch_size=-1"),
    ({"batch_size": "8"}, TypeError, "batch_size='8' is str, expected an integer"),
    ({"batch_size": True}, TypeError, "batch_size=True is bool"),
    ({"batch_size": 8.0}, TypeError, "batch_size=8.0 is float"),
    ({"split_rows": 0}, ValueError, "split_rows=0"),
    ({"split_rows": "3"}, TypeError, "split_rows='3'"),
    ({"num_workers": -1}, ValueError, "num_workers=-1"),
    ({"num_workers": 1.0}, TypeError, "num_workers=1.0"),
    ({"num_workers": True}, TypeError, "num_workers=True"),
    ({"shuffle": 1}, TypeError, "shuffle=1"),
    ({"shuffle": None}, TypeError, "shuffle=None"),
    ({"drop_last": "no"}, TypeError, "drop_last='no'"),
    ({"shuffle_seed": 1.5}, TypeError, "shuffle_seed=1.5"),
    ({"shuffle_seed": None}, TypeError, "shuffle_seed=None"),
    ({"shuffle": True, "shuffle_buffer_size": 0}, ValueError, "shuffle_buffer_size=0"),
    ({"shuffle_buffer_size": 100}, ValueError, "shuffle_buffer_size=100 has no meaning without shuffle=True"),
    ({"output_format": "pandas"}, ValueError, "output_format='pandas' is not one of 'torch', 'numpy', 'arrow', 'dict'"),
    ({"output_format": None}, ValueError, "output_format=None"),
    ({"format": "hdf5"}, ValueError, "format='hdf5' is not one of 'parquet'"),
    ({"collate_fn": "list"}, TypeError, "collate_fn='list' cannot be called"),
    ({"columns": "value"}, TypeError, "columns='value': expected a list of column names"),
    ({"columns": ["value", 3]}, TypeError, "expected a list of column names"),
    ({"columns": 3}, TypeError, "columns=3"),
    ({"columns": ["value", "name", "value"]}, ValueError, "names a column twice"),
    ({"columns": [], "row_id_column": None}, ValueError, "columns is empty"),
    ({"row_id_column": ""}, TypeError, "row_id_column=''"),
    ({"row_id_column": 3}, TypeError, "row_id_column=3"),
    ({"filters": "value > 3"}, TypeError, r"filters='value > 3': expected a pyarrow.compute.Expression"),
    ({"filters": [("value", ">")]}, TypeError, "expected a pyarrow.compute.Expression"),
    ({"filters": list}, TypeError, "expected a pyarrow.compute.Expression"),
    ({"num_ranks": 2}, ValueError, "num_ranks=2 and rank=None: give both or neither"),
    ({"rank": 0}, ValueError, "num_ranks=None and rank=0: give both or neither"),
    ({"num_ranks": 2, "rank": 2}, ValueError, "rank=2 is out of range: with num_ranks=2 ranks go from 0 to 1"),
    ({"num_ranks": 2, "rank": -1}, ValueError, "rank=-1"),
    ({"num_ranks": 0, "rank": 0}, ValueError, "num_ranks=0"),
    ({"num_ranks": "2", "rank": 0}, TypeError, "num_ranks='2'"),
    ({"show_progress": True, "progress_interval_sec": -1}, ValueError, "progress_interval_sec=-1"),
    ({"storage_timeout": -1}, ValueError, "storage_timeout=-1"),
    ({"storage_timeout": 0}, ValueError, "storage_timeout=0"),
    ({"storage_timeout": float("inf")}, ValueError, "storage_timeout=inf: expected .* not infinite"),
    ({"storage_timeout": float("nan")}, ValueError, "storage_timeout=nan"),
    ({"storage_timeout": "2 min"}, ValueError, "storage_timeout='2 min'"),
    ({"storage_timeout": True}, ValueError, "storage_timeout=True"),
    ({"storage_timeout": None}, ValueError, "storage_timeout=None"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), WRONG_ARGUMENTS)
def test_a_wrong_argument_is_an_error_that_names_it(data, arguments, kind, message):
    with pytest.raises(kind, match=message):
        open_loader(data, **arguments)


@pytest.mark.parametrize(
    "value",
    [np.float64(8), np.array(8.5), np.array([8, 8]), torch.tensor(8.5), torch.tensor([8, 8])],
    ids=["a numpy float", "an array without dimensions", "an array", "a tensor without dimensions", "a tensor"],
)
def test_a_number_that_is_no_integer_is_an_error_that_names_the_argument(data, value):
    with pytest.raises(TypeError, match="batch_size="):
        open_loader(data, batch_size=value)


def test_integers_of_numpy_are_as_good_as_pythons_own(data):
    given = {"batch_size": 9, "split_rows": 50, "shuffle_seed": 3, "shuffle_buffer_size": 70, "split_bytes": 10_000}
    given |= {"num_workers": 0, "num_ranks": 1, "rank": 0}
    loader, dataset = open_loader(data, shuffle=True, **given)
    other_loader, other = open_loader(data, shuffle=True, **{name: np.int64(one) for name, one in given.items()})
    dataset.set_epoch(4)
    other.set_epoch(np.int64(4))
    assert json.dumps(other.state_dict()) == json.dumps(dataset.state_dict())
    assert batches_of(other_loader) == batches_of(loader)


def test_an_argument_that_does_not_exist_is_refused(data):
    with pytest.raises(TypeError, match="bach_size"):
        open_loader(data, bach_size=3)


def test_wrong_arguments_are_reported_before_anything_is_read(tmp_path):
    with pytest.raises(ValueError, match="batch_size=0"):
        open_loader(tmp_path / "nothing here", batch_size=0)


READABLE = {
    "128MiB": 128 * 1024**2,
    "1.5 GB": 1_500_000_000,
    "1kb": 1000,
    "2 KiB": 2048,
    " 7 ": 7,
    "7b": 7,
    "3TiB": 3 * 1024**4,
    4096: 4096,
    2**80: 2**80,
}


@pytest.mark.parametrize("size", READABLE)
def test_split_bytes_reads_integers_and_numbers_with_a_unit(data, size):
    _, dataset = open_loader(data, split_bytes=size)
    assert dataset.state_dict()["plan"]["split_bytes"] == READABLE[size]


@pytest.mark.parametrize(
    "size", ["12 parsecs", "MiB", "", "1,5 GB", "-1MiB", "1e6", "0x10", "1 2", "nan", "0", "0.2B", 0, -1]
)
def test_split_bytes_that_cannot_be_read_is_an_error_that_names_it(data, size):
    with pytest.raises(ValueError, match="split_bytes="):
        open_loader(data, split_bytes=size)


@pytest.mark.parametrize("size", [4096.0, None, True, b"1MiB"], ids=["float", "none", "true", "bytes"])
def test_split_bytes_of_another_type_is_a_type_error_that_names_it(data, size):
    with pytest.raises(TypeError, match="split_bytes="):
        open_loader(data, split_bytes=size)


@given(st.one_of(st.text(), st.from_regex(r"\d{1,400}(\.\d{0,40})? ?[kKMGTib]{0,4}", fullmatch=True)))
@examples(300, part=12)
def test_any_text_is_a_number_of_bytes_or_a_value_error(text):
    try:
        size = parse_bytes(text, "split_bytes")
    except ValueError:
        return
    assert type(size) is int
    assert size >= 1


# Columns -----------------------------------------------------------------------------------------------------------


def test_a_misspelled_column_is_named_with_the_nearest_match(data):
    with pytest.raises(ColumnError, match=r"no column 'vlaue'; did you mean 'value'\?") as raised:
        open_loader(data, columns=["name", "vlaue"])
    assert isinstance(raised.value, ValueError)
    assert "value, score, name" in str(raised.value)


@pytest.mark.parametrize(
    "filters",
    [pc.field("scoer") > 3, (pc.field("value") > 3) & (pc.field("scoer") < 1), pc.field("scoer").is_valid()],
    ids=["compared", "one of two", "valid"],
)
def test_a_misspelled_column_of_a_filter_is_named_with_the_nearest_match(data, filters):
    with pytest.raises(ColumnError, match=r"no column 'scoer' for the filter .*did you mean 'score'\?"):
        open_loader(data, filters=filters)


@pytest.mark.parametrize(
    "filters",
    [
        pc.field("value") == "three",
        pc.field("name") > 3,
        pc.field("value") < dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc),
        pc.field("value") & pc.field("score"),
        pc.field("value", "inner") > 3,
        pc.sum(pc.field("value")) > 3,
    ],
    ids=["number to text", "text to number", "number to time", "two numbers", "a field of a number", "a sum"],
)
def test_a_filter_that_does_not_fit_its_column_is_an_error_that_shows_it(data, filters):
    with pytest.raises(ColumnError, match=r"the filter .* does not fit the columns"):
        open_loader(data, filters=filters)


@pytest.mark.parametrize("filters", [pc.field(0) > 3, (pc.field("value") > 3) & (pc.field(1) < 3)], ids=["all", "half"])
def test_a_filter_that_names_a_column_by_its_index_is_refused(data, filters):
    with pytest.raises(ColumnError, match=r"names a column by its index, .*: use its name"):
        open_loader(data, filters=filters)


def test_a_value_and_a_name_that_look_like_an_index_are_none(tmp_path):
    names = ["value", "FieldPath(1)", "FieldPath(2)"]
    pq.write_table(pa.table({"FieldPath(0)": names, "x": [1, 2, 3]}), tmp_path / "a.parquet")
    filters = pc.field("FieldPath(0)") == "FieldPath(1)"
    loader, _ = open_loader(tmp_path, filters=filters, columns=["x"])
    assert [batch["x"].tolist() for batch in loader] == [[2]]


def test_a_column_that_differs_in_case_alone_is_the_nearest_match(data):
    with pytest.raises(ColumnError, match=r"no column 'VALUE'; did you mean 'value'\?"):
        open_loader(data, columns=["VALUE"])


def test_storage_options_that_are_no_dictionary_are_refused_without_showing_them(data):
    with pytest.raises(TypeError, match="storage_options is str, expected a dictionary") as raised:
        open_loader(data, storage_options="key-that-is-secret")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "filters", [pc.field("value"), pc.field("value") + 1, pc.scalar("yes")], ids=["column", "sum", "text"]
)
def test_a_filter_that_is_not_true_or_false_is_an_error_that_shows_it(data, filters):
    with pytest.raises(ColumnError, match=r"the filter .* gives (int64|string), not true or false"):
        open_loader(data, filters=filters)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("value", {}),
        ("value", {"columns": ["value"]}),
        ("score", {"columns": ["value"], "filters": pc.field("score") > 3}),
    ],
)
def test_a_row_id_column_of_the_name_of_another_is_refused(data, name, options):
    with pytest.raises(ColumnError, match=f"row_id_column='{name}' is the name of a column"):
        open_loader(data, row_id_column=name, **options)


def test_a_row_id_column_may_have_the_name_of_a_column_that_is_not_asked_for(data):
    loader, _ = open_loader(data, row_id_column="score", columns=["value"])
    assert [row for batch in loader for row in batch["score"].tolist()] == list(range(ROWS))


def test_a_column_that_stands_twice_in_the_files_is_refused_by_name_and_only_where_it_is_asked_for(tmp_path):
    table = pa.Table.from_arrays([pa.array([1, 2])] * 3, names=["x", "y", "x"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ColumnError, match="column 'x' stands 2 times"):
        open_loader(tmp_path)
    loader, _ = open_loader(tmp_path, columns=["y"])
    assert rows_in(loader) == [0, 1]


DIFFERENT = {
    "type": ({"x": [1, 2]}, {"x": ["a", "b"]}, "column 'x' is string in {b} but int64 in {a}"),
    "time zone": (
        {"x": pa.array([1], pa.timestamp("us"))},
        {"x": pa.array([1], pa.timestamp("us", "UTC"))},
        "column 'x' is timestamp[us, tz=UTC] in {b} but timestamp[us] in {a}",
    ),
    "missing": ({"x": [1], "y": [1]}, {"y": [1]}, "column 'x' is in {a} but not in {b}"),
    "surplus": ({"y": [1]}, {"x": [1], "y": [1]}, "column 'x' is in {b} but not in {a}"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_files_that_differ_in_a_column_are_both_named_with_it(tmp_path, case):
    first, second, message = DIFFERENT[case]
    a, b = write(tmp_path / "a.parquet", first), write(tmp_path / "b.parquet", second)
    with pytest.raises(ColumnError) as raised:
        open_loader(tmp_path)
    assert message.format(a=a, b=b) in str(raised.value)


def test_files_may_differ_in_columns_that_are_not_asked_for_and_in_the_order_of_all(tmp_path):
    write(tmp_path / "a.parquet", {"x": [1, 2], "y": [1.5, 2.5], "only here": [1, 2]})
    write(tmp_path / "b.parquet", {"y": [3.5, 4.5], "z": ["a", "b"], "x": [3, 4]})
    loader, _ = open_loader(tmp_path, columns=["x", "y"])
    [batch] = loader
    assert list(batch) == ["x", "y", "row"]
    assert batch["x"].tolist() == [1, 2, 3, 4]
    assert batch["y"].tolist() == [1.5, 2.5, 3.5, 4.5]
    write(tmp_path / "b.parquet", {"y": [3.5], "only here": [3], "x": [3]})
    loader, _ = open_loader(tmp_path)
    [batch] = loader
    assert batch["x"].tolist() == [1, 2, 3]
    assert batch["y"].tolist() == [1.5, 2.5, 3.5]


@pytest.mark.parametrize("output_format", ["torch", "numpy", "arrow", "dict"])
@pytest.mark.parametrize("mixing", [{}, {"shuffle": True, "shuffle_buffer_size": 100}], ids=["in file order", "mixed"])
def test_files_may_differ_in_whether_a_column_can_be_null(tmp_path, output_format, mixing):
    for name, nullable in (("a", True), ("b", False), ("c", True)):
        schema = pa.schema([pa.field("x", pa.int64(), nullable=nullable)])
        pq.write_table(pa.table({"x": [1, 2, 3]}, schema=schema), tmp_path / f"{name}.parquet")
    loader, dataset = open_loader(tmp_path, output_format=output_format, **mixing)
    [batch] = loader
    values = batch["x"].to_pylist() if output_format == "arrow" else batch["x"]
    assert sorted(map(int, values)) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    if output_format == "arrow":
        assert batch.schema.remove(1).equals(dataset.schema)


# Nulls that have no value ------------------------------------------------------------------------------------------

WITH_NULLS = {
    "int64": pa.array([1, 2, None, 4], pa.int64()),
    "uint8": pa.array([1, 2, None, 4], pa.uint8()),
    "bool": pa.array([True, False, None, True]),
    "list of ints": pa.array([[1, 2], [3, 4], None, [5, 6]], pa.list_(pa.int16(), 2)),
    "list with null ints": pa.array([[1, 2], [3, 4], [None, 1], [5, 6]], pa.list_(pa.int16(), 2)),
    "list of bools": pa.array([[True], [True], [None], [False]], pa.list_(pa.bool_(), 1)),
}


def skip_if_unreadable(name: str) -> None:
    """Skip null lists where pyarrow itself cannot read them back."""
    if name == "list of ints" and int(pa.__version__.split(".")[0]) < 26:
        pytest.skip("this pyarrow cannot read nulls in fixed-size lists")


@pytest.fixture(params=WITH_NULLS)
def with_nulls(request, tmp_path) -> Path:
    """Two files; the second has nulls in its second row group."""
    column = WITH_NULLS[request.param]
    write(tmp_path / "a.parquet", {"x": column.slice(0, 2), "y": [1, 2]})
    write(tmp_path / "b.parquet", {"x": column, "y": [3, 4, 5, 6]}, row_group_size=2)
    return tmp_path


@pytest.mark.parametrize("output_format", ["torch", "numpy"])
def test_announced_nulls_are_an_error_that_names_column_file_and_row_group(with_nulls, output_format):
    with pytest.raises(ColumnError, match="column 'x' holds 1 nulls") as raised:
        open_loader(with_nulls, output_format=output_format)
    assert f"(row group 1 of {with_nulls / 'b.parquet'})" in str(raised.value)


@pytest.mark.parametrize("output_format", ["arrow", "dict"])
def test_nulls_are_delivered_where_the_format_has_a_value_for_them(request, with_nulls, output_format):
    skip_if_unreadable(request.node.callspec.params["with_nulls"])
    loader, _ = open_loader(with_nulls, output_format=output_format)
    [batch] = loader
    values = batch["x"].to_pylist() if output_format == "arrow" else batch["x"]
    expected = [*pq.read_table(with_nulls / "a.parquet")["x"], *pq.read_table(with_nulls / "b.parquet")["x"]]
    assert values == [value.as_py() for value in expected]


def test_nulls_of_a_column_that_is_not_asked_for_do_not_matter(with_nulls):
    loader, _ = open_loader(with_nulls, columns=["y"])
    assert [value for batch in loader for value in batch["y"].tolist()] == [1, 2, 3, 4, 5, 6]


def test_nulls_do_not_matter_where_the_filter_rules_out_their_row_groups(with_nulls):
    loader, _ = open_loader(with_nulls, filters=pc.field("y") < 5)
    assert rows_in(loader) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["int64", "uint8", "bool", "list of ints"])
@pytest.mark.parametrize("mixing", [{}, {"shuffle": True, "shuffle_buffer_size": 100}], ids=["in file order", "mixed"])
def test_a_filter_that_takes_every_null_row_allows_the_column(tmp_path, name, mixing):
    skip_if_unreadable(name)
    write(tmp_path / "a.parquet", {"x": WITH_NULLS[name], "y": [3, 4, 5, 6]}, row_group_size=2)
    loader, _ = open_loader(tmp_path, filters=pc.field("x").is_valid(), **mixing)
    [batch] = loader
    assert sorted(batch["y"].tolist()) == [3, 4, 6]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (pc.field("x") > 1, [2, 4]),
        ((pc.field("x") > 1) & (pc.field("y") < 6), [2]),
        (pc.field("x").isin([1, 4]), [1, 4]),
        (~pc.field("x").is_null(), [1, 2, 4]),
    ],
    ids=["greater", "both", "in a set", "not null"],
)
def test_a_comparison_takes_null_rows_too(tmp_path, filters, expected):
    write(tmp_path / "a.parquet", {"x": WITH_NULLS["int64"], "y": [3, 4, 5, 6]})
    loader, _ = open_loader(tmp_path, filters=filters)
    [batch] = loader
    assert batch["x"].tolist() == expected


@pytest.mark.parametrize(
    "filters",
    [
        pc.field("y") > 3,
        pc.field("x").is_null(),
        (pc.field("x") > 1) | (pc.field("y") > 4),
        pc.field("x").is_valid() | pc.field("x").is_null(),
    ],
    ids=["another column", "null", "either column", "valid or null"],
)
def test_a_filter_that_may_leave_a_null_row_does_not_allow_the_column(tmp_path, filters):
    write(tmp_path / "a.parquet", {"x": WITH_NULLS["int64"], "y": [3, 4, 5, 6]})
    with pytest.raises(ColumnError, match="column 'x' holds 1 nulls"):
        open_loader(tmp_path, filters=filters)


@pytest.mark.parametrize("name", WITH_NULLS)
@pytest.mark.parametrize("mixing", [{}, {"shuffle": True, "shuffle_buffer_size": 100}], ids=["in file order", "mixed"])
def test_nulls_that_no_footer_announces_are_an_error_at_reading_that_names_their_place(tmp_path, name, mixing):
    skip_if_unreadable(name)
    path = write(tmp_path / "a.parquet", {"x": WITH_NULLS[name]}, row_group_size=2, write_statistics=False)
    loader, _ = open_loader(tmp_path, **mixing)
    with pytest.raises(ColumnError, match=r"column 'x' holds \d nulls") as raised:
        rows_in(loader)
    assert f"(row group 1 of {path})" in str(raised.value)


def test_rows_before_an_unannounced_null_are_delivered_and_counted(tmp_path):
    write(tmp_path / "a.parquet", {"x": WITH_NULLS["int64"]}, row_group_size=2, write_statistics=False)
    loader, dataset = open_loader(tmp_path, batch_size=2)
    running = iter(loader)
    assert next(running)["x"].tolist() == [1, 2]
    with pytest.raises(ColumnError):
        next(running)
    assert rows_recorded(dataset.state_dict()) == 2


def test_nulls_are_counted_in_the_right_leaf_beside_nested_columns(tmp_path):
    """Parquet stores the leaves of nested columns apart: the third column's nulls are the fifth leaf's."""
    nested = pa.array([{"a": 1, "b": {"c": None, "d": None}}] * 2)
    pairs = pa.array([[("k", None)]] * 2, pa.map_(pa.string(), pa.int64()))
    write(tmp_path / "a.parquet", {"s": nested, "m": pairs, "x": [1, 2]})
    loader, _ = open_loader(tmp_path)
    [batch] = loader
    assert batch["x"].tolist() == [1, 2]
    write(tmp_path / "a.parquet", {"s": nested, "m": pairs, "x": [1, None]})
    with pytest.raises(ColumnError, match="column 'x' holds 1 nulls"):
        open_loader(tmp_path)


# Ranks -------------------------------------------------------------------------------------------------------------


def uneven(tmp_path: Path) -> Path:
    """Four row groups of 10, 10, 10 and 30 rows."""
    write(tmp_path / "data" / "a.parquet", {"x": range(30)}, row_group_size=10)
    write(tmp_path / "data" / "b.parquet", {"x": range(30)}, row_group_size=30)
    return tmp_path / "data"


def test_ranks_of_unequal_length_are_warned_of_with_their_counts_at_the_callers_line(tmp_path):
    path = uneven(tmp_path)
    with pytest.warns(UnevenRanksWarning, match=r"batches \[2, 4\], rows \[20, 40\].*join\(\)") as warned:
        StructuredDataset.create_dataloader(path, batch_size=10, num_workers=0, num_ranks=2, rank=0)
    assert [one.filename for one in warned] == [__file__]


def test_of_many_ranks_the_warning_tells_the_least_and_the_greatest_count(tmp_path):
    expected = r"batches 0 \(rank 4\) to 3 \(rank 3\), rows 0 \(rank 4\) to 30 \(rank 3\)"
    with pytest.warns(UnevenRanksWarning, match=expected):
        open_loader(uneven(tmp_path), batch_size=10, num_ranks=5000, rank=0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "options",
    [
        {"num_ranks": 1, "rank": 0},
        {},
        {"num_ranks": 1, "rank": 0, "filters": pc.field("x") > 3},
        {"num_ranks": 2, "rank": 0, "batch_size": 100},
    ],
)
def test_one_rank_or_equal_numbers_of_batches_are_not_warned_of(tmp_path, options):
    open_loader(uneven(tmp_path), **{"batch_size": 10, **options})


@pytest.mark.filterwarnings("error")
def test_drop_last_may_make_ranks_equal(tmp_path):
    write(tmp_path / "a.parquet", {"x": range(19)}, row_group_size=10)
    open_loader(tmp_path, batch_size=9, drop_last=True, num_ranks=2, rank=0)
    with pytest.raises(UnevenRanksWarning, match=r"batches \[2, 1\], rows \[10, 9\]"):
        open_loader(tmp_path, batch_size=9, num_ranks=2, rank=0)


def test_with_a_filter_the_warning_says_that_lengths_are_not_known(data):
    unknown = (
        "the number of batches of each rank is not known ahead: only reading tells how many rows the filter leaves"
    )
    with pytest.warns(UnevenRanksWarning, match=unknown):
        open_loader(data, filters=pc.field("value") > 3, num_ranks=2, rank=1)


def test_the_warning_is_given_once_and_by_set_epoch_where_a_later_epoch_is_the_first_uneven_one(tmp_path):
    """Rows are mixed, so which row groups a rank gets differs from epoch to epoch."""
    for number, rows in enumerate((7, 13, 20, 31, 5) * 4):
        write(tmp_path / f"{number}.parquet", {"x": range(rows)})
    for seed in range(100):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options = {"shuffle": True, "shuffle_seed": seed, "num_ranks": 2, "rank": 0, "batch_size": 10}
            _, dataset = open_loader(tmp_path, **options)
            if caught:
                continue
            dataset.set_epoch(1)
            if not caught:
                continue
            for epoch in range(2, 20):
                dataset.set_epoch(epoch)
        assert [(one.category, one.filename) for one in caught] == [(UnevenRanksWarning, __file__)]
        assert "in epoch 1" in str(caught[0].message)
        return
    pytest.fail("no seed makes epoch 0 even and epoch 1 uneven")


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning")
def test_ranks_of_the_environment_share_the_rows(data, monkeypatch):
    rows = []
    for rank in range(3):
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("RANK", str(rank))
        loader, dataset = open_loader(data)
        assert (dataset.num_ranks, dataset.rank) == (3, rank)
        rows += rows_in(loader)
    assert sorted(rows) == list(range(ROWS))


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning")
def test_what_the_caller_says_counts_more_than_the_environment(data, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "2")
    _, dataset = open_loader(data, num_ranks=5, rank=4)
    assert (dataset.num_ranks, dataset.rank) == (5, 4)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_half_of_torchruns_environment_is_none(data, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    _, dataset = open_loader(data)
    assert (dataset.num_ranks, dataset.rank) == (1, 0)


@pytest.mark.parametrize(
    ("size", "rank", "named"),
    [
        ("2", "5", "rank=5 is out of range"),
        ("2", "2", "rank=2 is out of range"),
        ("2", "-1", "RANK='-1'"),
        ("0", "0", "WORLD_SIZE='0'"),
        ("1", "x", "RANK='x'"),
        ("two", "0", "WORLD_SIZE='two'"),
        ("1", "", "RANK=''"),
    ],
)
def test_an_environment_that_makes_no_sense_is_an_error_that_names_it(data, monkeypatch, size, rank, named):
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(ValueError, match=named):
        open_loader(data)


@pytest.fixture
def process_group() -> Iterator[None]:
    """An initialised process group of one."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning")
def test_a_process_group_counts_more_than_the_environment_and_less_than_the_caller(data, monkeypatch, process_group):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "2")
    _, dataset = open_loader(data)
    assert (dataset.num_ranks, dataset.rank) == (1, 0)
    _, dataset = open_loader(data, num_ranks=5, rank=4)
    assert (dataset.num_ranks, dataset.rank) == (5, 4)


# Workers -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(
    ("cpus", "local_world_size", "expected"),
    [(1, None, 1), (8, None, 7), (8, "1", 7), (8, "4", 1), (64, "8", 7), (3, "8", 1)],
)
def test_the_default_number_of_workers_is_the_ranks_share_of_the_cpus_less_one(
    data, monkeypatch, cpus, local_world_size, expected
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)), raising=False)
    monkeypatch.setattr(rank_cpus, "cpu_quota", lambda: math.inf)
    if local_world_size:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
    loader, dataset = open_loader(data, num_workers=None)
    assert dataset.num_workers == loader.num_workers == expected


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning")
def test_ranks_on_machines_of_different_sizes_plan_the_same_by_default(data, monkeypatch):
    digests, rows = set(), []
    for rank, cpus in enumerate((3, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cpus=cpus: set(range(cpus)), raising=False)
        _, dataset = open_loader(data, num_workers=None, num_ranks=2, rank=rank)
        assert dataset.num_workers == 1
        digests.add(dataset.plan_digest)
        rows += [row for batch in batches_of(dataset) for row in batch]
    assert len(digests) == 1
    assert sorted(rows) == list(range(ROWS))


@pytest.mark.parametrize("size", ["0", "-1", "many", "1.5"])
def test_a_local_world_size_that_makes_no_sense_is_an_error_that_names_it(data, monkeypatch, size):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", size)
    with pytest.raises(ValueError, match=f"LOCAL_WORLD_SIZE='{size}'"):
        open_loader(data, num_workers=None)


# Damaged files -----------------------------------------------------------------------------------------------------


def beside_good_ones(tmp_path: Path, content: bytes) -> Path:
    """A file of this content in a dataset that is whole otherwise."""
    write_dataset(tmp_path / "data")
    path = tmp_path / "data" / "part-0015.parquet"
    path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def content(data) -> bytes:
    """The bytes of a good file."""
    return (data / "part-000.parquet").read_bytes()


def footer_length(content: bytes) -> int:
    return int.from_bytes(content[-8:-4], "little")


DAMAGES: dict[str, bytes | Callable[[bytes], bytes]] = {
    "empty": b"",
    "one byte": b"P",
    "only magic": b"PAR1",
    "magic twice": b"PAR1PAR1",
    "no footer": b"PAR1" + bytes(4) + b"PAR1",
    "text": b"a,b\n1,2\n" * 100,
    "magic cut off": lambda content: content[:-4],
    "another magic": lambda content: content[:-4] + b"ARRO",
    "encrypted": lambda content: content[:-4] + b"PARE",
    "footer length beyond the file": lambda content: with_footer_length(content, len(content)),
    "huge footer length": lambda content: with_footer_length(content, 2**32 - 1),
    "footer length of zero": lambda content: with_footer_length(content, 0),
    "footer length too short": lambda content: with_footer_length(content, footer_length(content) // 2),
    "footer of zeros": lambda content: (
        content[: -8 - footer_length(content)] + bytes(footer_length(content)) + content[-8:]
    ),
    "column name that is no text": lambda content: content.replace(b"score", b"sc\xc7re"),
}


def with_footer_length(content: bytes, length: int) -> bytes:
    return content[:-8] + length.to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, content, damage):
    made = DAMAGES[damage]
    path = beside_good_ones(tmp_path, made if isinstance(made, bytes) else made(content))
    with pytest.raises(UnreadableFileError) as raised:
        open_loader(path.parent)
    assert str(path) in str(raised.value)
    assert isinstance(raised.value, OSError)


def test_a_file_cut_short_at_any_place_is_an_error_that_names_it(tmp_path, content):
    lengths = sorted({*range(0, len(content), 97), *range(len(content) - 20, len(content))})
    path = beside_good_ones(tmp_path, b"")
    for length in lengths:
        path.write_bytes(content[:length])
        with pytest.raises(UnreadableFileError) as raised:
            open_loader(path)
        assert str(path) in str(raised.value)


def test_damaged_data_is_an_error_at_reading_that_names_file_and_row_group(tmp_path):
    path = write(tmp_path / "a.parquet", {"x": np.arange(1000)}, row_group_size=500, use_dictionary=False)
    chunk = pq.ParquetFile(path).metadata.row_group(1).column(0)
    damaged = bytearray(path.read_bytes())
    damaged[chunk.data_page_offset : chunk.data_page_offset + 40] = bytes(40)
    path.write_bytes(damaged)
    loader, _ = open_loader(tmp_path, batch_size=100)
    running = iter(loader)
    for _ in range(5):
        next(running)
    with pytest.raises(UnreadableFileError) as raised:
        next(running)
    assert f"row group 1 of {path}" in str(raised.value)


@pytest.mark.parametrize("beside", [True, False], ids=["beside others", "alone"])
@pytest.mark.parametrize("row_groups", [0, 1])
def test_a_file_without_rows_delivers_nothing_and_is_no_error(tmp_path, beside, row_groups):
    path = tmp_path / "data" / "part-0015.parquet"
    if beside:
        write_dataset(path.parent)
    else:
        path.parent.mkdir()
    schema = pa.schema([("value", pa.int64()), ("score", pa.float64()), ("name", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for _ in range(row_groups):
            writer.write_table(schema.empty_table())
    assert pq.ParquetFile(path).metadata.num_row_groups == row_groups
    loader, dataset = open_loader(path.parent)
    assert len(loader) == (-(-ROWS // 16) if beside else 0)
    assert rows_in(loader) == list(range(ROWS if beside else 0))
    dataset.load_state_dict(dataset.state_dict())
    assert rows_in(loader) == []


def test_a_directory_named_like_a_file_is_searched_as_a_directory(tmp_path):
    write_dataset(tmp_path / "data" / "x.parquet")
    (tmp_path / "data" / "empty.parquet").mkdir()
    for path in (tmp_path / "data", tmp_path / "data" / "x.parquet"):
        loader, _ = open_loader(path)
        assert rows_in(loader) == list(range(ROWS))
    with pytest.raises(FileNotFoundError, match=r"empty\.parquet"):
        open_loader(tmp_path / "data" / "empty.parquet")


# Files that change after they were listed --------------------------------------------------------------------------


def _delete(path: Path) -> None:
    path.unlink()


def _write_larger(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:4] + bytes(1000) + path.read_bytes()[4:])


def _write_smaller(path: Path) -> None:
    write(path, {"value": [1], "score": [1.0], "name": ["x"]})


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("change", [_delete, _write_larger, _write_smaller, _empty])
def test_a_file_that_changed_since_it_was_listed_is_an_error_that_names_it(tmp_path, change, num_workers):
    write_dataset(tmp_path / "data")
    path = tmp_path / "data" / "part-002.parquet"
    loader, dataset = open_loader(tmp_path / "data", num_workers=num_workers)
    change(path)
    delivered = []
    kind = FileNotFoundError if change is _delete else UnreadableFileError
    with pytest.raises(kind) as raised:
        deliver_into(delivered, loader)
    assert str(path) in str(raised.value)
    assert delivered == list(range(len(delivered)))
    assert len(delivered) <= 137
    assert rows_recorded(dataset.state_dict()) == len(delivered)


def test_a_file_written_again_in_the_same_size_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "a.parquet"
    one = pa.table({"x": pa.array(range(100), pa.int64())})
    other = pa.table({"x": pa.array(range(100, 200), pa.int64())})
    plain = {"use_dictionary": False, "compression": "none"}
    pq.write_table(one, path, **plain)
    size = path.stat().st_size
    loader, _ = open_loader(path)
    pq.write_table(other, path, **plain)
    assert path.stat().st_size == size
    with pytest.raises(UnreadableFileError, match="was rewritten since it was listed") as raised:
        rows_in(loader)
    assert str(path) in str(raised.value)


def test_no_column_but_the_row_ids_can_be_asked_for(tmp_path):
    rows = write_dataset(tmp_path)
    loader, _ = open_loader(tmp_path, columns=[])
    batches = list(loader)
    assert [row for batch in batches for row in batch["row"].tolist()] == list(range(rows))
    assert all(batch.keys() == {"row"} for batch in batches)
