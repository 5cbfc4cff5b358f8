"""How much of a dataset is in memory at once, by Arrow's own count."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS = 800_000
COLUMNS = 10
BUFFER = 200_000

READ = """
import sys
import pyarrow as pa
from torch_dataloader_utils import StructuredDataset

options = {"shuffle": True, "shuffle_buffer_size": int(sys.argv[2])} if sys.argv[2] != "None" else {}
loader, _ = StructuredDataset.create_dataloader(
    sys.argv[1], num_workers=0, batch_size=3000, output_format=sys.argv[3], **options
)
rows = sum(len(batch["c0"]) for batch in loader)
print(rows, pa.default_memory_pool().max_memory())
"""


@pytest.mark.parametrize("output_format", ["torch", "arrow"])
@pytest.mark.parametrize(("buffer", "unit"), [(BUFFER, BUFFER), (None, 10_000)], ids=["mixed", "in order"])
def test_no_more_than_what_is_read_and_what_the_last_batch_keeps_is_in_memory(tmp_path, buffer, unit, output_format):
    """Two shards of mixed rows, or two row groups, and a column or so on the way from one form to the other."""
    chance = np.random.default_rng(0)
    table = pa.table({f"c{number}": chance.random(ROWS) for number in range(COLUMNS)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10_000, use_dictionary=False)
    command = [sys.executable, "-c", READ, str(tmp_path), str(buffer), output_format]
    rows, peak = map(int, subprocess.check_output(command).split())
    assert rows == ROWS
    assert peak < 2.3 * unit * COLUMNS * 8 + 2e6
