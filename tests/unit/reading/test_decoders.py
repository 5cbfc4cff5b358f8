"""Which thread decodes a row group."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import all_rows_of, open_loader

from torch_dataloader_utils.reading.row_groups.decoder import Decoder

SIZES = {"a": 4_000, "b": 10, "c": 10, "d": 10}
"""Rows of each file, which is one row group: the first is larger than all others together."""


def test_a_row_group_does_not_wait_for_a_large_one_while_another_thread_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = 0
    for name, rows in SIZES.items():
        pq.write_table(pa.table({"id": range(first, first + rows)}), tmp_path / f"{name}.parquet")
        first += rows
    monkeypatch.setattr(pa, "cpu_count", lambda: 2)
    decode = Decoder._attempt
    third = threading.Event()
    came: list[bool] = []

    def attempt(self: Decoder, path: str, numbers: range, rest: Any) -> Any:
        if path == "a.parquet":
            came.append(third.wait(60))
        decoded = decode(self, path, numbers, rest)
        if path == "c.parquet":
            third.set()
        return decoded

    monkeypatch.setattr(Decoder, "_attempt", attempt)
    loader, _ = open_loader(tmp_path, batch_size=100)
    assert all_rows_of(loader) == list(range(sum(SIZES.values())))
    assert came == [True]
