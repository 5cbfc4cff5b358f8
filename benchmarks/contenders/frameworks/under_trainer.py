"""Under the Trainer of Transformers: this library, and the Trainer's own skipping of the batches it has trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.contenders.frameworks.hf_datasets import converted, streamed
from benchmarks.contenders.frameworks.job import EPOCHS, Job, Recorder, steps_of
from benchmarks.contenders.frameworks.loaders import FEATURES, loss_of, ours
from torch_dataloader_utils.integrations.transformers import ResumableTrainerMixin


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(len(FEATURES), 1)

    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": loss_of(self.layer, batch)}


class _Recorded(Trainer):  # type: ignore[misc]
    recorder: Recorder
    passes = -1

    def training_step(self, model: Any, inputs: Any, *more: Any) -> torch.Tensor:
        self.recorder.train(self.passes, inputs["row"].tolist())
        loss: torch.Tensor = super().training_step(model, inputs, *more)
        return loss

    def _save_checkpoint(self, *arguments: Any) -> None:
        self.recorder.save()
        super()._save_checkpoint(*arguments)


class _Resumable(ResumableTrainerMixin, _Recorded):
    pass


class _Steps(TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: _Recorded) -> None:
        self._trainer = trainer

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.passes += 1

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer.recorder.may_die()


def train(job: Job, recorder: Recorder) -> None:
    """Train with a checkpoint every so many steps."""
    arguments = TrainingArguments(
        output_dir=job.directory,
        per_device_train_batch_size=job.batch_size,
        dataloader_num_workers=job.workers,
        num_train_epochs=EPOCHS,
        max_steps=steps_of(job) if job.way == "skip, streamed" or job.filtered else -1,
        save_strategy="steps",
        save_steps=job.every,
        save_total_limit=None,
        use_cpu=True,
        remove_unused_columns=False,
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        seed=7,
        **({} if job.shuffle else {"train_sampling_strategy": "sequential"}),
    )
    if job.way == "ours":
        trainer: _Recorded = _Resumable(model=_Model(), args=arguments, train_dataloader=ours(job))
    else:
        rows = streamed(job) if job.way == "skip, streamed" else converted(job)
        trainer = _Recorded(model=_Model(), args=arguments, train_dataset=rows)
    trainer.recorder = recorder
    trainer.add_callback(_Steps(trainer))
    checkpoint = None if job.checkpoint is None else str(Path(job.directory, f"checkpoint-{job.checkpoint}"))
    recorder.begin()
    trainer.train(resume_from_checkpoint=checkpoint)
