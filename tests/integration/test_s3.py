"""S3, from a real server: each row once, exact resume, errors that name their object, and no secrets anywhere."""

from __future__ import annotations

import gc
import http.server
import inspect
import io
import itertools
import json
import logging
import re
import subprocess
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from conftest import ACCESS_KEY, SECRET_KEY, S3Server
from fsspec.implementations.memory import MemoryFileSystem
from jobs.processes import inherited, own_children, wait_until_none
from s3fs import S3FileSystem
from stops import each_stop
from support import all_rows_of, batches_of, open_loader, rows_of, write_dataset

from torch_dataloader_utils import ChangedFilesWarning, CheckpointMismatchError, UnreadableFileError
from torch_dataloader_utils.distributed import load_rank_state, save_rank_state
from torch_dataloader_utils.reading.row_groups.fetcher import FETCHES, LARGEST_GAP
from torch_dataloader_utils.reading.row_groups.file_row_group import FileRowGroup
from torch_dataloader_utils.reading.row_groups.reader import RowGroupReader
from torch_dataloader_utils.storage import attempts, range_stream, request_size
from torch_dataloader_utils.storage.obstore import s3 as obstore_s3
from torch_dataloader_utils.storage.obstore.plain_http import HttpRange
from torch_dataloader_utils.workers import message_size

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

SMALL_FILES = ((37, 10), (5, 5), (29, 8))
WORKERS = [
    pytest.param({"num_workers": 0}, id="in-process"),
    pytest.param({"num_workers": 2, "multiprocessing_context": "fork"}, id="fork"),
    pytest.param({"num_workers": 2, "multiprocessing_context": "forkserver"}, id="forkserver"),
    pytest.param({"num_workers": 2, "multiprocessing_context": "spawn"}, id="spawn", marks=pytest.mark.soak),
]
IN_PROCESS_AND_IN_SOAK_FORKED = [WORKERS[0], pytest.param(*WORKERS[1].values, id="fork", marks=pytest.mark.soak)]
"""For errors of which other tests show that those of workers are raised with the name of their object."""

MIXED = {"shuffle": True, "shuffle_buffer_size": 30}

TIMEOUT_SEC = 2.0
"""The storage_timeout of tests whose endpoint refuses connections until the end."""


