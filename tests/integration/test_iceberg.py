"""Iceberg tables: what is delivered is what pyiceberg itself reads of the same snapshot."""

from __future__ import annotations

import json
import pickle
import shutil
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from icebergs import WRITTEN, append_rows, config_of, data_files, delete_rows, new_catalog, next_url, open_catalog
from pyiceberg.expressions import And, GreaterThan, LessThan
from pyiceberg.manifest import DataFileContent
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform, YearTransform
from pyiceberg.typedef import Record
from pyiceberg.types import (
    DateType,
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
from stops import at_few_stops
from support import counted, delivered

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
MIDNIGHT = datetime(2024, 1, 1)  # noqa: DTZ001 - the column has no time zone
CITIES = ("Bern", None, "a/b c%")


def rows_from(first: int, count: int, city: str | None = "Bern", day: int = 0) -> pa.Table:
    ids = list(range(first, first + count))
    return pa.table(
        {
            "id": pa.array(ids, pa.int32()),
            "city": pa.array([city] * count, pa.string()),
            "score": pa.array([None if one % 5 == 0 else float("nan") if one % 7 == 0 else one / 8 for one in ids]),
            "price": pa.array([Decimal(one * 7) / 100 for one in ids], pa.decimal128(9, 2)),
            "seen": pa.array([MIDNIGHT + timedelta(days=day, hours=one % 24) for one in ids], pa.timestamp("us")),
            "tags": pa.array([None if one % 3 == 0 else [str(one)] * (one % 3) for one in ids], pa.list_(pa.string())),
            "place": pa.array([{"x": one, "y": one / 2} for one in ids]),
        }
    )


def fill(table: Table) -> None:
    """Append rows of three cities and days, each of a bucket to a file of its own."""
    for number, city in enumerate(CITIES):
        rows = rows_from(number * 100, 60, city, day=number)
        buckets = [BUCKET(one) for one in rows["id"].to_pylist()]
        for bucket in sorted(set(buckets)):
            chosen = rows.filter(pa.array([one == bucket for one in buckets]))
            append_rows(table, chosen, Record(city, bucket, 19723 + number))


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
    return open_catalog(directory).load_table(name)


def open_table(directory: Path, name: str = "db.events", **options: Any) -> Any:
    return IcebergDataset.create_dataloader(
        name,
        catalog_config=config_of(directory),
        **{"num_workers": 0, "batch_size": 16, "output_format": "dict", **options},
    )


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
    "an identity partition's order, where one is null": ((FIELD("city") < "C") & (FIELD("id") > 2), 5),
    "an identity partition, not": (FIELD("city") != "Bern", 8),
    "a bucket and a day": ((FIELD("id") == 105) & (FIELD("seen") >= MIDNIGHT + timedelta(days=1)), 1),
    "a day": (FIELD("seen") < MIDNIGHT + timedelta(days=1), 4),
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


@pytest.fixture(scope="module")
def events(lake) -> pa.Table:
    """All rows of the table, as pyiceberg reads them."""
    return table_of(lake).scan().to_arrow()


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_keeps_the_rows_that_it_keeps_row_by_row_and_rules_out_files(lake, events, name):
    expression, files = FILTERS[name]
    expected = events.filter(expression)
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
    "in slices": {"read_ahead_bytes": 400},
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


@pytest.fixture(scope="module")
def ids(pitted) -> list[int]:
    """The rows that are left, as pyiceberg reads them, in order: files are in the order of their ids."""
    return sorted(table_of(pitted, "db.numbers").scan().to_arrow()["id"].to_pylist())


@pytest.mark.parametrize("reading", READING)
@pytest.mark.parametrize("expression", [None, FIELD("id") > 33], ids=["all", "some"])
def test_row_ids_count_the_rows_that_are_left_however_they_are_read(pitted, ids, reading, expression):
    row_of = {one: row for row, one in enumerate(ids)}
    loader, dataset = open_table(pitted, "db.numbers", filters=expression, row_id_column="row", **READING[reading])
    found = [pair for batch in loader for pair in zip(batch["id"], batch["row"], strict=True)]
    kept = [one for one in ids if expression is None or one > 33]
    assert sorted(found) == sorted((one, row_of[one]) for one in kept)
    if expression is None:
        assert dataset.state_dict()["plan"]["rows"] == len(ids)


@pytest.mark.parametrize("reading", READING)
def test_rows_are_excluded_by_their_numbers_without_deleted_rows(pitted, ids, reading):
    loader, dataset = open_table(pitted, "db.numbers", batch_size=9, **READING[reading])
    as_planned = [batch["id"] for batch in loader]
    files = {file: rows for file, *_, rows in dataset.state_dict()["files"]}
    homes = [(file, row) for file, rows in files.items() for row in range(rows)]
    gone = ids[::4]
    loader.exclude([homes[ids.index(one)] for one in gone])
    shorter = [[one for one in batch if one not in gone] for batch in as_planned]
    assert [batch["id"] for batch in loader] == [batch for batch in shorter if batch]
    dataset.set_epoch(1)
    assert len(loader) == -(-(len(ids) - len(gone)) // 9)
    assert sorted(one for batch in loader for one in batch["id"]) == sorted(set(ids) - set(gone))


@at_few_stops
@pytest.mark.parametrize("reading", READING)
@pytest.mark.parametrize("expression", [None, FIELD("id") > 33], ids=["all", "some"])
def test_a_resume_at_every_batch_goes_on_with_the_next_one(pitted, reading, expression, stops):
    options = {"filters": expression, "batch_size": 9, **READING[reading]}
    loader, dataset = open_table(pitted, "db.numbers", **options)
    states, batches = [dataset.state_dict()], []
    for batch in loader:
        batches.append(batch["id"])
        states.append(json.loads(json.dumps(dataset.state_dict())))
    for number in stops(states):
        dataset.load_state_dict(states[number])
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


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning")
def test_ranks_share_the_rows_that_are_left_and_resume_under_another_number(pitted, ids):
    found, states = [], []
    options = {"split_rows": 10, "batch_size": 7}
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


# What a table moves on to, and what cannot be read --------------------------------------------------------------------


@pytest.fixture
def small(tmp_path) -> Path:
    """A catalog with the table ``db.small`` of two files of ten rows."""
    schema = Schema(NestedField(1, "id", LongType(), required=True), NestedField(2, "city", StringType()))
    table = new_catalog(tmp_path).create_table("db.small", schema, properties={"format-version": "2"})
    for first in (0, 10):
        append_rows(table, small_rows(first))
    return tmp_path


def small_rows(first: int) -> pa.Table:
    return pa.table({"id": range(first, first + 10), "city": ["Bern"] * 10})


def ids_of(loader: Any) -> list[int]:
    return sorted(one for batch in loader for one in batch["id"])


def test_the_snapshot_of_the_construction_is_read_while_the_table_moves_on(small):
    loader, dataset = open_table(small, "db.small")
    table = table_of(small, "db.small")
    pinned = table.current_snapshot().snapshot_id
    iterator = iter(loader)
    found = list(next(iterator)["id"])
    state = dataset.state_dict()
    append_rows(table, small_rows(20))
    delete_rows(table, {data_files(table)[0]: [0, 1]})
    assert sorted(found + [one for batch in iterator for one in batch["id"]]) == list(range(20))
    assert ids_of(open_table(small, "db.small")[0]) == list(range(2, 30))

    _, moved_on = open_table(small, "db.small")
    with pytest.raises(CheckpointMismatchError, match=f"create the loader with snapshot_id={pinned}") as caught:
        moved_on.load_state_dict(state)
    assert {difference.name for difference in caught.value.differences} == {"snapshot_id", "rows"}
    with pytest.raises(CheckpointMismatchError, match=f"snapshot_id={pinned}"):
        moved_on.load_state_dict([state], strict=False, on_changed_files="continue")

    loader, resumed = open_table(small, "db.small", snapshot_id=pinned)
    resumed.load_state_dict(state)
    assert ids_of(loader) == sorted(set(range(20)) - set(found))


@pytest.mark.parametrize("context", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.soak)])
def test_workers_know_no_catalog(small, context):
    options = {"num_workers": 1, "multiprocessing_context": context}
    loader, dataset = open_table(small, "db.small", **options)
    assert b"sqlite" not in pickle.dumps(dataset)
    (small / "catalog.db").unlink()
    shutil.rmtree(small / "warehouse" / "db" / "small" / "metadata")
    assert ids_of(loader) == list(range(20))


