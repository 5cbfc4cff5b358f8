"""Read an epoch of a mixture and print its rows and the most bytes Arrow held: ``mixed_peak_job.py PATHS OPTIONS``.

The paths are those of the sources, which have equal weights; the options are those of a loader. Both are written as
Python writes them. The rows that are put together are in Arrow's memory, too.
"""

from __future__ import annotations

import ast
import sys
import time

import pyarrow as pa

from torch_dataloader_utils import MixedDataset, Source


def main() -> None:
    """Read the epoch."""
    paths, options = map(ast.literal_eval, sys.argv[1:])
    sources = {f"s{number}": Source(path) for number, path in enumerate(paths)}
    loader, _ = MixedDataset.create_dataloader(
        sources, dict.fromkeys(sources, 1.0), num_workers=0, batch_size=3000, **options
    )
    rows = 0
    for batch in loader:
        if not rows:
            time.sleep(0.3)  # until as much is read ahead as may be
        rows += len(batch["c0"])
    sys.stdout.write(f"{rows} {pa.default_memory_pool().max_memory()}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
