"""Delta Lake tables: what is delivered is what deltalake itself reads of the same version."""

from __future__ import annotations

import json
import pickle
import shutil
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from deltas import commit, vector_inline, vector_on_disk
from row_hashes import entry_of
from support import counted, delivered

from torch_dataloader_utils import CheckpointMismatchError, ColumnError, DeltaDataset, UnreadableFileError

FIELD = pc.field
KINDS = ("a b", None, "ü/x%20", "plain")


def open_table(table: Any, **options: Any) -> Any:
    return DeltaDataset.create_dataloader(
        table, **{"num_workers": 0, "batch_size": 16, "output_format": "dict", **options}
    )


def rows_from(first: int, count: int) -> pa.Table:
    ids = range(first, first + count)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "kind": [KINDS[one % 4] for one in ids],
            "day": [date(2024, 1, 1 + one % 2) for one in ids],
            "score": pa.array([None if one % 7 == 0 else one / 4 for one in ids], pa.float32()),
            "price": pa.array([Decimal(one) / 100 for one in ids], pa.decimal128(9, 2)),
            "seen": pa.array([datetime(2024, 1, 1, one % 24, tzinfo=timezone.utc) for one in ids]),
            "tags": pa.array([[str(one)] * (one % 3) for one in ids], pa.list_(pa.string())),
            "place": pa.array([{"x": one, "y": None} for one in ids], pa.struct({"x": pa.int32(), "y": pa.string()})),
        }
    )


def queried(table: Path) -> pa.Table:
    """Read a table as deltalake's own engine does: to_pyarrow_table knows no deletion vectors and no mapping."""
    reader = QueryBuilder().register("own", DeltaTable(table)).execute("SELECT * FROM own")
    return pa.table(reader)


def ids_of(loader: Any) -> list[int]:
    return sorted(one for batch in loader for one in batch["id"])


@pytest.fixture(scope="module")
def lake(tmp_path_factory) -> Path:
    """A table of three versions, partitioned by texts and days, with a column added; its path has a space in it."""
    table = tmp_path_factory.mktemp("lake") / "a table"
    partitions = ["kind", "day"]
    write_deltalake(table, rows_from(0, 90), partition_by=partitions)
    write_deltalake(table, rows_from(90, 30), mode="append")
    more = rows_from(120, 20).append_column("note", pa.array(["new"] * 20))
    write_deltalake(table, more, mode="append", schema_mode="merge")
    return table


@pytest.mark.parametrize("version", [None, 0, 1, 2])
def test_a_version_is_delivered_as_deltalake_reads_it(lake, version):
    expected = DeltaTable(lake, version=version).to_pyarrow_table()
    loader, dataset = open_table(lake, version=version)
    assert dataset.schema.names == expected.schema.names
    assert dataset.state_dict()["plan"]["version"] == (2 if version is None else version)
    assert delivered(loader) == counted(expected)


def test_a_table_may_be_named_by_path_or_url(lake, monkeypatch):
    monkeypatch.chdir(lake.parent)
    for name in (str(lake), f"{lake}/", lake.as_uri(), "a table", "./a table"):
        assert ids_of(open_table(name)[0]) == list(range(140))


def test_a_partition_of_bytes_has_the_bytes_that_were_written(tmp_path):
    """The log escapes them, and deltalake returns the escaped text."""
    values = [b"ab", b"\x00\xff", b"ab", None, b"\\u00"]
    write_deltalake(tmp_path / "table", pa.table({"id": range(5), "key": values}), partition_by=["key"])
    loader, _ = open_table(tmp_path / "table", output_format="dict")
    rows = {row: key for batch in loader for row, key in zip(batch["id"], batch["key"], strict=True)}
    assert rows == dict(enumerate(values))
    assert ids_of(open_table(tmp_path / "table", filters=FIELD("key") == b"ab")[0]) == [0, 2]


FILTERS = {
    "a partition": FIELD("kind") == "ü/x%20",
    "a partition that is null": FIELD("kind").is_null(),
    "a partition's day": (FIELD("day") > date(2024, 1, 1)) & (FIELD("id") > 40),
    "a column added later": FIELD("note") == "new",
    "statistics": FIELD("id") < 9,
    "none": FIELD("id") < 0,
}


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_keeps_the_rows_that_it_keeps_row_by_row(lake, name):
    loader, dataset = open_table(lake, filters=FILTERS[name])
    assert delivered(loader) == counted(DeltaTable(lake).to_pyarrow_table().filter(FILTERS[name]))
    assert dataset.get_metrics()["row_groups_pruned"] > 0


