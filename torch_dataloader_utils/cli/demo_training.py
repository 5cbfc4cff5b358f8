"""The training of ``tdu demo``: a process of its own, which is killed and started again.

    python -m torch_dataloader_utils.cli.demo_training DIRECTORY

Each step appends the ids of its rows to a file, so that the rows can be counted whatever happens to the process.
"""

from __future__ import annotations

import struct
import sys
import time
from pathlib import Path
from typing import Any

import torch

from torch_dataloader_utils.dataset.structured import StructuredDataset

OPTIONS: dict[str, Any] = {"batch_size": 256, "num_workers": 2, "shuffle": True, "shuffle_buffer_size": 2_000}
"""The loader's settings."""

CHECKPOINT_EVERY = 20
SECONDS_PER_STEP = 0.005
STEP = struct.Struct("<qq")
"""How a step begins in the file of steps: its number, and the number of the row ids that follow."""


def train(directory: Path, wait_at: int) -> None:
    """Train for one epoch, from the checkpoint if there is one; wait without end at a step, to be killed at the latest.

    The step is -1 for a training that nobody kills.
    """
    loader, _ = StructuredDataset.create_dataloader(directory / "data", **OPTIONS)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step, saved = 0, directory / "checkpoint.pt"
    if saved.exists():
        checkpoint = torch.load(saved, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loader.load_state_dict(checkpoint["loader"])
        step = checkpoint["step"]
    with (directory / "steps").open("ab") as steps:
        for batch in loader:
            features = torch.stack([batch["x"], batch["y"]], dim=1)
            loss = torch.nn.functional.mse_loss(model(features)[:, 0], batch["target"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            time.sleep(SECONDS_PER_STEP)  # a model that takes its time
            steps.write(STEP.pack(step, len(batch["id"])) + batch["id"].numpy().tobytes())
            steps.flush()
            step += 1
            if step % CHECKPOINT_EVERY == 0:
                parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
                states = {name: part.state_dict() for name, part in parts.items()}
                torch.save({**states, "step": step}, directory / "checkpoint.new")
                (directory / "checkpoint.new").replace(saved)
            while step == wait_at:
                time.sleep(1)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
