"""In two ranks: rank 1 cannot tell its state. Where states of all ranks meet, both raise, and communicate on.

Its argument, JSON: ``data``; ``url`` of a store; ``report``, the file to which each rank appends its own number.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from jobs.groups import leave_group
from torch.utils.data import DataLoader

from torch_dataloader_utils import CheckpointStore, StructuredDataset
from torch_dataloader_utils.distributed import CheckpointEntry, gather_states

LIMIT_SEC = 60
"""A rank that waits longer for the other ends with an error of torch's."""


def places(url: str) -> dict[str, Callable[[Any], Any]]:
    """Return where states of all ranks meet."""
    store = CheckpointStore(url)
    return {
        "gather_states": gather_states,
        "CheckpointEntry": lambda loader: CheckpointEntry(loader).state_dict(),
        "elastic CheckpointEntry": lambda loader: CheckpointEntry(loader, elastic=True).state_dict(),
        "CheckpointStore": lambda loader: store.save(1, loader=loader),
    }


def main() -> None:
    """Meet in each place."""
    arguments = json.loads(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_SEC))
    loader, dataset = StructuredDataset.create_dataloader(arguments["data"], batch_size=8, num_workers=0)
    if dist.get_rank() == 1:
        next(iter(DataLoader(dataset, batch_size=None, num_workers=1)))
    found = {}
    for name, meet in places(arguments["url"]).items():
        try:
            meet(loader)
        except Exception as error:  # noqa: BLE001 - the report tells which
            found[name] = f"{type(error).__name__}: {error}"
        numbers = [None, None]
        dist.all_gather_object(numbers, dist.get_rank())
        assert numbers == [0, 1]
    loader.set_epoch(1)
    assert len(gather_states(loader)) == 2
    Path(f"{arguments['report']}-{dist.get_rank()}").write_text(json.dumps(found))
    leave_group()


if __name__ == "__main__":
    main()
