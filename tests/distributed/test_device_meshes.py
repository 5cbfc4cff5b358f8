"""Loaders of device meshes: processes that differ in other dimensions deliver the same batches, and have one state."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import deltalake
import numpy as np
import pyarrow.parquet as pq
import pytest
from jobs.ranks import run_ranks
from support import batches_of, open_loader, write_dataset

pytestmark = [
    pytest.mark.usefixtures("leaves_nothing_behind"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

FILES = ((130, 20), (7, 7), (111, 15), (95, 12))
ROWS = 343
GLOBAL = 32
STOP = 3
SHUFFLED = {"shuffle": True, "shuffle_seed": 7, "shuffle_buffer_size": 60}


def case(shape: str, dp: str, load: str | None = None, **options: Any) -> dict[str, Any]:
    """Return a case; a shape is written as in ``dp 2, tp 2``, and processes may have another order in the mesh.

    One that loads a checkpoint makes all steps that are left.
    """
    names, sizes = zip(*(dimension.split() for dimension in shape.split(", ")), strict=True)
    together = options.pop("together", None)
    own = {name: options.pop(name) for name in ("table", "order") if name in options}
    return {
        "shape": list(map(int, sizes)),
        "names": names,
        "dp": dp.split(", "),
        "load": load,
        "stop": STOP if load is None else None,
        "together": together,
        "options": {"num_workers": 0, **SHUFFLED, **options},
        **own,
    }


REPLICATED = "dp_replicate, dp_shard"
CASES = {
    "dp by tp": case("dp 2, tp 2", "dp"),
    "dp by tp, resumed": case("dp 2, tp 2", "dp", load="dp by tp"),
    "dp alone, resumed": case("dp 4, tp 1", "dp", load="dp by tp"),
    "one rank, resumed": case("dp 1, tp 4", "dp", load="dp by tp"),
    "stages by dp": case("pp 2, dp 2", "dp", num_workers=1),
    "stages by dp, resumed": case("pp 2, dp 2", "dp", load="stages by dp", num_workers=1),
    "replicate by shard": case("dp_replicate 2, dp_shard 2", REPLICATED),
    "replicate by shard, resumed": case("dp_replicate 2, dp_shard 2, tp 1", REPLICATED, load="replicate by shard"),
    "shard by tp": case("dp_replicate 1, dp_shard 2, tp 2", REPLICATED),
    "shard by tp, resumed": case("dp_replicate 2, dp_shard 1, tp 2", REPLICATED, load="shard by tp"),
    "renumbered": case("dp_replicate 2, dp_shard 2", REPLICATED, order=[3, 1, 2, 0]),
    "renumbered, resumed": case("dp 2, tp 2", "dp", load="renumbered", order=[1, 3, 0, 2]),
}
FILTERED = {
    "stopped together": case("dp_replicate 2, dp_shard 2", REPLICATED, together="drop", filters=[["value", "<", 200]]),
    "padded together": case(
        "dp_replicate 2, dp_shard 2", REPLICATED, "stopped together", together="pad", filters=[["value", "<", 200]]
    ),
}
EIGHT = {
    "replicate by shard by tp": case("dp_replicate 2, dp_shard 2, tp 2", REPLICATED),
    "replicate by shard by tp, resumed": case("dp_shard 4, tp 2", "dp_shard", load="replicate by shard by tp"),
    "stages by replicate by shard": case("pp 2, dp_replicate 2, dp_shard 2", REPLICATED, num_workers=1),
    "stages by replicate by shard, resumed": case(
        "pp 2, dp_replicate 1, dp_shard 4", REPLICATED, "stages by replicate by shard", num_workers=2
    ),
    "tp in the middle": case("dp_replicate 2, tp 2, dp_shard 2", REPLICATED),
    "tp in the middle, resumed": case("dp_replicate 8, dp_shard 1", REPLICATED, load="tp in the middle"),
}
UNINTERRUPTED = ("dp by tp", "stages by dp", "replicate by shard")
"""Cases that another mesh of as many ranks resumes."""

Reports = list[dict[str, Any]]
"""What each process reports, by case."""


def run_processes(count: int, cases: dict[str, dict[str, Any]], directory: Path) -> Reports:
    """Run the cases in so many processes."""
    named = [{"name": name, **case} for name, case in cases.items()]
    report = directory / "report"
    arguments = {"data": str(directory / "data"), "directory": str(directory), "cases": named, "report": str(report)}
    assert write_dataset(directory / "data", FILES) == ROWS
    run_ranks("mesh_job.py", count, arguments, directory)
    return [json.loads(Path(f"{report}-{process}").read_text()) for process in range(count)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("meshes")


@pytest.fixture(scope="module")
def four(directory: Path) -> Reports:
    """What each of four processes reports."""
    return run_processes(4, CASES | FILTERED, directory)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What each of eight processes reports."""
    return run_processes(8, EIGHT, tmp_path_factory.mktemp("eight"))


@pytest.fixture
def processes(request: pytest.FixtureRequest, case: str) -> Reports:
    """What each process reports of a case."""
    reports: Reports = request.getfixturevalue("eight" if case in EIGHT else "four")
    return reports


def params(names: Iterable[str]) -> list[Any]:
    """Return cases as parameters: those of eight processes take minutes."""
    return [pytest.param(name, marks=[pytest.mark.soak] if name in EIGHT else []) for name in names]


ALL = CASES | FILTERED | EIGHT
each_case = pytest.mark.parametrize("case", params(ALL))
each_start = pytest.mark.parametrize(
    "case", params({case["load"]: 0 for case in (CASES | EIGHT).values() if case["load"]})
)


