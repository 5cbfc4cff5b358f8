"""torchtitan: the guide's loader in torchtitan's own checkpoints, killed and continued under any number of ranks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs.ranks import run_ranks, running_ranks
from support import open_loader

pytest.importorskip("torchtitan", reason="torchtitan is not installed: pip install torchtitan")

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "torchtitan.md"
ROWS = 744
EVERY = 3


def write_tokens(directory: Path) -> None:
    """Write rows of five tokens, the first of which is the row's id."""
    directory.mkdir()
    tokens = (np.arange(ROWS)[:, None] + np.arange(5)).astype(np.int64)
    column = pa.FixedSizeListArray.from_arrays(pa.array(tokens.ravel()), 5)
    pq.write_table(pa.table({"tokens": column}), directory / "part-0.parquet", row_group_size=40)


def train(directory: Path, runs: list[tuple[int, int | None]], *, sharing: int = 1, mode: str = "disabled"):
    """Train under so many processes each, killed after a step, and return the rows that each run kept, by rank."""
    write_tokens(directory / "data")
    for processes, die in runs:
        places = {"data": str(directory / "data"), "directory": str(directory), "page": str(PAGE)}
        arguments = {**places, "sharing": sharing, "mode": mode, "die": die}
        if die is None:
            run_ranks("torchtitan_job.py", processes, arguments, directory)
            continue
        with running_ranks("torchtitan_job.py", processes, arguments, directory) as job:
            assert job.wait(180) == -9, job.output()
            job.end()
    kept: list[list[list[int]]] = json.loads((directory / "runs.json").read_text())
    return kept


@pytest.mark.usefixtures("leaves_nothing_behind")
@pytest.mark.parametrize(
    ("processes", "sharing", "mode"),
    [
        pytest.param(2, 1, "disabled", id="2 ranks"),
        pytest.param(2, 1, "async", id="2 ranks, saved asynchronously"),
        pytest.param(4, 2, "disabled", id="2 data-parallel ranks of 2 processes"),
    ],
)
def test_a_killed_training_continues_with_the_batches_that_were_to_come(tmp_path, processes, sharing, mode):
    kept = train(tmp_path, [(processes, 11), (processes, None)], sharing=sharing, mode=mode)
    for rank in range(2):
        options = {"shuffle": True, "shuffle_buffer_size": 60, "uneven_ranks": "drop", "num_workers": 1}
        loader, _ = open_loader(tmp_path / "data", batch_size=8, num_ranks=2, rank=rank, **options)
        whole = [row for batch in loader for row in batch["row"].tolist()]
        assert [len(run[rank]) for run in kept] == [9 * 8, len(whole) - 9 * 8]
        assert [row for run in kept for row in run[rank]] == whole


@pytest.mark.usefixtures("leaves_nothing_behind")
@pytest.mark.parametrize("then", [1, 3])
def test_another_data_parallel_degree_continues_with_each_row_once(tmp_path, then):
    kept = train(tmp_path, [(2, 11), (then, None)])
    assert [len(run) for run in kept] == [2, then]
    assert Counter(row for run in kept for rank in run for row in rank) == Counter(range(ROWS))
