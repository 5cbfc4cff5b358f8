"""Transformers' Trainer: killed and resumed with its own checkpoints, in any epoch, under any number of ranks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
import torch
from jobs.forked import run_forked
from jobs.ranks import run_ranks, running_ranks
from support import batches_of, open_loader, skip_unless_installed, write_dataset

from torch_dataloader_utils.distributed import read_states

skip_unless_installed("transformers", reason="the group of frameworks is not installed")

pytestmark = pytest.mark.usefixtures("preloaded_frameworks")

FILES = ((130, 50), (7, 50), (211, 40), (96, 30))
ROWS = 444
FIRST_LEFT = 100
"""The first row that the job's filter leaves."""

LOADER = {"columns": ["score"], "batch_size": 8, "shuffle": True, "shuffle_buffer_size": 60, "uneven_ranks": "drop"}
"""The job's loader, where nothing else is said."""

soak = pytest.mark.soak


class Training:
    """A training of one or more runs in a directory, and what its ranks wrote."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.directory = directory
        self.options = options
        assert write_dataset(directory / "data", FILES) == ROWS

    def job(self, runs: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Return the argument of a job."""
        shared = {"data": str(self.directory / "data"), "directory": str(self.directory)}
        return {**shared, "options": self.options | options, "runs": list(runs.items())}

    def run(self, ranks: int, runs: dict[str, Any]) -> None:
        """Train to the end."""
        run_ranks("transformers_job.py", ranks, self.job(runs), self.directory)

    def run_all(self, runs: list[tuple[int, dict[str, int]]]) -> None:
        """Train in runs of so many ranks, from the last checkpoint, each but the last until it kills itself."""
        for number, (ranks, dies) in enumerate(runs):
            job = self.job({f"run-{number}": number > 0}, **dies)
            with running_ranks("transformers_job.py", ranks, job, self.directory) as running:
                if not dies:
                    running.finish()
                    continue
                assert running.wait(120) == -9, running.output()
                running.end()

    def batches(self, name: str, rank: int = 0) -> list[dict[str, Any]]:
        """Return what a rank was trained on: the step, the epoch and the rows of each batch."""
        return [json.loads(line) for line in (self.directory / f"{name}-{rank}.jsonl").read_text().splitlines()]

    def end(self, name: str, rank: int = 0) -> dict[str, Any]:
        """Return how a rank ended."""
        return json.loads((self.directory / f"{name}-{rank}.json").read_text())

    def checkpoints(self) -> list[str]:
        """Return the names of the checkpoints, oldest first."""
        found = (path.name for path in (self.directory / "checkpoints").iterdir())
        return sorted(found, key=lambda name: int(name.removeprefix("checkpoint-")))

    def committed(self, ranks: list[int]) -> list[list[dict[str, Any]]]:
        """Return for each run and rank the batches of the steps after which no later run began."""
        runs = [[self.batches(f"run-{number}", rank) for rank in range(count)] for number, count in enumerate(ranks)]
        began = [run[0][0]["step"] for run in runs[1:]] + [10**9]
        pairs = zip(runs, began, strict=True)
        return [[batch for batch in rank if batch["step"] < step] for run, step in pairs for rank in run]

    def batches_of_ranks(self, ranks: list[int], of_all: list[int]) -> list[list[list[int]]]:
        """Return the rows of each rank's committed batches over the first runs, which have equally many ranks."""
        parts = self.committed(of_all)[: sum(ranks)]
        return [[batch["rows"] for part in parts[rank :: ranks[0]] for batch in part] for rank in range(ranks[0])]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"validates": 2, "accumulated": 5, "batch_size": 24}, id="accumulated and evaluated"),
        pytest.param({"filtered": True, "max_steps": 14, "batch_size": 24}, id="a filter and max_steps", marks=soak),
        pytest.param({"workers": 2, "accumulated": 2, "batch_size": 24, "saves": 5}, id="with workers", marks=soak),
        pytest.param({"save_strategy": "epoch", "batch_size": 24}, id="a checkpoint an epoch", marks=soak),
    ],
)
def test_every_checkpoint_continues_with_the_batches_that_were_to_come(tmp_path: Path, options: dict[str, Any]):
    training = Training(tmp_path, **{"saves": 1} | options)
    training.run(1, {"whole": None})
    whole, end = training.batches("whole"), training.end("whole")
    checkpoints = training.checkpoints()
    training.run(1, {name: name for name in checkpoints[:-1]})
    for name in checkpoints[:-1]:
        step = int(name.removeprefix("checkpoint-"))
        resumed, its_end = training.batches(name), training.end(name)
        assert resumed == [batch for batch in whole if batch["step"] >= step], name
        assert its_end["epochs"] == {after: epoch for after, epoch in end["epochs"].items() if int(after) > step}
        last = [batch["rows"] for batch in resumed if batch["epoch"] == whole[-1]["epoch"]]
        assert its_end["rows_read"] == sum(map(len, last)), "rows were read to be skipped"
        assert its_end["weights"] == end["weights"]
    assert len(checkpoints) > 1
    first = tmp_path / "checkpoints" / checkpoints[0]
    assert read_states(first) == torch.load(first / "loader.pt", weights_only=True)


