"""In several ranks: train on a mixture until its epochs end or the job is killed, from the newest checkpoint.

Its argument, JSON: ``data``, a directory with a directory for each source; ``directory``, where the checkpoint is;
``weights``; loader ``options``; ``every``, the steps between two checkpoints; ``pause``, the seconds that a step takes;
``epochs``, after which the training ends; ``hold``, the steps after which it waits to be killed, or null. A checkpoint
holds all ranks' states and, instead of a model, what was trained: for each plan, of an epoch or of the rest that an
elastic load left of it, the batches of each rank.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jobs.groups import leave_group

from torch_dataloader_utils import MixedDataset, Source
from torch_dataloader_utils.distributed import gather_states, load_gathered

HOLD_SEC = 600


class Training:
    """What was trained: a list of plans, each with its epoch, its weights and the batches of each rank."""

    def __init__(self, path: Path, run: list[Any], weights: dict[str, float]) -> None:
        self._path, self._run, self._weights = path, run, weights
        self.checkpoint: dict[str, Any] | None = torch.load(path, weights_only=True) if path.exists() else None
        self._plans: list[dict[str, Any]] = [] if self.checkpoint is None else self.checkpoint["plans"]
        self._own: list[list[list[int]]] = []

    def begin(self, epoch: int) -> None:
        """Begin an epoch, or go on with it."""
        before = self._plans[-1] if self._plans else None
        if before is None or (before["epoch"], before["run"]) != (epoch, self._run):
            ranks: list[Any] = [[] for _ in range(dist.get_world_size())]
            self._plans.append({"epoch": epoch, "run": self._run, "weights": self._weights, "ranks": ranks})
        self._own = self._plans[-1]["ranks"][dist.get_rank()]

    def add(self, batch: dict[str, torch.Tensor]) -> None:
        """Note a batch."""
        self._own.append(list(zip(batch["source"].tolist(), batch["x"].tolist(), strict=True)))

    def commit(self, loader: Any, *, ended: bool) -> None:
        """Write one file with everything, at once. All ranks call it together."""
        states = gather_states(loader)
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, self._own)
        self._plans[-1]["ranks"] = ranks
        self._own = ranks[dist.get_rank()]
        if dist.get_rank() == 0:
            unfinished = self._path.with_suffix(".unfinished")
            torch.save({"loaders": states, "plans": self._plans, "ended": ended}, unfinished)
            unfinished.replace(self._path)


def main() -> None:
    """Train from the newest checkpoint on."""
    arguments = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    path = Path(arguments["directory"]) / "checkpoint.pt"
    weights, options = arguments["weights"], arguments["options"]
    sources = {name: Source(Path(arguments["data"]) / name) for name in weights}
    loader, _ = MixedDataset.create_dataloader(sources, weights, source_column="source", **options)
    training = Training(path, [dist.get_world_size(), options["num_workers"], list(weights.values())], weights)
    first = made = 0
    if training.checkpoint is not None:
        load_gathered(loader, training.checkpoint["loaders"])
        first = training.checkpoint["loaders"][0]["epoch"]
    for epoch in range(first, arguments["epochs"]):
        loader.set_epoch(epoch)
        training.begin(epoch)
        for step, batch in enumerate(loader, start=1):
            training.add(batch)
            time.sleep(arguments["pause"])
            made += 1
            if made == arguments["hold"]:
                (path.parent / f"held-{dist.get_rank()}").touch()
                time.sleep(HOLD_SEC)
            if step % arguments["every"] == 0:
                training.commit(loader, ended=False)
        training.commit(loader, ended=epoch == arguments["epochs"] - 1)
    leave_group()


if __name__ == "__main__":
    main()