def test_a_table_needs_a_snapshot_and_a_catalog_that_knows_it(small):
    with pytest.raises(FileNotFoundError, match=r"^the table 'db\.smal' is not in the catalog$"):
        open_table(small, "db.smal")
    with pytest.raises(FileNotFoundError, match=r"'nowhere\.small' is not in the catalog"):
        open_table(small, "nowhere.small")
    with pytest.raises(ValueError, match=r"snapshot_id=7: the table 'db\.small' has no such snapshot.*latest are"):
        open_table(small, "db.small", snapshot_id=7)
    open_catalog(small).create_table("db.empty", SCHEMA)
    with pytest.raises(FileNotFoundError, match=r"'db\.empty' has no snapshot"):
        open_table(small, "db.empty")
    with pytest.raises(TypeError, match=r"table=None is NoneType, expected the table's name in the catalog"):
        IcebergDataset.create_dataloader(None, catalog_config={})
    with pytest.raises(TypeError, match="catalog_config is str"):
        IcebergDataset.create_dataloader("db.small", catalog_config="sqlite:///catalog.db")
    for name in ("path", "format", "partitioning", "manifest"):
        with pytest.raises(TypeError, match=f"{name}: the files"):
            open_table(small, "db.small", **{name: "x"})


def test_a_filter_has_to_fit_the_table(small):
    with pytest.raises(ColumnError, match="scan_filter=towns = 'Bern' does not fit"):
        open_table(small, "db.small", scan_filter="towns = 'Bern'")
    with pytest.raises(ValueError, match=r"scan_filter='city =' cannot be parsed"):
        open_table(small, "db.small", scan_filter="city =")
    with pytest.raises(TypeError, match="scan_filter=3"):
        open_table(small, "db.small", scan_filter=3)
    with pytest.raises(ColumnError, match="no column 'towns'"):
        open_table(small, "db.small", filters=FIELD("towns") == "Bern")
    with pytest.raises(ValueError, match="filter"):
        open_table(small, "db.small", scan_filter="id > 3", uneven_ranks="drop")