@pytest.mark.usefixtures("leaves_nothing_behind")
@pytest.mark.parametrize(
    ("runs", "options"),
    [
        pytest.param([(2, {"die": 22}), (2, {"die": 30}), (1, {})], {"limit": 1}, id="2 ranks in both epochs, then 1"),
        pytest.param(
            [(1, {"die_saving": 8}), (1, {"die_before_step": 9}), (1, {})], {}, id="in a checkpoint or step", marks=soak
        ),
        pytest.param([(2, {"die": 22}), (2, {"die": 30}), (2, {})], {"workers": 2}, id="2 ranks, workers", marks=soak),
        pytest.param([(1, {"die": 22}), (1, {"die": 60}), (1, {})], {"validates": 2}, id="1 rank", marks=soak),
        pytest.param([(2, {"die_saving": 8}), (2, {})], {}, id="2 ranks in a checkpoint", marks=soak),
        pytest.param([(2, {"die": 29}), (1, {})], {"saves": 5}, id="2 ranks at an epoch's end, then 1", marks=soak),
        pytest.param([(2, {"die": 40}), (3, {"die": 5}), (1, {})], {"saves": 1}, id="2 ranks, 3, then 1", marks=soak),
        pytest.param([(2, {"die": 16}), (3, {})], {"saves": 2}, id="2 ranks in the first epoch, then 3", marks=soak),
    ],
)
def test_a_killed_training_goes_on_with_each_row_once(
    tmp_path: Path, runs: list[tuple[int, dict[str, int]]], options: dict[str, Any]
):
    training = Training(tmp_path, **options)
    training.run_all(runs)
    counts = [ranks for ranks, _ in runs]
    trained = Counter(
        (batch["epoch"], row) for part in training.committed(counts) for batch in part for row in batch["rows"]
    )
    assert trained.total() == len(trained), "rows repeated"
    assert trained.keys() == {(epoch, row) for epoch in range(2) for row in range(ROWS)}
    end = training.end(f"run-{len(runs) - 1}")
    assert end["steps"] == end["max_steps"]
    assert end["epochs"][str(end["steps"])] == 2
    assert [rate > 0 for rate in end["rates"]] == [True] * (len(end["rates"]) - 1) + [False]
    alike = [ranks for ranks in counts if ranks == counts[0]]
    in_order = training.batches_of_ranks(alike, counts)
    expected = batches_of_loaders(training, counts[0], epochs=2)
    assert in_order == [batches[: len(in_order[0])] for batches in expected]
    assert in_order == expected or len(alike) < len(counts)
    if "limit" in options:
        assert len(training.checkpoints()) == options["limit"]


@soak
@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning")
@pytest.mark.usefixtures("leaves_nothing_behind")
def test_ranks_that_a_filter_leaves_different_numbers_of_batches_end_their_epochs_together(tmp_path: Path):
    training = Training(tmp_path, filtered=True, max_steps=20)
    training.run_all([(2, {"die": 16}), (2, {"die": 30}), (2, {})])
    trained = training.batches_of_ranks([2, 2, 2], [2, 2, 2])
    expected = batches_of_loaders(training, 2, epochs=4, filters=pc.field("value") >= FIRST_LEFT, uneven_ranks="allow")
    lengths = [len(batches) for batches in trained]
    assert lengths[0] == lengths[1] > 2 * 15
    assert trained == [batches[: lengths[0]] for batches in expected]


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"max_steps": 4}, 4), ({"max_steps": 18}, 18), ({"epochs": 1.5}, 29)],
    ids=["in mid epoch", "at an epoch's end", "half an epoch"],
)
def test_a_training_that_has_made_all_its_steps_makes_none_when_it_is_resumed(tmp_path: Path, options, steps: int):
    training = Training(tmp_path, **options, accumulated=1, batch_size=24, saves=2)
    training.run(1, {"whole": None, "again": True, "once more": True})
    assert len(training.batches("whole")) == steps
    assert training.checkpoints()[-1] == f"checkpoint-{steps}"
    for name in ("again", "once more"):
        assert not (tmp_path / f"{name}-0.jsonl").exists(), "a batch was trained on"
        assert training.end(name)["weights"] == training.end("whole")["weights"]


