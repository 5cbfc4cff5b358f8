"""In several ranks: train an epoch with the guide's loader and torchtitan's checkpoints, from the newest one on.

Its argument, JSON: ``data``; ``directory``, of the checkpoints; ``page``, the guide; ``sharing``, the processes that
have the same data-parallel rank; ``die``, the step of this run at which all ranks kill themselves, or null; ``mode`` of
torchtitan's checkpoints.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jobs.groups import leave_group
from jobs.pages import code_of
from torchtitan.components.checkpoint import CheckpointManager

EVERY = 3


class Trained:
    """The rows that all data-parallel ranks have trained, which torchtitan saves with the model."""

    def __init__(self, sharing: int) -> None:
        self.runs: list[list[list[int]]] = []
        self.rows: list[int] = []
        self._sharing = sharing

    def state_dict(self) -> dict[str, str]:
        """Return the rows as text."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self.rows)
        return {"runs": json.dumps([*self.runs, every[:: self._sharing]])}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Load the rows of the runs before."""
        self.runs = json.loads(state["runs"])


def main() -> None:
    """Train."""
    arguments = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    rank, sharing = dist.get_rank(), arguments["sharing"]
    guide: dict[str, Any] = {"__name__": __name__}
    exec(code_of(arguments["page"]), guide)  # noqa: S102
    config = guide["Tokens"].Config(dataset_path=arguments["data"], options={"shuffle_buffer_size": 60})
    ranks = dist.get_world_size() // sharing
    loader = config.build(dp_world_size=ranks, dp_rank=rank // sharing, tokenizer=None, seq_len=4, local_batch_size=8)
    loader.load_state_dict({})  # valid, as torchtitan wants it

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    trained = Trained(sharing)
    checkpoints = CheckpointManager.Config(
        enable=True, folder="checkpoints", interval=EVERY, async_mode=arguments["mode"], keep_latest_k=2
    ).build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizer,
        lr_schedulers=torch.optim.lr_scheduler.ConstantLR(optimizer),
        states={"train_state": trained},
        sd_adapter=None,
        base_folder=arguments["directory"],
    )
    checkpoints.load()
    first = max([int(path.name[5:]) for path in Path(arguments["directory"]).glob("checkpoints/step-*")], default=0)
    for step, (inputs, _labels) in enumerate(loader, start=1):
        if loader.dataset.epoch == 1:
            break
        model(inputs["input"].float()).mean().backward()
        optimizer.step()
        trained.rows += inputs["input"][:, 0].tolist()
        checkpoints.save(first + step)
        if step == arguments["die"]:
            checkpoints.maybe_wait_for_saving()
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.maybe_wait_for_saving()
    runs = trained.state_dict()["runs"]
    if rank == 0:
        Path(arguments["directory"], "runs.json").write_text(runs)
    checkpoints.close()
    leave_group()


if __name__ == "__main__":
    main()