def test_a_table_is_no_manifest(small):
    with pytest.raises(ValueError, match="open the table with snapshot_id="):
        open_table(small, "db.small")[1].dump_manifest()


def test_an_epoch_of_which_everything_is_ruled_out_is_empty(small):
    for wanted in ({"filters": FIELD("id") > 99}, {"scan_filter": "id > 99"}):
        loader, dataset = open_table(small, "db.small", **wanted)
        assert list(loader) == []
        dataset.load_state_dict(dataset.state_dict())
        assert list(loader) == []
    table = table_of(small, "db.small")
    delete_rows(table, {file: range(10) for file in data_files(table)})
    loader, _ = open_table(small, "db.small")
    assert len(loader) == 0
    assert list(loader) == []


def test_files_that_are_gone_or_cut_short_are_named(small):
    table = table_of(small, "db.small")
    data = Path(data_files(table)[1].removeprefix("file://"))
    loader, _ = open_table(small, "db.small")
    content = data.read_bytes()
    data.unlink()
    with pytest.raises(FileNotFoundError, match=data.name):
        list(loader)
    with pytest.raises(FileNotFoundError, match=data.name):
        open_table(small, "db.small")
    data.write_bytes(content[:-30])
    with pytest.raises(UnreadableFileError, match=data.name):
        open_table(small, "db.small")
    data.write_bytes(content)

    deletes = Path(delete_rows(table, {data_files(table)[0]: [3]}).removeprefix("file://"))
    content = deletes.read_bytes()
    without_page_header = content[:4] + bytes(20) + content[24:]  # of a page's content some damage is other paths
    for broken in (content[:-9], without_page_header, bytes(len(content))):
        deletes.write_bytes(broken)
        with pytest.raises(UnreadableFileError, match=deletes.name):
            open_table(small, "db.small")
    deletes.unlink()
    with pytest.raises(FileNotFoundError, match=deletes.name):
        open_table(small, "db.small")


def test_a_damaged_deletion_vector_is_named(small):
    table = table_of(small, "db.small")
    vectors = Path(delete_rows(table, {data_files(table)[0]: [3, 4]}, vectors=True).removeprefix("file://"))
    content = vectors.read_bytes()
    vectors.write_bytes(content[:20] + b"\xff" + content[21:])
    with pytest.raises(UnreadableFileError, match=rf"{vectors.name}.*damaged"):
        open_table(small, "db.small")


def test_deletes_beyond_the_end_of_a_file_are_refused(small):
    table = table_of(small, "db.small")
    file = data_files(table)[0]
    delete_rows(table, {file: [3, 10]})
    with pytest.raises(UnreadableFileError, match=rf"deletes row 10 of .*{Path(file).name}, which has 10 rows"):
        open_table(small, "db.small")


