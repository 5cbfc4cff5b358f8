"""Read an epoch and print its rows and the most bytes that Arrow held: ``peak_job.py PATH OPTIONS``.

Its options are those of a loader, as Python writes a dictionary; ``sum_at_least`` filters by the sum of all columns.
"""

from __future__ import annotations

import ast
import functools
import operator
import sys
import time

import pyarrow as pa
import pyarrow.compute as pc
import ranged  # noqa: F401 - registers the storage

from torch_dataloader_utils import StructuredDataset


def main() -> None:
    """Read the epoch."""
    path, options = sys.argv[1], ast.literal_eval(sys.argv[2])
    if "sum_at_least" in options:
        fields = [pc.field(f"c{number}") for number in range(10)]
        options["filters"] = functools.reduce(operator.add, fields) >= options.pop("sum_at_least")
    loader, _ = StructuredDataset.create_dataloader(path, num_workers=0, batch_size=3000, **options)
    rows = 0
    for batch in loader:
        if not rows:
            time.sleep(0.3)  # until as much is read ahead as may be
        rows += len(batch["c0"])
    sys.stdout.write(f"{rows} {pa.default_memory_pool().max_memory()}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
