"""One rank of many opens real files, plans, delivers its first batch with worker processes, saves and loads a state."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from benchmarks.contenders.harness import report
from benchmarks.contenders.scale.stages import Stages
from torch_dataloader_utils import StructuredDataset

CALLS = 20
"""How many states are saved after the first one."""


def main(path: str, ranks: int, workers: int, group_rows: int) -> None:
    """Measure it. Each row group is a shard of its own, so that there are as many shards as there can be."""
    stages = Stages()
    loader, dataset = stages.run(
        "open",
        lambda: StructuredDataset.create_dataloader(
            path,
            batch_size=group_rows,
            num_workers=workers,
            shuffle=True,
            split_rows=group_rows,
            num_ranks=ranks,
            rank=0,
        ),
    )

    def plan() -> int:
        dataset.set_epoch(1)
        return len(loader)

    steps = stages.run("plan", plan)

    def first_batch() -> Any:
        iterator = iter(loader)
        next(iterator)
        return iterator

    iterator = stages.run("first_batch", first_batch)
    state = stages.run("first_state", loader.state_dict)
    seconds = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        state = loader.state_dict()
        seconds.append(time.perf_counter() - begin)
    del iterator
    text = json.dumps(state)
    stages.run("load", lambda: loader.load_state_dict(json.loads(text)))
    report(stages=stages.figures, steps=steps, state_s=statistics.median(seconds), state_bytes=len(text))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
