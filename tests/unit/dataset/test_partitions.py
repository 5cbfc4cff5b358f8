"""Partition columns and files whose columns differ: what pyarrow reads of the same files, or an error that says why."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import batches_of, edited, examples, open_loader

from torch_dataloader_utils import CheckpointMismatchError, ColumnError, UnreadableFileError

NULL = "__HIVE_DEFAULT_PARTITION__"


def write(path: Path, **columns: Any) -> None:
    """Write one file with three row groups at least, and its rows' numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=2)


def write_tree(root, values, rows=5):
    """Write a file for each (directory, first row)."""
    for number, directory in enumerate(values):
        write(root / directory / "part.parquet", x=np.arange(rows) + rows * number)


def delivered(loader: Any, *names: str) -> dict[str, list[Any]]:
    """The values of columns over all batches."""
    batches = list(loader)
    return {name: [value for batch in batches for value in batch[name]] for name in names}


# Types of partition columns ------------------------------------------------------------------------------------------

KINDS = {
    "small integers": (["k=1", "k=-20"], pa.int32(), [1, -20]),
    "leading zeros": (["k=01", "k=02"], pa.int32(), [1, 2]),
    "wide integers": (["k=1", "k=3000000000"], pa.int64(), [1, 3_000_000_000]),
    "the widest": (["k=-9223372036854775808", "k=9223372036854775807"], pa.int64(), [-(2**63), 2**63 - 1]),
    "integers beyond any": (["k=1", "k=99999999999999999999"], pa.string(), ["1", "99999999999999999999"]),
    "dates": (["k=2024-02-29", "k=1999-01-01"], pa.date32(), [dt.date(2024, 2, 29), dt.date(1999, 1, 1)]),
    "no dates": (["k=2024-02-30", "k=1999-01-01"], pa.string(), ["2024-02-30", "1999-01-01"]),
    "texts": (["k=a", "k=b"], pa.string(), ["a", "b"]),
    "integers and texts": (["k=1", "k=b"], pa.string(), ["1", "b"]),
    "null and integers": ([f"k={NULL}", "k=7"], pa.int32(), [None, 7]),
    "null alone": ([f"k={NULL}"], pa.string(), [None]),
    "encoded": (["k=a%20b%2Fc", "k=%C3%A9"], pa.string(), ["a b/c", "é"]),
    "an empty text": (["k=", "k=x"], pa.string(), ["", "x"]),
}


@pytest.mark.parametrize("case", KINDS)
def test_a_partition_column_has_the_type_that_all_its_values_fit(tmp_path, case):
    directories, kind, values = KINDS[case]
    write_tree(tmp_path, directories)
    loader, dataset = open_loader(tmp_path, partitioning="hive", output_format="dict", columns=["k", "x"])
    assert dataset.schema.field("k").type == kind
    order = sorted(range(len(directories)), key=lambda number: directories[number])
    found = delivered(loader, "k", "x")
    assert found["k"] == [values[number] for number in order for _ in range(5)]
    assert found["x"] == [row for number in order for row in range(5 * number, 5 * number + 5)]


def test_only_directories_below_the_root_stand_for_columns_and_only_where_they_are_asked_for(tmp_path):
    root = tmp_path / "above=1" / "data"
    write_tree(root, ["a=1/b=x", "a=2/b=y"])
    _, dataset = open_loader(root, partitioning="hive")
    assert dataset.schema.names == ["x", "a", "b"]
    _, below = open_loader(root / "a=1", partitioning="hive")
    assert below.schema.names == ["x", "b"]
    loader, _ = open_loader(root, partitioning="hive", columns=["a"])
    assert [set(batch) for batch in loader] == [{"a", "row"}]
    _, without = open_loader(root)
    assert without.schema.names == ["x"]


def test_a_directory_without_a_value_leaves_its_column_null(tmp_path):
    write_tree(tmp_path, ["k=1", "plain"])
    loader, _ = open_loader(tmp_path, partitioning="hive", output_format="dict")
    assert delivered(loader, "k")["k"] == [1] * 5 + [None] * 5
    with pytest.raises(ColumnError, match=r"column 'k' holds 2 nulls.*plain/part\.parquet"):
        open_loader(tmp_path, partitioning="hive")


