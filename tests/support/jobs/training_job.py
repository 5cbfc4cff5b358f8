"""Under torchrun: train a small model on a grid, under any number of ranks that divides it, from a checkpoint or not.

Its argument, JSON: ``data``; ``directory``; ``name``, of this run's report; ``load``, a checkpoint or null;
``save_at``, a step after which to save one and go on, or null; ``num_workers``; ``mixed``, whether each directory in
``data`` is a source.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from jobs.groups import leave_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_dataloader_utils import MixedDataset, Source, StructuredDataLoader, StructuredDataset
from torch_dataloader_utils.distributed import gather_states

GLOBAL_BATCH = 32


def main() -> None:
    """Train an epoch and write the losses."""
    arguments = json.loads(sys.argv[1])
    directory = Path(arguments["directory"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.02)
    options: dict[str, Any] = {
        "batch_size": GLOBAL_BATCH // dist.get_world_size(),
        "shuffle": True,
        "shuffle_buffer_size": 60,
        "uneven_ranks": "drop",
        "virtual_ranks": 4,
        "virtual_workers": 2,
        "num_workers": arguments["num_workers"],
    }
    loader: StructuredDataLoader
    if arguments["mixed"]:
        sources = {path.name: Source(path, columns=["score"]) for path in sorted(Path(arguments["data"]).iterdir())}
        weights = dict(zip(sources, (0.6, 0.25, 0.15), strict=True))
        loader, _ = MixedDataset.create_dataloader(sources, weights, rows_per_epoch=840, **options)
    else:
        loader, _ = StructuredDataset.create_dataloader(arguments["data"], columns=["score"], **options)
    if arguments["load"] is not None:
        checkpoint = torch.load(directory / arguments["load"], weights_only=True)
        layers.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loader.load_state_dict(checkpoint["loaders"])
    losses = []
    for step, batch in enumerate(loader, start=1):
        x = batch["score"].unsqueeze(1) / 100
        loss = (model(x) - torch.sin(5 * x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if step == arguments["save_at"]:
            states = gather_states(loader)
            checkpoint = {"model": layers.state_dict(), "optimizer": optimizer.state_dict(), "loaders": states}
            if dist.get_rank() == 0:
                torch.save(checkpoint, directory / "checkpoint.pt")
            dist.barrier()
    if dist.get_rank() == 0:
        (directory / f"{arguments['name']}.json").write_text(json.dumps(losses))
    dist.barrier()
    del model
    leave_group()


if __name__ == "__main__":
    main()