READING: dict[str, dict[str, Any]] = {
    "in order": {},
    "in slices": {"read_ahead_bytes": 400},
    "rows mixed": {"shuffle": True, "shuffle_buffer_size": 40},
    "rows mixed in rounds": {"shuffle": True, "shuffle_buffer_size": 8, "shuffle_interleave": 3},
}


@pytest.fixture(scope="module")
def pitted(tmp_path_factory) -> Path:
    """A table with deletion vectors in files and in the log, by the protocol's specification."""
    table = tmp_path_factory.mktemp("pitted")
    fields = [{"name": "id", "type": "long", "nullable": True, "metadata": {}}]
    features = ["deletionVectors"]
    actions: list[dict[str, Any]] = [
        {"protocol": protocol(features)},
        {"metaData": metadata(fields, configuration={"delta.enableDeletionVectors": "true"})},
    ]
    for number, (count, group_rows) in enumerate(((100, 30), (60, 60), (41, 10), (5, 5))):
        path = table / f"{number}.parquet"
        pq.write_table(pa.table({"id": range(number * 100, number * 100 + count)}), path, row_group_size=group_rows)
        places = [*range(30, 60), *range(0, 100, 7)] if number == 0 else range(0, count, number)
        vector = (vector_inline if number == 2 else lambda found: vector_on_disk(table, found))(sorted(set(places)))
        actions.append({"add": added(path, deletionVector=vector)})
    plain = table / "4.parquet"
    pq.write_table(pa.table({"id": range(400, 410)}), plain)
    commit(table, 0, [*actions, {"add": added(plain)}])
    return table


