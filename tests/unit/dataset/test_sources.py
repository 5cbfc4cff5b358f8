"""Sources of mixtures: described and checked at once, opened once, with one schema and known numbers of rows."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from torch_dataloader_utils.dataset.discovery import Request
from torch_dataloader_utils.dataset.kept_rows import kept_rows
from torch_dataloader_utils.dataset.manifest_file import dump_manifest
from torch_dataloader_utils.dataset.sources import open_sources, require_sources
from torch_dataloader_utils.errors import ColumnError
from torch_dataloader_utils.formats.base import KnownFooters
from torch_dataloader_utils.formats.read_cache import ReadCache
from torch_dataloader_utils.formats.text.footer import Cutting
from torch_dataloader_utils.reading.row_groups.reader import RowGroupReader
from torch_dataloader_utils.tables.source import Source

REQUEST = Request(None, None, lambda field: pa.types.is_integer(field.type), 60.0, None)


def opened(sources, source_column=None):
    return open_sources(require_sources(sources), REQUEST, Cutting(1 << 27), source_column)


def write(directory, **columns: Any):
    directory.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), directory / f"part-{len(list(directory.iterdir()))}.parquet", row_group_size=10)
    return directory


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"format": "avro"}, ValueError, "format"),
        ({"columns": "x"}, TypeError, "columns"),
        ({"filters": 3}, TypeError, "filters"),
        ({"storage_options": "key"}, TypeError, "storage_options"),
        ({"count_rows": 1}, TypeError, "count_rows"),
        ({"format_options": {"delimiter": ";"}}, ValueError, "format_options"),
        ({"partitioning": "flat"}, (TypeError, ValueError), "partitioning"),
    ],
)
def test_a_source_checks_its_arguments_at_once(options, error, name):
    with pytest.raises(error, match=name):
        Source("nowhere", **options)


def test_a_source_is_frozen_and_shows_no_secret():
    source = Source("s3://bucket/web", storage_options={"secret": "open-sesame-1234"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        source.columns = ["x"]
    assert "open-sesame" not in repr(source)
    assert pickle.loads(pickle.dumps(source)).text == source.text


@pytest.mark.parametrize(
    "source",
    [Source("nowhere", filters=pc.field("x") > 3), Source("nowhere", "jsonl"), Source("nowhere", "csv")],
    ids=["filtered", "jsonl", "csv"],
)
def test_rows_that_only_reading_tells_have_to_be_counted(source):
    with pytest.raises(ValueError, match=r"source 'web' \(nowhere\).*count_rows=True"):
        require_sources({"web": source})


@pytest.mark.parametrize(
    ("sources", "error"),
    [([], TypeError), ({}, ValueError), ({"": Source("x")}, TypeError), ({"web": "data/web"}, TypeError)],
    ids=["a list", "none", "no name", "a path"],
)
def test_what_is_no_mapping_of_sources_is_refused(sources, error):
    with pytest.raises(error, match=r"[Ss]ource"):
        require_sources(sources)


def test_the_columns_of_all_sources_become_one_schema(tmp_path):
    web = write(tmp_path / "web", text=["a", "b"], score=pa.array([1, 2], pa.int32()))
    code = write(tmp_path / "code", score=pa.array([2**40], pa.int64()), text=["c"], stars=[0.5])
    files = opened({"web": Source(web), "code": Source(code)}, "source")
    assert {name: one.schema for name, one in files.items()} == dict.fromkeys(
        files,
        pa.schema({"text": pa.string(), "score": pa.int64(), "stars": pa.float64(), "source": pa.int64()}),
    )
    tables = [read(one).to_pydict() for one in files.values()]
    assert tables[0] == {"text": ["a", "b"], "score": [1, 2], "stars": [None] * 2, "source": [0, 0]}
    assert tables[1] == {"text": ["c"], "score": [2**40], "stars": [0.5], "source": [1]}


def test_columns_without_a_common_type_name_the_sources(tmp_path):
    web, code = write(tmp_path / "web", x=["a"]), write(tmp_path / "code", x=[1])
    with pytest.raises(ColumnError, match=r"column 'x' is int64 in source 'code' but string in source 'web'"):
        opened({"web": Source(web), "code": Source(code)})


def test_a_column_that_is_missing_names_the_source(tmp_path):
    web = write(tmp_path / "web", x=[1])
    with pytest.raises(ColumnError, match=r"source 'web'.*'y'"):
        opened({"web": Source(web, columns=["y"])})


def test_nulls_of_a_column_that_a_source_lacks_are_announced(tmp_path):
    web, code = write(tmp_path / "web", x=[1]), write(tmp_path / "code", x=[1], y=[2])
    files = opened({"web": Source(web), "code": Source(code)})
    assert "column 'y' is in source 'code' but not in source 'web'" in files["web"].announced_nulls
    assert files["code"].announced_nulls is None


def test_a_filter_column_that_another_source_delivers_has_to_be_delivered(tmp_path):
    web, code = write(tmp_path / "web", x=[1], y=[1]), write(tmp_path / "code", x=[1], y=[2])
    filtered = Source(web, columns=["x"], filters=pc.field("y") > 0, count_rows=True)
    with pytest.raises(ColumnError, match=r"source 'web' filters by column 'y'.*source 'code'"):
        opened({"web": filtered, "code": Source(code)})


def test_the_name_of_the_source_column_must_be_free(tmp_path):
    web, code = write(tmp_path / "web", x=[1]), write(tmp_path / "code", x=[1], source=[2])
    with pytest.raises(ColumnError, match=r"source_column='source'.*source 'code'"):
        opened({"web": Source(web), "code": Source(code)}, "source")


def test_the_rows_that_a_filter_keeps_are_counted_for_each_row_group(tmp_path):
    values = np.random.default_rng(7).integers(0, 100, 57)
    path = write(tmp_path / "web", x=np.arange(57), y=values)
    [files] = opened({"web": Source(path, columns=["x"], filters=pc.field("y") < 40, count_rows=True)}).values()
    kept = [int((values[start : start + 10] < 40).sum()) for start in range(0, 57, 10)]
    assert [group.rows for group in files.manifest.files[0].row_groups] == kept
    assert files.unknown_rows is None
    assert read(files)["x"].to_pylist() == np.flatnonzero(values < 40).tolist()
    assert read(files, "row")["row"].to_pylist() == np.flatnonzero(values < 40).tolist()


def test_a_manifest_keeps_the_counts_for_the_same_filter(tmp_path, monkeypatch):
    path = write(tmp_path / "web", x=np.arange(57))
    kept = {"filters": pc.field("x") < 31}
    [files] = opened({"web": Source(path, count_rows=True, **kept)}).values()
    known = KnownFooters(files.footers, files.metadata_file)
    manifest = dump_manifest(
        files.manifest.root,
        tuple(files.files.values()),
        known,
        files.storage,
        format_name="parquet",
        kept=kept_rows(files),
    )
    counted = [group.rows for group in files.manifest.files[0].row_groups]

    other = Source(path, filters=pc.field("x") >= 50, count_rows=True, manifest=manifest)
    [counted_again] = opened({"web": other}).values()
    assert counted_again.manifest.rows == 7

    monkeypatch.setattr(RowGroupReader, "read", None)  # reading a row group would raise a TypeError
    [same] = opened({"web": Source(path, count_rows=True, manifest=manifest, **kept)}).values()
    assert [group.rows for group in same.manifest.files[0].row_groups] == counted


def test_a_part_of_a_row_group_is_found_among_the_rows_that_a_filter_keeps(tmp_path):
    values = np.random.default_rng(3).permutation(10)
    path = write(tmp_path / "web", x=np.arange(10), y=values)
    [files] = opened({"web": Source(path, columns=["x"], filters=pc.field("y") < 4, count_rows=True)}).values()
    reader = RowGroupReader(files, ReadCache.of_opened(files.footers))
    try:
        group = reader.group("part-0.parquet", 0)
        ends = (np.flatnonzero(values < 4) + 1).tolist()
        assert [reader.stored_rows(group, rows) for rows in range(group.rows + 1)] == [0, *ends[:-1], 10]
    finally:
        reader.close()


def read(files, row_id_column=None):
    """Return all rows of opened files, in order."""
    reader = RowGroupReader(files, ReadCache.of_opened(files.footers), row_id_column)
    tables = []
    try:
        for file in files.manifest.files:
            for number in range(len(file.row_groups)):
                group = reader.group(file.path, number)
                reader.request(group, whole=True)
                tables.append(reader.read(group))
    finally:
        reader.close()
    return pa.concat_tables(tables)
