"""Under Lightning, in one rank or several: train two epochs, then again from each of some checkpoints.

Its argument, JSON: ``data``; ``directory``, of checkpoints and reports; ``name``, of this run's report; ``options`` of
this job; ``checkpoints``, names to continue from, each in a trainer of its own, or null to train from the beginning.
A report has for each run the batches that this rank trained on, as pairs of the epoch and the row ids.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import pyarrow.compute as pc
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from torch_dataloader_utils import StructuredDataLoader, StructuredDataset
from torch_dataloader_utils.integrations.lightning import ResumableDataModuleMixin, ResumableLoader


class FailedStepError(Exception):
    """The failure of a step."""


class Model(lightning.LightningModule):
    """A model that keeps the rows it was trained on, in its checkpoints, too."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.options = options
        self.before: list[Any] = []
        self.batches: list[Any] = []

    def training_step(self, batch: Any, _number: int) -> torch.Tensor:
        """Train on a batch, or fail where the options say so."""
        if len(self.batches) == self.options.get("fails"):
            raise FailedStepError
        self.batches.append([self.current_epoch, batch["row"].tolist()])
        return self.layer(batch["score"].float().unsqueeze(1)).mean()

    def validation_step(self, batch: Any, _number: int) -> None:
        """Do nothing."""

    def on_train_start(self) -> None:
        """Exclude rows where the options say so."""
        if self.options.get("excludes") == "on_train_start":
            self.exclude()

    def on_train_epoch_start(self) -> None:
        """Exclude rows where the options say so."""
        if self.options.get("excludes") == "on_train_epoch_start" and self.current_epoch == 0:
            self.exclude()

    def exclude(self) -> None:
        """Exclude all rows of two steps of the first rank."""
        dataset = self.trainer.train_dataloader.dataset
        dataset.exclude([row for step in (1, 4) for row in dataset.rows_at(step, rank=0)])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer."""
        if self.options.get("estimates"):
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=1e-6)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what was trained."""
        checkpoint["batches"] = [*self.before, *self.batches]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load what was trained."""
        self.before = checkpoint["batches"]


class Data(lightning.LightningDataModule):
    """The loaders."""

    def __init__(self, data: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.path = data
        self.options = options

    def train_dataloader(self) -> Any:
        """Return the rows, to be saved."""
        return ResumableLoader(self.open())

    def open(self) -> StructuredDataLoader:
        """Return the rows, shuffled."""
        filters = pc.field("value") >= 100 if self.options.get("filtered") else None
        loader, _ = StructuredDataset.create_dataloader(
            self.path,
            batch_size=self.options["batch_size"],
            row_id_column="row",
            num_workers=self.options.get("workers", 0),
            shuffle=True,
            shuffle_buffer_size=60,
            filters=filters,
            uneven_ranks="allow" if self.options.get("filtered") else "drop",
        )
        return loader

    def val_dataloader(self) -> Any:
        """Return a few numbers, or the rows."""
        if self.options.get("validates_rows"):
            return ResumableLoader(self.open())
        return torch.utils.data.DataLoader(torch.arange(6), batch_size=2) if self.options.get("validates") else []


class MixedIn(ResumableDataModuleMixin, Data):
    """The same, by the mixin."""

    def train_dataloader(self) -> Any:
        """Return the rows."""
        return self.open()


def train(arguments: dict[str, Any], checkpoint: str | None) -> dict[str, Any]:
    """Train in a trainer of its own, and return the batches of this rank."""
    options, directory = arguments["options"], Path(arguments["directory"]) / "checkpoints"
    callbacks = []
    if checkpoint is None:
        each = ModelCheckpoint(directory, "step-{step:02d}", every_n_train_steps=1, save_top_k=-1)
        end = ModelCheckpoint(
            directory, "end-{step:02d}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=options.get("at_end")
        )
        callbacks = [each, end, OnExceptionCheckpoint(directory)]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        num_sanity_val_steps=0,
        accumulate_grad_batches=options.get("accumulated", 1),
        val_check_interval=options.get("validates", 1.0),
    )
    model = Model(options)
    path = None if checkpoint is None else str(directory / checkpoint)
    data = (MixedIn if options.get("mixed_in") else Data)(arguments["data"], options)
    with contextlib.suppress(FailedStepError):
        trainer.fit(model, datamodule=data, ckpt_path=path, weights_only=False)
    return {"before": model.before, "batches": model.batches}


def main() -> None:
    """Train, and report."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    arguments = json.loads(sys.argv[1])
    if "RANK" in os.environ:  # as torchrun starts them
        os.environ["TORCHELASTIC_RUN_ID"] = "test"
    found = {str(name): train(arguments, name) for name in arguments["checkpoints"] or [None]}
    report = Path(arguments["directory"]) / f"{arguments['name']}-{os.environ.get('RANK', '0')}.json"
    report.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
