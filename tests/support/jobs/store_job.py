"""In several ranks: train an epoch from the newest checkpoint of a store, until it ends or the job is killed.

Its argument, JSON: ``data``; ``url`` of the store and its ``storage_options``; ``directory``, for marks and the
result; loader ``options``; ``every``, the steps between two checkpoints; ``async``, whether they are asynchronous;
``pause``, the seconds that a step takes; ``steps``, after which the training stops, or null; ``sharded``, by FSDP2.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jobs.groups import leave_group
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from torch_dataloader_utils import CheckpointStore, StructuredDataset, UnevenRanksWarning

NUM_ROWS = 444
EPOCH = 3


class Counting(torch.nn.Module):
    """A model that says which rows it was trained on: each row adds 1 and its score to weights of its own.

    It also has a layer that every batch changes, in the order of the batches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.times = torch.nn.Parameter(torch.zeros(NUM_ROWS, dtype=torch.float64))
        self.scores = torch.nn.Parameter(torch.zeros(NUM_ROWS, dtype=torch.float64))
        self.layer = torch.nn.Linear(1, 4, dtype=torch.float64)
        torch.nn.init.constant_(self.layer.weight, 0.5)
        torch.nn.init.constant_(self.layer.bias, 0.25)

    def forward(self, rows: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return a loss. Its gradient by the weights of a row is what the row adds, less the sign."""
        added = self.times[rows].sum() + (self.scores[rows] * scores).sum()
        return 1e-3 * self.layer(scores.unsqueeze(1)).square().sum() - added

    def optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer with a state, which leaves the sums as they are."""
        groups = [{"params": [self.times, self.scores], "lr": 1.0, "momentum": 0.0}]
        groups.append({"params": self.layer.parameters(), "lr": 1e-3, "momentum": 0.9})
        return torch.optim.SGD(groups)


def wrapped(model: Counting, *, sharded: bool) -> torch.nn.Module:
    """Return the model under DDP, or sharded in place."""
    if not sharded:
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - not in old releases of torch
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - the same

    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def inputs_of(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows and scores of a batch; none where this rank has no batch left."""
    if batch is None:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)
    return batch["row"], batch["score"]


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
    directory = Path(arguments["directory"])
    counting = Counting()
    model = wrapped(counting, sharded=arguments.get("sharded", False))
    optimizer = counting.optimizer()
    loader, dataset = StructuredDataset.create_dataloader(
        arguments["data"], batch_size=8, row_id_column="row", **arguments["options"]
    )
    store = CheckpointStore(arguments["url"], keep_last=2, storage_options=arguments["storage_options"])
    found = store.restore(model=model, optimizer=optimizer, loader=loader)
    step = found.step if found else 0
    dataset.set_epoch(EPOCH)
    batches = iter(loader)
    (directory / f"begun-{dist.get_rank()}").touch()
    while step != arguments.get("steps") and someone_has(batch := next(batches, None)):
        optimizer.zero_grad()
        (model(*inputs_of(batch)) * dist.get_world_size()).backward()  # the mean over ranks becomes their sum
        optimizer.step()
        time.sleep(arguments["pause"])
        step += 1
        if step % arguments["every"] == 0:
            store.save(step, model=model, optimizer=optimizer, loader=loader, async_=arguments["async"])
    store.wait()
    if found is None or found.step != step:
        store.save(step, model=model, optimizer=optimizer, loader=loader)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save({"step": step, "weights": weights}, directory / "result.pt")
    leave_group()


if __name__ == "__main__":
    main()
