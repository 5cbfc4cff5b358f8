"""In several ranks: train until the epoch ends or the job is killed, from the newest checkpoint.

Its argument, JSON: ``data``; ``directory``, where the checkpoint is; loader ``options``; ``every``, the steps between
two checkpoints; ``pause``, the seconds that a step takes. A checkpoint holds all ranks' states and, instead of a model,
the batches that each rank has trained on.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch
import torch.distributed as dist
from jobs.groups import leave_group

from torch_dataloader_utils import StructuredDataLoader, StructuredDataset, UnevenRanksWarning
from torch_dataloader_utils.distributed import gather_states, own_state, require_same_plan


def commit(path: Path, loader: StructuredDataLoader, trained: list[list[int]], *, ended: bool) -> None:
    """Write one file with everything, at once. All ranks call it together."""
    states = gather_states(loader)
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, trained)
    if dist.get_rank() == 0:
        unfinished = path.with_suffix(".unfinished")
        torch.save({"loaders": states, "trained": everything, "ended": ended}, unfinished)
        unfinished.replace(path)


def someone_has(batch: object) -> bool:
    """Whether any rank still has a batch."""
    have = torch.tensor(int(batch is not None))
    dist.all_reduce(have, op=dist.ReduceOp.MAX)
    return bool(have)


def main() -> None:
    """Train from the newest checkpoint on."""
    arguments = json.loads(sys.argv[1])
    warnings.simplefilter("ignore", UnevenRanksWarning)
    dist.init_process_group("gloo")
    path = Path(arguments["directory"]) / "checkpoint.pt"
    options = dict(arguments["options"])
    if "least" in options:
        options["filters"] = pc.field("value") >= options.pop("least")
    loader, dataset = StructuredDataset.create_dataloader(
        arguments["data"], batch_size=8, row_id_column="row", **options
    )
    trained: list[list[int]] = []
    if path.exists():
        checkpoint = torch.load(path, weights_only=True)
        loader.load_state_dict(own_state(checkpoint["loaders"]))
        trained = checkpoint["trained"][dist.get_rank()]
    dataset.set_epoch(arguments["epoch"])
    require_same_plan(dataset)
    batches, step = iter(loader), 0
    batch = next(batches, None)
    (path.parent / f"begun-{dist.get_rank()}").touch()
    while someone_has(batch):
        if batch is not None:
            trained.append(batch["row"].tolist())
            time.sleep(arguments["pause"])
        step += 1
        if step % arguments["every"] == 0:
            commit(path, loader, trained, ended=False)
        batch = next(batches, None)
    commit(path, loader, trained, ended=True)
    leave_group()


if __name__ == "__main__":
    main()
