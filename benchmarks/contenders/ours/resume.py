"""This library's loader, stopped within an epoch: what the first batch costs, by each way to come back to it.

`options` names the way: ``save`` iterates to the place and keeps a state beside the batch that comes next; ``fresh``
begins an epoch; ``resume`` loads the state; ``forward`` iterates to the place and throws all batches away.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from harness import own_memory, read_job, report

from torch_dataloader_utils import StructuredDataset


def sum_of(batch: dict[str, Any]) -> int:
    """Tell a batch from others."""
    return int(batch["id"].long().sum())


if __name__ == "__main__":
    job = read_job()
    memory = own_memory()
    way, kept = job.options["way"], Path(job.options["kept"])
    known = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    began = time.perf_counter()
    loader, _ = StructuredDataset.create_dataloader(job.path, batch_size=job.batch_size, num_workers=job.workers)
    built = time.perf_counter()
    if way == "resume":
        loader.load_state_dict(known["state"])
    loaded = time.perf_counter()
    skipped = int(len(loader) * job.options["share"]) if way in {"save", "forward"} else 0
    batches = iter(loader)
    for _ in range(skipped):
        next(batches)
    if way == "save":
        known = {"state": loader.state_dict()}
    batch = next(batches)
    first = time.perf_counter()
    if way == "save":
        kept.write_text(json.dumps(known | {"next": sum_of(batch)}), encoding="utf-8")
    assert way == "fresh" or sum_of(batch) == json.loads(kept.read_text(encoding="utf-8"))["next"]
    report(
        construction_s=built - began,
        load_state_s=loaded - built,
        first_batch_s=first - began,
        rows=len(batch["id"]),
        complete=False,
        **memory,
    )
