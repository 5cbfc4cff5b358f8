"""Ranks that differ in anything: refused by all of them where they first meet, or every row is delivered once."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs.differing_job import PLACES, differences
from jobs.ranks import run_ranks
from support import write_dataset

FAULT = "ranks that differ in anything"
FILES = ((60, 20), (45, 15), (75, 25))
ROWS = 180
PLAIN = {"use_dictionary": False, "compression": "none", "write_statistics": False}

HARMLESS = {
    "nothing",
    "CPUs",
    "another order of the same files",
    "another mount point",
    "columns",
    "the batch size",
    "the short batch dropped",
    "checksums of pages",
    "read ahead",
    "uneven steps",
}
"""Differences that change no plan: each row is delivered once, but for those that a rank was told to drop."""

OTHER_STEPS = {
    "the batch size": "require_same_plan",
    "the short batch dropped": "require_same_plan",
    "uneven steps": "in_step",
}
"""Harmless differences that one place refuses all the same: ranks would make other steps."""

SHARE_A_RANK = {"ranks that do not know of each other"}
COMPARE_PLANS_ALONE = {"require_same_plan", "CheckpointEntry", "in_step"}
"""There, processes that share the rows of one rank may meet, as those of tensor parallelism do."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("ranks")
    assert write_dataset(directory / "parts", FILES) == ROWS
    for name in ("first", "copy", "other", "second"):
        shutil.copytree(directory / "parts", directory / name)
    for name, value, rows in (("first", 0, 60), ("copy", 0, 60), ("second", 1, 60), ("other", 0, 59)):
        table = pa.table({"value": np.arange(rows) + value, "score": np.zeros(rows), "name": ["x"] * rows})
        pq.write_table(table, directory / name / "part-000.parquet", row_group_size=20, **PLAIN)
    shutil.copy(directory / "first" / "part-002.parquet", directory / "more.parquet")
    return directory


@pytest.fixture(scope="module")
def cells(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what all ranks found in each cell: the same ranks try all cells."""

    @functools.cache
    def run(num_ranks: int) -> dict[tuple[str, str], tuple[dict[str, Any], ...]]:
        pairs = list(itertools.product(PLACES, differences(data)))
        report = tmp_path_factory.mktemp("reports") / "rank"
        arguments = {"data": str(data), "report": str(report), "cells": pairs}
        run_ranks("differing_job.py", num_ranks, arguments, report.parent)
        found = [json.loads(Path(f"{report}-{rank}").read_text()) for rank in range(num_ranks)]
        return dict(zip(pairs, zip(*found, strict=True), strict=True))

    return run


def test_two_versions_of_a_file_differ_in_their_values_alone(data):
    first, second = (data / name / "part-000.parquet" for name in ("first", "second"))
    assert first.stat().st_size == second.stat().st_size
    assert pq.read_metadata(first).to_dict() == pq.read_metadata(second).to_dict()
    assert first.read_bytes() != second.read_bytes()


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("place", PLACES)
def test_ranks_that_differ_are_refused_by_all_together_or_deliver_each_row_once(cells, data, record, place, num_ranks):
    found = cells(num_ranks)
    for name in differences(data):
        ranks = found[place, name]
        with record(FAULT, f"{name} differs, {num_ranks} ranks meet in {place}") as outcome:
            outcome.seconds = max(rank["seconds"] for rank in ranks)
            outcome.error = ranks[0]["refused"]
            refused = [rank["refused"] is not None for rank in ranks]
            assert all(refused) or not any(refused), name
            if name in HARMLESS:
                assert all(refused) == (place == OTHER_STEPS.get(name)), ranks[0]["refused"]
                rows = [row for rank in ranks for row in rank["rows"]]
                dropped = set(range(ROWS)).difference(rows) if name == "the short batch dropped" else set()
                assert len(dropped) < 8 or all(refused)
                if not all(refused):
                    expected = [(row, "") for row in range(ROWS) if row not in dropped]
                    outcome.compare(expected, [(row, "") for row in rows])
            elif name not in SHARE_A_RANK or place not in COMPARE_PLANS_ALONE:
                assert all(refused), name


def test_a_rank_that_cannot_tell_its_state_lets_all_ranks_raise_and_none_wait(data, tmp_path):
    arguments = {"data": str(data / "first"), "url": str(tmp_path / "store"), "report": str(tmp_path / "rank")}
    run_ranks("unknown_state_job.py", 2, arguments, tmp_path)
    first, second = (json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2))
    own = "ProgressUnknownError: the progress is not known: worker processes of a plain DataLoader deliver batches"
    assert len(first) == len(second) == 4
    for name, error in second.items():
        assert error.startswith(own) or (name == "CheckpointStore" and own in error), name
    for error in first.values():
        assert error.startswith(f"RankMismatchError: the state of process 1 is not known. Its error is {own}")