def test_deletes_apply_to_the_files_that_were_there_when_they_were_made(small):
    table = table_of(small, "db.small")
    files = data_files(table)
    later = next_url(table, "parquet").replace(f"{len(WRITTEN):06d}", f"{len(WRITTEN) + 1:06d}")
    delete_rows(table, {files[0]: [1], later: [2]})  # names a file that comes only later
    assert append_rows(table, small_rows(20)) == later
    assert ids_of(open_table(small, "db.small")[0]) == [0, *range(2, 30)]


def test_equality_deletes_are_refused_by_name(small):
    table = table_of(small, "db.small")
    path = delete_rows(table, {data_files(table)[0]: [3]}, content=DataFileContent.EQUALITY_DELETES)
    with pytest.raises(UnreadableFileError, match=rf"'db\.small' deletes rows by equality, in {path}"):
        open_table(small, "db.small")


def test_files_without_ids_are_read_by_the_tables_names(small):
    table = table_of(small, "db.small")
    path = small / "added.parquet"
    columns = pa.schema([pa.field("id", pa.int64(), nullable=False), ("city", pa.string())])
    pq.write_table(small_rows(20).cast(columns), path)
    table.add_files([f"file://{path}"])  # gives the table its names
    with table.update_schema() as change:
        change.rename_column("city", "town")
    table = table_of(small, "db.small")
    loader, _ = open_table(small, "db.small")
    assert delivered(loader) == counted(table.scan().to_arrow())
    with table.transaction() as transaction:
        transaction.remove_properties("schema.name-mapping.default")
    with pytest.raises(ColumnError, match=r"added.parquet: .*no field ids .*schema\.name-mapping\.default"):
        open_table(small, "db.small")


def test_a_state_is_refused_where_columns_of_the_filter_have_exchanged_their_names(tmp_path):
    schema = Schema(NestedField(1, "a", LongType()), NestedField(2, "b", LongType()))
    table = new_catalog(tmp_path).create_table("db.exchanged", schema)
    append_rows(table, pa.table({"a": range(100), "b": range(99, -1, -1)}))
    options = {"filters": FIELD("a") < 60, "batch_size": 7, "columns": ["a"]}
    loader, _ = open_table(tmp_path, "db.exchanged", **options)
    next(iter(loader))
    state = loader.state_dict()
    open_table(tmp_path, "db.exchanged", **options)[0].load_state_dict(state)
    with table.update_schema() as change:
        change.rename_column("a", "c")
    with table.update_schema() as change:
        change.rename_column("b", "a")
    with table.update_schema() as change:
        change.rename_column("c", "b")
    again, dataset = open_table(tmp_path, "db.exchanged", **options)
    assert dataset.state_dict()["plan"]["snapshot_id"] == state["plan"]["snapshot_id"]
    with pytest.raises(CheckpointMismatchError, match="filter_binding"):
        again.load_state_dict(state)


def test_fields_within_columns_that_changed_are_refused_by_name(small):
    schema = Schema(
        NestedField(1, "id", LongType()), NestedField(2, "place", StructType(NestedField(3, "x", LongType())))
    )
    table = open_catalog(small).create_table("db.nested", schema)
    append_rows(table, pa.table({"id": [1, 2], "place": [{"x": 1}, None]}))
    assert delivered(open_table(small, "db.nested")[0]) == counted(table.scan().to_arrow())
    with table.update_schema() as change:
        change.rename_column(("place", "x"), "longitude")
    with pytest.raises(
        ColumnError, match=r"\.parquet: column 'place' has the fields longitude \(id 3\) in the table but x \(id 3\)"
    ):
        open_table(small, "db.nested")
    assert ids_of(open_table(small, "db.nested", columns=["id"])[0]) == [1, 2]
    with table.update_schema() as change:
        change.rename_column("place", "spot")  # whose leaves, for Parquet, are called as before
        change.rename_column(("place", "longitude"), "x")
    append_rows(table, pa.table({"id": [3], "spot": [{"x": 3}]}))
    assert delivered(open_table(small, "db.nested")[0]) == counted(table.scan().to_arrow())


def test_what_a_partition_or_a_default_says_of_a_column_stands_in_for_it(small):
    table = table_of(small, "db.small")
    with table.update_spec() as change:
        change.add_identity("city")
    append_rows(table, small_rows(20).drop_columns(["city"]), Record("Chur"))
    loader, _ = open_table(small, "db.small", filters=FIELD("city") == "Chur")
    assert ids_of(loader) == list(range(20, 30))
    assert delivered(open_table(small, "db.small")[0]) == counted(table.scan().to_arrow())


