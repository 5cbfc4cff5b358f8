"""Train on handwritten digits on several ranks, with DDP. Kill it at any moment and start it again: it goes on exactly.

    python examples/digits/make_data.py /tmp/digits
    torchrun --nproc-per-node 2 examples/digits/train.py --data /tmp/digits --run-dir /tmp/digits/run

Two places make the training resumable, each marked with "Resume".
"""

from __future__ import annotations

import argparse
import gc
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import digits
import torch
import torch.distributed as dist

# DDP imports this module. Imported after `init_process_group`, its defaults would keep the process group alive.
import torch.distributed.nn.functional
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torch_dataloader_utils import StructuredDataLoader
from torch_dataloader_utils.distributed import gather_states, own_state, require_same_plan


def over_ranks(sums: Tensor) -> Tensor:
    """Return the sums over all ranks. All ranks call it together."""
    total = sums.clone()
    dist.all_reduce(total)
    return total


@dataclass
class Training:
    """Everything a checkpoint holds."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    loader: StructuredDataLoader
    epoch: int = 0
    step: int = 0  # in this epoch
    sums: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))  # of this rank, in this epoch
    history: list[dict[str, Any]] = field(default_factory=list)  # the metrics of each epoch

    def save(self, path: Path) -> None:
        """Resume, 1 of 2: save the model and all ranks' loader states in one file. All ranks call it."""
        states, sums = gather_states(self.loader), over_ranks(self.sums)
        if dist.get_rank() != 0:
            return
        checkpoint = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loaders": states,
            "sums": sums,
            "history": self.history,
        }
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)  # atomic: a reader finds the old checkpoint or the new one, complete

    def resume(self, path: Path) -> None:
        """Resume, 2 of 2: load what `save` wrote, if it did. The next `iter(loader)` continues from there."""
        if not path.exists():
            return
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        state = own_state(checkpoint["loaders"])
        self.model.module.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.loader.load_state_dict(state)
        self.epoch, self.step, self.history = state["epoch"], state["batches_delivered"], checkpoint["history"]
        if dist.get_rank() == 0:  # the sums of all ranks go on at one
            self.sums = checkpoint["sums"]
            print(f"going on with epoch {self.epoch} after step {self.step}", flush=True)

    def learn(self, batch: digits.Batch) -> None:
        """Make one step."""
        self.optimizer.zero_grad()
        loss, sums = digits.loss_and_counts(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch declares no types for it
        self.optimizer.step()
        self.sums += sums
        self.step += 1


def validate(model: DistributedDataParallel, loader: StructuredDataLoader) -> dict[str, float]:
    """Return the metrics over the images of all ranks, which may have different numbers of batches."""
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for batch in loader:
            sums += digits.loss_and_counts(model.module, batch)[1]
    return digits.means(over_ranks(sums))


def train_epoch(training: Training, path: Path, checkpoint_every: int) -> None:
    """Train the rest of the epoch."""
    for batch in training.loader:
        training.learn(batch)
        if training.step % checkpoint_every == 0:
            training.save(path)
            metrics = digits.means(over_ranks(training.sums))
            if dist.get_rank() == 0:
                place = f"epoch {training.epoch}, step {training.step} of {len(training.loader)}"
                print(f"{place}: loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.3f}", flush=True)


def end_epoch(training: Training, validation: StructuredDataLoader) -> None:
    """Report the epoch that has ended, and begin the next one."""
    trained, validated = digits.means(over_ranks(training.sums)), validate(training.model, validation)
    training.history.append({"training": trained, "validation": validated})
    if dist.get_rank() == 0:
        print(f"epoch {training.epoch}: validation accuracy {validated['accuracy']:.3f}", flush=True)
    training.epoch, training.step = training.epoch + 1, 0
    training.sums.zero_()
    training.loader.set_epoch(training.epoch)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="what make_data.py wrote")
    parser.add_argument("--run-dir", type=Path, required=True, help="where the checkpoint is kept")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--checkpoint-every", type=int, default=8, metavar="STEPS")
    return parser.parse_args()


def train(arguments: argparse.Namespace) -> None:
    """Train from the newest checkpoint, or from the beginning, to the end of the last epoch."""
    torch.manual_seed(0)
    model = DistributedDataParallel(digits.Model())
    loader, dataset = digits.training_loader(arguments.data, arguments.batch_size)
    validation = digits.validation_loader(arguments.data, arguments.batch_size)
    path = arguments.run_dir / "checkpoint.pt"

    training = Training(model, digits.make_optimizer(model), loader)
    training.resume(path)
    require_same_plan(dataset)  # all ranks see the same files and have the same options
    while training.epoch < arguments.epochs:
        train_epoch(training, path, arguments.checkpoint_every)
        end_epoch(training, validation)
        training.save(path)


def main() -> None:
    """Join the other ranks, train, and leave."""
    arguments = parse_arguments()
    arguments.run_dir.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    train(arguments)
    gc.collect()  # DDP is in a reference cycle and holds the process group, whose threads would not end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
