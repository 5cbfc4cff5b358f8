"""Throughput of the loader beside raw Arrow, as ratios within one run.

Run by ``make bench``. Contenders take turns, so that a machine that slows down slows both; medians and their ratio are
what to quote.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torch_dataloader_utils import StructuredDataset

COLUMNS = 22
ROW_GROUP_ROWS = 100_000


def write_numeric_table(directory: Path, rows: int) -> None:
    """Write `rows` rows of 22 numeric columns, snappy, in row groups of 100,000."""
    random = np.random.default_rng(0)
    columns = {f"c{number}": random.standard_normal(rows).astype(np.float32) for number in range(COLUMNS - 2)}
    columns |= {"label": random.integers(0, 2, rows), "user": random.integers(0, 1_000_000, rows)}
    pq.write_table(pa.table(columns), directory / "numeric.parquet", row_group_size=ROW_GROUP_ROWS)


def read_with_arrow(directory: Path) -> int:
    """Decode every row group, memory-mapped, and do nothing with it."""
    file = pq.ParquetFile(directory / "numeric.parquet", memory_map=True)
    return sum(file.read_row_group(number).num_rows for number in range(file.num_row_groups))


def read_with_loader(directory: Path, num_workers: int) -> int:
    """Deliver one epoch in batches of 1,024."""
    loader, _ = StructuredDataset.create_dataloader(directory, num_workers=num_workers)
    return sum(len(batch["label"]) for batch in loader)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_numeric_table(directory, arguments.rows)
        contenders: dict[str, Callable[[], int]] = {
            "raw Arrow": lambda: read_with_arrow(directory),
            "loader, in process": lambda: read_with_loader(directory, 0),
            "loader, 2 workers": lambda: read_with_loader(directory, 2),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(arguments.rounds):
            for name, read in contenders.items():
                began = time.perf_counter()
                assert read() == arguments.rows
                seconds[name].append(time.perf_counter() - began)
    base = statistics.median(seconds["raw Arrow"])
    print(f"{arguments.rows:,} rows, {COLUMNS} columns, batches of 1,024, median of {arguments.rounds}")
    for name, times in seconds.items():
        median = statistics.median(times)
        print(
            f"{name:20} {median:8.3f} s   {arguments.rows / median:14,.0f} rows/s   {base / median:6.3f} of raw Arrow"
        )


if __name__ == "__main__":
    main()
