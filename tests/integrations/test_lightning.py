"""Lightning: every checkpoint of it continues exactly, also at an epoch's end and on another number of ranks."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jobs.forked import run_forked
from jobs.ranks import run_ranks
from support import skip_unless_installed, write_dataset

from torch_dataloader_utils import audit
from torch_dataloader_utils.distributed import read_states

skip_unless_installed("lightning", reason="the group of frameworks is not installed")

pytestmark = pytest.mark.usefixtures("preloaded_frameworks")

FILES = ((60, 20), (7, 5), (70, 30), (41, 30))
ROWS = 178

CELLS: dict[str, dict[str, Any]] = {
    "a filter, accumulated, validated": {
        "filtered": True,
        "accumulated": 2,
        "validates": 3,
        "validates_rows": True,
        "at_end": True,
    },
    "estimated first, mixed in": {"mixed_in": True, "estimates": True, "accumulated": 3, "validates": 4},
    "a known length, mixed in": {"mixed_in": True, "at_end": True},
    "a filter": {"filtered": True, "at_end": True},
    "estimated first, with workers": {"estimates": True, "validates": 4, "workers": 2},
}
SHORT = ("a filter, accumulated, validated", "estimated first, mixed in")
soak = pytest.mark.soak


def run(directory: Path, name: str, ranks: int, options: dict[str, Any], checkpoints: list[str] | None) -> list[Any]:
    """Train under some ranks, and return their reports."""
    data = directory / "data"
    if not data.exists():
        assert write_dataset(data, FILES) == ROWS
    arguments = {"data": str(data), "directory": str(directory), "name": name, "options": options}
    run_ranks("lightning_job.py", ranks, {**arguments, "checkpoints": checkpoints}, directory)
    return [json.loads((directory / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


MIXING = """
import lightning, pytest, torch
from support import open_loader
from torch_dataloader_utils.integrations.lightning import ResumableDataModuleMixin

class Existing(lightning.LightningDataModule):
    def train_dataloader(self):
        made = [open_loader("data")[0] for _ in range(2)]
        return {"first": made[0], "both": [made[1], torch.utils.data.DataLoader([1, 2])]}

class Rows(ResumableDataModuleMixin, Existing):
    pass

class Changed(Rows):
    def train_dataloader(self):
        return super().train_dataloader()["first"]

loaders = Rows().train_dataloader()
wrapped = [type(loader).__name__ for loader in (loaders["first"], *loaders["both"], Changed().train_dataloader())]
assert wrapped == ["ResumableLoader", "ResumableLoader", "DataLoader", "ResumableLoader"], wrapped
with pytest.raises(TypeError, match="Alone"):

    class Alone(ResumableDataModuleMixin):
        pass
"""
"""Data modules with the mixin. Like all that follows, a process runs it that is forked where Lightning is imported."""


def test_a_data_module_is_mixed_in_in_front_of_one_that_exists_too(tmp_path: Path, monkeypatch):
    write_dataset(tmp_path / "data", FILES)
    monkeypatch.chdir(tmp_path)
    run_forked(MIXING, tmp_path)


@pytest.mark.parametrize("cell", [pytest.param(cell, marks=() if cell in SHORT else soak) for cell in CELLS])
def test_every_checkpoint_continues_with_the_batches_that_were_to_come(tmp_path: Path, cell: str):
    options = {"batch_size": 24, **CELLS[cell]}
    [whole] = run(tmp_path, "whole", 1, options, None)
    batches = whole["None"]["batches"]
    checkpoints = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert any(name.startswith("end") for name in checkpoints)
    [resumed] = run(tmp_path, "resumed", 1, options, checkpoints)
    wrong = [name for name, one in resumed.items() if one["before"] + one["batches"] != batches]
    assert wrong == []
    assert len(resumed) == len(checkpoints)


@pytest.mark.parametrize("filtered", [pytest.param(False, id="known length"), pytest.param(True, id="filter")])
def test_the_batch_whose_step_failed_is_trained_on_after_the_checkpoint_of_the_failure(tmp_path: Path, filtered: bool):
    options = {"batch_size": 24, "filtered": filtered}
    [whole] = run(tmp_path, "whole", 1, options, None)
    options = {**options, "fails": 4}
    [failed] = run(tmp_path, "failed", 1, options, None)
    [resumed] = run(tmp_path, "resumed", 1, {**options, "fails": None}, ["on_exception.ckpt"])
    assert failed["None"]["batches"] == resumed["on_exception.ckpt"]["before"] == whole["None"]["batches"][:4]
    assert resumed["on_exception.ckpt"]["batches"] == whole["None"]["batches"][4:]


AGAIN = """
import lightning
import pyarrow.compute as pc
from support import open_loader
from torch_dataloader_utils.integrations.lightning import ResumableLoader

