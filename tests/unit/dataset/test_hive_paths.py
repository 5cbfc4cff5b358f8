"""`partitioning="hive"` with files, lists and globs: the columns that pyarrow takes from the same paths."""

from __future__ import annotations

import shutil
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from support import all_rows_of, open_loader

from torch_dataloader_utils import ColumnError

DIRECTORIES = ("year=2020/region=us", "year=2021/region=eu")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory below `run=7` with a file of each of `DIRECTORIES`, and one without keys."""
    root = tmp_path_factory.mktemp("hive") / "run=7" / "data"
    for number, directory in enumerate([*DIRECTORIES, "plain"]):
        (root / directory).mkdir(parents=True)
        pq.write_table(pa.table({"x": [2 * number, 2 * number + 1]}), root / directory / "part.parquet")
    return root


def rows_of_loader(path, **options: Any):
    loader, _ = open_loader(
        path, partitioning="hive", output_format="arrow", row_id_column=None, **{"num_workers": 0, **options}
    )
    return pa.concat_tables(loader)


def assert_same_rows(path, source):
    """Assert that a loader delivers what pyarrow reads of the same files, types included."""
    expected = pads.dataset(source, partitioning="hive").to_table()
    found = rows_of_loader(path).select(expected.column_names)
    assert found.schema.equals(expected.schema)
    assert found.sort_by("x").equals(expected.sort_by("x"))


def test_a_file_takes_columns_from_all_directories_of_its_path(root):
    path = str(root / DIRECTORIES[0] / "part.parquet")
    assert rows_of_loader(path).column_names == ["x", "run", "year", "region"]
    assert_same_rows(path, path)
    assert_same_rows(f"file://{path}", path)


def test_files_of_a_list_take_columns_from_all_directories_of_their_paths(root):
    paths = [str(root / directory / "part.parquet") for directory in DIRECTORIES]
    assert_same_rows(paths, paths)
    with_other_keys = [*paths, str(root / "plain" / "part.parquet")]
    assert_same_rows(with_other_keys, with_other_keys)


def test_a_file_without_a_key_that_others_of_the_list_have_is_null_there_or_an_error(root):
    paths = [str(root / directory / "part.parquet") for directory in (*DIRECTORIES, "plain")]
    assert rows_of_loader(paths).to_pydict()["year"] == [None, None, 2020, 2020, 2021, 2021]
    with pytest.raises(ColumnError, match=r"column 'year' holds 2 nulls.*plain/part\.parquet"):
        open_loader(paths, partitioning="hive", columns=["year"])


def test_a_directory_takes_columns_from_below_it_alone(root):
    for directory in (root, root / "year=2020", root / DIRECTORIES[0], f"{root}/year=2020/"):
        assert_same_rows(directory, str(directory))
    assert rows_of_loader(root / DIRECTORIES[0]).column_names == ["x"]


@pytest.mark.parametrize("pattern", ["year=2020/region=us/*.parquet", "year=*/region=us/part.parquet", "y*0/*"])
def test_a_glob_takes_columns_from_all_directories_of_its_path(root, pattern):
    files = [str(path) for path in root.glob("year=2020/**/*.parquet")]
    assert files
    assert_same_rows(f"{root}/{pattern}", files)


def test_directories_beside_files_or_globs_of_a_list_follow_their_rule(root):
    directories = [str(root / "year=2020"), str(root / "year=2021")]
    assert rows_of_loader(directories).column_names == ["x", "year", "region"]  # below their common directory
    mixed = rows_of_loader([str(root / "year=2020"), str(root / DIRECTORIES[1] / "*.parquet")])
    assert mixed.to_pydict() == {
        "x": [0, 1, 2, 3],
        "year": [2020, 2020, 2021, 2021],
        "region": ["us", "us", "eu", "eu"],
        "run": [7, 7, 7, 7],
    }
    parts = [str(root / DIRECTORIES[0] / "part.parquet"), str(root / DIRECTORIES[1])]
    assert rows_of_loader(parts).to_pydict()["region"] == ["us", "us", "eu", "eu"]
    within = [str(root / DIRECTORIES[0] / "part.parquet"), str(root / DIRECTORIES[0] / "more")]
    (root / DIRECTORIES[0] / "more").mkdir()
    pq.write_table(pa.table({"x": [9]}), root / DIRECTORIES[0] / "more" / "part.parquet")
    assert sorted(rows_of_loader(within).to_pydict()["region"]) == ["us"] * 3
    shutil.rmtree(root / DIRECTORIES[0] / "more")


def test_a_relative_path_above_the_working_directory_keeps_the_directories_that_were_written(root, monkeypatch):
    (root / DIRECTORIES[0] / "sub").mkdir()
    monkeypatch.chdir(root / DIRECTORIES[0] / "sub")
    assert rows_of_loader("../../region=us/part.parquet").to_pydict() == {"x": [0, 1], "region": ["us"] * 2}
    (root / DIRECTORIES[0] / "sub").rmdir()


@pytest.mark.parametrize(
    "path",
    [
        "year=2020/region=us/part.parquet",
        "./year=2020/region=us/part.parquet",
        "../data/year=2020/region=us/part.parquet",
        "year=2021/../year=2020/region=us/part.parquet",
    ],
)
def test_a_relative_path_takes_no_columns_from_the_working_directory(root, monkeypatch, path):
    monkeypatch.chdir(root)
    assert rows_of_loader(path).to_pydict() == {"x": [0, 1], "year": [2020] * 2, "region": ["us"] * 2}
    if "2021" not in path:  # pyarrow does not resolve the dots
        assert_same_rows(path, path)


def test_a_relative_glob_takes_no_columns_from_the_working_directory(root, monkeypatch):
    monkeypatch.chdir(root)
    assert_same_rows("year=2020/region=us/*.parquet", "year=2020/region=us/part.parquet")
    monkeypatch.chdir(root / "plain")
    assert rows_of_loader("../year=2020/*/*.parquet").column_names == ["x", "year", "region"]


def test_a_hive_partitioning_with_a_schema_takes_the_same_directories(root):
    path = str(root / DIRECTORIES[0] / "part.parquet")
    partitioning = pads.partitioning(pa.schema([("run", pa.int8()), ("year", pa.int16())]), flavor="hive")
    loader, dataset = open_loader(path, partitioning=partitioning, row_id_column=None)
    assert dataset.schema.equals(pads.dataset(path, partitioning=partitioning).schema)
    assert [batch["run"].tolist() for batch in loader] == [[7, 7]]


def test_a_column_of_the_path_rules_out_files_and_may_be_the_only_one(root):
    paths = [str(root / directory / "part.parquet") for directory in DIRECTORIES]
    loader, dataset = open_loader(
        paths, partitioning="hive", columns=["region"], filters=[("year", "==", 2021)], output_format="dict"
    )
    assert [batch["region"] for batch in loader] == [["eu", "eu"]]
    assert dataset.get_metrics()["row_groups_pruned"] == 1


def test_a_column_in_the_given_path_and_in_the_file_is_an_error_that_names_both(tmp_path):
    path = tmp_path / "region=us" / "part.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"region": ["file"], "x": [1]}), path)
    with pytest.raises(ColumnError, match=r"column 'region' is both in the paths of files and in .*part\.parquet"):
        open_loader(path, partitioning="hive")
    assert rows_of_loader(path, columns=["x"]).to_pydict() == {"x": [1]}
    assert rows_of_loader(path.parent, columns=["region"]).to_pydict() == {"region": ["file"]}


def test_two_values_of_a_key_in_the_given_path_are_an_error(tmp_path):
    path = tmp_path / "day=1" / "day=2" / "part.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(ColumnError, match="two values of the partition column 'day'"):
        open_loader(path, partitioning="hive")
    assert rows_of_loader(tmp_path / "day=1").to_pydict() == {"x": [1], "day": [2]}


def test_a_state_does_not_depend_on_which_directories_become_columns(root):
    path = root / DIRECTORIES[0] / "part.parquet"
    plain, _ = open_loader(path, batch_size=1)
    assert all_rows_of([next(iter(plain))]) == [0]
    loader, _ = open_loader(path, batch_size=1, partitioning="hive", output_format="dict")
    loader.load_state_dict(plain.state_dict())
    assert [(batch["region"], batch["row"]) for batch in loader] == [(["us"], [1])]


def test_a_manifest_gives_the_same_columns_as_listing(root):
    for path in (root, root / DIRECTORIES[0] / "part.parquet", root / "year=*" / "*" / "*.parquet"):
        _, dataset = open_loader(path, partitioning="hive", output_format="dict")
        loader, known = open_loader(
            path, partitioning="hive", output_format="dict", manifest=dataset.dump_manifest(), row_id_column=None
        )
        assert known.schema.equals(dataset.schema)
        assert list(loader)


def test_names_with_wildcards_are_files_and_directories_first(tmp_path):
    path = tmp_path / "k=[1]" / "part[1].parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"x": [1]}), path)
    assert rows_of_loader(path).to_pydict() == {"x": [1], "k": ["[1]"]}
    assert rows_of_loader(path.parent).to_pydict() == {"x": [1]}
    assert_same_rows(path, str(path))
