"""Entries of torch.distributed.checkpoint that hold the states of all ranks, loaded by any number of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs.ranks import run_ranks
from support import batches_of, open_loader, write_dataset

pytestmark = [
    pytest.mark.usefixtures("leaves_nothing_behind"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

FILES = ((130, 20), (7, 7), (111, 15), (95, 12))
ROWS = 343
STOP = 5

SHUFFLED = {"shuffle": True, "shuffle_seed": 7, "shuffle_buffer_size": 60}
CASES: dict[str, dict[str, Any]] = {
    "save": {"how": "save", "options": {"num_workers": 0, **SHUFFLED}},
    "async_save": {"how": "async_save", "options": {"num_workers": 2, **SHUFFLED}},
}

Report = list[dict[str, Any]]
"""What each process of a job delivered, by case."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Report]:
    """Run the cases once for each set of arguments."""
    directory = tmp_path_factory.mktemp("entries")
    data = directory / "data"
    assert write_dataset(data, FILES) == ROWS
    done: dict[str, Report] = {}

    def run(processes: int, *, load: str | None, save: str | None, stop: int | None, sharing: int = 1) -> Report:
        cases = [{"name": name, **case} for name, case in CASES.items()]
        arguments = {"cases": cases, "load": load, "save": save, "stop": stop, "sharing": sharing}
        key = f"{processes} {json.dumps(arguments)}"
        if key not in done:
            report = directory / f"report-{len(done)}"
            places = {"data": str(data), "directory": str(directory), "report": str(report)}
            run_ranks("entry_job.py", processes, arguments | places, directory)
            done[key] = [json.loads(Path(f"{report}-{rank}").read_text()) for rank in range(processes)]
        return done[key]

    run.data = data  # type: ignore[attr-defined] # where the rows are
    return run


def delivered(*reports: Report, case: str) -> list[int]:
    """Return all rows that were delivered, once for each rank, whichever of its processes has reported them."""
    found = []
    for report in reports:
        ranks = {process[case]["rank"]: process[case]["rows"] for process in report}
        found += [row for rows in ranks.values() for batch in rows for row in batch]
    return sorted(found)


@pytest.mark.parametrize("case", CASES)
def test_as_many_ranks_deliver_the_batches_of_an_uninterrupted_run(run, case):
    first = run(2, load=None, save="at 2", stop=STOP)
    second = run(2, load="at 2", save=None, stop=None)
    for rank in range(2):
        _, dataset = open_loader(run.data, batch_size=8, **CASES[case]["options"], num_ranks=2, rank=rank)
        assert first[rank][case]["rows"] + second[rank][case]["rows"] == batches_of(dataset)


@pytest.mark.parametrize("case", CASES)
def test_two_then_three_then_one_rank_deliver_each_row_once(run, case):
    first = run(2, load=None, save="at 2", stop=STOP)
    second = run(3, load="at 2", save="at 3", stop=STOP)
    third = run(1, load="at 3", save=None, stop=None)
    assert delivered(first, second, third, case=case) == list(range(ROWS))
    assert all(process[case]["rows"] for report in (first, second, third) for process in report)


@pytest.mark.parametrize("case", CASES)
def test_processes_that_share_a_rank_save_one_state_of_it(run, case):
    first = run(4, load=None, save="shared", stop=STOP, sharing=2)
    second = run(4, load="shared", save=None, stop=None)
    for one, other in itertools.pairwise(first):
        assert (one[case]["rank"] == other[case]["rank"]) == (one[case]["rows"] == other[case]["rows"])
    assert delivered(first, second, case=case) == list(range(ROWS))