def protocol(features: list[str]) -> dict[str, Any]:
    return {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": features, "writerFeatures": features}


def metadata(fields: list[dict[str, Any]], partitions: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    return {
        "id": "made-up",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": list(partitions),
        "configuration": {},
        "createdTime": 0,
        **more,
    }


def added(path: Path, **more: Any) -> dict[str, Any]:
    size = path.stat().st_size
    return {
        "path": path.name,
        "size": size,
        "partitionValues": {},
        "modificationTime": 0,
        "dataChange": True,
        "stats": json.dumps({"numRecords": pq.read_metadata(path).num_rows}),
        **more,
    }


@pytest.mark.parametrize("reading", READING)
@pytest.mark.parametrize("expression", [None, FIELD("id") > 33], ids=["all", "some"])
def test_rows_of_deletion_vectors_are_not_delivered_and_a_resume_at_every_batch_is_exact(pitted, reading, expression):
    ids = sorted(queried(pitted)["id"].to_pylist())
    kept = {one: row for row, one in enumerate(ids) if expression is None or one > 33}
    loader, dataset = open_table(pitted, filters=expression, row_id_column="row", batch_size=9, **READING[reading])
    states, batches = [dataset.state_dict()], []
    for batch in loader:
        batches.append(list(zip(batch["id"], batch["row"], strict=True)))
        states.append(json.loads(json.dumps(dataset.state_dict())))
    assert sorted(pair for batch in batches for pair in batch) == sorted(kept.items())
    for number, state in enumerate(states):
        dataset.load_state_dict(state)
        assert [list(zip(batch["id"], batch["row"], strict=True)) for batch in loader] == batches[number:]


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("begin", ["", "file:", "file://"])
def test_files_elsewhere_may_be_written_as_paths_and_urls_and_have_deletion_vectors(tmp_path, begin):
    table, elsewhere = tmp_path / "table", tmp_path / "else where"
    table.mkdir()
    elsewhere.mkdir()
    fields = [{"name": "id", "type": "long", "nullable": True, "metadata": {}}]
    actions: list[dict[str, Any]] = [{"protocol": protocol(["deletionVectors"])}, {"metaData": metadata(fields)}]
    for number, vector in enumerate(({"deletionVector": vector_inline([1, 3])}, {})):
        path = elsewhere / f"{number}.parquet"
        pq.write_table(pa.table({"id": range(6 * number, 6 * number + 6)}), path)
        actions.append({"add": {**added(path, **vector), "path": begin + quote(str(path))}})
    commit(table, 0, actions)
    loader, _ = open_table(table)
    assert sorted(row for batch in loader for row in batch["id"]) == [0, 2, 4, 5, *range(6, 12)]


@pytest.mark.parametrize("escape", ["", "all", "some"])
def test_a_file_has_its_deletion_vector_however_the_log_escapes_its_name(tmp_path, escape):
    """Java leaves letters as they are, other writers do not, and deltalake makes URLs of its own."""
    name = "city=Zürich [x] a|b!/1:2.parquet"
    (tmp_path / name).parent.mkdir()
    pq.write_table(pa.table({"id": range(6)}), tmp_path / name)
    logged = {"": name, "all": quote(name), "some": quote(name, safe="/=ü!:")}[escape]
    fields = [{"name": "id", "type": "long", "nullable": True, "metadata": {}}]
    added_file = {**added(tmp_path / name, deletionVector=vector_inline([1, 3])), "path": logged}
    commit(
        tmp_path,
        0,
        [{"protocol": protocol(["deletionVectors"])}, {"metaData": metadata(fields)}, {"add": added_file}],
    )
    loader, _ = open_table(tmp_path)
    assert [row for batch in loader for row in batch["id"]] == [0, 2, 4, 5]


def test_a_version_that_a_table_does_not_have_yet_is_an_error_with_the_latest(tmp_path):
    write_deltalake(str(tmp_path), rows_from(0, 40))
    with pytest.raises(UnreadableFileError, match=r"version 7 of the table .* its latest version is 0"):
        open_table(tmp_path, version=7)


@pytest.mark.parametrize("table", [None, ["a"], b"a"], ids=["none", "a list", "bytes"])
def test_what_names_no_table_is_an_error_that_names_the_argument(table):
    with pytest.raises(TypeError, match=rf"table=.* is {type(table).__name__}, expected"):
        DeltaDataset.create_dataloader(table)


@pytest.mark.parametrize("begin", ["", "file://"], ids=["path", "url"])
@pytest.mark.parametrize("name", ["50%25off", "a%20b", "a%2Fb", "a\\b", "50%off", "a b", "ü+#?"])
def test_a_table_is_not_read_with_the_log_of_another_whose_name_looks_like_its_own(tmp_path, name, begin):
    """Deltalake decodes the name of a directory once too often."""
    alike = tmp_path / unquote(name).replace("\\", "/")
    write_deltalake(str(tmp_path / "table"), rows_from(0, 40))
    (tmp_path / "table").rename(tmp_path / name)
    if alike != tmp_path / name:
        shutil.copytree(tmp_path / name, alike)
        write_deltalake(str(alike), rows_from(40, 40), mode="append")
    (tmp_path / "link").symlink_to(tmp_path / name)
    for path in (tmp_path / name, tmp_path / "link"):
        url = path.as_uri() if begin else str(path)
        if alike != tmp_path / name:
            with pytest.raises(UnreadableFileError, match="deltalake would read"):
                open_table(url)
        else:
            loader, _ = open_table(url)
            assert ids_of(loader) == list(range(40))


def test_the_hash_of_delivered_rows_tells_which_ones_deletion_vectors_left(tmp_path):
    hashes = []
    fields = [{"name": "id", "type": "long", "nullable": True, "metadata": {}}]
    for deleted in (3, 14):
        table = tmp_path / str(deleted)
        table.mkdir()
        pq.write_table(pa.table({"id": range(30)}), table / "0.parquet", row_group_size=10)
        file = added(table / "0.parquet", deletionVector=vector_inline([deleted]))
        commit(table, 0, [{"protocol": protocol(["deletionVectors"])}, {"metaData": metadata(fields)}, {"add": file}])
        loader, dataset = open_table(table, fingerprint=True, row_id_column="row")
        rows = [row for batch in loader for row in batch["row"]]
        assert dataset.get_metrics()["delivered_hash"] == [entry_of(loader.state_dict()["files"], rows)]
        hashes += dataset.get_metrics()["delivered_hash"]
    assert hashes[0]["rows"] == hashes[1]["rows"] == 29
    assert hashes[0]["hash"] != hashes[1]["hash"]


def test_workers_resume_at_every_batch_without_the_log(pitted, tmp_path):
    table = tmp_path / "table"
    shutil.copytree(pitted, table)
    options = {"filters": FIELD("id") > 33, "shuffle": True, "shuffle_buffer_size": 30, "num_workers": 2}
    loader, dataset = open_table(table, **options)
    assert b"deltalake" not in pickle.dumps(dataset)
    shutil.rmtree(table / "_delta_log")
    for vector in table.glob("*.bin"):
        vector.unlink()
    states, batches = [dataset.state_dict()], []
    for batch in loader:
        batches.append(batch["id"])
        states.append(dataset.state_dict())
    for number, state in enumerate(states):
        loader.load_state_dict(state)
        assert [batch["id"] for batch in loader] == batches[number:]


def test_the_version_of_the_construction_is_read_while_the_table_moves_on(tmp_path):
    write_deltalake(tmp_path, rows_from(0, 40))
    loader, dataset = open_table(tmp_path)
    iterator = iter(loader)
    found = list(next(iterator)["id"])
    state = dataset.state_dict()
    write_deltalake(tmp_path, rows_from(40, 40), mode="append")
    assert sorted(found + [one for batch in iterator for one in batch["id"]]) == list(range(40))
    _, moved_on = open_table(tmp_path)
    with pytest.raises(CheckpointMismatchError, match="create the loader with version=0"):
        moved_on.load_state_dict(state)
    loader, resumed = open_table(tmp_path, version=0)
    resumed.load_state_dict(state)
    assert ids_of(loader) == sorted(set(range(40)) - set(found))


def field_of(name: str, physical: str, number: int, kind: Any) -> dict[str, Any]:
    mapped = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": physical}
    return {"name": name, "type": kind, "nullable": True, "metadata": mapped}


@pytest.mark.parametrize("mode", ["name", "id"])
def test_mapped_columns_are_found_whatever_files_call_them(tmp_path, mode):
    inner = {"type": "struct", "fields": [field_of("x", "col-6", 6, "long")]}
    fields = [
        field_of("id", "name", 1, "long"),
        field_of("name", "id", 2, "string"),
        field_of("part", "col-3", 3, "integer"),
        field_of("later", "col-4", 4, "double"),
        field_of("place", "col-5", 5, inner),
    ]
    columns = [("id", "2", pa.string()), ("name", "1", pa.int64()), ("col-5", "5", pa.struct([("col-6", pa.int64())]))]
    stored = pa.schema([pa.field(name, kind, metadata={"PARQUET:field_id": own}) for name, own, kind in columns])
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table([["a", "b"], [1, 2], [{"col-6": 1}, None]], schema=stored), path)
    configuration = {"delta.columnMapping.mode": mode, "delta.columnMapping.maxColumnId": "6"}
    commit(
        tmp_path,
        0,
        [
            {"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}},
            {"metaData": metadata(fields, ("part",), configuration=configuration)},
            {"add": added(path, partitionValues={"col-3": "7"})},
        ],
    )
    wanted = ["id", "name", "part", "later"]
    assert delivered(open_table(tmp_path, columns=wanted)[0]) == counted(queried(tmp_path).select(wanted))
    assert ids_of(open_table(tmp_path, columns=["id"], filters=FIELD("name") == "b")[0]) == [2]
    with pytest.raises(
        ColumnError, match=r"f\.parquet: column 'place' contains the field 'x', which files call 'col-6'"
    ):
        open_table(tmp_path)


def test_files_without_the_ids_that_the_table_maps_columns_by_are_refused(tmp_path):
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"col-1": [1, 2]}), path)
    configuration = {"delta.columnMapping.mode": "id", "delta.columnMapping.maxColumnId": "1"}
    described = metadata([field_of("id", "col-1", 1, "long")], configuration=configuration)
    commit(tmp_path, 0, [{"protocol": protocol(["columnMapping"])}, {"metaData": described}, {"add": added(path)}])
    with pytest.raises(ColumnError, match=r"f\.parquet: column 'id': .* have none \(it has col-1\)"):
        open_table(tmp_path)


