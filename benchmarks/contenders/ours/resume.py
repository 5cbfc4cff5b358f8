"""This library's loader, stopped within an epoch: the seconds to the first batch, by each way to return there.

`options` names the way: ``save`` iterates to a position and saves the state and the sum of the next batch; ``fresh``
begins an epoch; ``resume`` loads the state; ``forward`` iterates to the position and drops the batches before it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from harness import own_memory, read_job, report

from torch_dataloader_utils import StructuredDataset


def sum_of(batch: dict[str, Any]) -> int:
    """Return what identifies a batch."""
    return int(batch["id"].long().sum())


if __name__ == "__main__":
    job = read_job()
    memory = own_memory()
    way, saved = job.options["way"], Path(job.scratch, job.options["saved"])
    checkpoint = json.loads(saved.read_text(encoding="utf-8")) if way in {"resume", "forward"} else {}
    began = time.perf_counter()
    loader, _ = StructuredDataset.create_dataloader(job.path, batch_size=job.batch_size, num_workers=job.workers)
    built = time.perf_counter()
    if way == "resume":
        loader.load_state_dict(checkpoint["state"])
    loaded = time.perf_counter()
    skipped = int(len(loader) * job.options["share"]) if way in {"save", "forward"} else 0
    batches = iter(loader)
    for _ in range(skipped):
        next(batches)
    if way == "save":
        checkpoint = {"state": loader.state_dict()}
    batch = next(batches)
    first = time.perf_counter()
    if way == "save":
        saved.parent.mkdir(parents=True, exist_ok=True)
        saved.write_text(json.dumps(checkpoint | {"next": sum_of(batch)}), encoding="utf-8")
    elif way != "fresh":
        assert sum_of(batch) == checkpoint["next"]
    report(
        construction_s=built - began,
        load_state_s=loaded - built,
        first_batch_s=first - began,
        rows=len(batch["id"]),
        complete=False,
        **memory,
    )