def test_epochs_that_are_too_short_for_a_step_are_warned_of(tmp_path: Path):
    training = Training(tmp_path, filtered=True, max_steps=3, accumulated=60)
    training.run_all([(1, {"die": 300})])
    lines = [line for path in tmp_path.glob("output-*.txt") for line in path.read_text().splitlines()]
    assert sum("made no step in it" in line for line in lines) == 1
    assert {batch["step"] for batch in training.batches("run-0")} == {0}


RESTORING = """
import warnings
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from torch_dataloader_utils import SkippedStepsWarning, StructuredDataset
from torch_dataloader_utils.integrations.transformers import ResumableTrainerMixin

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.rows = torch.nn.Linear(1, 1), []

    def forward(self, value):
        self.rows.append(value.tolist())
        return {"loss": self.layer(value.float().unsqueeze(1)).mean()}

class ResumableTrainer(ResumableTrainerMixin, Trainer):
    pass

class Restores(TrainerCallback):
    def __init__(self, loader, begin, at):
        self.loader, self.begin, self.at = loader, begin, at

    def on_train_begin(self, arguments, state, control, **others):
        if self.begin:
            self.loader.skip_steps(*self.begin)

    def on_step_end(self, arguments, state, control, **others):
        if state.global_step == self.at:
            self.loader.restore_skipped()

def batches(begin=None, at=None, resumes=None):
    loader, _ = StructuredDataset.create_dataloader("data", columns=["value"], batch_size=50, num_workers=0)
    model = Model()
    arguments = TrainingArguments(
        "checkpoints", num_train_epochs=2, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True
    )
    trainer = ResumableTrainer(
        model=model, args=arguments, train_dataloader=loader, callbacks=[Restores(loader, begin, at)]
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.train(resumes)
    told = [str(each.message) for each in found if each.category is SkippedStepsWarning]
    return [rows[0] // 50 for rows in model.rows], told

whole = list(range(9))
assert batches() == (whole * 2, [])
assert batches((4, 6), resumes="checkpoints/checkpoint-2") == ([2, 3, 6, 7, 8] + whole, [])
done, told = batches((4, 6), at=3)
assert done == [0, 1, 2, 3, 6, 7, 8] + whole, done
[text] = told
assert "the Trainer ended epoch 0 before all of its skipped steps were delivered again" in text, text
"""
"""Trainings that skip steps, and in one case ask for them too late."""


def test_the_trainer_skips_what_its_begin_is_told_and_says_so_where_it_cannot_restore(tmp_path: Path, monkeypatch):
    write_dataset(tmp_path / "data", FILES)
    monkeypatch.chdir(tmp_path)
    run_forked(RESTORING, tmp_path)


def batches_of_loaders(training: Training, ranks: int, *, epochs: int, **options: Any) -> list[list[list[int]]]:
    """Return what each rank's loader delivers where nothing stops it, as far as all ranks have batches."""
    expected: list[list[list[int]]] = [[] for _ in range(ranks)]
    for epoch in range(epochs):
        delivered = []
        for rank in range(ranks):
            own = {"num_workers": training.options.get("workers", 0), "num_ranks": ranks, "rank": rank}
            loader, _ = open_loader(training.directory / "data", **LOADER | options | own)
            loader.set_epoch(epoch)
            delivered.append(batches_of(loader))
        for rank, batches in enumerate(delivered):
            expected[rank] += batches[: min(map(len, delivered))]
    return expected


REFUSED = {
    "a dataset": ("TypeError", "divide this rank's rows among the ranks once more", "ResumableTrainerMixin"),
    "another number of ranks": ("ValueError", "rank 0 of 1", "of 2", "make the loader after the TrainingArguments"),
    "no loader of this package": ("TypeError", "train_dataloader is list"),
    "a dataset, too": ("TypeError", "leave out train_dataset"),
    "a skip": ("TypeError", "skip_first_batches", "ResumableTrainerMixin"),
    "no states": ("FileNotFoundError", "checkpoint-4/loader.pt", "train() without resume_from_checkpoint"),
    "damaged states": ("ValueError", "checkpoint-4/loader.pt"),
    "tensor parallelism": ("ValueError", "data-parallel rank 0 of 1", "num_ranks=1, rank=0"),
    "tensor parallelism with one rank": ("nothing was raised",),
    "sequence parallelism": ("ValueError", "several times"),
    "another batch size": ("ValueError", "auto_find_batch_size"),
}


def test_what_would_lose_rows_is_refused_on_all_ranks_with_what_to_do(tmp_path: Path):
    training = Training(tmp_path)
    run_ranks("transformers_refused_job.py", 2, training.job({}), tmp_path)
    for rank in range(2):
        messages = json.loads((tmp_path / f"messages-{rank}.json").read_text())
        missing = [(name, part) for name, parts in REFUSED.items() for part in parts if part not in messages[name]]
        assert missing == [], messages