loader = ResumableLoader(open_loader("data", filters=pc.field("value") >= 100, shuffle=True)[0])
trained = []

class Model(lightning.LightningModule):
    automatic_optimization = False

    def training_step(self, batch, number):
        trained.append((self.current_epoch, batch["value"].tolist()))

    def configure_optimizers(self):
        return None

quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
for _ in range(2):
    lightning.Trainer(max_epochs=2, enable_model_summary=False, **quiet).fit(Model(), loader)
half = len(trained) // 2
assert trained[:half] == trained[half:], trained
assert half > 2
"""


def test_a_loader_of_unknown_length_is_trained_on_again_from_the_beginning(tmp_path: Path, monkeypatch):
    write_dataset(tmp_path / "data", FILES)
    monkeypatch.chdir(tmp_path)
    run_forked(AGAIN, tmp_path)


ENDED = """
import os
import lightning, pytest, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch_dataloader_utils import StructuredDataset
from torch_dataloader_utils.integrations.lightning import ResumableLoader

class Numbers:  # another loader with a state, which is that of a whole pass
    loaded = False

    def __iter__(self):
        return iter(range(1000))

    def state_dict(self):
        return {"passed": 1000}

    def load_state_dict(self, state):
        self.loaded = True

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.trained = torch.nn.Linear(1, 1), []

    def training_step(self, batch, number):
        self.trained.append((self.current_epoch, batch["rows"]["row"].tolist()))
        return self.layer(torch.ones(1, 1)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

def fit(epochs, saves_in=None, seed=0, checkpoint=None, excluded=(), trainer=None):
    rows, _ = StructuredDataset.create_dataloader(
        "data", batch_size=24, shuffle=True, num_workers=0, row_id_column="row", shuffle_seed=seed
    )
    if excluded:
        rows.exclude(excluded)
    numbers, model = Numbers(), Model()
    loaders = CombinedLoader({"rows": ResumableLoader(rows), "numbers": numbers}, "min_size")
    trainer = trainer or lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(saves_in, "end")] if saves_in else [], enable_checkpointing=saves_in is not None,
    )
    trainer.fit(model, loaders, ckpt_path=checkpoint)
    assert not numbers.loaded, "at an epoch's end Lightning leaves such a state out: it would end the next one at once"
    return model.trained, trainer

def second_epoch(batches):
    return [batch for batch in batches if batch[0] == 1]

excluded = [(sorted(os.listdir("data"))[0], row) for row in range(30)]
whole, of_other_seed, left = fit(2)[0], fit(2, seed=1)[0], fit(2, excluded=excluded)[0]
assert sum(len(rows) for _, rows in left) == sum(len(rows) for _, rows in whole) - 60
fit(1, "ended", excluded=excluded)
trained, _ = fit(2, checkpoint="ended/end.ckpt")
assert trained == second_epoch(left), "what was excluded was delivered"
with pytest.warns(UserWarning, match="(?s)had ended was not of this data, so the next one begins whole.*seed"):
    trained, _ = fit(2, seed=1, checkpoint="ended/end.ckpt")
assert trained == second_epoch(of_other_seed)

