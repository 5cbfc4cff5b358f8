"""This library's loader over many files: construction, planning an epoch, and states late in an epoch."""

from __future__ import annotations

import json
import statistics
import time

from harness import own_memory, read_job, report

from torch_dataloader_utils import StructuredDataset

CALLS = 20

if __name__ == "__main__":
    job = read_job()
    memory = own_memory()
    began = time.perf_counter()
    loader, dataset = StructuredDataset.create_dataloader(
        job.path, batch_size=job.batch_size, num_workers=job.workers, shuffle=True
    )
    built = time.perf_counter()
    len(loader)  # the first epoch is planned
    planned = time.perf_counter()
    dataset.set_epoch(1)
    set_epoch = time.perf_counter()
    len(loader)  # planning may wait until it is needed: that belongs to set_epoch's cost
    set_epoch_and_plan = time.perf_counter()
    rows = 0
    total = len(loader)
    seconds = []
    state: dict[str, object] = {}
    for number, batch in enumerate(loader, start=1):
        rows += len(batch["id"])
        if number == total - 1:  # all splits but those of the last batch are complete
            for _ in range(CALLS):
                asked = time.perf_counter()
                state = loader.state_dict()
                seconds.append(time.perf_counter() - asked)
    ended = time.perf_counter()
    report(
        construction_s=built - began,
        first_plan_s=planned - built,
        set_epoch_s=set_epoch - planned,
        set_epoch_and_plan_s=set_epoch_and_plan - planned,
        epoch_s=ended - set_epoch_and_plan,
        state_dict_s=statistics.median(seconds),
        state_dict_first_s=seconds[0],
        state_bytes=len(json.dumps(state)),
        rows=rows,
        complete=True,
        **memory,
    )
