"""How much of a dataset is in memory at once, by Arrow's own count."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS = 800_000
COLUMNS = 10
WIDTH = COLUMNS * 8
BUFFER = 200_000
GROUP = 10_000
PAGE = 1 << 20
"""Bytes of a data page, as pyarrow writes them."""

READ = """
import sys
import pyarrow as pa
from torch_dataloader_utils import StructuredDataset

options = {"shuffle": True, "shuffle_buffer_size": int(sys.argv[2])} if sys.argv[2] != "None" else {}
loader, _ = StructuredDataset.create_dataloader(
    sys.argv[1], num_workers=0, batch_size=3000, output_format=sys.argv[3], read_ahead_bytes=int(sys.argv[4]), **options
)
rows = sum(len(batch["c0"]) for batch in loader)
print(rows, pa.default_memory_pool().max_memory())
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    directory: Path = tmp_path_factory.mktemp("memory")
    chance = np.random.default_rng(0)
    table = pa.table({f"c{number}": chance.random(ROWS) for number in range(COLUMNS)})
    pq.write_table(table, directory / "a.parquet", row_group_size=GROUP, use_dictionary=False)
    pq.write_table(table, directory / "large", row_group_size=ROWS, use_dictionary=False)
    return directory


def peak_of(path: Path, buffer: int | None, output_format: str, read_ahead_bytes: int) -> int:
    """Return the most bytes that Arrow held in a process that reads an epoch."""
    command = [sys.executable, "-c", READ, str(path), str(buffer), output_format, str(read_ahead_bytes)]
    rows, peak = map(int, subprocess.check_output(command).split())
    assert rows == ROWS
    return peak


@pytest.mark.parametrize("output_format", ["torch", "arrow"])
def test_two_shards_of_mixed_rows_are_in_memory_and_a_column_or_so_on_its_way(path, output_format):
    assert peak_of(path / "a.parquet", BUFFER, output_format, 1 << 30) < 2.3 * BUFFER * WIDTH + 2e6


@pytest.mark.parametrize("output_format", ["torch", "arrow"])
@pytest.mark.parametrize("groups", [4, 12])
def test_no_more_than_read_ahead_bytes_is_in_memory(path, groups, output_format):
    limit = groups * GROUP * WIDTH
    assert peak_of(path / "a.parquet", None, output_format, limit) < 1.1 * limit


@pytest.mark.parametrize("output_format", ["torch", "arrow"])
def test_a_row_group_that_is_larger_is_read_in_pieces_with_a_page_of_each_column_beside_them(path, output_format):
    limit = 16_000_000
    assert peak_of(path / "large", None, output_format, limit) < 1.1 * limit + COLUMNS * PAGE
