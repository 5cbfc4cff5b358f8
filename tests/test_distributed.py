"""Many ranks, by real torchrun: states gathered or in files, plans compared, and SIGKILL at any moment."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from jobs.processes import descendants, living, ownerless, shared_memory, wait_until_none
from jobs.torchrun import JOBS, Job, running
from support import batches_of, open_loader, write_dataset

from torch_dataloader_utils import CheckpointMismatchError, RankMismatchError
from torch_dataloader_utils.distributed import gather_states, load_rank_state, own_state, save_rank_state

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


# Two runs of torchrun -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TwoRuns:
    """What the ranks of two runs of torchrun delivered, the second one continuing the first.

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


@pytest.fixture(scope="module", params=[2, 3], ids=["2-ranks", "3-ranks"])
def two_runs(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> TwoRuns:
    """Run all cases up to `STOP` steps, and in a second torchrun the rest of them."""
    directory = tmp_path_factory.mktemp("runs")
    reports = []
    for run, stop in enumerate((STOP, None)):
        arguments = {"data": str(data), "directory": str(directory), "cases": CASES, "stop": stop, "run": run}
        with running("resume_job.py", request.param, arguments, directory) as job:
            job.finish()
        files = [directory / f"run-{run}-rank-{rank}.json" for rank in range(request.param)]
        reports.append([json.loads(file.read_text()) for file in files])
        if run == 0:
            keep_states(directory)
    return TwoRuns(request.param, directory, reports)


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


def test_the_plan_digest_tells_files_of_another_content_apart(tmp_path):
    digests = set()
    for number in range(2):
        write_dataset(tmp_path / str(number), FILES)
        if number:
            table = pq.read_table(tmp_path / "1" / "part-000.parquet")
            doubled = table.set_column(0, "value", pc.multiply(table["value"], 2))
            pq.write_table(doubled, tmp_path / "1" / "part-000.parquet", row_group_size=FILES[0][1])
        digests.add(open_loader(tmp_path / str(number))[1].plan_digest)
    assert len(digests) == 2


# Lists and files of states, without torchrun -------------------------------------------------------------------------


def states_of(data: Path, num_ranks: int, stop: int = 3) -> list[dict[str, Any]]:
    """Return the states of all ranks, each after some batches."""
    states = []
    for rank in range(num_ranks):
        loader, _ = open_loader(data, batch_size=8, num_ranks=num_ranks, rank=rank)
        batches = iter(loader)
        for _ in range(stop):
            next(batches)
        states.append(loader.state_dict())
    return states


def test_own_state_finds_a_rank_in_any_order_of_the_list(data):
    states = states_of(data, 3)
    for order in itertools.permutations(states):
        assert [own_state(order, rank)["rank"] for rank in range(3)] == [0, 1, 2]


def test_own_state_asks_the_environment_of_torchrun_for_the_rank(data, monkeypatch):
    states = states_of(data, 2)
    assert own_state(states)["rank"] == 0
    monkeypatch.setenv("RANK", "1")
    assert own_state(states)["rank"] == 1


@pytest.mark.parametrize("ranks", [[0, 2], [0, 1, 1], [1, 2], [0, 0], []])
def test_own_state_refuses_a_list_in_which_a_rank_is_missing_or_twice(data, ranks):
    states = states_of(data, 3)
    with pytest.raises(RankMismatchError, match=r"rank"):
        own_state([states[rank] for rank in ranks], 0)


def test_own_state_refuses_a_rank_that_saved_nothing_and_says_how_many_did(data):
    with pytest.raises(RankMismatchError, match=r"rank 2 .*2 ranks"):
        own_state(states_of(data, 2), 2)


def test_own_state_refuses_a_list_that_lacks_the_last_ranks(data):
    with pytest.raises(RankMismatchError, match="rank"):
        own_state(states_of(data, 3)[:2], 0)


def test_another_ranks_state_and_one_of_more_ranks_are_refused(data):
    loader, _ = open_loader(data, batch_size=8, num_ranks=2, rank=0)
    with pytest.raises(CheckpointMismatchError, match="rank changed: checkpoint=1, current=0"):
        loader.load_state_dict(states_of(data, 2)[1])
    with pytest.raises(CheckpointMismatchError, match="num_ranks changed: checkpoint=3, current=2"):
        loader.load_state_dict(states_of(data, 3)[0])


def test_without_a_process_group_the_gathered_list_has_one_state(data):
    loader, _ = open_loader(data, batch_size=8)
    whole = batches_of(loader)
    batches = iter(loader)
    next(batches)
    states = gather_states(loader)
    assert len(states) == 1
    fresh, _ = open_loader(data, batch_size=8)
    fresh.load_state_dict(own_state(states))
    assert batches_of(fresh) == whole[1:]


def test_a_rank_whose_file_is_missing_is_told_what_the_directory_holds(data, tmp_path):
    loader, _ = open_loader(data, batch_size=8, num_ranks=2, rank=0)
    path = save_rank_state(loader, tmp_path / "step-1")
    assert [one.name for one in path.parent.iterdir()] == ["loader-00000-of-00002.json"]
    for other in ({"num_ranks": 2, "rank": 1}, {"num_ranks": 1, "rank": 0}):
        fresh, _ = open_loader(data, batch_size=8, **other)
        with pytest.raises(FileNotFoundError, match=r"loader-00000-of-00002\.json"):
            load_rank_state(fresh, tmp_path / "step-1")
    with pytest.raises(FileNotFoundError, match="nothing"):
        load_rank_state(loader, tmp_path / "nothing")


# SIGKILL ------------------------------------------------------------------------------------------------------------

KILL_FILES = ((900, 40), (33, 33), (1100, 50), (700, 25))
KILL_ROWS = 2733
EVERY = 3
PAUSE_SEC = 0.01
START_SEC = 4.0
"""About what torchrun and its ranks take until the first batch."""


@pytest.fixture(scope="module")
def kill_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("killed") / "data"
    assert write_dataset(directory, KILL_FILES) == KILL_ROWS
    return directory


def ranks_or_workers(job: Job) -> tuple[list[int], list[int]]:
    """Return the ids of the job's rank processes and of their data workers."""
    ranks, workers = [], []
    for pid in job.processes():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().startswith("pt_data_worker"):
                workers.append(pid)
            elif b"killed_job.py" in Path(f"/proc/{pid}/cmdline").read_bytes() and pid != job.torchrun:
                ranks.append(pid)
    return ranks, workers


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_everything(job: Job, choice: random.Random) -> None:
    """Take down torchrun and all that it started, as a machine that goes off would."""
    job.end()


def kill_all_but_workers(job: Job, choice: random.Random) -> None:
    """Take down torchrun and the ranks; their workers have to notice by themselves."""
    kill([job.torchrun, *ranks_or_workers(job)[0]])


def kill_one_rank(job: Job, choice: random.Random) -> None:
    """Take down one rank; torchrun has to end the other, and the workers have to notice."""
    kill([choice.choice(ranks_or_workers(job)[0] or [job.torchrun])])


def kill_one_worker(job: Job, choice: random.Random) -> None:
    """Take down one worker; its rank has to fail, not to wait for it."""
    ranks, workers = ranks_or_workers(job)
    kill([choice.choice(workers or ranks or [job.torchrun])])


Way: TypeAlias = Callable[[Job, random.Random], None]
WAYS: tuple[Way, ...] = (kill_everything, kill_one_rank, kill_all_but_workers, kill_one_worker)


@dataclass
class Epoch:
    """An epoch that is trained under fire until it ends.

    Attributes:
        data: The files.
        directory: Where its checkpoint is.
        options: Those of the loader.
        choice: Decides when and whom to kill.
        kills: How often its training was killed.
    """

    data: Path
    directory: Path
    options: dict[str, Any]
    choice: random.Random
    kills: int = 0

    def checkpoint(self) -> dict[str, Any]:
        """Return what is committed."""
        path = self.directory / "checkpoint.pt"
        if not path.exists():
            return {"trained": [[], []], "ended": False}
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        return saved

    def killed(self, way: Way, seconds: float, *, in_training: bool = True) -> None:
        """Train, kill it some time after it began, and see that what was committed stays and nobody is left."""
        before, blocks = self.checkpoint()["trained"], shared_memory()
        with self._training() as job:
            if in_training:
                wait_until_none(lambda: job.is_running and len(list(self.directory.glob("begun-*"))) < 2, seconds=60)
            wait_until_none(lambda: job.is_running, seconds)
            if job.is_running:
                way(job, self.choice)
                self.kills += 1
            job.wait(60)
            left = wait_until_none(job.processes)
            assert not left, f"after {way.__name__}, processes were left behind:\n{job.output()}"
        assert not wait_until_none(lambda: ownerless(shared_memory() - blocks))
        after = self.checkpoint()["trained"]
        assert [new[: len(old)] for old, new in zip(before, after, strict=True)] == before

    def finished(self) -> None:
        """Train to the end."""
        with self._training() as job:
            job.finish()

    def expected(self) -> list[list[list[int]]]:
        """Return the batches of each rank in an epoch that nobody disturbs."""
        options = dict(self.options)
        if "least" in options:
            options["filters"] = pc.field("value") >= options.pop("least")
        whole = []
        for rank in range(2):
            loader, dataset = open_loader(self.data, batch_size=8, num_ranks=2, rank=rank, **options)
            dataset.set_epoch(3)
            whole.append(batches_of(loader))
        return whole

    def _training(self) -> contextlib.AbstractContextManager[Job]:
        for mark in self.directory.glob("begun-*"):
            mark.unlink()
        arguments = {"data": str(self.data), "directory": str(self.directory), "options": self.options}
        return running(
            "killed_job.py", 2, {**arguments, "every": EVERY, "pause": PAUSE_SEC, "epoch": 3}, self.directory
        )


def check_rows(epoch: Epoch) -> None:
    """Count what was committed: no row lost, none repeated, every batch that of an undisturbed epoch."""
    checkpoint = epoch.checkpoint()
    assert checkpoint["ended"]
    rows = [row for rank in checkpoint["trained"] for batch in rank for row in batch]
    expected = set(range(epoch.options.get("least", 0), KILL_ROWS))
    assert expected - set(rows) == set(), "rows lost"
    assert len(rows) == len(expected), "rows repeated"
    assert checkpoint["trained"] == epoch.expected()


def test_an_epoch_killed_three_times_commits_each_row_once_and_leaves_nobody_behind(kill_data, tmp_path):
    options = {"num_workers": 2, **ROWS_MIXED, "shuffle_buffer_size": 200}
    epoch = Epoch(kill_data, tmp_path, options, random.Random(5))
    committed = []
    for way in (kill_everything, kill_one_rank, kill_all_but_workers):
        epoch.killed(way, epoch.choice.uniform(0.1, 0.7))
        committed.append(sum(map(len, epoch.checkpoint()["trained"])))
    assert epoch.kills == 3
    assert 0 < committed[-1] < KILL_ROWS // 8, "the kills must fall into the epoch"
    epoch.finished()
    check_rows(epoch)


def test_a_killed_worker_fails_its_rank_which_can_be_resumed(kill_data, tmp_path):
    epoch = Epoch(kill_data, tmp_path, {"num_workers": 2}, random.Random(6))
    epoch.killed(kill_one_worker, 0.4)
    assert epoch.kills == 1
    assert not epoch.checkpoint()["ended"]
    epoch.finished()
    check_rows(epoch)


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_workers_with_full_queues_end_with_a_killed_training_process(tmp_path, start):
    """A pipe holds 64 KiB; whoever writes more to it waits for somebody to read."""
    write_dataset(tmp_path / "data", ((80_000, 4_000),))
    command = [sys.executable, str(JOBS / "stalled_job.py"), str(tmp_path / "data"), start]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            family = descendants(process.pid)
            time.sleep(1)
        finally:
            process.kill()
    assert len(family) >= 2
    left = wait_until_none(lambda: family & living())
    kill(sorted(left))
    assert not left


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_workers", [2, 0])
@pytest.mark.parametrize(
    "options",
    [
        IN_ORDER,
        SHARDS_SHUFFLED,
        {**ROWS_MIXED, "shuffle_buffer_size": 200},
        {**SHARDS_SHUFFLED, "least": 1000},
        {**ROWS_MIXED, "shuffle_buffer_size": 200, "least": 1000},
    ],
    ids=["in-order", "shards-shuffled", "rows-mixed", "filtered", "rows-mixed-and-filtered"],
)
def test_epochs_killed_at_random_moments_commit_each_row_once(kill_data, tmp_path, options, num_workers):
    kills = 0
    for number in range(10):
        epoch = Epoch(kill_data, tmp_path / str(number), {"num_workers": num_workers, **options}, random.Random(number))
        epoch.directory.mkdir()
        while not epoch.checkpoint()["ended"]:
            in_training = epoch.choice.random() < 0.8
            longest = 0.8 if in_training else START_SEC
            epoch.killed(epoch.choice.choice(WAYS), epoch.choice.uniform(0, longest), in_training=in_training)
        check_rows(epoch)
        kills += epoch.kills
        if kills >= 6:
            return
    pytest.fail("the epochs ended before they were killed")