trained, trainer = fit(1, checkpoint="ended/end.ckpt")  # all of its epochs are made
trainer.fit_loop.max_epochs = 2
assert trained == []
assert fit(2, trainer=trainer)[0] == second_epoch(whole), "the state of a checkpoint that was not passed was loaded"
"""


def test_after_an_epochs_end_what_was_excluded_stays_so_and_other_data_is_a_warning(tmp_path: Path, monkeypatch):
    write_dataset(tmp_path / "data", FILES)
    monkeypatch.chdir(tmp_path)
    run_forked(ENDED, tmp_path)


BESIDE = """
from pathlib import Path
import lightning, torch
import pyarrow.compute as pc
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch_dataloader_utils import StructuredDataset
from torch_dataloader_utils.integrations.lightning import ResumableLoader

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.trained = torch.nn.Linear(1, 1), []

    def training_step(self, batch, number):
        self.trained.append([batch[name]["row"].tolist() for name in ("filtered", "counted")])
        return self.layer(torch.ones(1, 1)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

def fit(saves_in=None, checkpoint=None):
    loaders = {
        name: ResumableLoader(
            StructuredDataset.create_dataloader(
                "data", batch_size=size, shuffle=True, num_workers=0, row_id_column="row", filters=filters
            )[0]
        )
        for name, size, filters in (("filtered", 24, pc.field("value") >= 60), ("counted", 20, None))
    }
    model = Model()
    lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(saves_in, "{step}", every_n_train_steps=1, save_top_k=-1)] if saves_in else [],
        enable_checkpointing=saves_in is not None,
    ).fit(model, CombinedLoader(loaders, "min_size"), ckpt_path=checkpoint, weights_only=False)
    return model.trained

whole = fit("checkpoints")
assert len(list(Path("checkpoints").iterdir())) == len(whole)
for number in range(1, len(whole), 3):
    assert fit(checkpoint=f"checkpoints/step={number}.ckpt") == whole[number:], number
"""


def test_loaders_side_by_side_continue_where_the_length_of_one_alone_is_known(tmp_path: Path, monkeypatch):
    write_dataset(tmp_path / "data", FILES)
    monkeypatch.chdir(tmp_path)
    run_forked(BESIDE, tmp_path)


NOT_WRAPPED = """
import pytest
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support import open_loader
from torch_dataloader_utils import to_device
from torch_dataloader_utils.integrations.lightning import ResumableLoader

loader, _ = open_loader("data")
for plain in (loader, to_device(loader, "cpu")):
    with pytest.raises(TypeError, match=r"ResumableLoader\\(loader\\)"):
        CombinedLoader(plain)._state_dicts()
wrapped = ResumableLoader(loader)
assert [list(state) for state in CombinedLoader(wrapped)._state_dicts()] == [["ranks"]]
with pytest.raises(ValueError, match="saved without ResumableLoader"):
    wrapped.load_state_dict(loader.state_dict())
"""


def test_a_loader_that_is_not_wrapped_is_refused_by_the_first_checkpoint(tmp_path: Path, monkeypatch):
    write_dataset(tmp_path / "data", FILES)
    monkeypatch.chdir(tmp_path)
    run_forked(NOT_WRAPPED, tmp_path)


OTHER_TRAINER = """
import pytest
import pytorch_lightning
from support import open_loader
from torch_dataloader_utils.integrations.lightning import ResumableLoader

loader, _ = open_loader("data")
fetcher = pytorch_lightning.loops.fetchers._PrefetchDataFetcher()
fetcher.setup(pytorch_lightning.utilities.combined_loader.CombinedLoader(ResumableLoader(loader)))
with pytest.raises(TypeError, match=r"import lightning\\.pytorch as pl"):
    iter(fetcher)
