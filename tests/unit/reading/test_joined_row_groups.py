"""Small consecutive row groups are decoded as one, and nothing but their number of calls tells."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ranged import ranged
from support import all_rows_of, batches_of, open_loader, rows_of, write_dataset

from torch_dataloader_utils import Manifest, Shard, Split, SplitStrategy
from torch_dataloader_utils.errors import ColumnError, UnreadableFileError
from torch_dataloader_utils.formats.parquet.codec import _ParquetRowGroups

NUMBERS = ["value", "score"]
GROUPS = 40
ROWS = 50
"""Of a row group."""


SHARDS: dict[str, dict[str, Any]] = {
    "large shards": {},
    "shards of three": {"split_rows": 3 * ROWS},
    "a shard for each": {"split_rows": ROWS},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("small") / "data"
    write_dataset(directory, ((GROUPS * ROWS, ROWS), (3 * ROWS, ROWS), (7, ROWS)))
    return directory


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The row groups that each call decodes."""
    calls: list[range] = []
    read, read_joined = _ParquetRowGroups.read, _ParquetRowGroups.read_joined

    def one(groups: Any, number: int) -> pa.Table:
        calls.append(range(number, number + 1))
        return read(groups, number)

    def several(groups: Any, numbers: range) -> pa.Table:
        calls.append(numbers)
        return read_joined(groups, numbers)

    monkeypatch.setattr(_ParquetRowGroups, "read", one)
    monkeypatch.setattr(_ParquetRowGroups, "read_joined", several)
    return calls


@pytest.mark.parametrize("shards", SHARDS)
def test_ever_more_row_groups_are_decoded_as_one_each_once_and_in_order(path, decoded, shards):
    loader, dataset = open_loader(path, columns=NUMBERS, **SHARDS[shards])
    assert all_rows_of(loader) == list(range(GROUPS * ROWS + 3 * ROWS + 7))
    assert {1, 2, 3 if shards == "shards of three" else 4} <= set(map(len, decoded))  # whole shards are joined
    assert len(decoded) <= GROUPS // 4
    assert sorted(number for numbers in decoded for number in numbers) == sorted([*range(GROUPS), *range(3), 0])
    assert dataset.get_metrics()["row_groups_read"] == GROUPS + 4


@pytest.mark.parametrize("shards", SHARDS)
def test_they_take_a_part_of_the_memory_for_reading(path, decoded, shards):
    row = 3 * 8  # value, score and row id
    loader, _ = open_loader(path, columns=NUMBERS, read_ahead_bytes=6 * 3 * ROWS * row, **SHARDS[shards])
    assert all_rows_of(loader) == list(range(GROUPS * ROWS + 3 * ROWS + 7))
    assert max(map(len, decoded)) == 3


OTHER_COLUMNS = {
    "lists": pa.array([[1, 2]] * 4 * ROWS),
    "strings": pa.array(["red", "green"] * 2 * ROWS),
    "a dictionary": pa.array(["red", "green"] * 2 * ROWS).dictionary_encode(),
    "tensors": pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((4 * ROWS, 2, 2))),
}


@pytest.mark.parametrize("column", OTHER_COLUMNS)
def test_row_groups_whose_size_rows_do_not_tell_are_decoded_one_by_one(tmp_path, decoded, column):
    table = pa.table({"number": np.arange(4 * ROWS), "other": OTHER_COLUMNS[column]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=ROWS)
    loader, _ = open_loader(tmp_path, output_format="arrow")
    assert sum(len(batch) for batch in loader) == 4 * ROWS
    assert set(map(len, decoded)) == {1}


@pytest.mark.parametrize("why", ["fetched", "transform"])
def test_row_groups_are_decoded_one_by_one(path, decoded, why):
    options: dict[str, Any] = {"transform": lambda table: table} if why == "transform" else {"row_id_column": "row"}
    loader, _ = open_loader(ranged(path) if why == "fetched" else path, columns=NUMBERS, **options)
    assert sum(len(batch["value"]) for batch in loader) == GROUPS * ROWS + 3 * ROWS + 7
    assert set(map(len, decoded)) == {1}


WAYS: dict[str, dict[str, Any]] = {
    "all rows": {},
    "filter": {"filters": [("value", "!=", 77)]},
    "a part of the rows": {"uneven_ranks": "drop", "num_ranks": 3, "rank": 1},
    "shards of three": {"split_rows": 3 * ROWS, "batch_size": 17},
    "a shard for each": {"split_rows": ROWS, "batch_size": 17},
}


@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("way", WAYS)
def test_a_stop_at_any_batch_changes_no_batch(path, decoded, way, every):
    options = {"columns": NUMBERS, **WAYS[way]}
    loader, _ = open_loader(path, **options)
    states, batches = {0: loader.state_dict()}, []
    for batch in loader:
        batches.append(batch["row"].tolist())
        if len(batches) % every == 0:
            states[len(batches)] = loader.state_dict()
    assert max(map(len, decoded)) > 1
    assert len(states) > 1
    for place, state in states.items():
        again, _ = open_loader(path, **options)
        again.load_state_dict(state)
        assert batches_of(again) == batches[place:]


@pytest.mark.parametrize("shards", SHARDS)
def test_excluded_rows_are_left_out_of_row_groups_that_are_decoded_as_one(path, decoded, shards):
    loader, dataset = open_loader(path, columns=NUMBERS, **SHARDS[shards])
    excluded = [1, ROWS, 7 * ROWS + 3, *range(12 * ROWS, 13 * ROWS), *range(20 * ROWS, 21 * ROWS), 31 * ROWS - 1]
    dataset.exclude({"part-000.parquet": excluded})
    assert all_rows_of(loader) == sorted(set(range(GROUPS * ROWS + 3 * ROWS + 7)) - set(excluded))
    assert max(map(len, decoded)) > 1
    assert [loader.state_dict()["in_progress"] for _ in loader][-1] == []


def collect(loader: Any, rows: list[int]) -> None:
    """Add the row ids of every batch to a list."""
    for batch in loader:
        rows += rows_of(batch)


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("bad", [0, 1, 2, 6, 39])
def test_a_value_that_cannot_be_delivered_is_an_error_of_its_row_group_after_the_rows_before(tmp_path, bad, shards):
    values: list[int | None] = list(range(GROUPS * ROWS))
    values[bad * ROWS + 7] = None
    table = pa.table({"value": pa.array(values, pa.int64())})
    # Without statistics, only reading tells that there is a null.
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=ROWS, write_statistics=False)
    loader, _ = open_loader(tmp_path, batch_size=10, **SHARDS[shards])
    delivered: list[int] = []
    with pytest.raises(ColumnError, match=rf"'value' holds 1 nulls.* \(row group {bad} of .*a\.parquet\)"):
        collect(loader, delivered)
    assert delivered == list(range(bad * ROWS))