@pytest.fixture
def doubles(tmp_path) -> Path:
    """A catalog with the table ``db.doubles``, which is partitioned by doubles that no float of 32 bits holds."""
    schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "key", DoubleType()))
    spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "key"))
    table = new_catalog(tmp_path).create_table("db.doubles", schema, partition_spec=spec)
    table.append(pa.table({"id": pa.array(range(4), pa.int64()), "key": [0.1, 0.7, None, 0.5]}))
    return tmp_path


@pytest.mark.parametrize("null", [False, True])
@pytest.mark.parametrize("as_scan_filter", [False, True])
def test_no_row_of_a_partition_by_doubles_is_lost(doubles, as_scan_filter, null):
    """The compiled decoder of pyiceberg rounds these values, and its own scans lose such rows."""
    filters = {
        "key = 0.1": (FIELD("key") == 0.1, [0]),
        "key <= 0.1": (FIELD("key") <= 0.1, [0]),
        "key >= 0.7": (FIELD("key") >= 0.7, [1]),
        "key in (0.1, 0.7)": (FIELD("key").isin([0.1, 0.7]), [0, 1]),
        "key < 0.2 and id < 3": ((FIELD("key") < 0.2) & (FIELD("id") < 3), [0]),
    }
    for text, (expression, wanted) in filters.items():
        by_text = f"({text}) or key is null" if null else text
        by_expression = expression | FIELD("key").is_null() if null else expression
        given = {"scan_filter": by_text} if as_scan_filter else {"filters": by_expression}
        assert ids_of(open_table(doubles, "db.doubles", **given)[0]) == wanted + [2] * null


def test_a_double_that_only_a_partition_holds_is_refused_by_name(doubles):
    table = table_of(doubles, "db.doubles")
    append_rows(table, pa.table({"id": pa.array([9], pa.int64())}), Record(0.3))
    assert ids_of(open_table(doubles, "db.doubles", columns=["id"])[0]) == [0, 1, 2, 3, 9]
    with pytest.raises(ColumnError, match=r"column 'key' is not in .* .* rounds doubles"):
        open_table(doubles, "db.doubles")


def test_files_that_are_older_than_a_column_of_doubles_are_delivered(small):
    table = table_of(small, "db.small")
    with table.update_schema() as change:
        change.add_column("key", DoubleType())
    with table.update_spec() as spec:
        spec.add_identity("key")
    rows = small_rows(20).append_column("key", pa.array([0.1] * 10))
    table.append(rows.cast(table.schema().as_arrow()))
    assert ids_of(open_table(small, "db.small")[0]) == list(range(30))
    assert ids_of(open_table(small, "db.small", filters=FIELD("key") == 0.1)[0]) == list(range(20, 30))


def give_default(table: Any, name: str, value: str) -> None:
    """Write an initial default of a column: pyiceberg writes no table of version 3, which is what has them."""
    metadata = Path(table.metadata_location.removeprefix("file://"))
    content = json.loads(metadata.read_text())
    next(field for field in content["schemas"][-1]["fields"] if field["name"] == name)["initial-default"] = value
    metadata.write_text(json.dumps(content))


def test_a_new_columns_default_stands_in_for_it(small):
    table = table_of(small, "db.small")
    with table.update_schema() as change:
        change.add_column("kind", StringType())
    append_rows(table, small_rows(20).append_column("kind", pa.nulls(10, pa.string())))
    give_default(table, "kind", "plain")
    assert delivered(open_table(small, "db.small")[0]) == counted(table_of(small, "db.small").scan().to_arrow())
    assert ids_of(open_table(small, "db.small", filters=FIELD("kind") == "plain")[0]) == list(range(20))
    assert ids_of(open_table(small, "db.small", filters=FIELD("kind").is_null())[0]) == list(range(20, 30))


def test_a_null_of_the_partition_is_not_replaced_by_the_columns_default(small):
    table = table_of(small, "db.small")
    with table.update_schema() as change:
        change.add_column("kind", StringType())
    with table.update_spec() as spec:
        spec.add_identity("kind")
    append_rows(table, small_rows(20), Record(None))
    give_default(table, "kind", "plain")
    kinds = [one for batch in open_table(small, "db.small")[0] for one in batch["kind"]]
    assert sorted(map(str, kinds)) == ["None"] * 10 + ["plain"] * 20
    assert ids_of(open_table(small, "db.small", filters=FIELD("kind") == "plain")[0]) == list(range(20))
    assert ids_of(open_table(small, "db.small", filters=FIELD("kind").is_null())[0]) == list(range(20, 30))