@pytest.fixture(scope="module")
def bucket(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A bucket with `SMALL_FILES` under data/ and data/deeper/."""
    directory = tmp_path_factory.mktemp("bucket")
    write_dataset(directory / "data", SMALL_FILES)
    (directory / "data" / "deeper").mkdir()
    (directory / "data" / "part-001.parquet").rename(directory / "data" / "deeper" / "part-001.parquet")
    (directory / "data" / "_SUCCESS").touch()
    return s3.new_bucket(directory)


def plain_parquet(first: int, rows: int = 100) -> bytes:
    """Return a Parquet file whose footer says nothing about its values, so that it is the same for all `first`."""
    sink = io.BytesIO()
    table = pa.table({"value": np.arange(first, first + rows)})
    pq.write_table(table, sink, row_group_size=10, compression="none", use_dictionary=False, write_statistics=False)
    return sink.getvalue()


def values_of(loader: Any) -> set[int]:
    """Return the values of the column `value`."""
    return {int(value) for batch in loader for value in batch["value"]}


def put(s3: S3Server, bucket: str, key: str, body: bytes) -> None:
    s3.client().put_object(Bucket=bucket, Key=key, Body=body)


# Reading ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", WORKERS)
def test_a_private_bucket_is_delivered_each_row_once(s3, bucket, workers):
    loader, _ = open_loader(f"s3://{bucket}/data", storage_options=s3.storage_options(), **workers)
    rows = all_rows_of(loader)
    assert sorted(rows) == list(range(71))


FORKS_WORKERS = """
import json, sys
from jobs.processes import own_children
from torch_dataloader_utils import MixedDataset, Source, StructuredDataset
path, options = sys.argv[1], json.loads(sys.argv[2])
workers = dict(num_workers=2, multiprocessing_context="fork", batch_size=10)
found = {}
for kind in ("nothing there", "one dataset", "a mixture"):
    if kind == "one dataset":
        loader, _ = StructuredDataset.create_dataloader(path, storage_options=options, **workers)
    elif kind == "a mixture":
        sources = {name: Source(path, storage_options=options) for name in "ab"}
        loader, _ = MixedDataset.create_dataloader(sources, {"a": 1, "b": 1}, rows_per_epoch=142, **workers)
    else:
        try:
            StructuredDataset.create_dataloader(path + "/none", storage_options=options, **workers)
        except FileNotFoundError as error:
            loader, kept = [], error
    assert not own_children(), "a process is left"
    values = [value for batch in loader for value in batch["value"].tolist()]
    found[kind] = [sorted(values), sorted({"obstore", "s3fs"} & set(sys.modules))]
    del loader
print(json.dumps(found))
"""


def test_a_process_that_forks_workers_imports_no_client_and_no_other_is_left_when_it_has_opened(s3, bucket):
    """One dataset, a mixture, and where nothing is there."""
    command = [sys.executable, "-c", FORKS_WORKERS, f"s3://{bucket}/data", json.dumps(s3.storage_options())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=inherited())
    assert done.returncode == 0, done.stderr
    times = {"nothing there": 0, "one dataset": 1, "a mixture": 2}
    assert json.loads(done.stdout) == {kind: [sorted([*range(71)] * count), []] for kind, count in times.items()}


def test_what_a_process_that_forks_workers_reads_later_is_cancelled_when_its_time_is_over(s3, bucket):
    loader, dataset = open_loader(
        f"s3://{bucket}/data", storage_options=s3.storage_options(), num_workers=2, multiprocessing_context="fork"
    )
    del loader
    storage = dataset._opened_files.storage
    assert inspect.iscoroutinefunction(storage.fs.get_range.__wrapped__)  # which `within` cancels
    file = next(iter(dataset._opened_files.files.values()))
    assert len(storage.read(file, 0, 4)) == 4


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 5),
        ({"shuffle": True}, 12),
        ({"read_ahead_bytes": 16_000}, 5),
        ({"filters": pc.field("value") < 200}, 5),
    ],
    ids=["in order", "shuffled", "little memory", "filtered"],
)
@pytest.mark.parametrize("client", ["plain HTTP", "obstore"])
def test_row_groups_that_follow_one_another_are_fetched_together(s3, tmp_path, monkeypatch, *, options, most, client):
    monkeypatch.setattr(obstore_s3, "LEAST_BY_HTTP", {"obstore": sys.maxsize, "plain HTTP": 0}[client])
    write_dataset(tmp_path / "data", ((400, 10),))
    requests = noted_requests(monkeypatch)
    path = f"s3://{s3.new_bucket(tmp_path)}/data"
    loader, _ = open_loader(path, storage_options=s3.storage_options(), **options)
    sizes = noted_parts(monkeypatch, client)
    delivered = all_rows_of(loader)
    assert sorted(delivered) == list(range(200 if "filters" in options else 400))
    footers, ranges = requests[:1], requests[1:]
    assert footers[0][1] == (tmp_path / "data" / "part-000.parquet").stat().st_size
    assert len(ranges) <= most
    assert sizes[0] < 400 * 8 or "shuffle" in options  # the first batch waits for one row group alone


@pytest.mark.parametrize("order", [{}, {"shuffle": True, "shuffle_buffer_size": 1000}], ids=["in order", "shuffled"])
@pytest.mark.parametrize(("column", "values"), [("year", {1: 100, 2: 100, 3: 100}), ("late", {-1: 200, 7: 100})])
def test_columns_of_which_a_file_has_none_are_delivered(s3, column, values, order):
    """Partition values alone, or a column that only newer files have: no byte of the older ones is needed."""
    bucket = s3.new_bucket()
    for year in (1, 2, 3):
        table = pa.table({"value": range(100)} | ({"late": [7] * 100} if year == 3 else {}))
        sink = io.BytesIO()
        pq.write_table(table, sink, row_group_size=10)
        put(s3, bucket, f"data/year={year}/a.parquet", sink.getvalue())
    options = {"columns": [column], "partitioning": "hive", "split_bytes": "1GiB", "row_id_column": None, **order}
    options["fill_nulls"] = {"late": -1} if column == "late" else None
    loader, _ = open_loader(f"s3://{bucket}/data", storage_options=s3.storage_options(), **options)
    assert Counter(int(value) for batch in loader for value in batch[column]) == values


def test_objects_that_differ_in_slashes_alone_are_refused_by_name(s3):
    bucket = s3.new_bucket()
    for key in ("data/a.parquet", "data//a.parquet"):
        put(s3, bucket, key, plain_parquet(0))
    with pytest.raises(ValueError, match=r"data//a\.parquet' and 's3://.*/data/a\.parquet' differ in slashes alone"):
        open_loader(f"s3://{bucket}/data", storage_options=s3.storage_options())


def noted_requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that gets the range of each request of obstore."""
    requests: list[tuple[int, int]] = []
    wanted = obstore_s3._request

    def noting(location: str, start: int, stop: int, etag: str | None) -> Any:
        requests.append((start, stop))
        return wanted(location, start, stop, etag)

    monkeypatch.setattr(obstore_s3, "_request", noting)
    return requests


def noted_parts(monkeypatch: pytest.MonkeyPatch, client: str) -> list[int]:
    """Return a list that gets the bytes of each part that is received of a request."""
    sizes: list[int] = []
    kind: Any = {"plain HTTP": HttpRange, "obstore": obstore_s3.ObstoreRange}[client]
    read_into = kind.read_into

    def noting(self: Any, memory: memoryview, seconds: float) -> Any:
        sizes.append(len(memory))
        return read_into(self, memory, seconds)

    monkeypatch.setattr(kind, "read_into", noting)
    return sizes


@pytest.mark.parametrize("is_worth_it", [True, False])
@pytest.mark.parametrize("room", [16_000, "128MiB"])
def test_a_request_for_a_whole_file_is_cut_unless_its_first_bytes_tell_that_it_is_worth_it(
    s3, monkeypatch, is_worth_it, room
):
    bucket, sizes = s3.new_bucket(), []
    for number in range(2):
        body = plain_parquet(1000 * number, rows=1000)
        put(s3, bucket, f"d/{number}.parquet", body)
        sizes.append(len(body))
    monkeypatch.setattr(request_size, "FIRST_BYTES", 4_000)
    monkeypatch.setattr(request_size, "SMALLEST_ANSWER", 1)
    monkeypatch.setattr(range_stream, "SMALLEST_ANSWER", 1)
    monkeypatch.setattr(request_size, "RECEIVING", 1_000_000 if is_worth_it else 0)
    requests = noted_requests(monkeypatch)
    loader, dataset = open_loader(f"s3://{bucket}/d", storage_options=s3.storage_options(), read_ahead_bytes=room)
    dataset._opened_files.storage.request_size._answers.clear()  # those of footers, which are mostly too small to tell
    requests.clear()
    assert [int(value) for batch in loader for value in batch["value"]] == list(range(2000))
    assert requests[0] == (0, sizes[0])
    assert requests == [(0, size) for size in sizes] if is_worth_it else len(requests) > 100


def test_the_next_file_is_requested_before_there_is_memory_for_its_rows(s3, tmp_path, monkeypatch):
    write_dataset(tmp_path / "data", ((400, 10), (400, 10)))
    requests: list[tuple[str, int]] = []
    requested = threading.Condition()
    wanted = obstore_s3._request

    def noting(location: str, start: int, stop: int, etag: str | None) -> Any:
        with requested:
            requests.append((location.rpartition("/")[2], stop - start))
            requested.notify_all()
        return wanted(location, start, stop, etag)

    monkeypatch.setattr(obstore_s3, "_request", noting)
    path = f"s3://{s3.new_bucket(tmp_path)}/data"
    loader, _ = open_loader(path, storage_options=s3.storage_options(), batch_size=10, read_ahead_bytes=4_000)
    footers = len(requests)
    batches = iter(loader)
    rows = [row for _ in range(25) for row in next(batches)["row"].tolist()]
    assert rows == list(range(250))
    with requested:
        assert requested.wait_for(lambda: "part-001.parquet" in dict(requests[footers:]), 60), requests
    assert [row for batch in batches for row in batch["row"].tolist()] == list(range(250, 800))
    names = [name for name, _ in requests[footers:]]
    assert names.count("part-001.parquet") == 1


def test_ranges_that_share_no_request_are_requested_ahead_also_where_their_answers_are_too_small_to_tell(
    s3, tmp_path, monkeypatch
):
    groups = 60
    (tmp_path / "data").mkdir()
    columns = {"x": pa.array(range(groups)), "between": [bytes(2 * LARGEST_GAP)] * groups}
    pq.write_table(
        pa.table(columns), tmp_path / "data" / "a.parquet", row_group_size=1, use_dictionary=False, compression="none"
    )
    monkeypatch.setattr(request_size, "FIRST_BYTES", 500)
    ahead: list[int] = []
    requested, read = itertools.count(1), itertools.count()
    request, tables = RowGroupReader.request, RowGroupReader.read_as_decoded

    def noting_request(self: RowGroupReader, *args: Any, **options: Any) -> None:
        request(self, *args, **options)
        ahead.append(next(requested))

    def noting_read(self: RowGroupReader, group: FileRowGroup) -> Iterator[tuple[pa.Table, bool]]:
        done = next(read)
        assert ahead[-1] - done >= min(FETCHES, groups - done)
        return tables(self, group)

    monkeypatch.setattr(RowGroupReader, "request", noting_request)
    monkeypatch.setattr(RowGroupReader, "read_as_decoded", noting_read)
    path = f"s3://{s3.new_bucket(tmp_path)}/data"
    loader, _ = open_loader(path, storage_options=s3.storage_options(), columns=["x"], batch_size=7)
    assert [row for batch in loader for row in batch["x"].tolist()] == list(range(groups))
    assert next(read) == groups


def test_objects_that_are_named_like_files_are_not_listed_too(s3, tmp_path, monkeypatch):
    write_dataset(tmp_path, ((40, 10), (40, 10)))
    bucket = s3.new_bucket(tmp_path)
    monkeypatch.setattr(obstore_s3.ObstoreS3, "listed", None)
    loader, _ = open_loader(
        [f"s3://{bucket}/part-{number:03d}.parquet" for number in range(2)], storage_options=s3.storage_options()
    )
    assert all_rows_of(loader) == list(range(80))


@each_stop
@pytest.mark.parametrize("workers", WORKERS[:2])
def test_resuming_at_every_batch_goes_on_with_the_same_batches(s3, bucket, workers, stops, monkeypatch):
    monkeypatch.setattr(obstore_s3, "LEAST_BY_HTTP", 0)

    def fresh(**options: Any) -> Any:
        options = {**workers, **MIXED, **options}
        return open_loader(f"s3://{bucket}/data", storage_options=s3.storage_options(), **options)[0]

    loader = fresh()
    states, whole = [loader.state_dict()], []
    for batch in loader:
        whole.append(batch["row"].tolist())
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert len(whole) >= 5
    chosen = stops(states)
    # Each worker imports its client first, which takes long: they are started once, for a stop in the middle.
    kept = fresh(persistent_workers=True) if workers["num_workers"] else None
    for stop in chosen[len(chosen) // 2 :] + chosen[: len(chosen) // 2]:
        loader = kept or fresh()
        loader.load_state_dict(states[stop])
        assert batches_of(loader) == whole[stop:]


@pytest.fixture
def without_obstore(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what has s3fs read from then on."""
    return lambda: monkeypatch.setattr(obstore_s3, "is_usable", lambda: False)


def test_a_state_saved_while_obstore_reads_resumes_at_every_batch_where_s3fs_does(
    s3, bucket, without_obstore, monkeypatch
):
    by_obstore = []
    get_range = obstore_s3.ObstoreS3.get_range

    def noting(self: obstore_s3.ObstoreS3, *args: Any) -> Any:
        by_obstore.append(args)
        return get_range(self, *args)

    def fresh() -> Any:
        return open_loader(f"s3://{bucket}/data", storage_options=s3.storage_options(), **MIXED)[0]

    monkeypatch.setattr(obstore_s3.ObstoreS3, "get_range", noting)
    loader = fresh()
    states, whole = [loader.state_dict()], []
    for batch in loader:
        whole.append(batch["row"].tolist())
        states.append(loader.state_dict())
    assert by_obstore
    by_obstore.clear()
    without_obstore()
    for stop, state in enumerate(states):
        loader = fresh()
        loader.load_state_dict(state)
        assert batches_of(loader) == whole[stop:]
    assert not by_obstore


@pytest.mark.parametrize("client", ["obstore", "s3fs"])
@pytest.mark.parametrize("path", ["data", "data/", "other", "data/part", "data/part-000.parquet", ""])
def test_both_clients_list_the_same_objects_also_those_with_empty_names(s3, tmp_path, path, client, without_obstore):
    write_dataset(tmp_path, ((10, 5),))
    bucket = s3.new_bucket()
    body = (tmp_path / "part-000.parquet").read_bytes()
    for key in ("data/part-000.parquet", "data//part-001.parquet", "data/./hidden.parquet"):
        put(s3, bucket, key, body)
    if client == "s3fs":
        without_obstore()
    url = f"s3://{bucket}/{path}"
    if path in {"other", "data/part"}:
        with pytest.raises(FileNotFoundError):
            open_loader(url, storage_options=s3.storage_options())
        return
    loader, _ = open_loader(url, storage_options=s3.storage_options())
    assert len(all_rows_of(loader)) == (10 if path.endswith(".parquet") else 20)


def test_an_object_is_delivered_though_what_is_below_its_name_may_not_be_listed(s3, bucket, monkeypatch):
    def refused(self: obstore_s3.ObstoreS3, location: str) -> Any:
        raise PermissionError(location)

    monkeypatch.setattr(obstore_s3.ObstoreS3, "listed", refused)
    loader, _ = open_loader(f"s3://{bucket}/data/part-000.parquet", storage_options=s3.storage_options())
    assert sorted(all_rows_of(loader)) == list(range(37))
    with pytest.raises(PermissionError, match=f"s3://{bucket}/data"):
        open_loader(f"s3://{bucket}/data", storage_options=s3.storage_options())


def test_an_object_is_delivered_and_not_what_is_below_its_name(s3):
    bucket = s3.new_bucket()
    put(s3, bucket, "d.parquet", plain_parquet(0))
    put(s3, bucket, "d.parquet/other.parquet", plain_parquet(100))
    loader, _ = open_loader(f"s3://{bucket}/d.parquet", storage_options=s3.storage_options())
    assert values_of(loader) == set(range(100))


@pytest.mark.parametrize("path", ["data", "data/", "data/*", "data/**/*.parquet", "data/part-000.parquet", ""])
def test_a_path_means_what_it_means_in_a_local_directory(s3, bucket, path, tmp_path):
    write_dataset(tmp_path / "data", SMALL_FILES)
    (tmp_path / "data" / "deeper").mkdir()
    (tmp_path / "data" / "part-001.parquet").rename(tmp_path / "data" / "deeper" / "part-001.parquet")
    here, _ = open_loader(f"{tmp_path}/{path}")
    there, _ = open_loader(f"s3://{bucket}/{path}", storage_options=s3.storage_options())
    assert batches_of(there) == batches_of(here)
    assert [file[:3] for file in there.state_dict()["files"]] == [file[:3] for file in here.state_dict()["files"]]


def test_a_list_of_objects_directories_and_globs_is_one_dataset(s3, bucket):
    loader, _ = open_loader(
        [f"s3://{bucket}/data/part-*.parquet", f"s3://{bucket}/data/deeper"], storage_options=s3.storage_options()
    )
    assert sorted(all_rows_of(loader)) == list(range(71))
    assert loader.state_dict()["plan"]["root"] == f"s3://{bucket}/data"


def test_keys_with_spaces_unicode_and_equals_signs_are_delivered(s3):
    bucket = s3.new_bucket()
    keys = ["a b.parquet", "année=2024/ü.parquet", "x=1/y+z.parquet"]
    for number, key in enumerate(keys):
        put(s3, bucket, f"odd/{key}", plain_parquet(100 * number))
    loader, _ = open_loader(f"s3://{bucket}/odd", storage_options=s3.storage_options())
    assert values_of(loader) == set(range(300))
    assert [file[0] for file in loader.state_dict()["files"]] == keys


@pytest.mark.parametrize("client", ["obstore", "s3fs"])
@pytest.mark.parametrize("mark", ["", "made by a console"])
@pytest.mark.parametrize("path", ["", "/**/*.parquet", "/x.parquet"])
def test_an_object_that_marks_a_directory_named_like_a_file_is_no_file(s3, path, mark, client, without_obstore):
    bucket = s3.new_bucket()
    put(s3, bucket, "odd/x.parquet/", mark.encode())
    put(s3, bucket, "odd/x.parquet/part-0.parquet", plain_parquet(0))
    if client == "s3fs":
        without_obstore()
    loader, _ = open_loader(f"s3://{bucket}/odd{path}", storage_options=s3.storage_options())
    assert values_of(loader) == set(range(100))


@pytest.mark.parametrize("path", ["", "/a\tb.parquet"], ids=["listed", "named"])
def test_keys_with_control_characters_are_delivered(s3, path):
    bucket = s3.new_bucket()
    put(s3, bucket, "odd/a\tb.parquet", plain_parquet(0))
    loader, _ = open_loader(f"s3://{bucket}/odd{path}", storage_options=s3.storage_options())
    assert values_of(loader) == set(range(100))


@pytest.mark.parametrize("directory", ["a\tb", "deep/a\x7fb"], ids=["tab", "delete"])
def test_directories_whose_names_have_control_characters_are_delivered(s3, directory):
    bucket = s3.new_bucket()
    put(s3, bucket, f"{directory}/c.parquet", plain_parquet(0))
    loader, _ = open_loader(f"s3://{bucket}/{directory}", storage_options=s3.storage_options())
    assert values_of(loader) == set(range(100))


@pytest.mark.parametrize("cache", ["", "simplecache::"], ids=["no cache", "cache"])
def test_what_was_put_below_a_root_in_a_bucket_since_it_was_listed_is_delivered(s3, cache):
    bucket = s3.new_bucket()
    for number in range(3):
        put(s3, bucket, f"root/deep/{number}.parquet", plain_parquet(100 * number))
        loader, _ = open_loader(f"{cache}dir://deep::s3://{bucket}/root", storage_options={"s3": s3.storage_options()})
        assert values_of(loader) == set(range(100 * number + 100))


# Versions -----------------------------------------------------------------------------------------------------------


def test_a_state_records_the_etag_of_every_object(s3, bucket):
    loader, _ = open_loader(f"s3://{bucket}/data", storage_options=s3.storage_options())
    listed = s3.client().list_objects_v2(Bucket=bucket, Prefix="data/")["Contents"]
    etags = {one["Key"].removeprefix("data/"): one["ETag"].strip('"') for one in listed}
    files = loader.state_dict()["files"]
    assert len(files) == 3
    assert {file[0]: file[3] for file in files} == {path: etags[path] for path in etags if path != "_SUCCESS"}


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.ChangedFilesWarning")
def test_an_object_rewritten_with_the_same_size_and_footer_is_a_mismatch_by_its_etag(s3):
    bucket = s3.new_bucket()
    put(s3, bucket, "d/one.parquet", plain_parquet(0))
    put(s3, bucket, "d/two.parquet", plain_parquet(100))
    loader, _ = open_loader(f"s3://{bucket}/d", storage_options=s3.storage_options())
    next(iter(loader))
    state = loader.state_dict()

    put(s3, bucket, "d/two.parquet", plain_parquet(500))
    today, _ = open_loader(f"s3://{bucket}/d", storage_options=s3.storage_options())
    assert today.state_dict()["plan"]["fingerprint"] == state["plan"]["fingerprint"], "size and footer must be equal"
    with pytest.raises(CheckpointMismatchError, match=r"changed since the checkpoint: two\.parquet") as raised:
        today.load_state_dict(state)
    assert raised.value.files_changed == ("two.parquet",)

    put(s3, bucket, "d/two.parquet", plain_parquet(100))
    back, _ = open_loader(f"s3://{bucket}/d", storage_options=s3.storage_options())
    back.load_state_dict(state)
    assert values_of(back) == set(range(16, 200))


def test_an_object_uploaded_again_in_parts_is_a_mismatch_though_its_bytes_are_equal(s3):
    bucket = s3.new_bucket()
    put(s3, bucket, "d/one.parquet", plain_parquet(0))
    loader, _ = open_loader(f"s3://{bucket}/d", storage_options=s3.storage_options())
    state = loader.state_dict()
    client = s3.client()
    place = {"Bucket": bucket, "Key": "d/one.parquet"}
    upload = {**place, "UploadId": client.create_multipart_upload(**place)["UploadId"]}
    part = client.upload_part(**upload, PartNumber=1, Body=plain_parquet(0))
    parts = [{"PartNumber": 1, "ETag": part["ETag"]}]
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    today, _ = open_loader(f"s3://{bucket}/d", storage_options=s3.storage_options())
    with pytest.raises(CheckpointMismatchError, match=r"one\.parquet"):
        today.load_state_dict(state)


@pytest.mark.parametrize("workers", IN_PROCESS_AND_IN_SOAK_FORKED)
def test_an_object_rewritten_after_it_was_listed_is_an_error_that_names_it_and_never_delivered(s3, workers):
    bucket = s3.new_bucket()
    put(s3, bucket, "d/one.parquet", plain_parquet(0))
    loader, _ = open_loader(f"s3://{bucket}/d", storage_options=s3.storage_options(), **workers)
    put(s3, bucket, "d/one.parquet", plain_parquet(500))
    with pytest.raises(UnreadableFileError, match=rf"s3://{bucket}/d/one\.parquet"):
        next(iter(loader))
    assert loader.state_dict()["batches_delivered"] == 0


# Errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["data/nothing", "data/part-999.parquet", "data/*.csv", "nothing/*.parquet"])
def test_a_missing_object_is_file_not_found_and_names_what_was_looked_for(s3, bucket, path):
    with pytest.raises(FileNotFoundError, match=re.escape(f"s3://{bucket}/{path}")):
        open_loader(f"s3://{bucket}/{path}", storage_options=s3.storage_options())


@pytest.mark.parametrize("path", ["", "/data", "/data/*.parquet"])
def test_a_missing_bucket_is_file_not_found_and_names_it(s3, path):
    with pytest.raises(FileNotFoundError, match="s3://no-such-bucket"):
        open_loader(f"s3://no-such-bucket{path}", storage_options=s3.storage_options())


@pytest.mark.parametrize("workers", IN_PROCESS_AND_IN_SOAK_FORKED)
def test_an_object_deleted_in_the_epoch_is_an_error_that_names_it(s3, workers):
    bucket = s3.new_bucket()
    put(s3, bucket, "d/one.parquet", plain_parquet(0))
    put(s3, bucket, "d/two.parquet", plain_parquet(100))
    loader, _ = open_loader(f"s3://{bucket}/d", storage_options=s3.storage_options(), **workers)
    s3.client().delete_object(Bucket=bucket, Key="d/two.parquet")
    with pytest.raises((FileNotFoundError, UnreadableFileError), match=rf"s3://{bucket}/d/two\.parquet"):
        list(loader)


def test_a_worker_that_fails_takes_the_others_with_it_at_once(s3):
    bucket = s3.new_bucket()
    for number in range(4):
        put(s3, bucket, f"d/{number}.parquet", plain_parquet(100 * number))
    loader, _ = open_loader(f"s3://{bucket}/d", storage_options=s3.storage_options(), num_workers=2)
    before = own_children()
    s3.client().delete_object(Bucket=bucket, Key="d/2.parquet")
    gc.disable()
    try:
        with pytest.raises(OSError, match=r"2\.parquet"):
            list(loader)
        assert not wait_until_none(lambda: own_children() - before, seconds=5)
    finally:
        gc.enable()


def test_a_dead_endpoint_is_an_error_that_names_the_url_within_the_timeout(s3):
    options = s3.storage_options()
    options["client_kwargs"]["endpoint_url"] = "http://127.0.0.1:9"
    with pytest.raises(UnreadableFileError, match=r"s3://some-bucket/data: no success in .* storage_timeout=2 s"):
        open_loader("s3://some-bucket/data", storage_options=options, storage_timeout=TIMEOUT_SEC)


def test_an_endpoint_that_dies_in_the_epoch_is_an_error_that_names_the_object_and_the_rest_can_be_resumed(
    mortal_s3, s3, tmp_path
):
    rows = write_dataset(tmp_path / "data", SMALL_FILES)
    bucket = mortal_s3.new_bucket(tmp_path)
    loader, _ = open_loader(
        f"s3://{bucket}/data",
        storage_options=mortal_s3.storage_options(),
        storage_timeout=TIMEOUT_SEC,
        batch_size=5,
    )
    batches = iter(loader)
    delivered = next(batches)["row"].tolist()
    mortal_s3.process.kill()
    mortal_s3.process.wait()
    with pytest.raises(UnreadableFileError, match=rf"s3://{bucket}/data/part-00\d\.parquet: no success"):
        delivered.extend(row for batch in batches for row in batch["row"].tolist())

    assert len(delivered) < rows
    state = loader.state_dict()
    copy, _ = open_loader(f"s3://{s3.new_bucket(tmp_path)}/data", storage_options=s3.storage_options(), batch_size=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ChangedFilesWarning)
        copy.load_state_dict(state)
    assert delivered + all_rows_of(copy) == list(range(rows))


def test_credentials_that_are_wrong_are_refused_in_an_error_that_names_the_url_and_right_ones_let_in(s3, bucket):
    user = "trainer"
    iam = s3.client("iam")
    iam.create_user(UserName=user)
    right = iam.create_access_key(UserName=user)["AccessKey"]
    everything = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [everything]})
    iam.put_user_policy(UserName=user, PolicyName="reader", PolicyDocument=policy)
    url = f"s3://{bucket}/data"
    s3.check_credentials(True)
    try:
        loader, _ = open_loader(url, storage_options=s3.storage_options(right["AccessKeyId"], right["SecretAccessKey"]))
        assert sorted(all_rows_of(loader)) == list(range(71))
        for key, secret in ((ACCESS_KEY, SECRET_KEY), (right["AccessKeyId"], SECRET_KEY)):
            with pytest.raises(PermissionError, match=url):
                open_loader(url, storage_options=s3.storage_options(key, secret))
    finally:
        s3.check_credentials(False)


@pytest.mark.parametrize("path", ["data", "data/*.parquet", "data/**/*.parquet", "data/part-*"])
def test_a_listing_that_is_refused_is_no_permission_and_not_an_empty_directory(s3, bucket, path):
    s3.check_credentials(True)
    try:
        with pytest.raises(PermissionError, match=f"s3://{bucket}/data"):
            open_loader(f"s3://{bucket}/{path}", storage_options=s3.storage_options())
    finally:
        s3.check_credentials(False)


def test_the_retries_of_the_users_own_filesystem_stay_as_they_are(s3, bucket):
    options = s3.storage_options()
    own = fsspec.filesystem("s3", **options)
    _, dataset = open_loader(f"s3://{bucket}/data", storage_options=options)
    used = dataset._opened_files.storage.fs
    assert own.retries == S3FileSystem.retries == 5
    assert "retries" not in own.config_kwargs
    assert used is not own
    assert used.retries == 1
    assert used.config_kwargs["retries"]["total_max_attempts"] == 1, "as botocore writes max_attempts=0"
    options["config_kwargs"] = {"retries": {"max_attempts": 7}}
    _, dataset = open_loader(f"s3://{bucket}/data", storage_options=options)
    assert dataset._opened_files.storage.fs.config_kwargs["retries"]["total_max_attempts"] == 8, "as the user says"


# Secrets ------------------------------------------------------------------------------------------------------------

SESSION_TOKEN = "made-up-session-token-that-must-not-leak"
QUERY_TOKEN = "made-up-query-token-that-must-not-leak"
PASSWORD = "made-up-password-that-must-not-leak"
SECRETS = (ACCESS_KEY, SECRET_KEY, SESSION_TOKEN, QUERY_TOKEN, PASSWORD)


class Told:
    """Collects everything that a user, a log or a checkpoint could get to see, and finds the secrets in it."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, logger="torch_dataloader_utils")
        self._caplog = caplog
        self._texts: list[str] = []

    def show(self, *values: Any) -> None:
        """Take in what print, str and JSON make of values."""
        self._texts += [text for value in values for text in (str(value), repr(value))]

    def error_of(self, action: Callable[[], Any]) -> str:
        """Run an action that has to fail, and return the whole text of its error, tracebacks of workers included."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(Exception) as raised:  # noqa: PT011 - which error it is, other tests say
                action()
        text = "".join(traceback.format_exception(raised.value))
        self.show(text, raised.value, *(one.message for one in caught))
        return text

    def leaked(self) -> list[str]:
        """Return the secrets that were told, each with what stood before it."""
        records = [record for record in self._caplog.records if record.name.startswith("torch_dataloader_utils")]
        everything = "\n".join([*self._texts, *(record.getMessage() for record in records)])
        return re.findall(rf"(?s).{{0,60}}(?:{'|'.join(map(re.escape, SECRETS))})", everything)


@pytest.fixture
def single_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers send single batches: with many in each message they would have read all of so small files by then."""
    monkeypatch.setattr(message_size, "MAX_BATCHES", 1)


@pytest.fixture
def one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other attempt follows one that failed: the pause before it would be longer than the time for all."""
    monkeypatch.setattr(attempts, "FIRST_PAUSE_SEC", 1000.0)
    monkeypatch.setattr(attempts, "LONGEST_PAUSE_SEC", 1000.0)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    return Told(caplog)


@pytest.mark.usefixtures("single_batches")
@pytest.mark.parametrize("workers", WORKERS[:2])
def test_no_secret_of_s3_is_in_states_reprs_errors_logs_or_warnings(s3, told, workers):
    bucket = s3.new_bucket()
    for number in range(4):
        put(s3, bucket, f"d/{number}.parquet", plain_parquet(100 * number))
    options = {**s3.storage_options(), "token": SESSION_TOKEN}
    loader, dataset = open_loader(f"s3://{bucket}/d", storage_options=options, read_ahead_bytes=1000, **workers)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    told.show(
        state, dataset, loader, batches, dataset._opened_files, dataset._opened_files.storage, dataset.get_metrics()
    )

    put(s3, bucket, "d/3.parquet", plain_parquet(500))
    told.error_of(lambda: open_loader(f"s3://{bucket}/d", storage_options=options)[0].load_state_dict(state))
    text = told.error_of(lambda: list(batches))
    assert "3.parquet" in text
    assert ("in DataLoader worker process" in text) == bool(workers["num_workers"])
    told.error_of(lambda: open_loader(f"s3://{bucket}/nothing", storage_options=options))
    assert told.leaked() == []


@pytest.mark.usefixtures("one_attempt")
def test_no_secret_is_in_the_error_of_a_refused_login_or_a_dead_endpoint(s3, bucket, told):
    s3.check_credentials(True)
    try:
        told.error_of(lambda: open_loader(f"s3://{bucket}/data", storage_options=s3.storage_options()))
    finally:
        s3.check_credentials(False)
    options = s3.storage_options()
    options["client_kwargs"]["endpoint_url"] = f"http://trainer:{PASSWORD}@127.0.0.1:9"
    path = f"s3://{bucket}/data"
    told.error_of(lambda: open_loader(path, storage_options=options, storage_timeout=TIMEOUT_SEC))
    assert told.leaked() == []


@pytest.mark.parametrize("wrong", [{"kee": ACCESS_KEY}, {"client_kwargs": {"aws_secret": SECRET_KEY}}])
def test_no_secret_is_in_the_error_of_a_misspelled_storage_option(s3, bucket, told, wrong):
    told.error_of(lambda: open_loader(f"s3://{bucket}/data", storage_options={**s3.storage_options(), **wrong}))
    assert told.leaked() == []


class Talkative(MemoryFileSystem):
    """A storage that puts its options into its errors, as connection strings of some clouds are."""

    protocol = "talkative"
    broken: ClassVar[bool] = False

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return super()._strip_protocol(path.removeprefix("talkative:"))

    def info(self, path: str, **options: Any) -> Any:
        return self._unless_broken(super().info, path, **options)

    def cat_file(self, path: str, **options: Any) -> Any:
        return self._unless_broken(super().cat_file, path, **options)

    def open(self, path: str, *args: Any, **options: Any) -> Any:
        return self._unless_broken(super().open, path, *args, **options)

    def _unless_broken(self, action: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self.broken:
            raise ConnectionError(f"no connection with {self.storage_options}")
        return action(*args, **options)


@pytest.fixture
def talkative(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a directory on such a storage."""
    fsspec.register_implementation("talkative", Talkative, clobber=True)
    MemoryFileSystem().pipe_file("/talkative/one.parquet", plain_parquet(0))
    monkeypatch.setattr(Talkative, "broken", False)
    yield "talkative://talkative"
    MemoryFileSystem().rm("/talkative", recursive=True)


@pytest.mark.parametrize(
    "options",
    [
        {"connection_string": f"AccountName=x;AccountKey={SECRET_KEY}"},
        {"headers": {"Authorization": f"Bearer {SESSION_TOKEN}"}},
        {"auth": ("trainer", PASSWORD)},
        {"pat": "pat9"},
        {"passphrase": PASSWORD.encode()},
        {"pkey": SECRET_KEY, "signature": SESSION_TOKEN},
        {"client_kwargs": {"headers": {"X-Api-Key": PASSWORD[:5]}}},
        {"something_unheard_of": [{"deep": SECRET_KEY}]},
        {"endpoint_url": f"http://trainer:{PASSWORD}@127.0.0.1:9"},
    ],
    ids=[
        "a connection string",
        "a header",
        "a pair",
        "a short one",
        "bytes",
        "a key and a signature",
        "a short one in depth",
        "in a list in depth",
        "in a url",
    ],
)
@pytest.mark.usefixtures("one_attempt")
def test_no_secret_is_in_an_error_whatever_its_option_is_called(talkative, told, monkeypatch, options):
    monkeypatch.setattr(Talkative, "broken", True)
    text = told.error_of(lambda: open_loader(talkative, storage_options=options, storage_timeout=TIMEOUT_SEC))
    assert "no connection with" in text
    assert next(iter(options)) in text
    assert "pat9" not in text
    assert told.leaked() == []


@pytest.mark.parametrize(
    "url",
    [
        f"s3://{ACCESS_KEY}:{SECRET_KEY}@bucket/data",
        f"s3://trainer:{PASSWORD}@bucket/data",
        f"s3://trainer:a b{PASSWORD}@bucket/data x.parquet",
        f"http://127.0.0.1:9/a b.parquet?token={SESSION_TOKEN}",
        f"memory://nowhere/data?token={SESSION_TOKEN}",
        f"simplecache::memory://nowhere/a b?sig={SESSION_TOKEN}&other={PASSWORD}",
        f"talkative://trainer:{PASSWORD}@nowhere?sig={SESSION_TOKEN}",
    ],
    ids=["keys", "a password", "a space", "a query", "a query in memory", "a cached query", "both"],
)
@pytest.mark.usefixtures("one_attempt")
def test_no_secret_of_a_url_is_in_an_error(s3, talkative, told, url):
    options = s3.storage_options() if url.startswith("s3") else {}
    told.error_of(lambda: open_loader(url, storage_options=options, storage_timeout=TIMEOUT_SEC))
    told.error_of(lambda: open_loader([url, Path.cwd()], storage_options=options, storage_timeout=TIMEOUT_SEC))
    assert told.leaked() == []


def test_no_query_of_a_url_in_memory_is_in_a_state(told):
    filesystem = MemoryFileSystem()
    filesystem.pipe_file(f"/queried?token={SESSION_TOKEN}/one.parquet", plain_parquet(0))
    try:
        _, dataset = open_loader(f"memory://queried?token={SESSION_TOKEN}")
        told.show(dataset.state_dict(), dataset)
        assert dataset.state_dict()["plan"]["root"] == "memory:///queried?token=***"
    finally:
        filesystem.rm_file(f"/queried?token={SESSION_TOKEN}/one.parquet")
    assert told.leaked() == []


@pytest.mark.parametrize("workers", WORKERS[:2])
@pytest.mark.usefixtures("one_attempt")
def test_no_secret_is_in_an_error_though_the_storage_puts_it_there(talkative, told, monkeypatch, workers):
    options = {"account_key": SECRET_KEY, "deep": {"credentials": {"sas_token": SESSION_TOKEN}}, "password": PASSWORD}
    loader, _ = open_loader(talkative, storage_options=options, storage_timeout=TIMEOUT_SEC, **workers)
    monkeypatch.setattr(Talkative, "broken", True)
    texts = [
        told.error_of(lambda: open_loader(talkative, storage_options=options, storage_timeout=TIMEOUT_SEC)),
        told.error_of(lambda: list(loader)),
    ]
    assert all("no connection with" in text and "account_key" in text for text in texts)
    assert told.leaked() == []


class _FileServer(http.server.BaseHTTPRequestHandler):
    """Serves files to those who know the token, whole or by range."""

    directory: ClassVar[Path]
    broken: ClassVar[bool] = False
    fails: ClassVar[bool] = False
    asked: ClassVar[Counter[tuple[str, str, str | None]]] = Counter()

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: Any) -> None:
        """Keep quiet."""

    def _answer(self, *, body: bool) -> None:
        path, _, query = self.path.partition("?")
        request = self.command, path, self.headers.get("Range")
        self.asked[request] += 1
        if self.fails and self.asked[request] == 1:
            self.send_error(503)
            return
        file = self.directory / path.rpartition("/")[2]
        if self.broken or f"token={QUERY_TOKEN}" not in query.split("&") or not file.is_file():
            self.send_error(404 if not file.is_file() else 403)
            return
        data, wanted = file.read_bytes(), re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(wanted[1]), int(wanted[2]) + 1) if wanted else (0, len(data))
        self.send_response(206 if wanted else 200)
        self.send_header("Accept-Ranges", "bytes")
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{min(stop, len(data)) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data[start:stop])))
        self.end_headers()
        if body:
            self.wfile.write(data[start:stop])


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, type[_FileServer]]]:
    """A web server with `SMALL_FILES` that wants a password and a token; what comes before the path in its URLs."""
    write_dataset(tmp_path, SMALL_FILES)
    handler = type("Handler", (_FileServer,), {"directory": tmp_path, "asked": Counter()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://trainer:{PASSWORD}@127.0.0.1:{server.server_port}/data", handler
    server.shutdown()
    server.server_close()
    thread.join()


def signed(name: str) -> str:
    return f"{name}?token={QUERY_TOKEN}"


@pytest.mark.parametrize("workers", WORKERS[:2])
def test_files_behind_signed_urls_are_delivered_each_row_once_and_resumed(web, workers):
    base, _ = web
    urls = [f"{base}/{signed(f'part-{number:03d}.parquet')}" for number in range(3)]
    loader, _ = open_loader(urls, **workers)
    whole = batches_of(loader)
    assert sorted(itertools.chain(*whole)) == list(range(71))
    batches = iter(loader)
    assert [next(batches)["row"].tolist() for _ in range(2)] == whole[:2]
    resumed, _ = open_loader(urls, **workers)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert batches_of(resumed) == whole[2:]


@pytest.mark.usefixtures("single_batches")
@pytest.mark.parametrize("workers", WORKERS[:2])
def test_no_token_and_no_password_of_a_url_is_in_states_reprs_errors_logs_or_warnings(web, told, workers):
    base, handler = web
    urls = [f"{base}/{signed(f'part-{number:03d}.parquet')}" for number in range(3)]
    loader, dataset = open_loader(urls, batch_size=4, read_ahead_bytes=1, **workers)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    told.show(state, json.dumps(state), dataset, loader, dataset._opened_files, dataset._opened_files.storage)
    told.error_of(lambda: open_loader(f"{base}/{signed('nothing.parquet')}"))
    told.error_of(lambda: open_loader(f"{base}/part-000.parquet?token={QUERY_TOKEN}-of-yesterday"))
    told.error_of(lambda: open_loader([urls[0], urls[0]]))
    told.error_of(lambda: open_loader(urls[0])[0].load_state_dict(state))
    handler.broken = True
    text = told.error_of(lambda: list(batches))
    assert "part-" in text
    assert told.leaked() == []


REFUSED = r"^(?=.*part-000\.parquet)(?=.*403).*the signed URL give no access, or no longer do$"


def test_a_signed_url_that_expires_is_refused_and_not_missing(web):
    base, handler = web
    urls = [f"{base}/{signed(f'part-{number:03d}.parquet')}" for number in range(3)]
    loader, _ = open_loader(urls)
    handler.broken = True
    with pytest.raises(PermissionError, match=REFUSED):
        list(loader)
    with pytest.raises(PermissionError, match=REFUSED):
        open_loader(urls)
    with pytest.raises(FileNotFoundError, match=r"nothing\.parquet"):
        open_loader(f"{base}/{signed('nothing.parquet')}")


def test_a_web_server_that_fails_once_for_each_request_is_asked_again(web):
    base, handler = web
    handler.fails = True
    urls = [f"{base}/{signed(f'part-{number:03d}.parquet')}" for number in range(3)]
    loader, _ = open_loader(urls)
    assert sorted(all_rows_of(loader)) == list(range(71))


def test_a_state_is_resumed_under_a_newly_signed_url(web):
    base, _ = web
    old, new = (f"{base}/part-000.parquet?token={QUERY_TOKEN}{salt}" for salt in ("", "&signed=again"))
    assert old != new
    loader, _ = open_loader(old)
    whole = batches_of(loader)
    next(iter(loader))
    state = loader.state_dict()
    today, _ = open_loader(new)
    today.load_state_dict(state)
    assert batches_of(today) == whole[1:]


def test_the_state_that_another_process_has_put_below_a_root_in_a_bucket_is_found(s3, bucket, tmp_path):
    loader, _ = open_loader(f"s3://{bucket}/data", storage_options=s3.storage_options())
    file = Path(save_rank_state(loader, tmp_path))
    url, options = f"dir://root/states::s3://{bucket}", {"s3": s3.storage_options()}
    put(s3, bucket, "root/states/other", b"")
    with pytest.raises(FileNotFoundError, match=file.name):
        load_rank_state(loader, url, storage_options=options)
    put(s3, bucket, f"root/states/{file.name}", file.read_bytes())
    load_rank_state(loader, url, storage_options=options)


def test_states_of_ranks_are_kept_in_a_bucket(s3, bucket):
    options = s3.storage_options()
    loaders = [
        open_loader(f"s3://{bucket}/data", storage_options=options, num_ranks=2, rank=rank)[0] for rank in range(2)
    ]
    rows = [row for loader in loaders for row in rows_of(next(iter(loader)))]
    directory = f"s3://{bucket}/checkpoints/step-1"
    written = [save_rank_state(loader, directory, storage_options=options) for loader in loaders]
    assert written == [f"{directory}/loader-{rank:05d}-of-00002.json" for rank in range(2)]
    fresh, _ = open_loader(f"s3://{bucket}/data", storage_options=options, num_ranks=1, rank=0)
    load_rank_state(fresh, directory, strict=False, storage_options=options)
    assert sorted(rows + all_rows_of(fresh)) == list(range(71))
    with pytest.raises(OSError, match=rf"s3://{bucket}-gone/step-1/loader-00000-of-00002\.json"):
        save_rank_state(loaders[0], f"s3://{bucket}-gone/step-1", storage_options=options)
