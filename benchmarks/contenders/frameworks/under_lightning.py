"""Under Lightning: this library, and torchdata's StatefulDataLoader, whose state Lightning saves by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from datasets.distributed import split_dataset_by_node
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.contenders.frameworks.hf_datasets import streamed
from benchmarks.contenders.frameworks.job import EPOCHS, Job, Recorder
from benchmarks.contenders.frameworks.loaders import FEATURES, loss_of, ours
from torch_dataloader_utils.integrations.lightning import ResumableLoader


class _Model(lightning.LightningModule):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(len(FEATURES), 1)
        self.recorder = recorder

    def training_step(self, batch: Any, _number: int) -> torch.Tensor:
        self.recorder.train(self.current_epoch, batch["row"].tolist())
        return loss_of(self.layer, batch)

    def on_save_checkpoint(self, _checkpoint: dict[str, Any]) -> None:
        self.recorder.save()

    def on_train_batch_end(self, *_: Any) -> None:
        self.recorder.may_die()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def train(job: Job, recorder: Recorder) -> None:
    """Train with a `ModelCheckpoint` every so many steps."""
    checkpoints = ModelCheckpoint(
        job.directory, "step-{step}", every_n_train_steps=job.every, save_top_k=-1, auto_insert_metric_name=False
    )
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=job.num_ranks,
        strategy="ddp" if job.num_ranks > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoints],
    )
    path = None if job.checkpoint is None else str(Path(job.directory, f"step-{job.checkpoint}.ckpt"))
    loader = _loader(job)
    recorder.begin()
    trainer.fit(_Model(recorder), loader, ckpt_path=path, weights_only=False)


def _loader(job: Job) -> Any:
    if job.way == "ours":
        return ResumableLoader(ours(job))
    stream = streamed(job)
    if job.num_ranks > 1:
        stream = split_dataset_by_node(stream, rank=job.rank, world_size=job.num_ranks)
    return StatefulDataLoader(stream, batch_size=job.batch_size, num_workers=job.workers)
