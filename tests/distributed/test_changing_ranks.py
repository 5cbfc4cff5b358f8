"""Groups of 2, then 4, then 3 ranks: they make the same steps, and share one epoch between them.

Every step is a collective. Ranks that stopped apart would hang, and the job would be ended by its timeout, and fail.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest
from jobs.ranks import run_ranks
from jobs.torchrun import run_torchrun
from support import write_dataset

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

FILES = ((430, 20), (7, 7), (211, 35), (195, 12), (1, 1))
ROWS = 844
KEPT = [row for row in range(ROWS) if not row & 4]
GROUPS = (2, 4, 3)
STEPS = 6

MIXED = {"shuffle": True, "shuffle_buffer_size": 60}
CASES: list[dict[str, Any]] = [
    {"name": "dropped", "together": None, "options": {"uneven_ranks": "drop", "num_workers": 2, **MIXED}},
    {"name": "padded", "together": None, "options": {"uneven_ranks": "pad", "num_workers": 0, "shuffle": True}},
    {"name": "files, one row group", "together": None, "options": {"uneven_ranks": "drop", "num_workers": 1}},
    {"name": "stopped together", "together": "drop", "filtered": True, "options": {"num_workers": 2, **MIXED}},
    {"name": "padded together", "together": "pad", "filtered": True, "options": {"num_workers": 0, "shuffle": True}},
]
NAMES = [case["name"] for case in CASES]
FEW = 20
CASES.append({"name": "few", "together": "pad", "filtered": "few", "options": {"num_workers": 0, "batch_size": 3}})
SKIPPED = {"name": "skipped", "together": "drop", "skips": True, "options": {"uneven_ranks": "drop", "num_workers": 2}}
CASES.append({**SKIPPED, "options": {**SKIPPED["options"], **MIXED}})
FILTERED = [case["name"] for case in CASES if case.get("filtered")]
BALANCED = [name for name in NAMES if name not in FILTERED]


@pytest.fixture(scope="module", params=[run_ranks, pytest.param(run_torchrun, marks=pytest.mark.soak)])
def groups(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What each rank of each group reports of each case."""
    directory = tmp_path_factory.mktemp("groups")
    data = directory / "data"
    assert write_dataset(data, FILES) == ROWS
    reports = []
    for number, num_ranks in enumerate(GROUPS):
        last = number == len(GROUPS) - 1
        arguments = {
            "data": str(data),
            "directory": str(directory),
            "cases": CASES,
            "stop": None if last else STEPS,
            "load": f"group-{number - 1}" if number else None,
            "save": f"group-{number}",
        }
        request.param("shared_epoch_job.py", num_ranks, arguments, directory)
        files = [directory / f"report-group-{number}-{rank}.json" for rank in range(num_ranks)]
        reports.append([json.loads(file.read_text()) for file in files])
    return reports


def delivered(groups: list[list[dict[str, Any]]], name: str) -> Counter[int]:
    """Count how often each row was delivered, over all groups and ranks."""
    ranks = itertools.chain.from_iterable(groups)
    return Counter(row for rank in ranks for batch in rank[name]["rows"] for row in batch)


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_of_a_group_make_the_same_steps(groups, name):
    for group in groups:
        assert len({len(rank[name]["rows"]) for rank in group}) == 1
        assert group[0][name]["rows"]


@pytest.mark.parametrize("name", BALANCED)
def test_the_batches_of_a_step_are_of_one_size_and_the_length_is_exact(groups, name):
    for group in groups:
        sizes = [[len(batch) for batch in rank[name]["rows"]] for rank in group]
        assert all(one == sizes[0] for one in sizes)
        assert len({rank[name]["length"] for rank in group}) == 1
    last = groups[-1][0][name]
    assert last["length"] == 2 * STEPS + len(last["rows"]) == last["delivered"]


@pytest.mark.parametrize("name", ["dropped", "files, one row group"])
def test_three_groups_deliver_each_row_once_but_for_fewer_than_there_are_ranks(groups, name):
    counts = delivered(groups, name)
    assert set(counts.values()) == {1}
    left_out = set(range(ROWS)) - set(counts)
    assert len(left_out) == len(groups[-1][0][name]["metrics"]["uneven_rows_dropped"]) < GROUPS[-1]


