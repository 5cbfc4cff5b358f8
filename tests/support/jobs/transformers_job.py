"""Under Transformers' Trainer, in one rank or several: train, or go on from a checkpoint, and die where it is told to.

Its argument, JSON: ``data``; ``directory``, of checkpoints and reports; ``options`` of this job; ``runs``, each in a
trainer of its own: a name, and null, true for the last checkpoint, or a checkpoint's name. Each rank writes a line for
each batch before it trains on it: the steps that were made before, the epoch, and the row ids. It reports the end, too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from torch_dataloader_utils import StructuredDataLoader, StructuredDataset
from torch_dataloader_utils.integrations.transformers import ResumableTrainerMixin


class Model(torch.nn.Module):
    """A model with a dropout, whose random numbers go on where they were."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

    def forward(self, row: torch.Tensor, score: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": (self.layers(score.float().unsqueeze(1) / 100) - row.unsqueeze(1) % 3).square().mean()}


class JobTrainer(ResumableTrainerMixin, Trainer):
    """Writes what it is trained on, and dies."""

    def __init__(self, options: dict[str, Any], log: Path, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.options = options
        self.log_path = log
        self.trained = 0

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch."""
        line = {"step": self.state.global_step, "epoch": self.train_dataloader.dataset.epoch}
        with self.log_path.open("a") as file:
            file.write(json.dumps({**line, "rows": inputs["row"].tolist()}) + "\n")
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.trained += 1
        if self.trained == self.options.get("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Die in the midst of a checkpoint."""
        if self.state.global_step == self.options.get("die_saving"):
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_optimizer_and_scheduler(output_dir)


class Notes(TrainerCallback):
    """Notes how far the Trainer says it is after each step, and saves in the midst of one if it is told to."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.epochs: dict[int, float] = {}
        self.rates: list[float] = []
        self.trainer: Any = None
        self.options = options

    def on_step_end(self, _args: Any, state: Any, _control: Any, lr_scheduler: Any, **_: Any) -> None:
        """Note the epoch, and the next learning rate."""
        self.epochs[state.global_step] = state.epoch
        self.rates += lr_scheduler.get_last_lr()[:1]

    def on_pre_optimizer_step(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Save before a step is made, as a just-in-time checkpoint does, and die."""
        if state.global_step == self.options.get("die_before_step"):
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
            os.kill(os.getpid(), signal.SIGKILL)


def make_loader(data: str, options: dict[str, Any]) -> StructuredDataLoader:
    """Return this rank's loader."""
    loader, _ = StructuredDataset.create_dataloader(
        data,
        columns=["score"],
        batch_size=options.get("batch_size", 8),
        row_id_column="row",
        num_workers=options.get("workers", 0),
        shuffle=True,
        shuffle_buffer_size=60,
        filters=pc.field("value") >= 100 if options.get("filtered") else None,
        uneven_ranks="allow" if options.get("filtered") else "drop",
    )
    return loader


def arguments_of(options: dict[str, Any], directory: Path) -> TrainingArguments:
    """Return the training's arguments."""
    return TrainingArguments(
        str(directory / "checkpoints"),
        use_cpu=True,
        num_train_epochs=options.get("epochs", 2),
        max_steps=options.get("max_steps", -1),
        gradient_accumulation_steps=options.get("accumulated", 3),
        learning_rate=1e-2,
        save_strategy=options.get("save_strategy", "steps"),
        save_steps=options.get("saves", 4),
        save_total_limit=options.get("limit"),
        eval_strategy="steps" if "validates" in options else "no",
        eval_steps=options.get("validates"),
        per_device_eval_batch_size=2,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=7,
    )


def train(data: str, options: dict[str, Any], directory: Path, name: str, resumes: str | bool | None) -> None:
    """Train, and report."""
    arguments = arguments_of(options, directory)
    report = f"{name}-{arguments.process_index}.json"
    rows = [{"row": torch.tensor(row), "score": torch.tensor(row / 7)} for row in range(5)]
    noted = Notes(options)
    torch.manual_seed(7)
    trainer = JobTrainer(
        options,
        directory / f"{report}l",
        model=Model(),
        args=arguments,
        train_dataloader=make_loader(data, options),
        eval_dataset=rows if "validates" in options else None,
        callbacks=[noted],
    )
    noted.trainer = trainer
    trainer.train(resumes if not isinstance(resumes, str) else str(directory / "checkpoints" / resumes))
    end = {
        "steps": trainer.state.global_step,
        "max_steps": trainer.state.max_steps,
        "epochs": noted.epochs,
        "rates": noted.rates,
        "rows_read": trainer.train_dataloader.dataset.get_metrics()["rows_delivered"],
        "weights": [value.tolist() for value in trainer.model.state_dict().values()],
    }
    (directory / report).write_text(json.dumps(end))


def main() -> None:
    """Train as often as told."""
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", "an epoch ended before")
    logging.set_verbosity_error()
    job = json.loads(sys.argv[1])
    for name, resumes in job["runs"]:
        train(job["data"], job["options"], Path(job["directory"]), name, resumes)


if __name__ == "__main__":
    main()
