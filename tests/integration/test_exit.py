"""A process that ends while Arrow's threads free what they have read with ends as any other."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import all_rows_of, open_loader, write_dataset

from torch_dataloader_utils.reading import arrow_threads
from torch_dataloader_utils.storage.byte_ranges import SparseFile
from torch_dataloader_utils.storage.local_file import MappedFile

LEAVES = """
import sys
from torch_dataloader_utils import StructuredDataset

loader, _ = StructuredDataset.create_dataloader(sys.argv[1], num_workers=0, memory_map=sys.argv[2] == "mapped")
for step, batch in enumerate(loader):
    if step == 30:
        break
"""


@pytest.mark.parametrize("kind", [MappedFile, SparseFile], ids=["mapped", "fetched"])
def test_an_epoch_ends_once_arrow_has_let_go_of_its_files(tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch):
    write_dataset(tmp_path)
    monkeypatch.setattr(arrow_threads, "RELEASE_SEC", 60.0)
    kept: list[Any] = []  # as a thread of Arrow keeps them
    timers = []
    held_by_arrow = kind.held_by_arrow

    def held(file: Any) -> Any:
        references = held_by_arrow(file)
        kept.extend(reference() for reference in references)
        timers.append(threading.Timer(0.1, kept.clear))
        timers[-1].start()
        return references

    monkeypatch.setattr(kind, "held_by_arrow", held)
    loader, _ = open_loader(tmp_path, memory_map=kind is MappedFile)
    assert all_rows_of(loader)
    assert timers
    assert kept == []
    for timer in timers:
        timer.join()


@pytest.mark.soak
@pytest.mark.parametrize("files", ["mapped", "fetched"])
def test_a_script_that_leaves_an_epoch_ends_with_status_0(tmp_path: Path, files: str):
    """Without the wait it was aborted now and then: on a busy machine up to every second time."""
    chance = np.random.default_rng(0)
    table = pa.table({f"c{number}": chance.integers(0, 5_000, 600_000) for number in range(6)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=50_000)
    for _ in range(60):
        command = [sys.executable, "-c", LEAVES, str(tmp_path), files]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, ended.stderr
