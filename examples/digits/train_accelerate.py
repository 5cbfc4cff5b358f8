"""The training of `train.py` under Hugging Face Accelerate, which saves and loads the states of all ranks.

torchrun --nproc-per-node 2 examples/digits/train_accelerate.py --data /tmp/digits --run-dir /tmp/digits/accelerate
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import digits
import torch
from accelerate import Accelerator

from torch_dataloader_utils import StructuredDataLoader
from torch_dataloader_utils.integrations.accelerate import prepare_loader


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints, from the oldest to the newest."""
    return sorted(run_dir.glob("step-*"))


def save(accelerator: Accelerator, run_dir: Path, step: int) -> None:
    """Save a checkpoint, which gets its name when it is complete, and delete those before. All ranks call it."""
    accelerator.save_state(str(run_dir / "unfinished"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        earlier = checkpoints(run_dir)
        (run_dir / "unfinished").rename(run_dir / f"step-{step:06d}")
        for path in earlier:
            shutil.rmtree(path)
    accelerator.wait_for_everyone()


def validate(accelerator: Accelerator, model: torch.nn.Module, loader: StructuredDataLoader) -> float:
    """Return the accuracy over the images of all ranks, which may have different numbers of batches."""
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for batch in loader:
            sums += digits.loss_and_counts(accelerator.unwrap_model(model), batch)[1]
    return digits.means(accelerator.reduce(sums))["accuracy"]


def train(arguments: argparse.Namespace) -> None:
    """Train from the newest checkpoint, or from the beginning, to the end of the last epoch."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = digits.Model()
    model, optimizer = accelerator.prepare(model, digits.make_optimizer(model))
    loader = prepare_loader(accelerator, digits.training_loader(arguments.data, arguments.batch_size)[0])
    validation = digits.validation_loader(arguments.data, arguments.batch_size)

    step = 0
    if found := checkpoints(arguments.run_dir):
        accelerator.load_state(str(found[-1]))
        step = int(found[-1].name.removeprefix("step-"))
        accelerator.print(f"going on with epoch {loader.epoch} after step {step} of the training", flush=True)
    while (epoch := loader.epoch) < arguments.epochs:
        for batch in loader:
            optimizer.zero_grad()
            loss, _ = digits.loss_and_counts(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if step % arguments.checkpoint_every == 0:
                save(accelerator, arguments.run_dir, step)
                accelerator.print(f"epoch {epoch}, step {step} of the training: loss {loss.item():.3f}", flush=True)
        accuracy = validate(accelerator, model, validation)
        accelerator.print(f"epoch {epoch}: validation accuracy {accuracy:.3f}", flush=True)
    # Before the process group: a model that is freed after it may wait for gloo's threads without end (torch 2.13).
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()


def main() -> None:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="what make_data.py wrote")
    parser.add_argument("--run-dir", type=Path, required=True, help="where checkpoints are kept")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--checkpoint-every", type=int, default=8, metavar="STEPS")
    arguments = parser.parse_args()
    arguments.run_dir.mkdir(parents=True, exist_ok=True)
    train(arguments)


if __name__ == "__main__":
    main()