def test_a_pyarrow_partitioning_is_parsed_by_pyarrow(tmp_path):
    write_tree(tmp_path, ["2024/a", "2025/b"])
    schema = pa.schema([("year", pa.int16()), ("kind", pa.string())])
    loader, dataset = open_loader(tmp_path, partitioning=pads.partitioning(schema), output_format="dict")
    assert dataset.schema.field("year").type == pa.int16()
    assert delivered(loader, "year", "kind") == {"year": [2024] * 5 + [2025] * 5, "kind": ["a"] * 5 + ["b"] * 5}
    with pytest.raises(ColumnError, match=r"2024/a/part\.parquet"):
        open_loader(tmp_path, partitioning=pads.partitioning(pa.schema([("year", pa.int8())])))
    with pytest.raises(TypeError, match="with a schema"):
        open_loader(tmp_path, partitioning=pads.partitioning(flavor="hive"))


def test_partitioning_by_file_names(tmp_path):
    write(tmp_path / "2024_a.parquet", x=[1])
    write(tmp_path / "2025_b.parquet", x=[2])
    partitioning = pads.partitioning(pa.schema([("year", pa.int16())]), flavor="filename")
    loader, _ = open_loader(tmp_path, partitioning=partitioning)
    assert [int(year) for year in delivered(loader, "year")["year"]] == [2024, 2025]


def test_a_column_that_is_in_paths_and_in_files_is_an_error_that_names_a_file_where_it_is_asked_for(tmp_path):
    write(tmp_path / "x=1" / "a.parquet", x=[1], y=[2])
    for asked in ({}, {"columns": ["x"]}, {"columns": ["y"], "filters": pc.field("x") == 1}):
        with pytest.raises(ColumnError, match=r"column 'x' is both in the paths of files and in .*a\.parquet"):
            open_loader(tmp_path, partitioning="hive", **asked)
    loader, _ = open_loader(tmp_path, partitioning="hive", columns=["y"])
    assert delivered(loader, "y") == {"y": [2]}


MIXING = {"in order": {}, "mixed": {"shuffle_buffer_size": 100}, "in rounds": {"shuffle_buffer_size": 3}}


@pytest.mark.parametrize("name", MIXING)
def test_partition_columns_alone_have_every_row(tmp_path, name):
    write_tree(tmp_path, ["k=1", "k=2"], rows=8)
    for path in tmp_path.rglob("*.parquet"):
        pq.write_table(pq.ParquetFile(path).read(), path, row_group_size=8)
    options = {**MIXING[name], "shuffle": name != "in order", "row_id_column": None}
    loader, _ = open_loader(tmp_path, partitioning="hive", columns=["k"], **options)
    assert sorted(int(value) for value in delivered(loader, "k")["k"]) == [1] * 8 + [2] * 8


@examples(25, least=10)
@given(values=st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=5), min_size=1))
def test_any_text_survives_the_way_through_a_path(tmp_path_factory, values):
    root = tmp_path_factory.mktemp("any")
    texts = set(values)
    write_tree(root, [f"k={quote(text, safe='')}" for text in texts], rows=1)
    loader, _ = open_loader(
        root, partitioning=pads.partitioning(pa.schema([("k", pa.string())]), flavor="hive"), output_format="dict"
    )
    assert sorted(delivered(loader, "k")["k"]) == sorted(texts)


