"""The training of `train.py` under Lightning, whose checkpoints hold the states of all ranks.

torchrun --nproc-per-node 2 examples/digits/train_lightning.py --data /tmp/digits --run-dir /tmp/digits/lightning
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import digits
import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from torch_dataloader_utils import StructuredDataLoader
from torch_dataloader_utils.integrations.lightning import ResumableLoader


class Classifier(lightning.LightningModule):
    """The model, and what it learns from."""

    def __init__(self) -> None:
        super().__init__()
        self.model = digits.Model()

    def training_step(self, batch: digits.Batch, _number: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss, _ = digits.loss_and_counts(self.model, batch)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Count from 0."""
        self.sums = torch.zeros(3, dtype=torch.float64)

    def validation_step(self, batch: digits.Batch, _number: int) -> None:
        """Count what is classified right."""
        self.sums += digits.loss_and_counts(self.model, batch)[1]

    def on_validation_epoch_end(self) -> None:
        """Report the accuracy over the images of all ranks."""
        accuracy = digits.means(self.trainer.strategy.reduce(self.sums, reduce_op="sum"))["accuracy"]
        self.print(f"epoch {self.current_epoch}: validation accuracy {accuracy:.3f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return digits.make_optimizer(self.model)


class Data(lightning.LightningDataModule):
    """The loaders, which Lightning asks for when the ranks have joined."""

    def __init__(self, data: Path, batch_size: int) -> None:
        super().__init__()
        self.data, self.batch_size = data, batch_size

    def train_dataloader(self) -> ResumableLoader:
        """Return the images to train on."""
        return ResumableLoader(digits.training_loader(self.data, self.batch_size)[0])

    def val_dataloader(self) -> StructuredDataLoader:
        """Return the images to validate with."""
        return digits.validation_loader(self.data, self.batch_size)


def train(arguments: argparse.Namespace) -> None:
    """Train from the newest checkpoint, or from the beginning, to the end of the last epoch."""
    lightning.seed_everything(0, verbose=False)
    checkpoint = ModelCheckpoint(
        arguments.run_dir, every_n_train_steps=arguments.checkpoint_every, save_top_k=0, save_last=True
    )
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        max_epochs=arguments.epochs,
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
        callbacks=[checkpoint],
    )
    newest = arguments.run_dir / "last.ckpt"
    data = Data(arguments.data, arguments.batch_size)
    trainer.fit(Classifier(), datamodule=data, ckpt_path=newest if newest.exists() else None)


def main() -> None:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="what make_data.py wrote")
    parser.add_argument("--run-dir", type=Path, required=True, help="where checkpoints are kept")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--checkpoint-every", type=int, default=8, metavar="STEPS")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