@pytest.mark.parametrize("dtype", [pa.float32(), pa.float64()])
def test_a_filter_by_an_infinity_keeps_its_rows(small, dtype):
    infinity = float("inf")
    rows = pa.table({"id": [0, 1, 2], "x": pa.array([infinity, -infinity, 1.0], dtype)})
    open_catalog(small).create_table("db.infinities", rows.schema).append(rows)
    column = FIELD("x")
    for value in (infinity, -infinity):
        for expression in (column == value, column >= value, column <= value, column < value, column.isin([value])):
            wanted = rows.filter(expression)["id"].to_pylist()
            assert ids_of(open_table(small, "db.infinities", filters=expression)[0]) == wanted


@pytest.mark.parametrize("transform", [YearTransform(), DayTransform()])
def test_a_filter_may_compare_partitions_with_the_ends_of_the_calendar(tmp_path, transform):
    schema = Schema(
        NestedField(1, "id", LongType()), NestedField(2, "day", DateType()), NestedField(3, "seen", TimestampType())
    )
    spec = PartitionSpec(PartitionField(2, 1000, transform, "one"), PartitionField(3, 1001, transform, "other"))
    table = new_catalog(tmp_path).create_table("db.times", schema, partition_spec=spec)
    rows = pa.table({"id": [1], "day": [MIDNIGHT.date()], "seen": pa.array([MIDNIGHT], pa.timestamp("us"))})
    partition = [54] * 2 if isinstance(transform, YearTransform) else [19723] * 2
    append_rows(table, rows, Record(*partition))
    ends = {
        "day": (date.min, date.max),
        "seen": (datetime.min, datetime.max, pa.scalar(2**62, pa.timestamp("us"))),  # noqa: DTZ901 - no time zone
    }
    for name, values in ends.items():
        for value in values:
            for expression in (FIELD(name) < value, FIELD(name) > value, FIELD(name) == value):
                loader, _ = open_table(tmp_path, "db.times", filters=expression)
                assert ids_of(loader) == rows.filter(expression)["id"].to_pylist()


def test_a_table_on_s3_is_read_with_fsspecs_options(tmp_path, s3):
    bucket = s3.new_bucket()
    properties = {
        "py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO",
        "s3.endpoint": s3.url,
        "s3.access-key-id": s3.storage_options()["key"],
        "s3.secret-access-key": s3.storage_options()["secret"],
        "s3.region": "us-east-1",
        "warehouse": f"s3://{bucket}/warehouse",
    }
    catalog = new_catalog(tmp_path, **properties)
    schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "city", StringType()))
    table = catalog.create_table("db.small", schema, properties={"format-version": "2"})
    for first in (0, 10):
        append_rows(table, small_rows(first))
    delete_rows(table, {file: [3, 4] for file in data_files(table)})
    options = {"catalog_config": config_of(tmp_path, **properties), "num_workers": 0, "output_format": "dict"}
    loader, dataset = IcebergDataset.create_dataloader("db.small", storage_options=s3.storage_options(), **options)
    assert ids_of(loader) == [*range(3), *range(5, 13), *range(15, 20)]
    assert dataset.state_dict()["plan"]["root"] == f"s3://{bucket}/warehouse/db/small/data"
    assert properties["s3.secret-access-key"] not in json.dumps(dataset.state_dict())


def test_what_the_catalog_is_configured_with_is_shown_nowhere(small, monkeypatch):
    config = {"type": "sql", "uri": "postgresql://me:hunter2hunter2@db/lake", "s3.secret-access-key": "s3cr3ts3cr3t"}

    def fail(**config: str) -> None:
        raise OSError(f"no connection with {config}")

    with monkeypatch.context() as patch:
        patch.setattr("torch_dataloader_utils.tables.iceberg.table.load_catalog", fail)
        with pytest.raises(UnreadableFileError, match=r"'db\.small'.*no connection.*db/lake") as caught:
            IcebergDataset.create_dataloader("db.small", catalog_config=config)
    assert "hunter2" not in str(caught.value)
    assert "s3cr3t" not in str(caught.value)
    _, dataset = open_table(small, "db.small")
    assert "catalog.db" not in json.dumps(dataset.state_dict()) + repr(dataset)