def test_a_state_is_refused_where_the_filters_columns_are_read_from_other_directories(tmp_path):
    """Each row passes the filter then or now, so that without the comparison rows would be lost and others repeated."""
    write_tree(tmp_path, ["1/2", "2/1", "2/2"], rows=20)
    names = pa.schema([("first", pa.int32()), ("second", pa.int32())])
    options = {"filters": pc.field("first") == 2, "batch_size": 7}
    loader, _ = open_loader(tmp_path, partitioning=pads.partitioning(names), **options)
    next(iter(loader))
    state = loader.state_dict()
    again, _ = open_loader(tmp_path, partitioning=pads.partitioning(names), columns=["x"], **options)
    again.load_state_dict(state)
    exchanged = pa.schema([names.field("second"), names.field("first")])
    other, _ = open_loader(tmp_path, partitioning=pads.partitioning(exchanged), **options)
    for states, strict in ((state, True), ([state], False)):
        with pytest.raises(CheckpointMismatchError, match="or the partitions; or start") as raised:
            other.load_state_dict(states, strict=strict)
        assert [difference.name for difference in raised.value.differences] == ["filter_binding"]
    earlier = edited(state, plan={key: value for key, value in state["plan"].items() if key != "filter_binding"})
    again.load_state_dict(earlier)


