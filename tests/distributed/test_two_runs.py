"""Ranks of one run and of a second one that continues it: states gathered or in files, and plans compared."""

from __future__ import annotations

import functools
import io
import itertools
import json
import re
from collections.abc import Callable, Sequence
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
ROWS_SHUFFLED = {"shuffle": True, "shuffle_seed": 7, "shuffle_buffer_size": 60}

SHUFFLES = {"in_order": IN_ORDER, "shards_shuffled": SHARDS_SHUFFLED, "rows_shuffled": ROWS_SHUFFLED}
CASES = {
    f"{how}-{shuffle}-{num_workers}": {
        "how": how,
        "epoch": 2,
        "options": {"num_workers": num_workers, **SHUFFLES[shuffle]},
    }
    for how, shuffle in [*itertools.product(("gathered", "files"), SHUFFLES), ("checkpoint", "rows_shuffled")]
    for num_workers in (0, 2)
}
ON_TWO = ("gathered-shards_shuffled-2", "gathered-rows_shuffled-2", "files-in_order-0", "checkpoint-rows_shuffled-2")
ON_THREE = (
    "gathered-in_order-0",
    "gathered-rows_shuffled-2",
    "files-in_order-0",
    "files-shards_shuffled-0",
    "files-rows_shuffled-2",
)
"""Together they have every case once; each has those that the tests look at more closely."""


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


STARTS: dict[str, tuple[Callable[..., None], int, Sequence[str]]] = {
    "2 ranks": (run_ranks, 2, ON_TWO),
    "3 ranks": (run_ranks, 3, ON_THREE),
    "3 ranks of torchrun": (run_torchrun, 3, tuple(CASES)),
}
"""How the ranks of both runs are started, how many there are, and their cases."""

SOAK = "3 ranks of torchrun"


def for_soak(start: str) -> Any:
    return [pytest.mark.soak] if start == SOAK else []


each_start = pytest.mark.parametrize(
    "two_runs", [pytest.param(start, marks=for_soak(start)) for start in STARTS], indirect=True
)
each_case = pytest.mark.parametrize(
    ("two_runs", "case"),
    [pytest.param(start, case, marks=for_soak(start)) for start, (_, _, cases) in STARTS.items() for case in cases],
    indirect=["two_runs"],
)


@pytest.fixture(scope="module")
def run_twice(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TwoRuns]:
    """Run all cases up to `STOP` steps, and in a second run the rest of them: once for each start."""

    @functools.cache
    def run_twice(start: str) -> TwoRuns:
        run_job, num_ranks, names = STARTS[start]
        cases = [{"name": name, **CASES[name]} for name in names]
        directory = tmp_path_factory.mktemp("runs")
        reports = []
        for run, stop in enumerate((STOP, None)):
            arguments = {"data": str(data), "directory": str(directory), "cases": cases, "stop": stop, "run": run}
            run_job("resume_job.py", num_ranks, arguments, directory)
            files = [directory / f"run-{run}-rank-{rank}.json" for rank in range(num_ranks)]
            reports.append([json.loads(file.read_text()) for file in files])
            if run == 0:
                keep_states(directory)
        return TwoRuns(num_ranks, directory, reports)

    return run_twice


@pytest.fixture
def two_runs(request: pytest.FixtureRequest, run_twice: Callable[[str], TwoRuns]) -> TwoRuns:
    """What the ranks of two runs delivered."""
    return run_twice(request.param)


def keep_states(directory: Path) -> None:
    """Copy the states of the first run: the second one writes over them."""
    for file in directory.glob("gathered-*/states.pt"):
        file.with_name("states-of-run-0.pt").write_bytes(file.read_bytes())


@each_case
def test_two_runs_of_all_ranks_deliver_each_row_once(two_runs, case):
    runs = itertools.product(range(2), range(two_runs.num_ranks))
    rows = [row for run, rank in runs for batch in two_runs.delivered(case, run, rank) for row in batch]
    assert sorted(rows) == list(range(ROWS))
    assert all(len(two_runs.delivered(case, 0, rank)) == STOP for rank in range(two_runs.num_ranks))
    assert all(two_runs.delivered(case, 1, rank) for rank in range(two_runs.num_ranks))


