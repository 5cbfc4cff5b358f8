"""Ranks of one run and of a second one that continues it: states gathered or in files, and plans compared."""

from __future__ import annotations

import io
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.ranks import run_ranks
from jobs.torchrun import run_torchrun
from support import batches_of, open_loader, write_dataset

pytestmark = [
    pytest.mark.usefixtures("leaves_nothing_behind"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

FILES = ((130, 20), (7, 7), (111, 15), (95, 12))
ROWS = 343
STOP = 5

IN_ORDER: dict[str, Any] = {}
SHARDS_SHUFFLED = {"shuffle": True, "shuffle_seed": 7}
ROWS_MIXED = {"shuffle": True, "shuffle_seed": 7, "shuffle_buffer_size": 60}

SHUFFLES = {"in_order": IN_ORDER, "shards_shuffled": SHARDS_SHUFFLED, "rows_mixed": ROWS_MIXED}
CASES = [
    {
        "name": f"{how}-{shuffle}-{num_workers}",
        "how": how,
        "epoch": 2,
        "options": {"num_workers": num_workers, **SHUFFLES[shuffle]},
    }
    for how, shuffle in [*itertools.product(("gathered", "files"), SHUFFLES), ("checkpoint", "rows_mixed")]
    for num_workers in (0, 2)
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("distributed") / "data"
    assert write_dataset(directory, FILES) == ROWS
    return directory


@dataclass(frozen=True)
class TwoRuns:
    """What the ranks of two runs delivered, the second one continuing the first.

    Attributes:
        num_ranks: Number of ranks.
        directory: Where they kept their states.
        reports: What each rank of each run wrote, by run and rank.
    """

    num_ranks: int
    directory: Path
    reports: list[list[dict[str, Any]]]

    def delivered(self, case: str, run: int, rank: int) -> list[list[int]]:
        """Return the batches of one rank in one run."""
        batches: list[list[int]] = self.reports[run][rank]["delivered"][case]
        return batches


STARTS = [
    pytest.param((run_torchrun, 2), id="2 ranks of torchrun"),
    pytest.param((run_ranks, 3), id="3 ranks"),
    pytest.param((run_torchrun, 3), id="3 ranks of torchrun", marks=pytest.mark.soak),
]


@pytest.fixture(scope="module", params=STARTS)
def two_runs(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> TwoRuns:
    """Run all cases up to `STOP` steps, and in a second run the rest of them."""
    run_job, num_ranks = request.param
    directory = tmp_path_factory.mktemp("runs")
    reports = []
    for run, stop in enumerate((STOP, None)):
        arguments = {"data": str(data), "directory": str(directory), "cases": CASES, "stop": stop, "run": run}
        run_job("resume_job.py", num_ranks, arguments, directory)
        files = [directory / f"run-{run}-rank-{rank}.json" for rank in range(num_ranks)]
        reports.append([json.loads(file.read_text()) for file in files])
        if run == 0:
            keep_states(directory)
    return TwoRuns(num_ranks, directory, reports)


def keep_states(directory: Path) -> None:
    """Copy the states of the first run: the second one writes over them."""
    for file in directory.glob("gathered-*/states.pt"):
        file.with_name("states-of-run-0.pt").write_bytes(file.read_bytes())


@pytest.mark.parametrize("case", [case["name"] for case in CASES])
def test_two_runs_of_all_ranks_deliver_each_row_once(two_runs, case):
    runs = itertools.product(range(2), range(two_runs.num_ranks))
    rows = [row for run, rank in runs for batch in two_runs.delivered(case, run, rank) for row in batch]
    assert sorted(rows) == list(range(ROWS))
    assert all(len(two_runs.delivered(case, 0, rank)) == STOP for rank in range(two_runs.num_ranks))
    assert all(two_runs.delivered(case, 1, rank) for rank in range(two_runs.num_ranks))


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_two_runs_deliver_the_very_batches_of_an_uninterrupted_one(two_runs, case, data):
    for rank in range(two_runs.num_ranks):
        options = {**case["options"], "num_ranks": two_runs.num_ranks, "rank": rank}
        loader, dataset = open_loader(data, batch_size=8, **options)
        dataset.set_epoch(case["epoch"])
        both = [two_runs.delivered(case["name"], run, rank) for run in range(2)]
        assert both[0] + both[1] == batches_of(loader)


def test_a_gathered_list_keeps_once_what_is_equal_on_all_ranks(two_runs):
    file = two_runs.directory / "gathered-rows_mixed-2" / "states-of-run-0.pt"
    states = torch.load(file, weights_only=True)["loaders"]
    assert [state["rank"] for state in states] == list(range(two_runs.num_ranks))
    assert all(state["files"] is states[0]["files"] for state in states)
    assert all(state["plan"] is states[0]["plan"] for state in states)

    apart = io.BytesIO()
    torch.save({"loaders": [json.loads(json.dumps(state)) for state in states]}, apart)
    saved = file.stat().st_size
    assert saved < len(apart.getvalue()) - 200 * (two_runs.num_ranks - 1)


def test_states_of_ranks_are_plain_and_name_their_rank(two_runs):
    n = two_runs.num_ranks
    directory = two_runs.directory / "files-in_order-0"
    assert sorted(file.name for file in directory.iterdir()) == [
        f"loader-{rank:05d}-of-{n:05d}.json" for rank in range(n)
    ]
    for rank, file in enumerate(sorted(directory.iterdir())):
        state = json.loads(file.read_text())
        assert (state["rank"], state["num_ranks"]) == (rank, n)


def test_require_same_plan_passes_where_ranks_planned_alike(two_runs):
    assert [report["refusals"]["nothing"] for report in two_runs.reports[0]] == [None] * two_runs.num_ranks


@pytest.mark.parametrize("difference", ["seed", "files", "workers", "batch_size", "drop_last", "filters"])
def test_require_same_plan_raises_on_every_rank_and_names_the_ranks(two_runs, difference):
    said = [report["refusals"][difference] for report in two_runs.reports[0]]
    last = two_runs.num_ranks - 1
    apart = [[0], list(range(1, two_runs.num_ranks))] if difference == "files" else [list(range(last)), [last]]
    for message in said:
        assert message is not None
        named = [json.loads(f"[{ranks}]") for ranks in re.findall(r"ranks \[([\d, ]+)\]", message)]
        assert sorted(named) == apart


def test_gathering_states_that_are_not_one_of_each_rank_is_refused_on_every_rank(two_runs):
    for report in two_runs.reports[0]:
        assert "each rank's state once; this one holds ranks [0, " in report["refusals"]["gather"]
