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

FILES, GROUPS, ROWS, COLUMNS = 20, 6, 500, 16
SECONDS = 30


@pytest.fixture
def path(tmp_path: Path) -> str:
    rows = range(GROUPS * ROWS)
    table = pa.table({f"c{number}": [row + number for row in rows] for number in range(COLUMNS)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=ROWS)
    return str(tmp_path)


def loader_of(path: str, **options: Any) -> Any:
    return StructuredDataset.create_dataloader(path, batch_size=ROWS, num_workers=0, memory_map=False, **options)[0]


@pytest.mark.parametrize(
    ("wanted", "calls"),
    [(range(COLUMNS), 1), ((*range(5), *range(10, COLUMNS)), 2), (range(2), 2)],
    ids=["all", "all but some in the middle", "few"],
)
def test_arrow_reads_many_fetched_column_chunks_that_are_neighbours_by_one_call_and_few_one_by_one(
    path, wanted, calls, monkeypatch
):
    reads = []
    read_buffer = SparseFile.read_buffer

    def noting(self: SparseFile, size: int = -1) -> pa.Buffer:
        reads.append(size)
        return read_buffer(self, size)

    monkeypatch.setattr(SparseFile, "read_buffer", noting)
    batches = list(loader_of(path, columns=[f"c{number}" for number in wanted]))
    assert [int(batch["c0"][0]) for batch in batches] == [ROWS * number for number in range(GROUPS)]
    assert len(reads) == GROUPS * calls


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "shuffle_buffer_size": ROWS}], ids=["in order", "shuffled"])
def test_fetched_bytes_are_freed_once_they_are_decoded_while_their_files_stay_open(tmp_path, options, monkeypatch):
    table = pa.table({f"c{number}": range(ROWS) for number in range(COLUMNS)})
    for number in range(FILES):
        pq.write_table(table, tmp_path / f"{number}.parquet")
    fetched = list[weakref.ref[pa.Buffer]]()
    read = RangedFile.read

    def noting(self: RangedFile, start: int, stop: int) -> pa.Buffer:
        content = read(self, start, stop)
        fetched.append(weakref.ref(content))
        return content

    monkeypatch.setattr(RangedFile, "read", noting)
    batches = iter(loader_of(str(tmp_path), **options, read_ahead_bytes=4 * ROWS * COLUMNS * 8))
    for _ in range(FILES - 1):
        next(batches)
    until = time.monotonic() + SECONDS  # what was read ahead may still be decoded
    while any(content() is not None for content in fetched) and time.monotonic() < until:
        time.sleep(0.001)
    assert len(fetched) >= FILES - 1
    assert sum(content() is not None for content in fetched) == 0
    assert len(next(batches)["c0"]) == ROWS