@each_case
def test_two_runs_deliver_the_same_batches_as_an_uninterrupted_one(two_runs, case, data):
    for rank in range(two_runs.num_ranks):
        options = {**CASES[case]["options"], "num_ranks": two_runs.num_ranks, "rank": rank}
        _, dataset = open_loader(data, batch_size=8, **options)
        dataset.set_epoch(CASES[case]["epoch"])
        both = [two_runs.delivered(case, run, rank) for run in range(2)]
        assert both[0] + both[1] == batches_of(dataset)  # read in this process, which takes less time


@each_start
def test_a_gathered_list_keeps_once_what_is_equal_on_all_ranks(two_runs):
    file = two_runs.directory / "gathered-rows_shuffled-2" / "states-of-run-0.pt"
    states = torch.load(file, weights_only=True)["loaders"]
    assert [state["rank"] for state in states] == list(range(two_runs.num_ranks))
    assert all(state["files"] is states[0]["files"] for state in states)
    assert all(state["plan"] is states[0]["plan"] for state in states)

    apart = io.BytesIO()
    torch.save({"loaders": [json.loads(json.dumps(state)) for state in states]}, apart)
    saved = file.stat().st_size
    assert saved < len(apart.getvalue()) - 200 * (two_runs.num_ranks - 1)


@each_start
def test_states_of_ranks_are_plain_and_name_their_rank(two_runs):
    n = two_runs.num_ranks
    directory = two_runs.directory / "files-in_order-0"
    assert sorted(file.name for file in directory.iterdir()) == [
        f"loader-{rank:05d}-of-{n:05d}.json" for rank in range(n)
    ]
    for rank, file in enumerate(sorted(directory.iterdir())):
        state = json.loads(file.read_text())
        assert (state["rank"], state["num_ranks"]) == (rank, n)


@each_start
def test_require_same_plan_passes_where_ranks_planned_alike(two_runs):
    assert [report["refusals"]["nothing"] for report in two_runs.reports[0]] == [None] * two_runs.num_ranks


@each_start
@pytest.mark.parametrize(
    "difference",
    [
        "seed",
        "files",
        "workers",
        "batch_size",
        "drop_last",
        "filters",
        "gather_states of other plans",
        "in_step of other plans",
        "CheckpointEntry of other plans",
    ],
)
def test_ranks_that_planned_different_epochs_are_refused_on_every_rank_with_the_ranks(two_runs, difference):
    said = [report["refusals"][difference] for report in two_runs.reports[0]]
    last = two_runs.num_ranks - 1
    apart = [[0], list(range(1, two_runs.num_ranks))] if difference == "files" else [list(range(last)), [last]]
    for message in said:
        assert message is not None
        named = [json.loads(f"[{ranks}]") for ranks in re.findall(r"ranks \[([\d, ]+)\]", message)]
        assert sorted(named) == apart
        assert "of other plans" not in difference or "shuffle_seed=2 and 1" in message


@each_start
def test_a_rank_that_no_process_delivers_is_an_error_on_every_rank(two_runs):
    others = list(range(1, two_runs.num_ranks))
    for report in two_runs.reports[0]:
        assert f"delivers the rows of ranks {others} of {two_runs.num_ranks}" in report["refusals"]["one rank twice"]
        assert report["refusals"]["each rank alone"] is None


@each_start
def test_a_loader_that_was_opened_before_it_could_know_of_other_processes_is_an_error_on_every_rank(two_runs):
    expected = f"Now there are {two_runs.num_ranks} processes, and it would read all rows"
    for report in two_runs.reports[0]:
        assert [expected in str(message) for message in report["early"]["all"]] == [True] * 5
        for message in report["early"]["one"]:
            assert message.startswith("processes [0]: the dataset was opened as that of the only rank")


@each_start
def test_a_loader_of_one_rank_alone_waits_for_no_other(two_runs):
    assert {report["refusals"]["an entry on one rank alone"] for report in two_runs.reports[0]} == {None}


@each_start
def test_a_batch_of_none_is_not_taken_for_the_end(two_runs):
    counts = [report["without values"] for report in two_runs.reports[0]]
    batches = [count["batches"] for count in counts]
    assert min(batches) < max(batches)
    assert [count["steps"] for count in counts] == [max(batches)] * two_runs.num_ranks


@each_start
def test_gathering_states_that_are_not_one_of_each_rank_is_refused_on_every_rank(two_runs):
    for report in two_runs.reports[0]:
        assert "each rank's state once; this one holds ranks [0, " in report["refusals"]["gather"]