@pytest.mark.parametrize("shards", SHARDS)
def test_damaged_bytes_are_an_error_of_their_row_group_after_the_rows_before(tmp_path, shards):
    bad = 6
    file = tmp_path / "a.parquet"
    table = pa.table({"value": np.arange(GROUPS * ROWS)})
    pq.write_table(table, file, row_group_size=ROWS, use_dictionary=False)
    header = pq.read_metadata(file).row_group(bad).column(0).data_page_offset
    content = bytearray(file.read_bytes())
    content[header : header + 8] = b"\xff" * 8
    file.write_bytes(content)
    loader, dataset = open_loader(tmp_path, batch_size=10, **SHARDS[shards])
    delivered: list[int] = []
    with pytest.raises(UnreadableFileError, match=rf"row group {bad} of .*a\.parquet"):
        collect(loader, delivered)
    assert delivered == list(range(bad * ROWS))
    assert dataset.get_metrics()["row_groups_read"] == bad


@pytest.mark.parametrize("shards", SHARDS)
def test_batches_and_states_are_those_of_row_groups_that_are_decoded_one_by_one(path, decoded, shards):
    """Batches of 17 rows begin and end in other shards than the row groups that are decoded as one."""
    options = {"columns": NUMBERS, "batch_size": 17, "fingerprint": True, **SHARDS[shards]}
    joined, _ = open_loader(path, **options)
    found = [(batch["row"].tolist(), batch["score"].tolist(), joined.state_dict()) for batch in joined]
    assert max(map(len, decoded)) > 4
    decoded.clear()
    single, _ = open_loader(path, read_ahead_bytes=6 * ROWS * 3 * 8, **options)
    assert [(batch["row"].tolist(), batch["score"].tolist(), single.state_dict()) for batch in single] == found
    assert max(map(len, decoded)) == 1


@pytest.mark.parametrize("bad", [18, 19])
def test_a_row_group_that_is_left_out_of_the_plan_is_not_read_with_others(tmp_path, decoded, bad):
    """It may be damaged. The shards have two row groups each: it is the first or the last of its shard."""
    write_dataset(tmp_path / "data", ((32 * ROWS, ROWS),))
    loader, dataset = open_loader(tmp_path / "data", columns=NUMBERS, split_rows=2 * ROWS)
    left_out = range(bad * ROWS, (bad + 1) * ROWS)
    dataset.exclude({"part-000.parquet": left_out})
    dataset.set_epoch(1)  # planned without them
    assert all_rows_of(loader) == [row for row in range(32 * ROWS) if row not in left_out]
    assert bad not in {number for numbers in decoded for number in numbers}
    assert max(map(len, decoded)) > 2


class TwoHalves(SplitStrategy):
    """A shard for each row group, of the first half and of the second in turns: each of two ranks gets one half."""

    def shards(self, manifest: Manifest, epoch: int) -> Iterable[Shard]:
        del epoch
        file = manifest.files[0]
        rows = [group.rows for group in file.row_groups]
        starts = accumulate(rows[:-1], initial=0)
        shards = [Shard((Split(file.path, start, count),)) for start, count in zip(starts, rows, strict=True)]
        half = len(shards) // 2
        return chain.from_iterable(zip(shards[:half], shards[half:], strict=True))


def test_a_shard_of_which_a_rank_has_a_part_is_not_read_with_others(tmp_path, decoded):
    """The first half has 60 rows more: balancing cuts its last shard short, which follows others in the file."""
    sizes = [ROWS] * 20 + [ROWS - 3] * 20
    table = pa.table({"value": np.arange(sum(sizes))})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for start, size in zip(accumulate(sizes[:-1], initial=0), sizes, strict=True):
            writer.write_table(table.slice(start, size))
    delivered = []
    for rank in (0, 1):
        options = {"num_ranks": 2, "rank": rank, "uneven_ranks": "drop", "split_strategy": TwoHalves()}
        loader, _ = open_loader(tmp_path, batch_size=10, **options)
        delivered.append([value for batch in loader for value in batch["value"].tolist()])
    assert delivered[0] == list(range(970))
    assert sorted(delivered[1]) == list(range(970, sum(sizes)))
    assert max(map(len, decoded)) > 4