"""


@pytest.mark.skipif(importlib.util.find_spec("pytorch_lightning") is None, reason="pytorch_lightning is not installed")
def test_the_trainer_of_pytorch_lightning_is_refused(tmp_path: Path, monkeypatch):
    write_dataset(tmp_path / "data", FILES)
    monkeypatch.chdir(tmp_path)
    run_forked(OTHER_TRAINER, tmp_path)


@pytest.mark.parametrize(
    ("step", "then"),
    [
        pytest.param("step-step=03.ckpt", 1, id="2 ranks, then 1"),
        pytest.param("step-step=11.ckpt", 3, id="2 ranks with nothing but an odd rest, then 3", marks=soak),
        pytest.param("step-step=03.ckpt", 2, id="2 ranks, then 2", marks=soak),
        pytest.param("step-step=15.ckpt", 3, id="2 ranks in the second epoch, then 3", marks=soak),
    ],
)
def test_a_checkpoint_continues_on_other_ranks_with_each_row_once(tmp_path: Path, step: str, then: int):
    whole = run(tmp_path, "whole", 2, {"batch_size": 8}, None)
    steps = int(step[-7:-5])
    before = [batch for rank in whole for batch in rank["None"]["batches"][:steps]]
    after = [
        batch for rank in run(tmp_path, "after", then, {"batch_size": 8}, [step]) for batch in rank[step]["batches"]
    ]
    trained = Counter((epoch, row) for epoch, rows in before + after for row in rows)
    expected = {(epoch, row) for epoch in range(2) for row in range(ROWS)}
    assert trained.total() == len(trained), "rows repeated"
    assert len(expected - trained.keys()) <= 2 * (then - 1), "more rows lost than uneven_ranks='drop' leaves out"
    if then == 1:
        assert trained.keys() == expected
    states = read_states(next(tmp_path.rglob(step)))
    assert [(state["rank"], state["num_ranks"]) for state in states] == [(0, 2), (1, 2)]
    assert audit(states, tmp_path / "data").is_fine


def test_an_epoch_ends_on_all_ranks_when_a_filter_leaves_one_of_them_no_batch(tmp_path: Path):
    options = {"batch_size": 8, "filtered": True, "at_end": True}
    whole = [rank["None"]["batches"] for rank in run(tmp_path, "whole", 2, options, None)]
    passed = ROWS - 100
    for epoch in range(2):
        rows = [[row for of_epoch, rows in rank if of_epoch == epoch for row in rows] for rank in whole]
        trained = {*rows[0], *rows[1]}
        assert len(trained) == len(rows[0]) + len(rows[1]) < passed, "the ranks had equally many: nothing was tried"
        assert trained <= set(range(100, ROWS))
    assert len(whole[0]) == len(whole[1])
    checkpoints = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert len([name for name in checkpoints if name.startswith("end")]) == 2
    for rank, one in enumerate(run(tmp_path, "resumed", 2, options, checkpoints)):
        for name, found in one.items():
            assert found["batches"] == whole[rank][int(name[-7:-5]) :], (rank, name)


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start"])
def test_an_epoch_ends_on_all_ranks_when_a_hook_excludes_whole_steps_of_one(tmp_path: Path, hook: str):
    whole = [rank["None"]["batches"] for rank in run(tmp_path, "whole", 2, {"batch_size": 8, "excludes": hook}, None)]
    steps = [[sum(of_epoch == epoch for of_epoch, _ in rank) for epoch in range(2)] for rank in whole]
    assert steps[0] == steps[1]
    assert steps[0][0] == ROWS // 2 // 8 + 1 - 2, "no step was lost: nothing was tried"


ACCUMULATING = """
import sys
import lightning, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch_dataloader_utils import StructuredDataset
from torch_dataloader_utils.integrations.lightning import ResumableLoader

class Model(lightning.LightningModule):
    dies_at = 0

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, number):
        return self.layer(batch["score"].float().unsqueeze(1)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)

    def on_train_batch_end(self, outputs, batch, number):
        if number + 1 == self.dies_at:
            raise SystemExit

