"""How much memory a table takes, by which the memory of what is read and not yet delivered is bounded."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import open_loader

from torch_dataloader_utils.reading.sequential import SequentialScan

WORDS = pa.array([f"{number} is a word of some length" for number in range(500)])
COLUMNS = {
    "numbers": {"a": pa.array(range(500), pa.int64()), "b": pa.array([1.5] * 500, pa.float32())},
    "words": {"a": WORDS},
    "dictionary": {"a": pa.DictionaryArray.from_arrays(pa.array(range(500), pa.int32()), WORDS)},
    "vectors": {"a": pa.FixedSizeListArray.from_arrays(pa.array(range(1500), pa.float32()), 3)},
    "lists": {"a": pa.array([[1, 2, 3]] * 500, pa.list_(pa.int64()))},
}


@pytest.mark.parametrize("columns", COLUMNS)
def test_a_table_is_told_to_take_what_it_takes(tmp_path, monkeypatch, columns):
    pq.write_table(pa.table(COLUMNS[columns]), tmp_path / "a.parquet")
    told: list[tuple[int, int]] = []
    held_bytes = SequentialScan._held_bytes

    def noting(scan: SequentialScan, table: pa.Table) -> int:
        told.append((held_bytes(scan, table), table.nbytes))
        return told[-1][0]

    monkeypatch.setattr(SequentialScan, "_held_bytes", noting)
    loader, _ = open_loader(tmp_path, batch_size=100, output_format="arrow")
    assert sum(batch.num_rows for batch in loader) == 500
    assert told
    bitmaps = 500 / 8 + 1  # Arrow may have one of each column, of which it makes nothing here
    assert all(abs(held - size) <= bitmaps * len(COLUMNS[columns]) for held, size in told)
