"""Small files are read several at a time, as one table, and nothing but the number of steps tells."""

from __future__ import annotations

import os
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from decoded_together import Calls, note_decoded_together
from support import all_rows_of, batches_of, open_loader, rows_of, write_dataset

from torch_dataloader_utils.columns.arrow_memory import memory_pool
from torch_dataloader_utils.errors import ColumnError, UnreadableFileError
from torch_dataloader_utils.reading.permuting import Permuter
from torch_dataloader_utils.reading.row_groups import together as together_rules

NUMBERS = ["value", "score"]
ROWS = 50
"""Of a row group."""
SIZES = [(50, ROWS)] * 9 + [(150, ROWS)] * 3 + [(7, ROWS), (0, ROWS), (120, ROWS)] + [(50, ROWS)] * 25
"""Rows of each file, and of its row groups."""
TOTAL = sum(rows for rows, _ in SIZES)
FIRSTS = list(accumulate((rows for rows, _ in SIZES), initial=0))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("small_files") / "data"
    write_dataset(directory, SIZES)
    return directory


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The row groups that are decoded together, by file, call by call."""
    return note_decoded_together(monkeypatch)


def test_ever_more_of_them_are_read_together_each_once_and_in_order(path, together):
    loader, dataset = open_loader(path, columns=NUMBERS)
    assert all_rows_of(loader) == list(range(TOTAL))
    counts = {sum(len(numbers) for _, numbers in groups) for groups in together}
    assert {2, 4, together_rules.MOST_TOGETHER} <= counts
    assert max(counts) == together_rules.MOST_TOGETHER  # of as many as there are, the budget would have room
    assert max(len(numbers) for groups in together for _, numbers in groups[1:]) > 1  # of one file several, too
    read = [(file, number) for groups in together for file, numbers in groups for number in numbers]
    assert read == sorted(set(read))
    assert dataset.get_metrics()["row_groups_read"] == sum(-(-rows // ROWS) for rows, _ in SIZES)


def test_strings_are_read_together_once_it_is_known_how_large_they_become(path, together):
    loader, _ = open_loader(path, columns=["name"])
    names = [name for batch in loader for name in batch["name"]]
    assert names == [f"row {value}" for value in range(TOTAL)]
    read = {(file, number) for groups in together for file, numbers in groups for number in numbers}
    assert ("part-000.parquet", 0) not in read
    assert max(sum(len(numbers) for _, numbers in groups) for groups in together) == together_rules.MOST_TOGETHER


def test_strings_that_are_larger_than_those_before_are_read_by_themselves(tmp_path, together):
    """Their dictionary has one large value, of which the footer does not tell how many rows have it."""
    texts = ["x" * (3 if file < 10 else 40_000) for file in range(20)]
    for file, text in enumerate(texts):
        pq.write_table(pa.table({"text": [text] * ROWS}), tmp_path / f"{file:02}.parquet")
    loader, _ = open_loader(tmp_path, output_format="arrow")  # for lists they would stay in the dictionary
    read = [text for batch in loader for text in batch["text"].to_pylist()]
    assert read == [text for text in texts for _ in range(ROWS)]
    assert {file for groups in together for file, _ in groups} <= {f"{file:02}.parquet" for file in range(10)}
    assert together


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["x"] * 1_000, "y" * 5_000),
        ([None] * 1_000, "y" * 5_000),
        ([f"{row:0100}" for row in range(1_000)], "y" * 20_000),
    ],
    ids=["after short ones", "after nulls", "after different ones"],
)
def test_a_string_that_all_rows_have_is_read_by_itself_though_it_takes_little_in_the_file(
    tmp_path, together, before, after
):
    """Together they would take many times the memory that they were expected to take."""
    texts = [before] * 12 + [[after] * 1_000] * 8
    for file, of_file in enumerate(texts):
        pq.write_table(pa.table({"text": pa.array(of_file, pa.string())}), tmp_path / f"{file:02}.parquet")
    loader, _ = open_loader(tmp_path, batch_size=1_000, output_format="arrow")
    for of_file, batch in zip(texts, loader, strict=True):
        assert batch["text"].to_pylist() == of_file
    assert {file for groups in together for file, _ in groups} <= {f"{file:02}.parquet" for file in range(12)}
    assert together


def test_strings_that_stay_in_a_dictionary_take_its_memory_alone(tmp_path, together):
    """Each file has 15 MB of text, and a dictionary of 3 kB."""
    for file in range(20):
        pq.write_table(pa.table({"text": [str(file % 10) * 3_000] * 5_000}), tmp_path / f"{file:02}.parquet")
    loader, _ = open_loader(tmp_path, row_id_column=None, batch_size=5_000)
    pool = memory_pool() or pa.default_memory_pool()
    before, most = pool.bytes_allocated(), 0
    for file, batch in enumerate(loader):
        assert batch["text"] == [str(file % 10) * 3_000] * 5_000
        most = max(most, pool.bytes_allocated() - before)
    assert max(map(len, together)) > 1
    assert most < 2_000_000


def test_shards_of_strings_that_all_rows_have_are_not_read_together(tmp_path, monkeypatch):
    """Each takes little in its file, and many would be estimated to fit."""
    shards: list[int] = []
    permuted = Permuter.permuted

    def note_shards(self, parts, indices, meanwhile):
        shards.append(len(parts))
        return permuted(self, parts, indices, meanwhile)

    monkeypatch.setattr(Permuter, "permuted", note_shards)
    for file in range(20):
        table = pa.table({"text": [str(file % 10) * 5_000] * 500, "number": range(500)})
        pq.write_table(table, tmp_path / f"{file:02}.parquet")
    loader, _ = open_loader(tmp_path, shuffle=True, shuffle_buffer_size=500)
    assert sum(len(batch["text"]) for batch in loader) == 20 * 500
    assert shards == [1] * 20


def test_lists_are_not_read_together(tmp_path, together):
    for file in range(20):
        pq.write_table(pa.table({"tokens": [[file], [file, file]]}), tmp_path / f"{file:02}.parquet")
    loader, _ = open_loader(tmp_path, column_formats={"tokens": "list"})
    assert [row for batch in loader for row in batch["tokens"]] == [[file] * n for file in range(20) for n in (1, 2)]
    assert not together


def test_they_take_a_part_of_the_memory_for_reading(path, together):
    row = 3 * 8  # value, score and row id
    loader, _ = open_loader(path, columns=NUMBERS, read_ahead_bytes=6 * 3 * ROWS * row)
    assert all_rows_of(loader) == list(range(TOTAL))
    assert max(sum(len(numbers) for _, numbers in groups) for groups in together) == 3


@pytest.mark.parametrize("limit", [ROWS * 3 * 8 - 1, ROWS * 3 * 8])
def test_those_that_take_longer_to_copy_than_to_read_are_read_by_themselves(path, together, monkeypatch, limit):
    monkeypatch.setattr(together_rules, "COPIED_BYTES", limit)
    loader, _ = open_loader(path, columns=NUMBERS)
    assert all_rows_of(loader) == list(range(TOTAL))
    assert bool(together) == (limit == ROWS * 3 * 8)


WAYS: dict[str, dict[str, Any]] = {
    "all rows": {},
    "strings": {"columns": ["name", "value"]},
    "filter": {"filters": [("value", "!=", 77)]},
    "no memory to read several": {"read_ahead_bytes": 6 * ROWS * 3 * 8},
    "a part of the rows": {"uneven_ranks": "drop", "num_ranks": 3, "rank": 1, "batch_size": 16},
    "shards of three row groups": {"split_rows": 3 * ROWS, "batch_size": 17},
    "Arrow": {"output_format": "arrow", "batch_size": 33},
    "workers": {"num_workers": 2, "batch_size": 40},
}


def options_of(way: str) -> dict[str, Any]:
    """Return options of a loader."""
    return {"columns": NUMBERS, "batch_size": 24, **WAYS[way]}


@pytest.mark.parametrize("every", [37, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("way", WAYS)
def test_a_stop_at_any_batch_changes_no_batch(path, together, way, every):
    loader, _ = open_loader(path, **options_of(way))
    states, batches = {0: loader.state_dict()}, []
    for batch in loader:
        batches.append(batch["row"].tolist() if isinstance(batch, dict) else batch["row"].to_pylist())
        if len(batches) % every == 0:
            states[len(batches)] = loader.state_dict()
    assert bool(together) == (way not in {"no memory to read several", "workers"})  # workers do not tell here
    assert len(states) > 1
    for place, state in states.items():
        again, _ = open_loader(path, **options_of(way))
        again.load_state_dict(state)
        assert batches_of(again) == batches[place:]


def test_batches_and_states_are_those_of_files_that_are_read_one_by_one(path, together):
    options = {"columns": NUMBERS, "batch_size": 17, "fingerprint": True}
    loader, _ = open_loader(path, **options)
    found = [(batch["row"].tolist(), batch["score"].tolist(), loader.state_dict()) for batch in loader]
    assert together
    together.clear()
    single, _ = open_loader(path, read_ahead_bytes=6 * ROWS * 3 * 8, **options)
    assert [(batch["row"].tolist(), batch["score"].tolist(), single.state_dict()) for batch in single] == found
    assert not together


def test_excluded_rows_are_left_out(path, together):
    loader, dataset = open_loader(path, columns=NUMBERS)
    excluded = {0: [0], 3: range(50), 10: [7, 60, 149], 20: [49]}  # rows of files, by the file's number
    dataset.exclude({f"part-{file:03}.parquet": list(rows) for file, rows in excluded.items()})
    left_out = {FIRSTS[file] + row for file, rows in excluded.items() for row in rows}
    assert all_rows_of(loader) == sorted(set(range(TOTAL)) - left_out)
    assert together


def test_each_has_the_values_of_its_own_partition(tmp_path, together):
    for day in range(12):
        folder = tmp_path / f"day={day}"
        folder.mkdir()
        pq.write_table(pa.table({"number": [10 * day, None, 10 * day + 2]}), folder / "part.parquet")
    loader, _ = open_loader(tmp_path, partitioning="hive", fill_nulls={"number": -1})
    found = [row for batch in loader for row in zip(batch["day"].tolist(), batch["number"].tolist(), strict=True)]
    assert sorted(found) == sorted((day, number) for day in range(12) for number in (10 * day, -1, 10 * day + 2))
    assert together


def collect(loader: Any, rows: list[int]) -> None:
    """Add the row ids of every batch to a list."""
    for batch in loader:
        rows += rows_of(batch)


@pytest.mark.parametrize("bad", [0, 1, 2, 4, 6, 19])
def test_a_value_that_cannot_be_delivered_is_an_error_of_its_file_after_the_rows_before(tmp_path, bad):
    for file in range(20):
        values: list[int | None] = list(range(ROWS))
        values[7] = None if file == bad else 7
        table = pa.table({"value": pa.array(values, pa.int64())})
        # Without statistics, only reading tells that there is a null.
        pq.write_table(table, tmp_path / f"{file:02}.parquet", write_statistics=False)
    loader, _ = open_loader(tmp_path, batch_size=10)
    delivered: list[int] = []
    with pytest.raises(ColumnError, match=rf"'value' holds 1 nulls.* \(row group 0 of .*{bad:02}\.parquet\)"):
        collect(loader, delivered)
    assert delivered == list(range(bad * ROWS))


@pytest.mark.parametrize("how", ["damaged", "gone", "written"])
def test_a_file_that_cannot_be_read_is_an_error_of_its_own_after_the_rows_before(path, tmp_path, together, how):
    bad = 6
    write_dataset(tmp_path / "data", [(ROWS, ROWS)] * 20)
    file = tmp_path / "data" / f"part-{bad:03}.parquet"
    loader, dataset = open_loader(tmp_path / "data", columns=NUMBERS, batch_size=10)
    content = bytearray(file.read_bytes())
    if how == "damaged":
        header = pq.read_metadata(file).row_group(0).column(0)
        start = header.dictionary_page_offset or header.data_page_offset
        content[start : start + 8] = b"\xff" * 8
        modified = file.stat().st_mtime_ns
        file.write_bytes(content)
        os.utime(file, ns=(modified, modified))
    elif how == "gone":
        file.unlink()
    else:
        file.write_bytes(content + b"more")
    delivered: list[int] = []
    error = FileNotFoundError if how == "gone" else UnreadableFileError
    with pytest.raises(error, match=rf"part-{bad:03}\.parquet"):
        collect(loader, delivered)
    assert together
    assert delivered == list(range(bad * ROWS))
    assert dataset.get_metrics()["row_groups_read"] == bad


@pytest.mark.parametrize("how", ["gone", "cut short"])
@pytest.mark.parametrize("bad", [2, 6, 19])
def test_a_footer_that_is_needed_and_cannot_be_read_is_an_error_after_the_rows_before(tmp_path, together, bad, how):
    directory = tmp_path / "data"
    write_dataset(directory, [(ROWS, ROWS)] * 20)
    described: list[pq.FileMetaData] = []
    for file in sorted(directory.iterdir()):
        described.append(pq.read_metadata(file))
        described[-1].set_file_path(file.name)
    pq.write_metadata(pq.read_schema(file), directory / "_metadata", described)
    loader, _ = open_loader(directory, columns=NUMBERS, batch_size=10)
    file = directory / f"part-{bad:03}.parquet"
    if how == "gone":
        file.unlink()
    else:
        os.truncate(file, 100)
    delivered: list[int] = []
    error = FileNotFoundError if how == "gone" else UnreadableFileError
    with pytest.raises(error, match=rf"part-{bad:03}\.parquet"):
        collect(loader, delivered)
    assert delivered == list(range(bad * ROWS))
    assert bool(together) == (bad > 2)


def test_an_array_of_all_rows_is_what_pyarrow_reads(path):
    loader, _ = open_loader(path, columns=NUMBERS, batch_size=64)
    stored = pa.concat_tables(pq.read_table(file, columns=NUMBERS) for file in sorted(path.iterdir()))
    batches = list(loader)
    for name in NUMBERS:
        assert np.array_equal(np.concatenate([batch[name].numpy() for batch in batches]), stored[name].to_numpy())
