"""The bytes that are fetched of files that are not mapped: how Arrow reads them, and how long they are kept."""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torch_dataloader_utils import StructuredDataset
from torch_dataloader_utils.storage.byte_ranges import SparseFile
from torch_dataloader_utils.storage.local_file import RangedFile

GROUPS, ROWS, COLUMNS = 6, 500, 8
SECONDS = 30


@pytest.fixture
def path(tmp_path: Path) -> str:
    rows = range(GROUPS * ROWS)
    table = pa.table({f"c{number}": [row + number for row in rows] for number in range(COLUMNS)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=ROWS)
    return str(tmp_path)


def loader_of(path: str, **options: Any) -> Any:
    return StructuredDataset.create_dataloader(path, batch_size=ROWS, num_workers=0, memory_map=False, **options)[0]


@pytest.mark.parametrize("wanted", [None, ["c0", "c7"]])
def test_arrow_reads_the_fetched_column_chunks_of_a_row_group_by_one_call_for_those_that_are_neighbours(
    path, wanted, monkeypatch
):
    reads = []
    read_buffer = SparseFile.read_buffer

    def noting(self: SparseFile, size: int = -1) -> pa.Buffer:
        reads.append(size)
        return read_buffer(self, size)

    monkeypatch.setattr(SparseFile, "read_buffer", noting)
    batches = list(loader_of(path, columns=wanted))
    assert [int(batch["c7"][0]) for batch in batches] == [7 + ROWS * number for number in range(GROUPS)]
    assert len(reads) == GROUPS * (1 if wanted is None else 2)


@pytest.mark.parametrize(
    "options",
    [{}, {"read_ahead_bytes": ROWS * COLUMNS * 8}, {"shuffle": True, "shuffle_buffer_size": ROWS}],
    ids=["whole", "in parts", "shuffled"],
)
def test_fetched_bytes_are_freed_once_they_are_decoded(path, options, monkeypatch):
    fetched = list[weakref.ref[pa.Buffer]]()
    read = RangedFile.read

    def noting(self: RangedFile, start: int, stop: int) -> pa.Buffer:
        content = read(self, start, stop)
        fetched.append(weakref.ref(content))
        return content

    monkeypatch.setattr(RangedFile, "read", noting)
    batches = iter(loader_of(path, **options))
    rows = sum(len(next(batches)["c0"]) for _ in range(GROUPS))
    assert rows == GROUPS * ROWS
    assert len(fetched) == GROUPS
    until = time.monotonic() + SECONDS  # the threads that fetched them may still end
    while any(content() is not None for content in fetched) and time.monotonic() < until:
        time.sleep(0.001)
    assert not any(content() is not None for content in fetched)
    assert next(batches, None) is None
