"""Accelerate: killed and resumed, with its own save_state and load_state, under any number of ranks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.ranks import run_ranks, running_ranks
from support import open_loader, skip_unless_installed, write_dataset

from torch_dataloader_utils.distributed import read_states

skip_unless_installed("accelerate", reason="the group of frameworks is not installed")

pytestmark = pytest.mark.usefixtures("preloaded_frameworks")

FILES = ((130, 50), (7, 50), (211, 40), (96, 30))
ROWS = 444
STEPS = 28
"""Of an epoch on two ranks."""

soak = pytest.mark.soak


@pytest.mark.usefixtures("leaves_nothing_behind")
@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([(2, 2, 11), (2, 2, None)], id="2 ranks with workers"),
        pytest.param([(2, 0, STEPS), (1, 0, None)], id="2 ranks at an epoch's end, then 1"),
        pytest.param([(2, 2, 11), (3, 0, 13), (2, 0, None)], id="2 ranks, then 3, then 2", marks=soak),
        pytest.param([(1, 0, 11), (1, 0, 17), (1, 0, None)], id="1 rank", marks=soak),
        pytest.param([(1, 2, 11), (1, 2, None)], id="1 rank with workers", marks=soak),
        pytest.param([(2, 0, 11), (2, 0, None)], id="2 ranks", marks=soak),
        pytest.param([(2, 0, 31), (1, 2, None)], id="2 ranks in the second epoch, then 1", marks=soak),
    ],
)
def test_a_killed_training_goes_on_with_each_row_once(tmp_path: Path, runs: list[tuple[int, int, int | None]]):
    assert write_dataset(tmp_path / "data", FILES) == ROWS
    for ranks, workers, die in runs:
        arguments = {"data": str(tmp_path / "data"), "directory": str(tmp_path), "workers": workers, "die": die}
        if die is None:
            run_ranks("accelerate_job.py", ranks, arguments, tmp_path)
            continue
        with running_ranks("accelerate_job.py", ranks, arguments, tmp_path) as job:
            assert job.wait(120) == -9, job.output()
            job.end()
    trained = Counter(map(tuple, json.loads((tmp_path / "trained.json").read_text())))
    expected = {(epoch, row) for epoch in range(2) for row in range(ROWS)}
    # Of an odd rest that is dealt out to other ranks, fewer rows than ranks are left out in each epoch.
    dropped = sum(ranks - 1 for ranks, _, _ in runs) if len({ranks for ranks, *_ in runs}) > 1 else 0
    assert trained.keys() <= expected
    assert len(expected - trained.keys()) <= dropped
    assert trained.total() == len(trained), "rows repeated"
    states = read_states(tmp_path / "newest")
    saved = (torch.load(path, weights_only=True) for path in (tmp_path / "newest").glob("custom_checkpoint_*.pkl"))
    assert states == next(state["ranks"] for state in saved if "ranks" in state)
    assert len(states) == runs[-1][0]


def test_a_pass_ends_on_all_ranks_when_a_filter_leaves_one_of_them_no_batch(tmp_path: Path):
    """Killed at a step, and at the end of an epoch of which one rank has rows left: as without an interruption."""
    assert write_dataset(tmp_path / "data", FILES) == ROWS
    arguments = {"data": str(tmp_path / "data"), "from_value": 140, "workers": 0, "die": None}

    def trained_of(name: str, dies: list[int]) -> Counter[tuple[int, int]]:
        (tmp_path / name).mkdir()
        of_run = {**arguments, "directory": str(tmp_path / name)}
        for die in dies:
            with running_ranks("accelerate_job.py", 2, {**of_run, "die": die}, tmp_path) as job:
                assert job.wait(120) == -9, job.output()
                job.end()
        run_ranks("accelerate_job.py", 2, of_run, tmp_path)
        return Counter(map(tuple, json.loads((tmp_path / name / "trained.json").read_text())))

    whole = trained_of("whole", [])
    passed = ROWS - 140
    for epoch in range(2):
        rows = [row for of_epoch, row in whole if of_epoch == epoch]
        assert passed // 2 < len(rows) < passed, "the ranks had equally many batches: nothing was tried"
        assert set(rows) <= set(range(140, ROWS))
    [end, _] = json.loads((tmp_path / "whole" / "ends.json").read_text())
    assert trained_of("killed", [5, end - 3]) == whole
    assert whole.total() == len(whole), "rows repeated"


def test_a_pass_ends_on_all_ranks_when_rows_of_whole_steps_of_one_are_excluded(tmp_path: Path):
    """In the epoch in which they are excluded; the next one is balanced without them."""
    write_dataset(tmp_path / "data", FILES)
    arguments = {
        "data": str(tmp_path / "data"),
        "directory": str(tmp_path),
        "excludes": True,
        "workers": 0,
        "die": None,
    }
    run_ranks("accelerate_job.py", 2, arguments, tmp_path)
    ends = json.loads((tmp_path / "ends.json").read_text())
    assert ends == [STEPS - 2, STEPS - 2 + (ROWS - 16) // 16 + 1]
    trained = Counter(map(tuple, json.loads((tmp_path / "trained.json").read_text())))
    assert set(trained.values()) == {1}


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "remedy"),
    [
        pytest.param(
            {"dp_shard_size": 2, "tp_size": 2}, 2, 'torch_device_mesh["dp_shard"]', id="2 ranks of 2 processes"
        ),
        pytest.param({"tp_size": 2}, 1, "num_ranks=1, rank=0", id="1 rank of 2 processes"),
    ],
)
def test_processes_of_tensor_parallelism_train_on_the_same_batches(
    tmp_path: Path, sizes: dict[str, int], num_ranks: int, remedy: str
):
    assert write_dataset(tmp_path / "data", FILES) == ROWS
    arguments = {"data": str(tmp_path / "data"), "directory": str(tmp_path), "sizes": sizes}
    run_ranks("accelerate_mesh_job.py", 2 * num_ranks, arguments, tmp_path)
    reports = [json.loads((tmp_path / f"report-{process}.json").read_text()) for process in range(2 * num_ranks)]
    assert all(remedy in report["refusal"] for report in reports)
    batches = [report["batches"] for report in reports]
    assert batches[::2] == batches[1::2]
    assert sorted(row for rank in batches[::2] for batch in rank for row in batch) == list(range(ROWS))
    assert [report["again"] for report in reports] == [each[5:] for each in batches]
    assert {report["epoch"] for report in reports} == {1}, "an epoch that was set was left out"


@pytest.mark.parametrize("workers", [0, 2])
def test_the_random_numbers_of_the_model_go_on_after_a_resume(tmp_path: Path, workers: int):
    write_dataset(tmp_path / "data", FILES)
    accelerate = pytest.importorskip("accelerate")
    module = pytest.importorskip("torch_dataloader_utils.integrations.accelerate")

    def run(*, resumes: bool) -> list[float]:
        accelerator = accelerate.Accelerator(cpu=True)
        made, _ = open_loader(tmp_path / "data", num_workers=workers, batch_size=50)
        loader = module.prepare_loader(accelerator, made)
        torch.manual_seed(7)
        if resumes:
            accelerator.load_state(str(tmp_path / "saved"))
        drawn = []
        for number, _ in enumerate(loader):
            drawn.append(torch.rand(()).item())
            if number == 2 and not resumes:
                accelerator.save_state(str(tmp_path / "saved"))
        return drawn

    assert run(resumes=False)[3:] == run(resumes=True)


def seed_of_worker(batch: Any) -> int:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    return info.seed


def test_workers_that_each_epoch_starts_have_seeds_of_their_own(tmp_path: Path):
    write_dataset(tmp_path / "data", FILES)
    accelerate = pytest.importorskip("accelerate")
    module = pytest.importorskip("torch_dataloader_utils.integrations.accelerate")
    made, _ = open_loader(
        tmp_path / "data", num_workers=1, persistent_workers=False, batch_size=50, collate_fn=seed_of_worker
    )
    loader = module.prepare_loader(accelerate.Accelerator(cpu=True), made)
    torch.manual_seed(7)
    seeds = [set(loader) for _ in range(3)]  # nothing draws from the generator between them
    assert [len(each) for each in seeds] == [1, 1, 1]
    assert len(set.union(*seeds)) == 3
    torch.manual_seed(7)
    loader.set_epoch(2)
    assert set(loader) == seeds[2], "a resume in an epoch gives them others"


@pytest.mark.parametrize("resumed", [False, True])
def test_steps_restored_after_a_pass_are_delivered_by_the_next_pass_alone(tmp_path: Path, resumed: bool):
    write_dataset(tmp_path / "data", FILES)
    accelerate = pytest.importorskip("accelerate")
    module = pytest.importorskip("torch_dataloader_utils.integrations.accelerate")

    def prepared() -> Any:
        made, _ = open_loader(tmp_path / "data", num_workers=0, batch_size=50)
        return module.prepare_loader(accelerate.Accelerator(cpu=True), made)

    def rows_of_pass(loader: Any) -> list[int]:
        return [row for batch in loader for row in batch["row"].tolist()]

    loader = prepared()
    loader.loader.skip_steps(2, 4)
    left = rows_of_pass(loader)
    if resumed:
        state = loader.state_dict()
        loader = prepared()
        loader.load_state_dict(state)
    assert loader.epoch == 1
    loader.loader.restore_skipped()
    assert loader.epoch == 0
    assert rows_of_pass(loader) == list(range(100, 200))
    assert sorted([*left, *range(100, 200)]) == list(range(ROWS))
    assert loader.epoch == 1
    assert sorted(rows_of_pass(loader)) == list(range(ROWS))


@pytest.mark.parametrize("at", [0, 4, 5, 6])
def test_steps_restored_within_a_pass_come_in_it_or_in_the_next_one(tmp_path: Path, at: int):
    """Of a pass of seven batches; two are fetched ahead."""
    write_dataset(tmp_path / "data", FILES)
    accelerate = pytest.importorskip("accelerate")
    module = pytest.importorskip("torch_dataloader_utils.integrations.accelerate")
    made, _ = open_loader(tmp_path / "data", num_workers=0, batch_size=50)
    loader = module.prepare_loader(accelerate.Accelerator(cpu=True), made)
    made.skip_steps(2, 4)
    rows = []
    while loader.epoch == 0:
        for number, batch in enumerate(loader):
            rows += batch["row"].tolist()
            if number == at and len(rows) <= ROWS - 100:
                made.restore_skipped()
    assert rows == [*range(100), *range(200, ROWS), *range(100, 200)]


def test_a_restore_where_nothing_was_skipped_changes_nothing(tmp_path: Path):
    write_dataset(tmp_path / "data", FILES)
    accelerate = pytest.importorskip("accelerate")
    module = pytest.importorskip("torch_dataloader_utils.integrations.accelerate")
    made, _ = open_loader(tmp_path / "data", num_workers=0, batch_size=50)
    loader = module.prepare_loader(accelerate.Accelerator(cpu=True), made)
    for epoch in range(3):
        assert loader.epoch == epoch
        assert sum(1 for _ in loader) == 9
        made.restore_skipped()


def test_ranks_with_unequal_batches_restore_skipped_steps_together_and_lose_none_that_a_checkpoint_left(tmp_path: Path):
    assert write_dataset(tmp_path / "data", ((96, 96), (112, 112))) == 208
    lengths = [len(open_loader(tmp_path / "data", batch_size=8, num_ranks=2, rank=rank)[0]) for rank in range(2)]
    assert lengths[0] != lengths[1]
    arguments = {"data": str(tmp_path / "data"), "directory": str(tmp_path), "from_value": 40, "shorter": min(lengths)}
    run_ranks("accelerate_skips_job.py", 2, arguments, tmp_path)
    reports = [json.loads((tmp_path / f"report-{rank}.json").read_text()) for rank in range(2)]
    for report in reports:
        assert report["epochs"] == [0, 0]
        assert len(report["passes"][1]) == 16
    assert len(reports[0]["passes"][0]) == len(reports[1]["passes"][0]) < 208 // 2 - 16, "both had equally many"
    restored = [row for report in reports for rows in report["passes"] for row in rows]
    assert len(set(restored)) == len(restored), "rows repeated"
    kept = [row for report in reports for row in report["before"] + report["after"]]
    assert sorted(kept) == list(range(208))
    assert sorted(len(report["after"]) for report in reports) == [0, 8 * abs(lengths[0] - lengths[1])]