def test_a_mode_of_mapping_that_the_protocol_does_not_have_means_nothing(tmp_path):
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"id": [1, 2]}), path)
    fields = [{"name": "id", "type": "long", "nullable": True, "metadata": {}}]
    described = metadata(fields, configuration={"delta.columnMapping.mode": "name"})
    older = {"minReaderVersion": 1, "minWriterVersion": 2}
    commit(tmp_path, 0, [{"protocol": older}, {"metaData": described}, {"add": added(path)}])
    assert delivered(open_table(tmp_path)[0]) == counted(queried(tmp_path))


def test_features_that_are_not_supported_are_named(tmp_path):
    write_deltalake(tmp_path, rows_from(0, 4))
    commit(tmp_path, 1, [{"protocol": protocol(["deletionVectors", "timeTravelByTea"])}])
    with pytest.raises(UnreadableFileError, match="timeTravelByTea"):
        open_table(tmp_path)
    assert ids_of(open_table(tmp_path, version=0)[0]) == [0, 1, 2, 3]


def test_a_table_and_its_version_have_to_be_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no table .*: no log"):
        open_table(tmp_path / "nowhere")
    write_deltalake(tmp_path / "table", rows_from(0, 4))
    with pytest.raises(UnreadableFileError, match="version 7 of the table"):
        open_table(tmp_path / "table", version=7)
    with pytest.raises(TypeError, match="partitioning: the files"):
        open_table(tmp_path / "table", partitioning="hive")


