"""What SECURITY.md says that hostile data can and cannot do."""

from __future__ import annotations

import json
import pickle
import shutil
import socket
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from deltas import commit
from icebergs import append_rows, config_of, new_catalog
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField
from support import all_rows_of, batches_of, edited, open_loader, write_dataset

from torch_dataloader_utils import (
    CheckpointMismatchError,
    DeltaDataset,
    IcebergDataset,
    LostRowsWarning,
    MetadataFileWarning,
    UnreadableFileError,
)
from torch_dataloader_utils.storage.filesystem import Storage

ESCAPES = "a\x1b[31m\rroot# \u202e.parquet"
SECRET = "hunter2hunter2"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def listening() -> Any:
    """A port on which nobody may call."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def nobody_called(server: socket.socket) -> bool:
    try:
        server.accept()
    except BlockingIOError:
        return True
    return False


# States ------------------------------------------------------------------------------------------------------------


def opened_files(data: Path, monkeypatch: pytest.MonkeyPatch, load: Any) -> list[str]:
    """Return what is opened on the storage while a state is loaded and the rest is delivered."""
    opened: list[str] = []
    for name in ("open_local", "read", "open"):
        if hasattr(Storage, name):
            call = getattr(Storage, name)

            def noted(self: Any, file: Any, *args: Any, call: Any = call, **options: Any) -> Any:
                opened.append(str(getattr(file, "location", file)))
                return call(self, file, *args, **options)

            monkeypatch.setattr(Storage, name, noted)
    load()
    return opened


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_names_no_file_that_is_read(data, tmp_path, monkeypatch, strict):
    loader, _ = open_loader(data)
    next(iter(loader))
    secret = tmp_path / "secret.parquet"
    shutil.copy(data / "part-000.parquet", secret)
    state = json.loads(json.dumps(loader.state_dict()))
    text = json.dumps(edited(state)).replace("part-000.parquet", "../secret.parquet")

    def load() -> None:
        fresh, _ = open_loader(data)
        with pytest.raises(CheckpointMismatchError):
            fresh.load_state_dict(json.loads(text), strict=strict)
        if not strict:
            with pytest.warns(LostRowsWarning, match=r"114 rows .*: \.\./secret\.parquet"):
                fresh.load_state_dict(json.loads(text), strict=False, on_changed_files="continue")
        batches_of(fresh)

    assert not [location for location in opened_files(data, monkeypatch, load) if "secret" in location]


# `_metadata` -------------------------------------------------------------------------------------------------------


def test_a_metadata_file_names_no_file_that_is_read(data, tmp_path):
    table = pq.read_table(data / "part-000.parquet")
    pq.write_table(table, tmp_path / "elsewhere.parquet")
    footers = []
    for path in sorted(data.iterdir()):
        footer = pq.read_metadata(path)
        footer.set_file_path("../elsewhere.parquet" if path.name == "part-000.parquet" else path.name)
        footers.append(footer)
    first, *others = footers
    for footer in others:
        first.append_row_groups(footer)
    first.write_metadata_file(data / "_metadata")
    with pytest.warns(MetadataFileWarning, match=r"describes missing \.\./elsewhere\.parquet"):
        loader, _ = open_loader(data)
    assert sorted(all_rows_of(loader)) == list(range(443))


# File names --------------------------------------------------------------------------------------------------------


def test_names_of_files_control_no_terminal(data):
    """Not in errors of files that are damaged, are gone, or changed, nor in warnings."""
    shutil.copy(data / "part-000.parquet", data / ESCAPES)
    loader, _ = open_loader(data)
    state = loader.state_dict()
    messages = []
    (data / ESCAPES).write_bytes(b"PAR1 damaged PAR1")
    with pytest.raises(UnreadableFileError) as raised:
        open_loader(data)
    messages.append(str(raised.value))
    with pytest.raises(UnreadableFileError) as raised:
        batches_of(loader)
    messages.append(str(raised.value))
    shutil.copy(data / "part-001.parquet", data / ESCAPES)
    with pytest.raises(CheckpointMismatchError) as mismatched:
        open_loader(data)[0].load_state_dict(state)
    messages.append(str(mismatched.value))
    (data / ESCAPES).unlink()
    with pytest.raises(CheckpointMismatchError) as mismatched:
        open_loader(data)[0].load_state_dict(state)
    messages.append(str(mismatched.value))
    pq.read_metadata(data / "part-000.parquet").write_metadata_file(data / "_metadata")
    shutil.copy(data / "part-000.parquet", data / ESCAPES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        open_loader(data)
    messages += [str(warning.message) for warning in caught]
    for message in messages:
        assert "root#" in message
        assert not set(message) & {"\x1b", "\r", "\u202e"}, message
        assert "\\x1b[31m" in message


def test_an_error_with_a_name_is_the_same_after_pickling():
    error = UnreadableFileError(f"{ESCAPES} is damaged")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# Tables ------------------------------------------------------------------------------------------------------------

ELSEWHERE = ("ftp://127.0.0.1:{port}/x.parquet", "sftp://127.0.0.1:{port}/x.parquet", "s3://other/x.parquet")


def write_log(table: Path, path: str) -> None:
    """Write a version of a Delta table that has a file at any path."""
    write_deltalake(table, pa.table({"x": [1, 2]}))
    commit(
        table,
        1,
        [{"add": {"path": path, "size": 100, "partitionValues": {}, "modificationTime": 0, "dataChange": True}}],
    )


@pytest.mark.parametrize("url", ELSEWHERE)
def test_the_log_of_a_delta_table_leads_to_no_other_storage(tmp_path, listening, url):
    write_log(tmp_path / "table", url.format(port=listening.getsockname()[1]))
    with pytest.raises((ValueError, ImportError), match=r"are on two storages|paramiko") as raised:
        DeltaDataset.create_dataloader(tmp_path / "table", num_workers=0, storage_options={"password": SECRET})
    assert nobody_called(listening)
    assert SECRET not in str(raised.value)


def test_a_list_of_urls_makes_no_connection_to_another_storage(data, listening):
    with pytest.raises(ValueError, match="are on two storages"):
        open_loader([str(data), f"ftp://127.0.0.1:{listening.getsockname()[1]}/x.parquet"])
    assert nobody_called(listening)


def test_the_files_of_an_iceberg_table_are_on_its_own_storage(tmp_path, listening, monkeypatch):
    catalog = new_catalog(tmp_path)
    table = catalog.create_table("db.rows", Schema(NestedField(1, "id", LongType())))
    append_rows(table, pa.table({"id": [1, 2, 3]}))
    port = listening.getsockname()[1]
    load = IcebergDataset.create_dataloader
    loader, _ = load("db.rows", catalog_config=config_of(tmp_path), num_workers=0)
    assert len(list(loader)) == 1
    found = DataFile.file_path.fget
    monkeypatch.setattr(DataFile, "file_path", property(lambda self: f"ftp://127.0.0.1:{port}/{found(self)}"))
    with pytest.raises(ValueError, match="are on two storages"):
        load("db.rows", catalog_config=config_of(tmp_path), num_workers=0)
    assert nobody_called(listening)


@pytest.mark.parametrize("options", ["storage_options", "delta_options"])
def test_the_errors_of_a_table_hold_no_secret_nor_an_error_that_does(tmp_path, options):
    (tmp_path / "table" / "_delta_log").mkdir(parents=True)
    (tmp_path / "table" / "_delta_log" / f"{0:020d}.json").write_text(f'{{"damaged {SECRET}')
    for name in ("table", "nowhere"):
        with pytest.raises(OSError, match=name) as raised:
            DeltaDataset.create_dataloader(tmp_path / name, num_workers=0, **{options: {"password": SECRET}})
        assert raised.value.__context__ is raised.value.__cause__ is None
        assert SECRET not in str(raised.value)


# Footers -----------------------------------------------------------------------------------------------------------

CLAIMED = 134_217_727


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "shuffle_buffer_size": 10**5}], ids=["in order", "shuffled"])
def test_a_footer_that_claims_many_rows_takes_no_memory_for_them(tmp_path, options):
    path = tmp_path / "data" / "a.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"x": pa.array(np.zeros(2**20, np.int8))}), path, row_group_size=2**20)
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    honest, claimed = (b"\x80\x80\x80\x01", b"\xfe\xff\xff\x7f")  # as zigzag varints
    footer = content[start:]
    assert footer.count(honest) >= 2
    path.write_bytes(content[:start] + footer.replace(honest, claimed))
    assert pq.read_metadata(path).num_rows == CLAIMED
    tracemalloc.start()
    try:
        loader, _ = open_loader(path.parent, batch_size=2**16, **options)
        with pytest.raises((UnreadableFileError, OSError), match=r"a\.parquet"):
            for _ in loader:
                pass
        assert tracemalloc.get_traced_memory()[1] < CLAIMED // 2
    finally:
        tracemalloc.stop()
