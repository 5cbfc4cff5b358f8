"""Small consecutive row groups are decoded as one, and nothing but their number of calls tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ranged import ranged
from support import all_rows_of, batches_of, open_loader, rows_of, write_dataset

from torch_dataloader_utils.errors import ColumnError
from torch_dataloader_utils.formats.parquet.codec import _ParquetRowGroups

GROUPS = 40
ROWS = 50
"""Of a row group."""


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


def test_ever_more_row_groups_are_decoded_as_one_each_once_and_in_order(path, decoded):
    loader, dataset = open_loader(path, columns=["value", "score"])
    assert all_rows_of(loader) == list(range(GROUPS * ROWS + 3 * ROWS + 7))
    assert {1, 2, 4} <= set(map(len, decoded))
    assert len(decoded) <= GROUPS // 4
    assert sorted(number for numbers in decoded for number in numbers) == sorted([*range(GROUPS), *range(3), 0])
    assert dataset.get_metrics()["row_groups_read"] == GROUPS + 4


def test_they_take_a_part_of_the_memory_for_reading(path, decoded):
    row = 3 * 8  # value, score and row id
    loader, _ = open_loader(path, columns=["value", "score"], read_ahead_bytes=6 * 3 * ROWS * row)
    assert all_rows_of(loader) == list(range(GROUPS * ROWS + 3 * ROWS + 7))
    assert max(map(len, decoded)) == 3


@pytest.mark.parametrize("why", ["nested", "fetched", "transform"])
def test_row_groups_are_decoded_one_by_one(path, tmp_path, decoded, why):
    options: dict[str, Any] = {"transform": lambda table: table} if why == "transform" else {}
    if why == "nested":
        path = tmp_path
        lists = pa.table({"tokens": [[1, 2]] * 4 * ROWS})
        pq.write_table(lists, path / "lists.parquet", row_group_size=ROWS)
    loader, _ = open_loader(ranged(path) if why == "fetched" else path, **options)
    assert sum(len(batch) for batch in batches_of(loader)) >= 4 * ROWS
    assert set(map(len, decoded)) == {1}


@pytest.mark.parametrize("options", [{}, {"filters": [("value", "!=", 77)]}], ids=["all rows", "filter"])
def test_a_stop_at_any_batch_changes_no_batch(path, decoded, options):
    loader, _ = open_loader(path, **options)
    states, batches = [loader.state_dict()], []
    for batch in loader:
        batches.append(batch["row"].tolist())
        states.append(loader.state_dict())
    assert max(map(len, decoded)) > 1
    for place in range(0, len(states) - 1, 5):
        again, _ = open_loader(path, **options)
        again.load_state_dict(states[place])
        assert batches_of(again) == batches[place:]


def collect(loader: Any, rows: list[int]) -> None:
    """Add the row ids of every batch to a list."""
    for batch in loader:
        rows += rows_of(batch)


@pytest.mark.parametrize("bad", [0, 1, 2, 6, 39])
def test_a_value_that_cannot_be_delivered_is_an_error_of_its_row_group_after_the_rows_before(tmp_path, bad):
    values: list[int | None] = list(range(GROUPS * ROWS))
    values[bad * ROWS + 7] = None
    table = pa.table({"value": pa.array(values, pa.int64())})
    # Without statistics, only reading tells that there is a null.
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=ROWS, write_statistics=False)
    loader, _ = open_loader(tmp_path, batch_size=10)
    delivered: list[int] = []
    with pytest.raises(ColumnError, match=rf"'value' holds 1 nulls.* \(row group {bad} of .*a\.parquet\)"):
        collect(loader, delivered)
    assert delivered == list(range(bad * ROWS))
