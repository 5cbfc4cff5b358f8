"""What readers learn: kept from epoch to epoch in the read cache, and never in the opened files."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import all_rows_of, open_loader, write_dataset

from torch_dataloader_utils.formats import read_cache
from torch_dataloader_utils.formats.parquet import codec
from torch_dataloader_utils.formats.parquet.footer import FooterReader, parse_footer
from torch_dataloader_utils.formats.read_cache import FooterStore, ReadCache, SizeEstimates


def test_a_footer_is_known_if_it_was_read_when_files_were_opened_or_added_since():
    opened = {"a": b"1"}
    store = FooterStore(opened)
    assert "a" in store
    assert "b" not in store
    with pytest.raises(KeyError):
        store["b"]
    store.add({"b": b"2", "c": b"3"})
    assert [store[path] for path in "abc"] == [b"1", b"2", b"3"]
    assert opened == {"a": b"1"}


def test_the_first_parsed_footers_are_kept_as_far_as_there_is_room(monkeypatch):
    monkeypatch.setattr(read_cache, "PARSED_BYTES", 10)
    store = FooterStore({})
    store.parsed.keep("a", "a parsed", 6)
    store.parsed.keep("b", "b parsed", 6)
    store.parsed.keep("c", "c parsed", 4)
    assert [store.parsed.get(path) for path in "abc"] == ["a parsed", None, "c parsed"]
    copy = pickle.loads(pickle.dumps(store))
    assert copy.parsed.get("a") is None
    copy.parsed.keep("b", "b parsed", 10)
    assert copy.parsed.get("b") == "b parsed"


@pytest.mark.parametrize(("room", "parsed"), [(1 << 20, 0), (0, 4)])
def test_no_epoch_parses_a_footer_that_was_kept_when_the_files_were_opened(tmp_path, monkeypatch, room, parsed):
    monkeypatch.setattr(read_cache, "PARSED_BYTES", room)
    write_dataset(tmp_path, [(8, 4)] * 2)
    loader, _ = open_loader(tmp_path, batch_size=4)
    parsed_now: list[bytes] = []
    monkeypatch.setattr(codec, "parse_footer", lambda content: parsed_now.append(content) or parse_footer(content))
    assert sorted(all_rows_of(loader)) == sorted(all_rows_of(loader))
    assert len(parsed_now) == parsed


def test_forked_workers_have_the_footers_that_were_parsed_when_the_files_were_opened(tmp_path, monkeypatch):
    write_dataset(tmp_path, [(8, 4)] * 2)
    loader, _ = open_loader(tmp_path, batch_size=4, num_workers=2)
    monkeypatch.delattr(codec, "parse_footer")  # a worker that parses raises
    assert len(all_rows_of(loader)) == 16


def test_an_estimate_is_the_most_that_a_row_of_a_column_took():
    sizes = SizeEstimates()
    assert sizes.knows([])
    assert not sizes.knows(["text"])
    assert sizes.expected("text") == 0
    sizes.learn(pa.table({"text": ["x" * 100] * 10, "number": range(10)}))
    sizes.learn(pa.table({"text": ["x"] * 10, "number": range(10)}))
    sizes.learn(pa.table({"text": pa.array([], pa.string()), "other": pa.array([], pa.string())}))
    assert sizes.knows(["text"])
    assert not sizes.knows(["text", "other"])
    assert 100 <= sizes.expected("text") <= 110
    assert not sizes.knows(["number"])  # of a fixed width: nothing to learn


def test_bytes_of_a_file_are_compared_with_those_of_row_groups_like_it():
    sizes = SizeEstimates()
    assert not sizes.are_as_before("text", 10, 1)
    sizes.learn(pa.table({"text": ["x" * 100] * 10}))
    sizes.learn_stored("text", 1_000, 1_040)
    assert sizes.are_as_before("text", 10, 1_000)
    assert sizes.are_as_before("text", 10, 2_000)
    assert not sizes.are_as_before("text", 10, 2_100)  # larger values than before
    assert not sizes.are_as_before("text", 100, 2_100)  # as many bytes were not seen
    assert not sizes.are_as_before("text", 10, 100)  # no dictionary of so few values was seen
    sizes.learn_stored("text", 100, 1_040)
    assert sizes.are_as_before("text", 10, 100)
    assert not sizes.are_as_before("text", 10, 300)


def test_threads_learn_together():
    sizes = SizeEstimates()
    tables = [pa.table({f"text{number}": ["x" * number] * 10}) for number in range(1, 30)]
    threads = [threading.Thread(target=lambda: [sizes.learn(table) for table in tables]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(sizes.expected(f"text{number}") >= number for number in range(1, 30))


def test_a_copy_for_a_process_that_gets_footers_with_assignments_knows_sizes_and_no_footer():
    cache = ReadCache.of_opened({"a": b"footer of a"})
    cache.footers.add({"b": b"footer of b"})
    cache.sizes.learn(pa.table({"text": ["x"] * 10}))
    sent = pickle.dumps(cache.without_footers())
    assert b"footer" not in sent.replace(b"footers", b"").replace(b"FooterStore", b"")
    copy = pickle.loads(sent)
    assert copy.sizes.knows(["text"])
    assert "a" not in copy.footers
    assert cache.footers["a"] == b"footer of a"


@pytest.fixture
def described(tmp_path) -> Path:
    """Two files that a `_metadata` file describes."""
    collected: list[pq.FileMetaData] = []
    table = pa.table({"row": range(100), "name": [f"name {row}" for row in range(100)]})
    for number in range(2):
        with (tmp_path / f"{number}.parquet").open("wb") as file:
            pq.write_table(table, file, row_group_size=10, metadata_collector=collected)
        collected[-1].set_file_path(f"{number}.parquet")
    pq.write_metadata(table.schema, tmp_path / "_metadata", collected)
    return tmp_path


@pytest.mark.parametrize("limit", [500, "128MiB"])
def test_reading_changes_nothing_in_the_opened_files_and_no_footer_is_read_twice(described, monkeypatch, limit):
    read: list[str] = []
    content = FooterReader.content

    def record(reader, file):
        read.append(file.path)
        return content(reader, file)

    monkeypatch.setattr(FooterReader, "content", record)
    loader, dataset = open_loader(described, read_ahead_bytes=limit, row_id_column=None)
    assert read == ["_metadata"]
    loader.state_dict()  # what states say of the files is computed once
    files = pickle.dumps(dataset._opened_files)
    for _ in range(2):
        assert sorted(all_rows_of(loader)) == sorted([*range(100)] * 2)
    assert pickle.dumps(dataset._opened_files) == files
    assert read == ["_metadata", "0.parquet", "1.parquet"]
    assert dataset._stream.read_cache.sizes.knows(["name"])


def test_a_value_of_a_dictionary_counts_for_no_more_than_one_row():
    values = pa.array([f"{number:0100}" for number in range(50)])
    sizes = SizeEstimates()
    sizes.learn(pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * 10, pa.int32()), values)}))
    assert 100 <= sizes.expected("text") <= 110  # the other values are those of rows that follow
    sizes = SizeEstimates()
    sizes.learn(pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * 5_000, pa.int32()), values)}))
    assert 4 < sizes.expected("text") < 6


@pytest.mark.parametrize(("first", "is_encoded"), [("few", True), ("many", False)])
def test_the_first_file_decides_whether_a_column_is_read_as_a_dictionary(tmp_path, monkeypatch, first, is_encoded):
    monkeypatch.setattr("torch_dataloader_utils.formats.parquet.dictionaries.LEAST_ROWS", 1)
    for number, kind in enumerate([first, "many", "few"]):
        texts = [f"a text {row % 2 if kind == 'few' else row}" for row in range(100)]
        pq.write_table(pa.table({"text": texts, "other": texts}), tmp_path / f"{number}.parquet", row_group_size=50)
    loader, _ = open_loader(tmp_path, num_workers=0)
    types: set[pa.DataType] = set()
    learn = SizeEstimates.learn

    def noted(sizes: SizeEstimates, table: pa.Table) -> None:
        types.add(table.schema.field("text").type)
        learn(sizes, table)

    monkeypatch.setattr(SizeEstimates, "learn", noted)
    for _ in range(2):
        list(loader)
    assert set(map(pa.types.is_dictionary, types)) == {is_encoded}
