"""Read epochs in a process of its own, and print as JSON what was delivered and what it took.

Its argument, JSON: ``path``, loader ``options``, a number of ``epochs``, and ``rows``, the ids that the dataset has.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
from jobs.processes import own_children

from torch_dataloader_utils import StructuredDataset

MB = 1 << 20

MEASURED_SEC = 0.02
"""Memory is measured so often: it takes as long as many small batches."""


def blob_of(row: int, size: int = MB) -> bytes:
    """Return the bytes of a row: nothing compresses them, and no two rows have the same."""
    return hashlib.shake_128(row.to_bytes(8, "little")).digest(size)


def resident(pid: int) -> int:
    """Return the bytes of a process' own memory that are resident."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def open_files() -> list[str]:
    """Return what this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - it is /proc of this process
        with contextlib.suppress(FileNotFoundError):  # the one that listed them
            found.append(os.readlink(f"/proc/self/fd/{number}"))  # noqa: PTH115
    return found


def present() -> dict[str, int]:
    """Return what this process and its workers hold; of descriptors, those of shared memory apart."""
    processes = [os.getpid(), *own_children()]
    blocks = [file.startswith("/memfd:torch_dataloader_utils") for file in open_files()]
    return {
        "resident": sum(map(resident, processes)),
        "processes": len(processes),
        "threads": threading.active_count(),
        "descriptors": len(blocks) - sum(blocks),
        "blocks": sum(blocks),
    }


def delivered(loader: Any, rows: int) -> dict[str, int]:
    """Deliver an epoch, and compare each row."""
    seen: set[int] = set()
    repeated = corrupted = peak = 0
    measured = 0.0
    for batch in loader:
        ids = [int(row) for row in batch["row"]]
        repeated += len(seen.intersection(ids))
        seen.update(ids)
        if "blob" in batch:
            corrupted += sum(blob != blob_of(row) for row, blob in zip(ids, batch["blob"], strict=True))
        if time.monotonic() - measured > MEASURED_SEC:
            peak = max(peak, present()["resident"])
            measured = time.monotonic()
    return {"lost": rows - len(seen), "repeated": repeated, "corrupted": corrupted, "peak": peak}


def main() -> None:
    """Read all epochs."""
    arguments = json.loads(sys.argv[1])
    at_start = present()
    began = time.monotonic()
    loader, _ = StructuredDataset.create_dataloader(arguments["path"], row_id_column="row", **arguments["options"])
    opened = time.monotonic() - began
    epochs = []
    for epoch in range(arguments["epochs"]):
        loader.set_epoch(epoch)
        began = time.monotonic()
        found = delivered(loader, arguments["rows"])
        epochs.append({**found, **present(), "seconds": time.monotonic() - began})
    arrow = pa.default_memory_pool().max_memory()
    sys.stdout.write(json.dumps({"start": at_start, "opened": opened, "epochs": epochs, "arrow": arrow}) + "\n")


if __name__ == "__main__":
    main()