def test_a_version_that_the_log_no_longer_has_is_named(tmp_path):
    for first in (0, 4, 8):
        write_deltalake(tmp_path, rows_from(first, 4), mode="append")
    DeltaTable(tmp_path).create_checkpoint()
    for version in (0, 1):
        (tmp_path / "_delta_log" / f"{version:020d}.json").unlink()
    with pytest.raises(UnreadableFileError, match=r"version 1 of the table .* no longer has that version"):
        open_table(tmp_path, version=1)
    assert ids_of(open_table(tmp_path, version=2)[0]) == list(range(12))


def test_files_that_are_gone_or_cut_short_are_named(tmp_path):
    write_deltalake(tmp_path, rows_from(0, 40))
    (data,) = tmp_path.glob("*.parquet")
    loader, _ = open_table(tmp_path)
    content = data.read_bytes()
    data.unlink()
    with pytest.raises(FileNotFoundError, match=data.name):
        list(loader)
    with pytest.raises(FileNotFoundError, match=data.name):
        open_table(tmp_path)
    data.write_bytes(content[:-30])
    with pytest.raises(UnreadableFileError, match=data.name):
        open_table(tmp_path)


def test_a_damaged_deletion_vector_is_an_error(pitted, tmp_path):
    table = tmp_path / "table"
    shutil.copytree(pitted, table)
    vector = max(table.glob("*.bin"), key=lambda path: path.stat().st_size)
    content = vector.read_bytes()
    vector.write_bytes(content[:12])
    with pytest.raises(UnreadableFileError, match=str(table)):
        open_table(table)
    vector.unlink()
    with pytest.raises((UnreadableFileError, FileNotFoundError), match=vector.name):
        open_table(table)


def test_a_deletion_vector_at_which_deltalake_panics_is_an_error_as_others(tmp_path):
    pq.write_table(pa.table({"id": range(6)}), tmp_path / "0.parquet")
    fields = [{"name": "id", "type": "long", "nullable": True, "metadata": {}}]
    file = added(tmp_path / "0.parquet", deletionVector={**vector_inline([1]), "pathOrInlineDv": ""})
    commit(tmp_path, 0, [{"protocol": protocol(["deletionVectors"])}, {"metaData": metadata(fields)}, {"add": file}])
    with pytest.raises(UnreadableFileError, match=f"the table {tmp_path} cannot be read"):
        open_table(tmp_path)


def test_a_table_on_s3_is_read_with_fsspecs_options_and_its_log_with_deltalakes(tmp_path, s3, pitted):
    bucket = s3.new_bucket(pitted)
    delta_options = {
        "aws_endpoint": s3.url,
        "aws_access_key_id": s3.storage_options()["key"],
        "aws_secret_access_key": s3.storage_options()["secret"],
        "aws_region": "us-east-1",
        "allow_http": "true",
    }
    options = {"storage_options": s3.storage_options(), "delta_options": delta_options}
    loader, _ = open_table(f"s3://{bucket}/", **options)
    assert ids_of(loader) == ids_of(open_table(pitted)[0])


def test_options_of_the_storage_are_shown_nowhere(tmp_path):
    secrets = {
        "storage_options": {"secret": "hunter2hunter2"},
        "delta_options": {"aws_secret_access_key": "s3cr3ts3cr3t"},
    }
    with pytest.raises(Exception, match="nowhere") as caught:
        open_table(f"{tmp_path}/nowhere", **secrets)
    assert "hunter2" not in str(caught.value)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.skipif(int(pa.__version__.split(".")[0]) < 26, reason="this pyarrow cannot read nulls in fixed-size lists")
def test_fixed_size_lists_that_were_written_are_the_tables_lists(tmp_path):
    vectors = pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float32(), 2))
    write_deltalake(tmp_path, pa.table({"id": [1, 2, 3], "vector": vectors}))
    assert delivered(open_table(tmp_path)[0]) == counted(DeltaTable(tmp_path).to_pyarrow_table())


@pytest.mark.skipif(int(pa.__version__.split(".")[0]) < 18, reason="this pyarrow cannot add a field to a struct")
def test_a_field_that_was_added_within_a_column_is_null_in_older_files(tmp_path):
    write_deltalake(tmp_path, pa.table({"a": pa.array([3], pa.int32()), "b": [{"q": 1}]}))
    more = pa.table({"a": pa.array([4], pa.int32()), "b": [{"q": 5, "r": "z"}]})
    write_deltalake(tmp_path, more, mode="append", schema_mode="merge")
    assert delivered(open_table(tmp_path)[0]) == counted(DeltaTable(tmp_path).to_pyarrow_table())