def test_three_groups_deliver_each_row_and_repeat_fewer_than_there_are_ranks(groups):
    counts = delivered(groups, "padded")
    assert set(counts) == set(range(ROWS))
    assert counts.total() - ROWS == len(groups[-1][0]["padded"]["metrics"]["uneven_rows_repeated"]) < GROUPS[-1]


def test_ranks_that_stop_together_under_a_filter_deliver_no_row_twice_and_know_what_is_left(groups):
    counts = delivered(groups, "stopped together")
    assert set(counts.values()) == {1}
    assert set(counts) <= set(KEPT)
    assert len(counts) > len(KEPT) * 0.8


def test_ranks_that_are_padded_together_under_a_filter_deliver_every_row(groups):
    counts = delivered(groups, "padded together")
    assert set(counts) == set(KEPT)


def test_ranks_that_have_no_row_at_all_are_given_batches_of_others_from_the_beginning_or_a_checkpoint_on(groups):
    for group in groups[:2]:
        assert len({len(rank["few"]["rows"]) for rank in group}) == 1
        rows = [row for rank in group for batch in rank["few"]["rows"] for row in batch]
        assert len(set(rows)) < len(rows)
        assert rows
    assert set(delivered(groups, "few")) == set(range(FEW))


def test_steps_that_groups_skip_come_after_the_last_step_of_the_last_group(groups):
    counts = delivered(groups, "skipped")
    assert set(counts.values()) == {1}
    assert (
        len(counts) > ROWS - 2 * GROUPS[-1]
    )  # fewer rows than ranks are left out, of the last steps and of restored ones
    for group in groups:
        assert len({len(rank["skipped"]["rows"]) for rank in group}) == 1
        assert {rank["skipped"]["metrics"]["batches_skipped"] for rank in group} == {3}
    last = groups[-1][0]["skipped"]
    assert last["length"] == 2 * (STEPS) + len(last["rows"])


# A model that is trained on a grid -----------------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[(run_ranks, False), (run_ranks, True), pytest.param((run_torchrun, False), marks=pytest.mark.soak)],
    ids=["one dataset", "mixture", "torchrun"],
)
def losses(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The losses of each step: under 1, 2 and 4 ranks, and under 4 that go on from a checkpoint of 2."""
    directory = tmp_path_factory.mktemp("grid")
    run, mixed = request.param
    for name in ("web", "code", "math") if mixed else (".",):
        write_dataset(directory / "data" / name, FILES)
    runs: list[tuple[str, int, dict[str, Any]]] = [
        ("1 rank", 1, {"num_workers": 2}),
        ("2 ranks", 2, {"num_workers": 0, "save_at": 9}),
        ("4 ranks", 4, {"num_workers": 1}),
        ("4 ranks, resumed", 4, {"num_workers": 0, "load": "checkpoint.pt"}),
    ]
    found = {}
    for name, num_ranks, options in runs:
        arguments: dict[str, Any] = {"data": str(directory / "data"), "directory": str(directory), "name": name}
        arguments |= {"load": None, "save_at": None, "mixed": mixed, **options}
        run("training_job.py", num_ranks, arguments, directory)
        found[name] = json.loads((directory / f"{name}.json").read_text())
    return found


def test_a_model_trained_on_a_virtual_topology_has_the_same_losses_under_1_2_and_4_ranks(losses):
    whole = losses["1 rank"]
    assert len(whole) == ROWS // 4 * 4 // 32 + 1 == -(-840 // 32)
    assert whole[-1] < whole[0] / 2
    assert losses["2 ranks"] == pytest.approx(whole, rel=1e-9)
    assert losses["4 ranks"] == pytest.approx(whole, rel=1e-9)


def test_4_ranks_go_on_from_a_strict_checkpoint_of_2_with_the_same_losses(losses):
    assert losses["4 ranks, resumed"] == pytest.approx(losses["1 rank"][9:], rel=1e-9)
