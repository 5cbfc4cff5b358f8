"""Shards of row groups larger than the buffer: when each is read as a whole, and that its rows come as in rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torch_dataloader_utils import StructuredDataset
from torch_dataloader_utils.reading.row_groups.reader import RowGroupReader

GROUP, GROUPS = 1000, 16
SIDE_BY_SIDE = 8
WIDTH = 8
ORDER = 8
"""Bytes of a row while its place is drawn."""

ROWS = GROUP * SIDE_BY_SIDE
"""Of a shard."""

MANY = 20
COPIES = 2 * max(1, min(pa.cpu_count(), MANY // 8))
"""Columns that are in memory beside a shard of many while these are permuted."""

WHOLE = ROWS * (MANY * WIDTH + ORDER + COPIES * WIDTH)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    file: Path = tmp_path_factory.mktemp("whole") / "a.parquet"
    numbers = np.arange(GROUP * GROUPS)
    columns: dict[str, Any] = {f"c{number}": numbers + number for number in range(MANY)}
    pairs = pa.FixedSizeListArray.from_arrays(np.arange(2 * len(numbers)), 2)
    table = pa.table({**columns, "words": pa.array(map(str, numbers)), "pairs": pairs})
    pq.write_table(table, file, row_group_size=GROUP)
    return file


@pytest.fixture
def cursors(monkeypatch) -> list[object]:
    """The row groups that are read in parts."""
    opened: list[object] = []
    make = RowGroupReader.cursor

    def noted(reader: RowGroupReader, group, rows, first):
        opened.append(group)
        return make(reader, group, rows, first)

    monkeypatch.setattr(RowGroupReader, "cursor", noted)
    return opened


def loader_of(path: Path, read_ahead_bytes: int, columns: list[str]) -> Any:
    loader, _ = StructuredDataset.create_dataloader(
        str(path),
        batch_size=100,
        num_workers=0,
        shuffle=True,
        shuffle_buffer_size=GROUP // 2,
        read_ahead_bytes=read_ahead_bytes,
        columns=columns,
    )
    return loader


def rows_of(loader: Any) -> list[int]:
    return [row for batch in loader for row in batch["c0"].tolist()]


NUMBERS = [f"c{number}" for number in range(MANY)]


def test_a_shard_of_many_columns_is_read_as_a_whole_if_the_memory_has_it_with_two_copies_of_a_column_for_each_thread(
    path, cursors
):
    whole = rows_of(loader_of(path, WHOLE, NUMBERS))
    assert not cursors
    in_rounds = rows_of(loader_of(path, WHOLE - 1, NUMBERS))
    assert len(cursors) == GROUPS
    assert whole == in_rounds
    assert sorted(whole) == list(range(GROUP * GROUPS))


@pytest.mark.parametrize(
    "columns",
    [["c0"], NUMBERS[:7], [*NUMBERS, "words"], [*NUMBERS, "pairs"]],
    ids=["one column", "seven", "strings", "lists"],
)
def test_a_shard_of_few_columns_or_of_any_without_a_fixed_width_is_read_in_rounds_above_a_quarter_of_the_memory(
    path, cursors, columns
):
    a_quarter = ROWS * (len(columns) * WIDTH + ORDER)
    assert sorted(rows_of(loader_of(path, 3 * a_quarter, columns))) == list(range(GROUP * GROUPS))
    assert len(cursors) == GROUPS


@pytest.mark.parametrize("memory", [(WHOLE, WHOLE // 2), (WHOLE // 2, WHOLE)], ids=["whole first", "rounds first"])
def test_a_state_within_such_a_shard_goes_on_whether_it_is_read_as_a_whole_or_in_rounds(path, memory):
    expected = rows_of(loader_of(path, memory[0], NUMBERS))
    first, second = (loader_of(path, size, NUMBERS) for size in memory)
    batches = iter(first)
    delivered = [row for _ in range(33) for row in next(batches)["c0"].tolist()]
    second.load_state_dict(first.state_dict())
    assert delivered + rows_of(second) == expected