def fit(max_steps, checkpoint=None, dies_at=0):
    loader, _ = StructuredDataset.create_dataloader("data", batch_size=4, shuffle=True, num_workers=0)
    saves = ModelCheckpoint("checkpoints", "{step}", every_n_train_steps=2, save_top_k=-1)
    model = Model()
    model.dies_at = dies_at
    lightning.Trainer(
        max_steps=max_steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=4, callbacks=[saves],
    ).fit(model, ResumableLoader(loader), ckpt_path=checkpoint)

fit(2)
before = open("checkpoints/step=2.ckpt", "rb").read()
try:
    fit(4, "checkpoints/step=2.ckpt", dies_at=9)  # after a batch of a step of four
except SystemExit:
    pass
else:
    raise AssertionError("the resumed training was not ended")
assert open("checkpoints/step=2.ckpt", "rb").read() == before, "saved again with a part of the next step's batches"
fit(4, "checkpoints/step=2.ckpt")
open("checkpoints/step=4.ckpt", "rb").close()
"""
"""A training with accumulated gradients, in the directory where it is started."""


def test_a_resume_saves_no_checkpoint_between_two_steps_of_the_optimizer(tmp_path: Path, monkeypatch):
    write_dataset(tmp_path / "data", FILES)
    monkeypatch.chdir(tmp_path)
    run_forked(ACCUMULATING, tmp_path)


VALIDATING = """
import warnings
from shutil import rmtree
import lightning, torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch_dataloader_utils import SkippedStepsWarning, StructuredDataset
from torch_dataloader_utils.integrations.lightning import ResumableLoader

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.done = torch.nn.Linear(1, 1), []

    def training_step(self, batch, number):
        self.done.append("t")
        return self.layer(batch["score"].float().unsqueeze(1)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)

    def validation_step(self, batch, number):
        self.done.append("v")

    def on_train_epoch_end(self):
        self.done.append("|")

    def on_before_optimizer_step(self, optimizer):
        self.done.append("s")

class Skips(Callback):
    def __init__(self, loader, late, late_at, late_epoch, restored):
        self.loader, self.late, self.late_at, self.restored = loader, late, late_at, restored
        self.late_epoch = late_epoch

    def on_train_epoch_start(self, trainer, model):
        if self.late and self.late_at is None and trainer.current_epoch == self.late_epoch:
            self.loader.skip_steps(*self.late)

    def on_train_batch_end(self, trainer, model, outputs, batch, number):
        if trainer.current_epoch == 0 and number == self.late_at:
            self.loader.skip_steps(*self.late)
        if trainer.current_epoch == 0 and number == self.restored:
            self.loader.restore_skipped()

def fit(
    batch_size, checkpoint=None, skipped=None, excluded=(), late=None, late_at=None, late_epoch=0, restored=None,
    saved_every=4, **options,
):
    loader, _ = StructuredDataset.create_dataloader("data", batch_size=batch_size, num_workers=0)
    if skipped:
        loader.skip_steps(*skipped)
    loader.exclude(excluded)
    held_out, _ = StructuredDataset.create_dataloader("data", batch_size=444, num_workers=0)
    saves = ModelCheckpoint("checkpoints", "{step}", every_n_train_steps=saved_every, save_top_k=-1)
    model = Model()
    lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, callbacks=[saves, Skips(loader, late, late_at, late_epoch, restored)], **options,
    ).fit(model, ResumableLoader(loader), held_out, ckpt_path=checkpoint)
    done = "".join(model.done)
    return done if options.get("accumulate_grad_batches") else done.replace("s", "")

