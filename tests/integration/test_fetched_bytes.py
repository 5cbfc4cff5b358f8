"""The bytes that are fetched of files that are not mapped: how Arrow reads them, and how long they are kept."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torch_dataloader_utils import StructuredDataset
from torch_dataloader_utils.reading.row_groups.fetcher import Fetcher
from torch_dataloader_utils.reading.row_groups.reader import RowGroupReader
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


@pytest.mark.parametrize("memory_map", [True, False], ids=["mapped", "fetched"])
def test_nothing_is_kept_of_row_groups_that_were_read(tmp_path, memory_map):
    pq.write_table(pa.table({"c0": range(400)}), tmp_path / "a.parquet", row_group_size=2)
    loader, _ = StructuredDataset.create_dataloader(
        str(tmp_path), batch_size=2, num_workers=0, memory_map=memory_map, read_ahead_bytes=64
    )
    batches = iter(loader)
    for _ in range(150):
        next(batches)
    known = [found for found in gc.get_objects() if isinstance(found, (Fetcher, RowGroupReader))]
    assert len(known) == 2
    assert sum(len(vars(found).get(name, ())) for found in known for name in ("_requested", "_decoded")) < 20
    assert len(list(batches)) == 50


@pytest.mark.parametrize("version", ["", " version 1.2.8", " version 1.2.9"])
def test_files_whose_chunks_are_said_to_be_smaller_than_they_are_are_fetched(tmp_path, version):
    """By parquet-mr before 1.2.9: Arrow reads some bytes more of each column chunk."""
    pq.write_table(pa.table({"c0": range(1000), "c1": range(1000)}), tmp_path / "a.parquet", row_group_size=100)
    content = (tmp_path / "a.parquet").read_bytes()
    writer = pq.read_metadata(tmp_path / "a.parquet").created_by.encode()
    content = content.replace(writer, f"parquet-mr{version}".encode().ljust(len(writer)))
    (tmp_path / "a.parquet").write_bytes(content)
    assert pq.read_metadata(tmp_path / "a.parquet").created_by.startswith("parquet-mr")
    values = [int(value) for batch in loader_of(str(tmp_path), columns=["c0"]) for value in batch["c0"]]
    assert values == list(range(1000))
