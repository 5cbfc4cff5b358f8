"""A mixture in the training loops of frameworks: their own checkpoints continue it to the batch, in any epoch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs.forked import run_forked
from support import skip_unless_installed

pytestmark = pytest.mark.usefixtures("preloaded_frameworks")

OPENED = """
import sys
from pathlib import Path
import torch
from torch_dataloader_utils import MixedDataset, Source

root = Path(sys.argv[1])
TRAINED = []

def open_mixture():
    sources = {path.name: Source(path) for path in sorted((root / "data").iterdir())}
    loader, _ = MixedDataset.create_dataloader(
        sources, dict(zip(sources, (0.25, 0.15, 0.6))), rows_per_epoch=96, batch_size=8, num_workers=1,
        shuffle=True, shuffle_buffer_size=40, row_id_column="row",
    )
    return loader

def whole():
    loader, batches = open_mixture(), []
    for epoch in range(2):
        loader.set_epoch(epoch)
        batches += [batch["row"].tolist() for batch in loader]
    assert len(batches) == 24
    return batches
"""

LIGHTNING = """
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from torch_dataloader_utils.integrations.lightning import ResumableLoader

class FailedError(Exception):
    pass

class Model(lightning.LightningModule):
    def __init__(self, fails):
        super().__init__()
        self.layer, self.fails = torch.nn.Linear(1, 1), fails

    def training_step(self, batch, _):
        if len(TRAINED) == self.fails:
            raise FailedError
        TRAINED.append(batch["row"].tolist())
        return self.layer(batch["x"].float().unsqueeze(1)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)

    def train_dataloader(self):
        return ResumableLoader(open_mixture())

def train(fails, checkpoint):
    each = ModelCheckpoint(root / "lightning", "step-{step:02d}", every_n_train_steps=1, save_top_k=-1)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[each],
    )
    try:
        trainer.fit(Model(fails), ckpt_path=checkpoint, weights_only=False)
    except FailedError:
        pass

train(17, None)
checkpoint = max((root / "lightning").glob("*.ckpt"), key=lambda path: path.name)
train(None, str(checkpoint))
assert TRAINED == whole(), (len(TRAINED), TRAINED)
"""

ACCELERATE = """
from accelerate import Accelerator
from torch_dataloader_utils.integrations.accelerate import prepare_loader

def train(stops, resumes):
    accelerator = Accelerator(cpu=True)
    loader = prepare_loader(accelerator, open_mixture())
    if resumes:
        accelerator.load_state(str(root / "accelerate"))
    for epoch in range(loader.epoch, 2):
        loader.set_epoch(epoch)
        for batch in loader:
            TRAINED.append(batch["row"].tolist())
            if len(TRAINED) == stops:
                accelerator.save_state(str(root / "accelerate"))
                return

train(17, resumes=False)
train(None, resumes=True)
assert TRAINED == whole(), (len(TRAINED), TRAINED)
"""

TRANSFORMERS = """
from transformers import Trainer, TrainingArguments
from torch_dataloader_utils.integrations.transformers import ResumableTrainerMixin

class FailedError(Exception):
    pass

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, row, x):
        return {"loss": self.layer(x.float().unsqueeze(1)).mean()}

class MixtureTrainer(ResumableTrainerMixin, Trainer):
    fails = None

    def training_step(self, model, inputs, *args, **kwargs):
        if len(TRAINED) == self.fails:
            raise FailedError
        TRAINED.append(inputs["row"].tolist())
        return super().training_step(model, inputs, *args, **kwargs)

def train(fails, resumes):
    arguments = TrainingArguments(
        str(root / "transformers"), use_cpu=True, num_train_epochs=2, save_strategy="steps", save_steps=1,
        logging_strategy="no", report_to=[], disable_tqdm=True,
    )
    trainer = MixtureTrainer(model=Model(), args=arguments, train_dataloader=open_mixture())
    trainer.fails = fails
    try:
        trainer.train(resume_from_checkpoint=resumes)
    except FailedError:
        pass

train(17, resumes=None)
train(None, resumes=True)
assert TRAINED == whole(), (len(TRAINED), TRAINED)
"""


@pytest.mark.parametrize(
    ("framework", "program"),
    [("lightning", LIGHTNING), ("accelerate", ACCELERATE), ("transformers", TRANSFORMERS)],
    ids=["lightning", "accelerate", "transformers"],
)
def test_a_training_that_failed_in_its_second_epoch_goes_on_with_the_same_batches(tmp_path: Path, framework, program):
    skip_unless_installed(framework, reason="the group of frameworks is not installed")
    for name, rows in {"code": 70, "math": 30, "web": 130}.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        pq.write_table(pa.table({"x": np.arange(rows)}), tmp_path / "data" / name / "part.parquet", row_group_size=15)
    run_forked(OPENED + program, tmp_path, str(tmp_path))