whole = fit(40)
assert whole == ("t" * 12 + "v|") * 2, whole
for size in (20, 40, 80):
    rest, steps = -(-(444 - 160) // size), -(-444 // size)
    done = fit(size, "checkpoints/step=4.ckpt")
    assert done == "t" * rest + "v|" + "t" * steps + "v|", (size, done)
done = fit(40, skipped=(2, 4))
assert done == "t" * 10 + "v|" + "t" * 12 + "v|", done
done = fit(40, skipped=(2, 4), val_check_interval=0.5)
assert done == "tttttv" * 2 + "|" + "ttttttv" * 2 + "|", done
done = fit(40, late=(2, 4))
assert done == "t" * 10 + "v|" + "t" * 12 + "v|", done
done = fit(40, "checkpoints/step=4.ckpt", skipped=(0, 2))  # which the checkpoint has behind it
assert done == "t" * 8 + "v|" + "t" * 12 + "v|", done
done = fit(40, late=(2, 4), late_epoch=1)
assert done == "t" * 12 + "v|" + "t" * 10 + "v|", done
rmtree("checkpoints")
done = fit(40, late=(2, 4), saved_every=5)  # of ten steps
for step, left in ((5, 5), (10, 0)):
    done = fit(40, f"checkpoints/step={step}.ckpt")
    assert done == ("t" * left + "v|" if left else "") + "t" * 12 + "v|", (step, done)
for at, wanted in ((3, (6, 8)), (10, (11, 12))):  # the pass that runs goes on with all steps
    done = fit(40, late=wanted, late_at=at)
    assert done == ("t" * 12 + "v|") * 2, (at, done)
done = fit(40, skipped=(2, 4), restored=5, val_check_interval=0.5)
assert done == "tttttvtttttvtt|" + "ttttttv" * 2 + "|", done
for skipped, late in (((2, 4), None), (None, (2, 4))):
    for at in (0, 5, 8):  # before the last step that is not skipped
        done = fit(40, skipped=skipped, late=late, restored=at)
        assert done == ("t" * 12 + "v|") * 2, (at, done)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        done = fit(40, skipped=skipped, late=late, restored=9)
    assert done == "t" * 10 + "v|" + "t" * 12 + "v|", done
    [told] = [str(each.message) for each in found if each.category is SkippedStepsWarning]
    assert "Lightning ended epoch 0 before all of its skipped steps were delivered again" in told, told

for name, rows, left in (  # each has whole steps of the first epoch; the last step has 4 rows
    ("part-000.parquet", range(80), 10),
    ("part-000.parquet", range(90, 250), 9),
    ("part-001.parquet", range(140, 144), 11),
):
    excluded = [(name, row) for row in rows]
    after = -(-(444 - len(rows)) // 40)
    done = fit(40, excluded=excluded)
    assert done == "t" * left + "v|" + "t" * after + "v|", (rows, done)
    done = fit(40, excluded=excluded, accumulate_grad_batches=4)
    epochs = [("tttts" * 3)[: -(-batches // 4) * 5 - 1 - -batches % 4] + "sv|" for batches in (left, after)]
    assert done == "".join(epochs), (rows, done)
    done = fit(40, "checkpoints/step=4.ckpt", excluded=excluded)
    assert done.endswith("v|" + "t" * after + "v|"), (rows, done)

excluded = [("part-000.parquet", row) for row in range(80)]  # two whole steps: 10 are left, and 10 make the next epoch
for limit, first, then in ((1, 1, 1), (4, 4, 4), (11, 10, 10), (12, 10, 10), (0.95, 10, 9)):
    done = fit(40, excluded=excluded, limit_train_batches=limit)
    assert done == "t" * first + "v|" + "t" * then + "v|", (limit, done)
done = fit(40, excluded=excluded, limit_train_batches=11, accumulate_grad_batches=4)
assert done == "ttttsttttsttsv|" * 2, done
"""
"""Trainings that validate at the ends of epochs of other lengths than the first, in the directory of the process."""


def test_validation_is_at_the_end_of_epochs_of_every_length(tmp_path: Path, monkeypatch):
    write_dataset(tmp_path / "data", ((300, 50), (144, 40)))
    monkeypatch.chdir(tmp_path)
    run_forked(VALIDATING, tmp_path)


ENDING = """
import lightning, torch
import pyarrow.compute as pc
from pathlib import Path
from lightning.pytorch.callbacks import ModelCheckpoint
from torch_dataloader_utils import StructuredDataset
from torch_dataloader_utils.integrations.lightning import ResumableLoader

class Model(lightning.LightningModule):
    def __init__(self, estimates):
        super().__init__()
        self.layer, self.estimates, self.trained = torch.nn.Linear(1, 1), estimates, []

    def training_step(self, batch, number):
        self.trained.append((self.current_epoch, number, batch["row"].tolist()))
        return self.layer(torch.ones(1, 1)).mean()

    def on_train_epoch_start(self):
        if self.trainer.checkpoint_callbacks and self.current_epoch:
            directory = self.trainer.checkpoint_callback.dirpath
            self.trainer.save_checkpoint(f"{directory}/begin-step={self.global_step:02}.ckpt")

    def configure_optimizers(self):
        if self.estimates:
            assert self.trainer.estimated_stepping_batches != 0  # -1 where it is unknown
        return torch.optim.SGD(self.parameters(), lr=0.01)

def fit(max_steps, limit, filters, estimates, saves_in, checkpoint=None):
    loader, _ = StructuredDataset.create_dataloader(
        "data", batch_size=24, shuffle=True, num_workers=0, row_id_column="row", filters=filters,
    )
    saves = [
        ModelCheckpoint(saves_in, "end-{step:02}", save_top_k=-1),
        ModelCheckpoint(saves_in, "step-{step:02}", every_n_train_steps=1, save_top_k=-1),
    ]
    model = Model(estimates)
    lightning.Trainer(
        max_epochs=3, max_steps=max_steps, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=3, limit_train_batches=limit,
        callbacks=saves if saves_in else [], enable_checkpointing=saves_in is not None,
    ).fit(model, ResumableLoader(loader), ckpt_path=checkpoint, weights_only=False)
    return model.trained

def passed(checkpoint, in_steps, per_epoch):
    steps = int(checkpoint.stem.rpartition("=")[2])
    return steps // in_steps * per_epoch + min(steps % in_steps * 3, per_epoch)

passing = pc.field("value") >= 60
cells = [(-1, 1.0, passing, False), (-1, 1.0, passing, True), (20, 4, None, False), (20, 4, None, True)]
cells += [(20, 1.0, None, False), (20, 1.0, passing, True)]  # all pairs: each with estimates and without
for number, cell in enumerate(cells):
    name = str(number)
    whole = fit(*cell, name)
    found = sorted(Path(name).iterdir())
    assert [sum(path.name.startswith(of) for path in found) for of in ("begin", "end")] == [2, 3], found
    per_epoch = len(whole) // 3
    in_steps = (per_epoch + 2) // 3
    for path in found:
        before = passed(path, in_steps, per_epoch)
        if before % per_epoch > 3:
            continue
        again = f"{number}-again-{path.name}" if before == per_epoch and number in (0, 3) else None
        trained = fit(*cell, again, str(path))
        assert trained == whole[before:], (cell, path, len(trained), len(whole))
        for later in sorted(Path(again).iterdir()) if again else ():  # a second resume, in the epoch after that end
            trained = fit(*cell, None, str(later))
            assert trained == whole[passed(later, in_steps, per_epoch):], (cell, path, later, len(trained))
"""
"""Trainings that go on from each checkpoint, those of epochs' ends and beginnings too, in the process's directory."""


@pytest.mark.timeout(180)
def test_the_epoch_after_a_checkpoint_of_an_epochs_end_or_beginning_is_trained_on_whole(tmp_path: Path, monkeypatch):
    write_dataset(tmp_path / "data", FILES)
    monkeypatch.chdir(tmp_path)
    run_forked(ENDING, tmp_path)


STATELESS = """
import lightning, pytest, torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch_dataloader_utils import StructuredDataset
from torch_dataloader_utils.integrations.lightning import ResumableLoader

class Model(lightning.LightningModule):
    def __init__(self, make, begins_in):
        super().__init__()
        self.layer, self.make, self.begins_in, self.trained = torch.nn.Linear(1, 1), make, begins_in, []

    def train_dataloader(self):
        return self.make()

    def on_train_start(self):
        for loader in self.trainer.fit_loop._combined_loader.flattened:
            if isinstance(loader, ResumableLoader):
                loader.set_epoch(self.current_epoch)  # it need not be called, and may be

    def on_train_epoch_start(self):
        if self.begins_in:
            self.trainer.save_checkpoint(f"{self.begins_in}/begin={self.current_epoch}.ckpt")

    def training_step(self, batches, number):
        batches = batches if isinstance(batches, list) else [batches]
        self.trained.append([batch["row"].tolist() for batch in batches])
        return self.layer(torch.ones(1, 1)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

def resumable(size=24, seed=0):
    loader, _ = StructuredDataset.create_dataloader(
        "data", batch_size=size, shuffle=True, shuffle_seed=seed, row_id_column="row", num_workers=0
    )
    return ResumableLoader(loader)

def plain():
    return torch.utils.data.DataLoader([{"row": row} for row in range(178)], batch_size=24)

def unreachable():
    raise ConnectionError("the storage does not answer")

def fit(make, *callbacks, checkpoint=None, begins_in=None):
    model = Model(make, begins_in)
    lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=list(callbacks), enable_checkpointing=bool(callbacks),
    ).fit(model, ckpt_path=checkpoint, weights_only=False)
    return model.trained

def saves(directory):
    ends = ModelCheckpoint(directory, "end={epoch}", save_top_k=-1, auto_insert_metric_name=False)
    steps = ModelCheckpoint(
        directory, "step={step}", every_n_train_steps=1, save_top_k=-1, auto_insert_metric_name=False
    )
    return ends, steps

def refused(expected, make, *callbacks, checkpoint):
    with pytest.raises(ValueError, match=expected):
        fit(make, *callbacks, checkpoint=checkpoint)

stateless, again = "after batch 3 of it, and does not say which rows", "a training that could not be resumed: "
fit(plain, *saves("plain"), begins_in="plain")
refused(stateless, resumable, checkpoint="plain/step=3.ckpt")
for size in (24, 16):
    whole = fit(lambda: resumable(size))
    for path in ("step=8", "begin=1", "end=0"):
        assert fit(lambda: resumable(size), checkpoint=f"plain/{path}.ckpt") == whole[len(whole) // 3:], (path, size)

whole = fit(resumable, *saves("own"), begins_in="own")
with pytest.raises(ConnectionError):
    fit(unreachable, OnExceptionCheckpoint("failed"), checkpoint="own/step=3.ckpt")
refused(stateless, resumable, OnExceptionCheckpoint("first"), checkpoint="failed/on_exception.ckpt")
refused(again + ".*" + stateless, resumable, OnExceptionCheckpoint("second"), checkpoint="first/on_exception.ckpt")
refused(again, resumable, checkpoint="second/on_exception.ckpt")
other = lambda: resumable(seed=7)
refused("another plan", other, OnExceptionCheckpoint("mismatch"), checkpoint="own/step=3.ckpt")
refused(again + ".*another plan", other, checkpoint="mismatch/on_exception.ckpt")
with pytest.raises(ConnectionError):
    fit(unreachable, OnExceptionCheckpoint("begun"), checkpoint="own/begin=1.ckpt")
for path, trained in (("own/step=3", 3), ("own/begin=1", 8), ("begun/on_exception", 8), ("own/end=1", 16)):
    assert fit(resumable, checkpoint=f"{path}.ckpt") == whole[trained:], path

both = lambda: [resumable(), resumable(seed=1)]
whole = fit(both, *saves("both"), begins_in="both")
assert fit(both, *saves("later"), checkpoint="both/begin=1.ckpt") == whole[8:]
for epoch in (1, 2):
    assert fit(both, checkpoint=f"later/end={epoch}.ckpt") == whole[8 * (epoch + 1):], epoch
"""


def test_a_checkpoint_within_an_epoch_without_the_loaders_state_is_refused(tmp_path: Path, monkeypatch):
    write_dataset(tmp_path / "data", FILES)
    monkeypatch.chdir(tmp_path)
    run_forked(STATELESS, tmp_path)