OTHERWISE = {
    "in another order": pads.partitioning(pa.schema([("second", pa.string()), ("first", pa.string())])),
    "with the names in the values": pads.partitioning(pa.schema([("first", pa.string()), ("second", pa.string())])),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_continue_is_refused_where_unchanged_files_have_other_values_of_the_filters_columns(tmp_path, name):
    """The files have changed as well, so that only what each unchanged file has can be compared."""
    write_tree(tmp_path, ["first=1/second=2", "first=2/second=1", "first=2/second=2"], rows=20)
    names = pa.schema([("first", pa.string()), ("second", pa.string())])
    options = {"filters": pc.field("first") != "1", "batch_size": 7, "output_format": "dict"}
    then = pads.partitioning(names, flavor="hive")
    loader, _ = open_loader(tmp_path, partitioning=then, **options)
    rows = list(next(iter(loader))["x"])
    states = [loader.state_dict()]
    write(tmp_path / "first=3/second=1" / "part.parquet", x=np.arange(60, 80))
    other, _ = open_loader(tmp_path, partitioning=OTHERWISE[name], **options)
    message = "columns are other ones, or have other values, than at the checkpoint: first=1/second=2/part.parquet"
    with pytest.raises(CheckpointMismatchError, match=message) as raised:
        other.load_state_dict(states, strict=False, on_changed_files="continue")
    [difference] = raised.value.differences
    assert difference.name == "filter_binding"
    assert difference.checkpoint != difference.current
    again, _ = open_loader(tmp_path, partitioning=then, **options)
    again.load_state_dict(states, strict=False, on_changed_files="continue")
    assert sorted(rows + delivered(again, "x")["x"]) == [*range(20, 80)]
    plan = states[0]["plan"]
    short = edited(states[0], plan=plan | {"filter_bindings": plan["filter_bindings"][1:]})
    with pytest.raises(
        ValueError, match=r"\['filter_bindings'\] is str .*, expected 8 characters for each of the files"
    ):
        again.load_state_dict([short], strict=False, on_changed_files="continue")
    earlier = edited(states[0], plan={key: value for key, value in plan.items() if key != "filter_bindings"})
    again.load_state_dict([earlier], strict=False, on_changed_files="continue")


# Filters --------------------------------------------------------------------------------------------------------------

X, K, D = pc.field("x"), pc.field("k"), pc.field("d")
FILTERS = {
    "one partition": K == 2,
    "none": K == 99,
    "not": ~(K == 2),
    "null": K.is_null(),
    "not null": K.is_valid(),
    "a date": dt.date(2024, 1, 1) < D,
    "both kinds": (K == 1) & (X > 2),
    "either kind": (K == 1) | (X > 17),
    "each for its own": ((K == 1) & (X < 2)) | ((K == 2) & (X >= 13)),
    "membership": K.isin([1, 3]),
    "a computed one": (K + X) > 8,
}


@pytest.fixture
def tree(tmp_path):
    write_tree(tmp_path, [f"d=2024-01-0{k}/k={k}" for k in (1, 2, 3)] + [f"d={NULL}/k={NULL}"])
    return tmp_path


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("options", [{}, {"shuffle": True, "shuffle_buffer_size": 7}], ids=["in order", "mixed"])
def test_a_filter_over_partition_columns_keeps_what_pyarrow_keeps(tree, name, options):
    schema = pa.schema([("x", pa.int64()), ("d", pa.date32()), ("k", pa.int32())])
    whole = pads.dataset(tree, schema=schema, partitioning=pads.partitioning(schema.remove(0), flavor="hive"))
    kept = sorted(whole.to_table(columns=["x"], filter=FILTERS[name])["x"].to_pylist())
    loader, _ = open_loader(tree, filters=FILTERS[name], partitioning="hive", columns=["x"], batch_size=3, **options)
    batches = [batch["x"].tolist() for batch in loader]
    assert all(len(batch) == 3 for batch in batches[:-1])
    assert 0 not in map(len, batches)
    assert sorted(value for batch in batches for value in batch) == kept


@pytest.mark.parametrize(("name", "read"), [("one partition", 1), ("none", 0), ("null", 1), ("each for its own", 2)])
def test_files_of_other_partitions_are_not_opened(tree, name, read):
    loader, dataset = open_loader(tree, filters=FILTERS[name], partitioning="hive", columns=["x"])
    kept = sorted(tree.rglob("*.parquet"), key=str)
    groups = sum(pq.read_metadata(path).num_row_groups for path in kept)
    assert groups - dataset.get_metrics()["row_groups_pruned"] <= 3 * read
    for path in kept:
        if (name, path.parent.name) in {("one partition", "k=1"), ("none", "k=2"), ("null", "k=3")}:
            path.unlink()
    batches_of(loader)  # which is no error


WRONG = {
    "a text beside integers": (pc.field("x") == "one", "int64"),
    "an integer beside texts": (pc.field("name") > 3, "string"),
    "a partition column": (pc.field("k") == "two", "int32"),
    "a list beside integers": (pc.field("x") == pa.scalar([1]), "int64"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_filter_of_the_wrong_type_names_the_column_and_both_types(tmp_path, case):
    write(tmp_path / "k=2" / "a.parquet", x=[1, 2], name=["a", "b"])
    filters, kind = WRONG[case]
    column = next(name for name in ("x", "name", "k") if f"({name} " in str(filters))
    with pytest.raises(ColumnError) as raised:
        open_loader(tmp_path, filters=filters, partitioning="hive")
    assert str(filters) in str(raised.value)
    assert f"{column!r} is {kind}" in str(raised.value)


# Files whose columns differ -------------------------------------------------------------------------------------------

PROMOTED = {
    "wider integers": (pa.array([1, -2], pa.int8()), pa.array([2**40, 3], pa.int64()), pa.int64()),
    "integers and floats": (pa.array([1, 2], pa.int32()), pa.array([0.5, 1.5]), pa.float64()),
    "floats": (pa.array([1.5, 2], pa.float32()), pa.array([0.1, 1.5]), pa.float64()),
    "texts": (pa.array(["a", "b"]), pa.array(["c", "d"], pa.large_string()), pa.large_string()),
    "times": (pa.array([1, 2], pa.timestamp("s")), pa.array([3, 4], pa.timestamp("ms")), pa.timestamp("ms")),
    "null and integers": (pa.nulls(2), pa.array([1, 2]), pa.int64()),
}


@pytest.mark.parametrize("case", PROMOTED)
@pytest.mark.parametrize("turned", [False, True])
def test_types_that_differ_are_unified_as_pyarrow_does(tmp_path, case, turned):
    one, other, kind = PROMOTED[case]
    one, other = (other, one) if turned else (one, other)
    write(tmp_path / "a.parquet", x=one, y=[1, 2])
    write(tmp_path / "b.parquet", y=[3, 4], x=other)
    loader, dataset = open_loader(tmp_path, output_format="arrow", batch_size=100)
    assert dataset.schema.field("x").type == kind
    expected = pa.concat_tables(
        [pa.table({"x": one, "y": [1, 2]}), pa.table({"x": other, "y": [3, 4]})], promote_options="permissive"
    )
    [batch] = loader
    assert batch.select(["x", "y"]).to_pydict() == expected.to_pydict()
    assert batch.schema.field("x").type == expected.schema.field("x").type


DECIMALS = {
    "few digits": (pa.int32(), pa.decimal128(5, 2), pa.decimal128(12, 2)),
    "integers of 8 bits": (pa.int8(), pa.decimal128(5, 2), pa.decimal128(5, 2)),
    "no sign": (pa.uint64(), pa.decimal128(9, 2), pa.decimal128(22, 2)),
    "as many digits as there are": (pa.int64(), pa.decimal128(38, 19), pa.decimal128(38, 19)),
    "more than decimals of 128 bits have": (pa.int64(), pa.decimal128(38, 38), pa.decimal256(57, 38)),
    "256 bits": (pa.int8(), pa.decimal256(9, 2), pa.decimal256(9, 2)),
}


@pytest.mark.parametrize("case", DECIMALS)
@pytest.mark.parametrize("turned", [False, True])
def test_decimals_become_as_long_as_every_integer_of_another_file_needs(tmp_path, case, turned):
    integer, decimal, kind = DECIMALS[case]
    largest = 2 ** (integer.bit_width - pa.types.is_signed_integer(integer)) - 1
    parts = [
        pa.array([largest, 0], integer),
        pa.array([Decimal("0.01").scaleb(2 - decimal.scale), None], decimal),
    ]
    for name, values in zip("ab", reversed(parts) if turned else parts, strict=True):
        write(tmp_path / f"{name}.parquet", x=values)
    loader, dataset = open_loader(tmp_path, output_format="dict", batch_size=100)
    assert dataset.schema.field("x").type == kind
    [batch] = loader
    assert sorted(value for value in batch["x"] if value is not None) == sorted([largest, 0, parts[1][0].as_py()])


NESTED = {
    "lists": (pa.list_, lambda value: [value, None]),
    "large lists": (pa.large_list, lambda value: [value]),
    "lists of one size": (lambda dtype: pa.list_(dtype, 2), lambda value: [value, value]),
    "maps": (lambda dtype: pa.map_(pa.string(), dtype), lambda value: [("key", value)]),
    "structs": (
        lambda dtype: pa.struct([("text", pa.string()), ("n", dtype)]),
        lambda value: {"text": "a", "n": value},
    ),
    "structs in lists": (lambda dtype: pa.list_(pa.struct([("n", dtype)])), lambda value: [{"n": value}]),
}


@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("turned", [False, True], ids=["integers first", "decimals first"])
def test_decimals_within_other_types_become_as_long_as_well(tmp_path, nested, turned):
    kind, within = NESTED[nested]
    values = [within(2**63 - 1), within(Decimal("0.01"))]
    parts = [pa.array([values[0]], kind(pa.int64())), pa.array([values[1]], kind(pa.decimal128(9, 2)))]
    for name, column in zip("ab", reversed(parts) if turned else parts, strict=True):
        pq.write_table(pa.table({"x": column}), tmp_path / f"{name}.parquet")
    loader, dataset = open_loader(tmp_path, output_format="arrow", batch_size=100)
    assert dataset.schema.field("x").type == kind(pa.decimal128(21, 2))
    [batch] = loader
    assert batch["x"].to_pylist() == (values[::-1] if turned else values)


@pytest.mark.parametrize("kind", [lambda dtype: dtype, pa.list_], ids=["alone", "in lists"])
def test_integers_and_decimals_that_no_decimal_has_digits_for_are_refused_with_both_files(tmp_path, kind):
    write(tmp_path / "a.parquet", x=pa.array([None], kind(pa.int64())))
    write(tmp_path / "b.parquet", x=pa.array([None], kind(pa.decimal256(76, 60))))
    with pytest.raises(ColumnError, match=r"column 'x' is .* in .*b\.parquet but .* in .*a\.parquet.*no common type"):
        open_loader(tmp_path)


def test_a_column_that_a_file_lacks_is_null_there(tmp_path):
    write(tmp_path / "a.parquet", x=[1, 2], score=[0.5, 1.5], name=["a", "b"])
    write(tmp_path / "b.parquet", x=[3, 4], late=[1.0, 2.0])
    loader, dataset = open_loader(tmp_path)
    assert dataset.schema.names == ["x", "score", "name", "late"]
    [batch] = loader
    assert batch["x"].tolist() == [1, 2, 3, 4]
    np.testing.assert_equal(batch["score"].numpy(), [0.5, 1.5, np.nan, np.nan])
    np.testing.assert_equal(batch["late"].numpy(), [np.nan, np.nan, 1, 2])
    assert batch["name"] == ["a", "b", None, None]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array(["0.1234567890123456789"]).cast(pa.decimal128(30, 19)), pa.array([0.5], pa.float32())),
        (pa.array(["é"]), pa.array([b"\xff"])),
        (pa.array(["é"], pa.large_string()), pa.array([b"\xff"], pa.binary(1))),
    ],
    ids=["decimals and floats", "texts and bytes", "large texts and bytes"],
)
@pytest.mark.parametrize("within", ["a column", "lists", "fixed-size lists", "structs", "maps", "lists of structs"])
def test_types_whose_values_would_become_others_are_refused_with_both_files(tmp_path, one, other, within):
    for name, values in {"a.parquet": one, "b.parquet": other}.items():
        nested = {
            "a column": values,
            "lists": pa.ListArray.from_arrays([0, 1], values),
            "fixed-size lists": pa.FixedSizeListArray.from_arrays(values, 1),
            "structs": pa.StructArray.from_arrays([values], ["p"]),
            "maps": pa.MapArray.from_arrays([0, 1], pa.array(["k"]), values),
            "lists of structs": pa.ListArray.from_arrays([0, 1], pa.StructArray.from_arrays([values], ["p"])),
        }
        write(tmp_path / name, x=nested[within])
    with pytest.raises(ColumnError, match=r"column 'x' is .* in .*b\.parquet but .* in .*a\.parquet.*no common type"):
        open_loader(tmp_path)


