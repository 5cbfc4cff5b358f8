"""A manifest that one rank makes and all others are handed: nothing is listed, and no footer is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from logged import LoggedFileSystem
from support import all_rows_of, open_loader, write_dataset

from torch_dataloader_utils import UnreadableFileError
from torch_dataloader_utils.dataset.manifest_file import (
    DIGEST_SIZE,
    KEY,
    MAGIC,
    METADATA_FILE_KEY,
    SCHEMA,
    dump_manifest,
    sealed,
)
from torch_dataloader_utils.formats.base import KnownFooters
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.stored_file import StoredFile


@pytest.fixture
def path(tmp_path):
    write_dataset(tmp_path / "data", files=((100, 30), (50, 50), (70, 20)))
    return tmp_path / "data"


def test_with_a_manifest_nothing_is_listed_and_no_footer_is_read(path, tmp_path):
    fsspec.register_implementation("logged", LoggedFileSystem, clobber=True)
    options = {"storage_options": {"log": str(tmp_path / "log")}}
    loader, dataset = open_loader(f"logged://{path}", **options)
    manifest = dataset.dump_manifest()
    whole = all_rows_of(loader)
    (tmp_path / "log").unlink()

    copy, _ = open_loader(f"logged://{path}", manifest=manifest, **options)
    assert not (tmp_path / "log").exists()
    assert all_rows_of(copy) == whole


@pytest.mark.parametrize("options", [{}, {"filters": pc.field("value") >= 0}, {"columns": ["value"]}])
def test_a_manifest_serves_other_options_and_their_states_fit(path, options):
    _, first = open_loader(path)
    plain, _ = open_loader(path, batch_size=10, **options)
    known, _ = open_loader(path, batch_size=10, manifest=first.dump_manifest(), **options)
    batches = iter(plain)
    begun = [row for _ in range(3) for row in next(batches)["row"].tolist()]
    known.load_state_dict(plain.state_dict())
    assert begun + all_rows_of(known) == all_rows_of(open_loader(path, batch_size=10, **options)[0])


@pytest.mark.parametrize("named", ["v1", "v1/", "v", "v1/part-000.parquet"])
def test_a_manifest_of_another_directory_is_refused_however_alike_their_names(tmp_path, named):
    write_dataset(tmp_path / "v10")
    write_dataset(tmp_path / "v1")
    manifest = open_loader(tmp_path / "v10")[1].dump_manifest()
    with pytest.raises(ValueError, match="which is not at"):
        open_loader(f"{tmp_path}/{named}", manifest=manifest)
    assert all_rows_of(open_loader(f"{tmp_path}/v10/", manifest=manifest)[0])


def test_a_manifest_holds_no_urls_with_a_user_in_them():
    file = StoredFile("a.parquet", "http://user:hunter2@host/a.parquet", 100, None, None)
    storage, _ = Storage.for_urls([file.location])
    with pytest.raises(ValueError, match="user name"):
        dump_manifest("http://host", [file], KnownFooters({"a.parquet": b""}), storage, format_name="parquet")


@pytest.mark.parametrize("opened_as", ["orc", "csv", "jsonl"])
def test_a_manifest_of_another_format_is_refused_by_name(path, opened_as):
    manifest = open_loader(path)[1].dump_manifest()
    with pytest.raises(ValueError, match=r"files with the format 'parquet': pass format='parquet'"):
        open_loader(path, manifest=manifest, format=opened_as, row_id_column=None)


def test_a_manifest_holds_no_paths_with_a_secret_in_them():
    url = "memory://x?token=hunter2hunter2"
    with fsspec.open(f"{url}/a.parquet", "wb") as file:
        pq.write_table(pa.table({"x": [1]}), file)
    _, dataset = open_loader(url)
    with pytest.raises(ValueError, match="may be secret") as raised:
        dataset.dump_manifest()
    assert "hunter2" not in str(raised.value)


def test_globs_lists_and_single_files_have_manifests_too(path):
    for named in (
        str(path / "*.parquet"),
        [path / "part-000.parquet", path / "part-002.parquet"],
        path / "part-001.parquet",
    ):
        loader, dataset = open_loader(named)
        known, _ = open_loader(named, manifest=dataset.dump_manifest())
        assert all_rows_of(known) == all_rows_of(loader)


def test_on_s3_it_holds_no_credentials_and_is_all_that_is_asked_before_the_first_row(path, s3):
    bucket = s3.new_bucket(path)
    loader, dataset = open_loader(f"s3://{bucket}", storage_options=s3.storage_options())
    manifest = dataset.dump_manifest()
    for secret in s3.storage_options().values():
        assert str(secret).encode() not in manifest
    known, _ = open_loader(f"s3://{bucket}", storage_options=s3.storage_options(), manifest=manifest)
    assert all_rows_of(known) == all_rows_of(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_changed_since_is_an_error_that_names_it(path, workers):
    _, dataset = open_loader(path)
    manifest = dataset.dump_manifest()
    table = pq.read_table(path / "part-001.parquet")
    pq.write_table(table.slice(0, 40), path / "part-001.parquet")
    known, _ = open_loader(path, manifest=manifest, num_workers=workers)
    with pytest.raises(UnreadableFileError, match=r"part-001\.parquet"):
        list(known)


def table_in(manifest: bytes) -> pa.Table:
    """Return the table that a manifest holds after its digest."""
    with pa.ipc.open_stream(manifest[len(MAGIC) + DIGEST_SIZE :]) as stream:
        return stream.read_all()


def edited(manifest: bytes, edit: Callable[[dict[str, Any], list[dict[str, Any]]], Any]) -> bytes:
    """Return a manifest with other contents: what it says about itself, and its rows."""
    table = table_in(manifest)
    about, rows = json.loads(table.schema.metadata[KEY]), table.to_pylist()
    edit(about, rows)
    schema = SCHEMA.with_metadata({KEY: json.dumps(about).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_table(pa.Table.from_pylist(rows, schema=schema))
    return sealed(sink.getvalue().to_pybytes())


def test_a_manifest_leads_nowhere_else(path, tmp_path):
    write_dataset(tmp_path / "elsewhere")
    elsewhere = f"{path}/../elsewhere/part-000.parquet"
    manifest = edited(open_loader(path)[1].dump_manifest(), lambda _, rows: rows[0].update(location=elsewhere))
    for given in (path, f"{path}/*"):
        with pytest.raises(ValueError, match=r"elsewhere/part-000\.parquet, which is not at"):
            open_loader(given, manifest=manifest)


@pytest.mark.parametrize("given", ["d*", "*/part*.parquet", "data/**/part*", "data/part-00[12].parquet"])
def test_a_manifest_of_a_glob_holds_only_files_that_it_matches(path, tmp_path, given):
    (tmp_path / "elsewhere").mkdir()
    (path / "part-000.parquet").rename(tmp_path / "elsewhere" / "other.parquet")
    _, dataset = open_loader(tmp_path / given)
    manifest = dataset.dump_manifest()
    assert len(all_rows_of(open_loader(tmp_path / given, manifest=manifest)[0])) == 120
    elsewhere = str(tmp_path / "elsewhere" / "other.parquet")
    with pytest.raises(ValueError, match=r"elsewhere/other\.parquet, which is not at"):
        open_loader(tmp_path / given, manifest=edited(manifest, lambda _, rows: rows[0].update(location=elsewhere)))


@pytest.mark.parametrize("given", ["data/../data", "./data", "data//*.parquet", "data/../d*/"])
def test_a_manifest_serves_a_path_however_it_is_written(path, given, monkeypatch):
    monkeypatch.chdir(path.parent)
    loader, dataset = open_loader(given)
    assert all_rows_of(open_loader(given, manifest=dataset.dump_manifest())[0]) == all_rows_of(loader)


@pytest.mark.parametrize("damage", ["junk", "other files"])
def test_a_manifest_of_a_damaged_metadata_file_is_refused(path, damage):
    collected = []
    for file in sorted(path.iterdir()):
        collected.append(pq.read_metadata(file))
        collected[-1].set_file_path(file.name)
    schema = pq.read_schema(path / "part-000.parquet")
    pq.write_metadata(schema, path / "_metadata", collected)
    table = table_in(open_loader(path)[1].dump_manifest())
    pq.write_metadata(schema, path / "_metadata", collected[:2])
    content = b"junk" if damage == "junk" else (path / "_metadata").read_bytes()[4:]
    sink = pa.BufferOutputStream()
    schema = table.schema.with_metadata({**table.schema.metadata, METADATA_FILE_KEY: content})
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_table(table.cast(schema))
    with pytest.raises(UnreadableFileError, match="the manifest's `_metadata`"):
        open_loader(path, manifest=sealed(sink.getvalue().to_pybytes()))


DAMAGE: dict[str, Callable[[dict[str, Any], list[dict[str, Any]]], Any]] = {
    "no root": lambda about, _: about.pop("root"),
    "a root that is no text": lambda about, _: about.update(root=["x"]),
    "no version": lambda about, _: about.pop("version"),
    "no path": lambda _, rows: rows[1].update(path=None),
    "no location": lambda _, rows: rows[1].update(location=None),
    "no size": lambda _, rows: rows[1].update(size=None),
    "a negative size": lambda _, rows: rows[1].update(size=-1),
    "a file twice": lambda _, rows: rows.append(rows[-1]),
    "another order": lambda _, rows: rows.reverse(),
    "no files": lambda _, rows: rows.clear(),
    "no footer": lambda _, rows: rows[1].update(footer=None),
    "a footer of nothing": lambda _, rows: rows[1].update(footer=b""),
    "a damaged footer": lambda _, rows: rows[1].update(footer=rows[1]["footer"][3:]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_manifest_is_refused(path, damage):
    manifest = edited(open_loader(path)[1].dump_manifest(), DAMAGE[damage])
    with pytest.raises((ValueError, UnreadableFileError), match=r"manifest|part-001\.parquet"):
        open_loader(path, manifest=manifest)


@pytest.mark.parametrize("bits", [range(0, 4000, 61), range(4000, 12_000, 177)], ids=["beginning", "rest"])
def test_a_manifest_with_a_flipped_bit_is_refused_or_the_same(path, bits):
    _, dataset = open_loader(path)
    manifest = dataset.dump_manifest()
    for bit in bits:
        content = bytearray(manifest)
        content[bit // 8 % len(content)] ^= 1 << bit % 8
        try:
            _, opened = open_loader(path, manifest=bytes(content))
        except (ValueError, UnreadableFileError, FileNotFoundError):
            continue
        assert opened.state_dict()["plan"]["rows"] == dataset.state_dict()["plan"]["rows"]


def test_a_manifest_of_another_path_is_refused_by_name(path, tmp_path):
    _, dataset = open_loader(path)
    write_dataset(tmp_path / "other")
    with pytest.raises(ValueError, match=r"the manifest holds .*data/part-000\.parquet, which is not at .*other"):
        open_loader(tmp_path / "other", manifest=dataset.dump_manifest())


@pytest.mark.parametrize(
    "content",
    [b"", b"nonsense", pa.py_buffer(b"x").to_pybytes() * 500, "text"],
    ids=["no bytes", "a few bytes", "many bytes", "text"],
)
def test_what_is_no_manifest_is_refused(path, content):
    with pytest.raises(ValueError, match="the manifest is not a result of"):
        open_loader(path, manifest=content)
