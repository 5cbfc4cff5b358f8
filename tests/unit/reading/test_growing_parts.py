"""Row groups of text: only the first part of the first one is small, because nothing tells how large its rows are."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import open_loader

from torch_dataloader_utils.reading.row_groups import reader as row_groups
from torch_dataloader_utils.reading.row_groups.decoder import Decoder
from torch_dataloader_utils.reading.sequential import FIRST_ROWS

ROWS = 40_000


@pytest.fixture
def parts(monkeypatch):
    """The number of rows of each table that is decoded of a row group that is read in parts."""
    found = []

    def counted(self, path, number, rows):
        for decoded in in_parts(self, path, number, rows):
            found.append(decoded.table.num_rows)
            yield decoded

    in_parts = Decoder.in_parts
    monkeypatch.setattr(row_groups.Decoder, "in_parts", counted)
    return found


def write(path, length):
    text = [f"{row:0{length}}" for row in range(ROWS)]
    pq.write_table(pa.table({"id": range(ROWS), "text": text}), path / "a.parquet", row_group_size=ROWS // 2)


@pytest.mark.parametrize("batch_size", [100, FIRST_ROWS, 1500])
def test_the_first_rows_tell_how_large_the_other_parts_may_be(tmp_path, parts, batch_size):
    write(tmp_path, 10)
    loader, _ = open_loader(tmp_path, batch_size=batch_size)
    rows = [(row, text) for batch in loader for row, text in zip(batch["id"].tolist(), batch["text"], strict=True)]
    assert rows == [(row, f"{row:010}") for row in range(ROWS)]
    assert parts[:2] == [FIRST_ROWS, ROWS // 2 - FIRST_ROWS]
    assert parts[2:] in ([], [ROWS // 2])


def test_parts_are_no_larger_than_the_budget_allows(tmp_path, parts):
    write(tmp_path, 400)
    loader, _ = open_loader(tmp_path, batch_size=500, read_ahead_bytes="4MiB")
    assert sum(len(batch["id"]) for batch in loader) == ROWS
    assert sum(parts) == ROWS
    assert max(parts) * 400 <= 2**20
    assert len(parts) <= 2 * ROWS * 500 // 2**20