def test_an_integer_that_no_float_holds_is_an_error_that_names_its_row_group_not_another_number(tmp_path):
    write(tmp_path / "a.parquet", x=[0.5])
    write(tmp_path / "b.parquet", x=[1, 2, 3, 2**53 + 1])
    loader, _ = open_loader(tmp_path)
    with pytest.raises(UnreadableFileError, match=r"row group 1 of .*b\.parquet.*column 'x' is int64.*double"):
        list(loader)


def test_statistics_of_a_file_whose_column_has_another_type_rule_nothing_out(tmp_path):
    write(tmp_path / "a.parquet", x=pa.array([1, 2, 3], pa.int32()))
    write(tmp_path / "b.parquet", x=[0.5, 2.5, 3.5])
    write(tmp_path / "c.parquet", y=[1])
    for filters, kept in ((X > 2.25, [3, 2.5, 3.5]), (X < 1, [0.5]), (X.is_null(), [None])):
        loader, _ = open_loader(tmp_path, filters=filters, output_format="dict")
        assert delivered(loader, "x")["x"] == kept


@pytest.mark.parametrize("num_workers", [0, 2])
def test_partitioned_files_that_differ_resume_after_any_batch(tmp_path, num_workers):
    write(tmp_path / "k=1" / "a.parquet", x=pa.array(range(9), pa.int16()))
    write(tmp_path / "k=2" / "a.parquet", y=["a", "b", "c"], x=pa.array(range(9, 12), pa.int64()))
    write(tmp_path / "k=3" / "a.parquet", x=pa.array(np.arange(12.0, 30)))
    options = {"partitioning": "hive", "batch_size": 4, "shuffle": True, "shuffle_buffer_size": 6,
               "filters": (K > 1) | (X < 5), "num_workers": num_workers}  # fmt: skip
    loader, _ = open_loader(tmp_path, **options)
    whole = batches_of(loader)
    assert sorted(row for batch in whole for row in batch) == [*range(5), *range(9, 30)]
    resumed, _ = open_loader(tmp_path, **options)
    iterator = iter(loader)
    for stop in range(1, len(whole) + 1):
        next(iterator)
        resumed.load_state_dict(loader.state_dict())
        assert batches_of(resumed) == whole[stop:]
