"""Shards of row groups larger than the buffer: when each is read as a whole, and that its rows come as in rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torch_dataloader_utils import StructuredDataset
from torch_dataloader_utils.reading.row_groups import RowGroupReader

GROUP, GROUPS = 1000, 16
SIDE_BY_SIDE = 8
WIDTH = 8
ORDER = 8
"""Bytes of a row while its place is drawn."""


@pytest.fixture(params=[1, 20], ids=["one column", "20 columns"], scope="module")
def columns(request) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def path(tmp_path_factory, columns) -> Path:
    file: Path = tmp_path_factory.mktemp("whole") / "a.parquet"
    table = pa.table({f"c{number}": np.arange(GROUP * GROUPS) + number for number in range(columns)})
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


def rows_of(path: Path, read_ahead_bytes: int) -> list[int]:
    loader, _ = StructuredDataset.create_dataloader(
        str(path),
        batch_size=100,
        num_workers=0,
        shuffle=True,
        shuffle_buffer_size=GROUP // 2,
        read_ahead_bytes=read_ahead_bytes,
    )
    return [row for batch in loader for row in batch["c0"].tolist()]


def test_a_shard_is_read_as_a_whole_if_the_memory_has_it_with_two_copies_of_a_column_for_each_thread(
    path, columns, cursors
):
    rows = GROUP * SIDE_BY_SIDE
    threads = max(1, min(pa.cpu_count(), columns // 8))
    needed = rows * (columns * WIDTH + ORDER + 2 * threads * WIDTH)
    whole = rows_of(path, needed)
    assert not cursors
    in_rounds = rows_of(path, needed - 1)
    assert len(cursors) == GROUPS
    assert whole == in_rounds
    assert sorted(whole) == list(range(GROUP * GROUPS))