def rank_of(process: int, case: dict[str, Any]) -> int:
    """Return the rank that a process should have: its place in the data-parallel dimensions, in their order."""
    number = case["order"].index(process) if "order" in case else process
    place = dict(zip(case["names"], np.unravel_index(number, case["shape"]), strict=True))
    sizes = dict(zip(case["names"], case["shape"], strict=True))
    return int(np.ravel_multi_index([place[name] for name in case["dp"]], [sizes[name] for name in case["dp"]]))


@each_case
def test_processes_that_differ_in_other_dimensions_have_one_rank_the_same_batches_and_one_state(processes, case):
    given = ALL[case]
    num_ranks = math.prod(
        size for name, size in zip(given["names"], given["shape"], strict=True) if name in given["dp"]
    )
    for number, process in enumerate(processes):
        found = process[case]
        assert found["num_ranks"] == num_ranks
        assert found["rank"] == rank_of(number, given)
        assert found["states"] == list(range(num_ranks))
        assert found["states in the world"] == (found["states"] if num_ranks > 1 else None)
        assert found["own"]
        assert found["files"] == [f"loader-{rank:05d}-of-{num_ranks:05d}.json" for rank in range(num_ranks)]
        assert found["groups of copies"] == [True] * 3
        assert found["rows"] == next(one[case]["rows"] for one in processes if one[case]["rank"] == found["rank"])


def by_rank(processes: Reports, case: str) -> list[list[list[int]]]:
    """Return the batches of each rank."""
    ranks = {process[case]["rank"]: process[case]["rows"] for process in processes}
    return [ranks[rank] for rank in sorted(ranks)]


def delivered(processes: Reports, *cases: str) -> list[int]:
    """Return all rows that ranks delivered."""
    ranks = itertools.chain.from_iterable(by_rank(processes, case) for case in cases)
    return sorted(row for rank in ranks for batch in rank for row in batch)


@each_start
def test_an_epoch_that_another_mesh_resumes_delivers_each_row_once(processes, case):
    for name in [name for name, given in (CASES | EIGHT).items() if given["load"] == case]:
        assert delivered(processes, case, name) == list(range(ROWS))


@pytest.mark.parametrize("case", params(CASES | EIGHT))
def test_a_step_of_all_ranks_has_the_global_batch_size_but_for_the_end_of_a_stream(processes, case):
    ranks = by_rank(processes, case)
    for rank in ranks:
        shorter = [len(batch) for batch in rank if len(batch) != GLOBAL // len(ranks)]
        assert max(shorter, default=0) < GLOBAL // len(ranks)
        assert len(shorter) <= max(1, ALL[case]["options"]["num_workers"])
        assert len(rank) >= STOP


@pytest.mark.parametrize("case", UNINTERRUPTED)
def test_as_many_ranks_continue_with_the_batches_that_were_to_come(processes, case, directory):
    first, second = by_rank(processes, case), by_rank(processes, f"{case}, resumed")
    for rank in range(len(first)):
        options = {**CASES[case]["options"], "num_ranks": len(first), "rank": rank, "batch_size": GLOBAL // len(first)}
        _, dataset = open_loader(directory / "data", **options)
        assert first[rank] + second[rank] == batches_of(dataset)


def test_ranks_of_several_dimensions_step_together_under_a_filter(four):
    stopped, padded = by_rank(four, "stopped together"), by_rank(four, "padded together")
    assert {len(rank) for rank in stopped} == {STOP}
    assert len({len(rank) for rank in padded}) == 1
    assert sorted(set(delivered(four, "stopped together", "padded together"))) == list(range(200))
    assert len(delivered(four, "stopped together")) == len(set(delivered(four, "stopped together")))


REFUSALS = {
    "indivisible": "ValueError: global_batch_size=33 cannot be divided among 2 ranks",
    "both sizes": "ValueError: batch_size=16 and global_batch_size=32: give one of them",
    "mesh and rank": "ValueError: num_ranks=2 and rank=0 beside a mesh",
    "peers apart": "RankMismatchError: processes that share rank 0 of 2 have different states",
    "no states": "ValueError: rank 0 passed None",
    "no such rank": "ValueError: src=4: the process group has ranks 0 to 3",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_makes_no_sense_is_an_error_in_every_process(four, what):
    for process in four:
        assert process["refusals"][what].startswith(REFUSALS[what])


def test_a_process_outside_the_mesh_is_refused(four):
    said = [process["refusals"]["outside"] for process in four]
    assert said[:2] == [None, None]
    assert all("this process is not in the mesh" in message for message in said[2:])


def test_states_that_one_rank_has_read_reach_all_of_its_group(four):
    assert [process["broadcasts"] for process in four] == [[[{"from": 1}], [{"from": last}]] for last in (1, 1, 3, 3)]


def test_a_table_is_opened_for_a_mesh(tmp_path):
    assert write_dataset(tmp_path / "rows", FILES) == ROWS
    deltalake.write_deltalake(str(tmp_path / "table"), pq.read_table(tmp_path / "rows"))
    table = {"table": str(tmp_path / "table"), "shuffle_buffer_size": None}
    cases = {"table": case("dp 2, tp 2", "dp", **table), "resumed": case("dp 4", "dp", load="table", **table)}
    reports = run_processes(4, cases, tmp_path)
    assert delivered(reports, "table", "resumed") == list(range(ROWS))
    assert by_rank(reports, "table") != by_rank(reports, "resumed")
