"""Iceberg tables: what is delivered is what pyiceberg itself reads of the same snapshot."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from icebergs import (
    append_rows,
    config_of,
    data_files,
    delete_rows,
    new_catalog,
)
from pyiceberg.catalog import load_catalog
from pyiceberg.expressions import And, GreaterThan, LessThan
from pyiceberg.manifest import DataFileContent
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import (
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    ListType,
    LongType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
)

from torch_dataloader_utils import CheckpointMismatchError, ColumnError, IcebergDataset, UnreadableFileError

SCHEMA = Schema(
    NestedField(1, "id", IntegerType(), required=True),
    NestedField(2, "city", StringType(), required=False),
    NestedField(3, "score", FloatType(), required=False),
    NestedField(4, "price", DecimalType(9, 2), required=False),
    NestedField(5, "seen", TimestampType(), required=False),
    NestedField(6, "tags", ListType(7, StringType(), element_required=False), required=False),
    NestedField(8, "place", StructType(NestedField(9, "x", IntegerType()), NestedField(10, "y", DoubleType()))),
)
SPEC = PartitionSpec(
    PartitionField(2, 1000, IdentityTransform(), "city"),
    PartitionField(1, 1001, BucketTransform(4), "id_bucket"),
    PartitionField(5, 1002, DayTransform(), "seen_day"),
)
BUCKET = BucketTransform(4).transform(IntegerType())
CITIES = ("Bern", None, "a/b c%")


def rows_from(first: int, count: int, city: str | None = "Bern", day: int = 1) -> pa.Table:
    ids = list(range(first, first + count))
    return pa.table(
        {
            "id": pa.array(ids, pa.int32()),
            "city": pa.array([city] * count, pa.string()),
            "score": pa.array([None if one % 5 == 0 else float("nan") if one % 7 == 0 else one / 8 for one in ids]),
            "price": pa.array([Decimal(one * 7) / 100 for one in ids], pa.decimal128(9, 2)),
            "seen": pa.array([datetime(2024, 1, day, one % 24) for one in ids], pa.timestamp("us")),
            "tags": pa.array([None if one % 3 == 0 else [str(one)] * (one % 3) for one in ids], pa.list_(pa.string())),
            "place": pa.array([{"x": one, "y": one / 2} for one in ids]),
        }
    )


def fill(table: Table) -> None:
    """Append rows of three cities and days, each of a bucket to a file of its own."""
    for number, city in enumerate(CITIES):
        rows = rows_from(number * 100, 60, city, day=number + 1)
        buckets = [BUCKET(one) for one in rows["id"].to_pylist()]
        for bucket in sorted(set(buckets)):
            chosen = rows.filter(pa.array([one == bucket for one in buckets]))
            append_rows(table, chosen, Record(city, bucket, 19722 + number + 1))


@pytest.fixture(scope="module")
def lake(tmp_path_factory) -> Path:
    """A catalog with the table ``db.events``: partitions, deletes, and every change of columns that is supported."""
    directory = tmp_path_factory.mktemp("lake")
    catalog = new_catalog(directory)
    table = catalog.create_table("db.events", SCHEMA, partition_spec=SPEC, properties={"format-version": "2"})
    fill(table)
    first = data_files(table)
    for file, places in zip(first, ([*range(7), 8], [0, 7], [3]), strict=False):  # a whole row group, its end, one row
        delete_rows(table, {file: places}, partition=partition_of(table, file))
    with table.update_schema() as change:
        change.rename_column("score", "points")
        change.update_column("id", LongType())
        change.update_column("score", DoubleType())
        change.update_column("price", DecimalType(12, 2))
        change.delete_column("tags")
        change.add_column("note", StringType())
        change.move_first("score")
    with table.update_schema() as change:
        change.add_column("tags", LongType())  # another column of the same name
    later = pa.table(
        {
            "id": pa.array([one for one in range(2**40, 2**40 + 200) if BUCKET(one) == 0][:20], pa.int64()),
            "city": ["Bern"] * 20,
            "points": [1e300] * 20,
            "note": ["new"] * 20,
            "tags": range(20),
        }
    )
    append_rows(table, later, Record("Bern", 0, None))
    last = data_files(table)
    file = next(one for one in last if one not in first)
    delete_rows(table, {file: [0, 7, 8, 19]}, vectors=True, partition=partition_of(table, file))
    return directory


def partition_of(table: Table, path: str) -> Record:
    return next(task.file.partition for task in table.scan().plan_files() if task.file.file_path == path)


def table_of(directory: Path, name: str = "db.events") -> Table:
    return load_catalog(**config_of(directory)).load_table(name)


def open_table(directory: Path, name: str = "db.events", **options: Any) -> Any:
    return IcebergDataset.create_dataloader(
        name,
        catalog_config=config_of(directory),
        **{"num_workers": 0, "batch_size": 16, "output_format": "dict", **options},
    )


def counted(rows: pa.Table) -> Counter[str]:
    """Count rows, as texts, in which NaN is equal to itself."""
    return Counter(map(repr, rows.select(sorted(rows.column_names)).to_pylist()))


def delivered(loader: Any) -> Counter[str]:
    counts: Counter[str] = Counter()
    for batch in loader:
        names = sorted(batch)
        counts.update(repr(dict(zip(names, row, strict=True))) for row in zip(*(batch[name] for name in names)))
    return counts


def test_the_current_snapshot_is_delivered_as_pyiceberg_reads_it(lake):
    loader, dataset = open_table(lake)
    expected = table_of(lake).scan().to_arrow()
    assert dataset.schema.names == expected.schema.names
    assert delivered(loader) == counted(expected)
    assert len(expected) == 180 + 20 - 11 - 4


def test_every_snapshot_is_delivered_with_the_columns_of_its_time(lake):
    table = table_of(lake)
    for snapshot in table.snapshots()[-4:]:
        expected = table.scan(snapshot_id=snapshot.snapshot_id).to_arrow()
        loader, dataset = open_table(lake, snapshot_id=snapshot.snapshot_id)
        assert dataset.schema.names == expected.schema.names
        assert delivered(loader) == counted(expected)
        assert dataset.state_dict()["plan"]["snapshot_id"] == snapshot.snapshot_id


FIELD = pc.field
FILTERS: dict[str, tuple[pc.Expression, int]] = {
    "an identity partition": (FIELD("city") == "Bern", 5),
    "an identity partition that is null": (FIELD("city").is_null(), 4),
    "an identity partition, not": (FIELD("city") != "Bern", 8),
    "a bucket and a day": ((FIELD("id") == 105) & (FIELD("seen") >= datetime(2024, 1, 2)), 1),  # noqa: DTZ001
    "a day": (FIELD("seen") < datetime(2024, 1, 2), 4),  # noqa: DTZ001
    "a set": (FIELD("id").isin([3, 4, 209]), 6),
    "statistics of a promoted column": (FIELD("id") > 2**33, 1),
    "a column added later": (FIELD("note") == "new", 13),
    "a column added later, null": (FIELD("note").is_null(), 12),
    "a name dropped and used again": (FIELD("tags") > 3, 13),
    "a renamed column": (FIELD("points") < 1.0, 12),
    "not": (~(FIELD("points") < 30.0), 13),
    "either, one of which cannot be said": ((FIELD("id") > 2**33) | (FIELD("id") + 1 == 5), 13),
    "both, one of which cannot be said": ((FIELD("id") > 2**33) & (FIELD("id") + 1 != 5), 1),
    "nothing": (FIELD("id") < 0, 0),
}


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_keeps_the_rows_that_it_keeps_row_by_row_and_rules_out_files(lake, name):
    expression, files = FILTERS[name]
    expected = table_of(lake).scan().to_arrow().filter(expression)
    loader, dataset = open_table(lake, filters=expression)
    assert delivered(loader) == counted(expected)
    assert dataset.state_dict()["plan"]["files"] <= files


@pytest.mark.parametrize(
    "scan_filter",
    ["city = 'Bern' and id > 20", "points < 2.0 or id in (3, 150)", And(GreaterThan("id", 10), LessThan("id", 130))],
)
def test_a_scan_filter_delivers_what_pyiceberg_reads_with_it(lake, scan_filter):
    expected = table_of(lake).scan(row_filter=scan_filter).to_arrow()
    loader, dataset = open_table(lake, scan_filter=scan_filter)
    assert delivered(loader) == counted(expected)
    both = FIELD("id") > 40
    loader, filtered = open_table(lake, scan_filter=scan_filter, filters=both)
    assert delivered(loader) == counted(expected.filter(both))
    digests = {one.state_dict()["plan"]["filter"] for one in (dataset, filtered, open_table(lake)[1])}
    assert len(digests) == 3


# Deleted rows, wherever rows are counted ------------------------------------------------------------------------------

READING: dict[str, dict[str, Any]] = {
    "in order": {},
    "in pieces": {"read_ahead_bytes": 400},
    "shards shuffled": {"shuffle": True, "split_rows": 20},
    "rows mixed": {"shuffle": True, "shuffle_buffer_size": 40},
    "rows mixed in rounds": {"shuffle": True, "shuffle_buffer_size": 8, "shuffle_interleave": 3},
}


@pytest.fixture(scope="module")
def pitted(tmp_path_factory) -> Path:
    """A catalog with the table ``db.numbers``, of which every third row and some whole row groups are deleted."""
    directory = tmp_path_factory.mktemp("pitted")
    schema = Schema(NestedField(1, "id", LongType(), required=True), NestedField(2, "text", StringType()))
    table = new_catalog(directory).create_table("db.numbers", schema, properties={"format-version": "2"})
    for first, count, group_rows in ((0, 100, 30), (100, 60, 60), (200, 41, 10), (300, 5, 5)):
        ids = pa.array(range(first, first + count))
        rows = pa.table({"id": ids, "text": [f"row {one}" * (one % 4) for one in range(first, first + count)]})
        append_rows(table, rows, group_rows=group_rows)
    files = data_files(table)
    delete_rows(table, {files[0]: [*range(30, 60), 99], files[1]: [*range(25)], files[3]: [*range(5)]})
    delete_rows(table, {file: range(0, count, 3) for file, count in zip(files, (100, 60, 41, 5), strict=True)})
    return directory


@pytest.mark.parametrize("reading", READING)
@pytest.mark.parametrize("expression", [None, FIELD("id") > 33], ids=["all", "some"])
def test_row_ids_count_the_rows_that_are_left_however_they_are_read(pitted, reading, expression):
    ids = table_of(pitted, "db.numbers").scan().to_arrow()["id"].to_pylist()
    row_of = {one: row for row, one in enumerate(sorted(ids))}  # files are in the order of their ids
    loader, dataset = open_table(pitted, "db.numbers", filters=expression, row_id_column="row", **READING[reading])
    found = [pair for batch in loader for pair in zip(batch["id"], batch["row"], strict=True)]
    kept = [one for one in ids if expression is None or one > 33]
    assert sorted(found) == sorted((one, row_of[one]) for one in kept)
    if expression is None:
        assert dataset.state_dict()["plan"]["rows"] == len(ids)


@pytest.mark.parametrize("reading", READING)
@pytest.mark.parametrize("expression", [None, FIELD("id") > 33], ids=["all", "some"])
def test_a_resume_at_every_batch_goes_on_with_the_very_next_one(pitted, reading, expression):
    options = {"filters": expression, "batch_size": 9, **READING[reading]}
    loader, dataset = open_table(pitted, "db.numbers", **options)
    states, batches = [dataset.state_dict()], []
    for batch in loader:
        batches.append(batch["id"])
        states.append(json.loads(json.dumps(dataset.state_dict())))
    for number, state in enumerate(states):
        dataset.load_state_dict(state)
        assert [batch["id"] for batch in loader] == batches[number:]


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_workers_resume_at_every_batch(pitted):
    options = {"filters": FIELD("id") > 33, "shuffle": True, "shuffle_buffer_size": 30, "num_workers": 2}
    loader, dataset = open_table(pitted, "db.numbers", **options)
    states, batches = [dataset.state_dict()], []
    for batch in loader:
        batches.append(batch["id"])
        states.append(dataset.state_dict())
    for number, state in enumerate(states):
        loader.load_state_dict(state)
        assert [batch["id"] for batch in loader] == batches[number:]


def test_ranks_share_the_rows_that_are_left_and_resume_under_another_number(pitted):
    ids = sorted(table_of(pitted, "db.numbers").scan().to_arrow()["id"].to_pylist())
    found, states = [], []
    options = {"split_rows": 10, "batch_size": 7, "uneven_ranks": "allow"}
    for rank in range(2):
        loader, dataset = open_table(pitted, "db.numbers", num_ranks=2, rank=rank, **options)
        iterator = iter(loader)
        found += next(iterator)["id"]
        states.append(dataset.state_dict())
    for rank in range(3):
        loader, dataset = open_table(pitted, "db.numbers", num_ranks=3, rank=rank, **options)
        dataset.load_state_dict(states, strict=False)
        found += [one for batch in loader for one in batch["id"]]
    assert sorted(found) == ids
