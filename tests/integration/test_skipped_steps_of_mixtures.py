"""Steps of a mixture that are skipped: all others keep their batches, and no resume delivers skipped rows."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torch_dataloader_utils import MixedDataset, Source

ROWS = {"web": 200, "code": 80, "math": 45}
WEIGHTS = {"web": 0.6, "code": 0.25, "math": 0.15}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    for name, rows in ROWS.items():
        pq.write_table(pa.table({"x": np.arange(rows)}), root / f"{name}.parquet", row_group_size=15)
    return root


def open_mixture(root, ranks=1, weights: Any = WEIGHTS, **options: Any):
    sources = {name: Source(root / f"{name}.parquet") for name in ROWS}
    given = {"rows_per_epoch": 240, "batch_size": 12, "num_workers": 0, "shuffle": True, "shuffle_buffer_size": 40}
    given |= {"source_column": "source"}
    return [
        MixedDataset.create_dataloader(sources, weights, num_ranks=ranks, rank=rank, **{**given, **options})[0]
        for rank in range(ranks)
    ]


def rows_of(batch):
    return list(zip(batch["source"].tolist(), batch["x"].tolist(), strict=True))


TOPOLOGIES = {
    "one process": (1, {}),
    "ranks and workers": (2, {"num_workers": 2, "batch_size": 6}),
    "grid": (2, {"virtual_ranks": 4, "virtual_workers": 2, "num_workers": 1, "batch_size": 6}),
}


@pytest.mark.parametrize("shares", [2, pytest.param(1, marks=pytest.mark.soak)], ids=["some stops", "every stop"])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_all_other_steps_keep_their_batches_however_the_run_is_resumed(root, name, shares):
    """Ranks share the stops, if there are several."""
    ranks, options = TOPOLOGIES[name]
    for rank in range(ranks):
        loader = open_mixture(root, ranks, **options)[rank]
        loader.set_epoch(1)
        whole = [rows_of(batch) for batch in loader]
        loader.set_epoch(2)
        following = rows_of(next(iter(loader)))
        expected = [*whole[:3], *whole[6:9], *whole[11:]]
        loader.set_epoch(1)
        loader.skip_steps(3, 6)
        loader.skip_steps(9, 11)
        assert len(loader) == len(whole) - 5
        states = [json.loads(json.dumps(loader.state_dict()))]
        made = []
        for batch in loader:
            made.append(rows_of(batch))
            states.append(json.loads(json.dumps(loader.state_dict())))
        assert made == expected
        metrics = loader.dataset.get_metrics()
        of_sources = Counter(source for batch in made for source, _ in batch)
        assert [of["rows"] for of in metrics["sources"].values()] == [of_sources[number] for number in range(3)]
        loader.set_epoch(2)
        assert rows_of(next(iter(loader))) == following
        for step in (0, 2, 4, 7)[rank % shares :: shares] if ranks > 1 else (0, 2, 4, 7):
            resumed = open_mixture(root, ranks, **options)[rank]
            resumed.load_state_dict(states[step])
            assert [rows_of(batch) for batch in resumed] == expected[step:]
            resumed.set_epoch(2)
            assert rows_of(next(iter(resumed))) == following


def test_a_grid_that_skips_steps_is_resumed_by_other_ranks(root):
    _, options = TOPOLOGIES["grid"]
    [one] = open_mixture(root, 1, **{**options, "batch_size": 12})
    one.skip_steps(4, 7)
    whole = [rows_of(batch) for batch in one]
    states, parts = [], []
    for loader in open_mixture(root, 2, **options):
        loader.skip_steps(4, 7)
        batches = iter(loader)
        parts.append([rows_of(next(batches)) for _ in range(6)])
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert [first + second for first, second in zip(*parts, strict=True)] == whole[:6]
    [one] = open_mixture(root, 1, **{**options, "batch_size": 12})
    one.load_state_dict(states)
    assert [rows_of(batch) for batch in one] == whole[6:]


@pytest.mark.parametrize("steps", [2, 8], ids=["before they are passed", "after they are passed"])
def test_skipped_rows_stay_skipped_after_an_elastic_load(root, steps):
    sequence = Counter()
    [loader] = open_mixture(root)
    for epoch in range(10):
        loader.set_epoch(epoch)
        sequence.update(row for batch in loader for row in rows_of(batch))
    loaders = open_mixture(root, 2, num_workers=1, batch_size=6)
    taken, states, skipped = Counter(), [], set()
    for rank, loader in enumerate(loaders):
        for step in range(4, 7):
            rows = loader.dataset.rows_at(step, 0, rank)
            skipped |= {(list(ROWS).index(path.partition("@")[0]), row) for path, row in rows}
        loader.skip_steps(4, 7)
        batches = iter(loader)
        for _ in range(steps):
            taken.update(rows_of(next(batches)))
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert len(skipped) == 2 * 3 * 6
    new = {"web": 0.2, "code": 0.3, "math": 0.5}
    [loader] = open_mixture(root, weights=new)
    loader.load_state_dict(states, strict=False)
    for epoch in range(12):
        loader.set_epoch(epoch)
        taken.update(row for batch in loader for row in rows_of(batch))
    for number, rows in enumerate(ROWS.values()):
        # A skipped row comes one time less often than it would in as many passes.
        counts = {taken[number, row] + ((number, row) in skipped) for row in range(rows)}
        assert max(counts) - min(counts) <= 1
