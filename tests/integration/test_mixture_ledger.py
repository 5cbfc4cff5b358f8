"""The ledger of a mixture: which rows its steps have, which steps have a row, and a batch again."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from torch_dataloader_utils import LedgerUnknownError, MixedDataset, RunLog, Source, audit

ROWS = {"web": (90, 70), "code": (50, 34), "math": (41,)}
WEIGHTS = {"web": 0.6, "code": 0.25, "math": 0.15}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return a directory of sources. `x` is a row's number in its source."""
    root = tmp_path_factory.mktemp("sources")
    for name, files in ROWS.items():
        (root / name).mkdir()
        first = 0
        for part, rows in enumerate(files):
            table = pa.table({"x": np.arange(first, first + rows)})
            pq.write_table(table, root / name / f"part-{part}.parquet", row_group_size=15)
            first += rows
    return root


def open_mixture(root, ranks=1, weights: Any = WEIGHTS, sources: Any = None, **options: Any):
    sources = sources or {name: Source(root / name) for name in ROWS}
    given = {"rows_per_epoch": 150, "batch_size": 12, "num_workers": 0, "shuffle": True, "shuffle_buffer_size": 40}
    given |= {"source_column": "source"}
    return [
        MixedDataset.create_dataloader(sources, weights, num_ranks=ranks, rank=rank, **{**given, **options})
        for rank in range(ranks)
    ]


def rows_of(batch):
    return list(zip(batch["source"].tolist(), batch["x"].tolist(), strict=True))


def named(rows):
    """Return the rows that a ledger names as pairs of the source's place and the row's number in the source."""
    found = []
    for path, row in rows:
        head, _, file = path.partition("/")
        name = head.rpartition("@")[0]
        before = sum(ROWS[name][: int(file[len("part-")])])
        found.append((list(ROWS).index(name), before + row))
    return found


def require_ledger(dataset, epoch, rank, steps, batches):
    """Raise unless the ledger tells a rank's steps as they were delivered, and where their rows are."""
    for step, batch in zip(steps, batches, strict=True):
        rows = dataset.rows_at(step, epoch, rank)
        assert named(rows) == rows_of(batch)
        for place, (path, row) in list(enumerate(rows))[::5]:
            at = dataset.step_of(path, row, epoch)
            assert (at.epoch, at.step, at.rank, at.place, at.others) == (epoch, step, rank, place, ())


TOPOLOGIES = {
    "one process": (1, {}),
    "in order": (1, {"shuffle": False, "shuffle_buffer_size": None}),
    "ranks and workers": (2, {"num_workers": 2}),
    "grid": (2, {"virtual_ranks": 4, "virtual_workers": 2, "num_workers": 1, "batch_size": 6}),
    "no short step": (3, {"drop_last": True, "num_workers": 1}),
    "schedule": (2, {"weights": [(0, WEIGHTS), (70, {"web": 0, "code": 1, "math": 2}), (200, WEIGHTS)]}),
}


@pytest.mark.parametrize(
    "epochs", [(0, 2), pytest.param((0, 1, 2), marks=pytest.mark.soak)], ids=["two epochs", "three epochs"]
)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_ledger_tells_what_every_rank_delivers_before_and_after_it_does(root, name, epochs):
    ranks, options = TOPOLOGIES[name]
    loaders = open_mixture(root, ranks, **options)
    _, before = open_mixture(root, ranks, **options)[0]  # which delivers nothing
    for epoch in epochs:
        for rank, (loader, dataset) in enumerate(loaders):
            loader.set_epoch(epoch)
            batches = list(loader)
            require_ledger(dataset, epoch, rank, range(len(batches)), batches)
            require_ledger(before, epoch, rank, range(len(batches)), batches)
            with pytest.raises(ValueError, match=f"step={len(batches)}"):
                dataset.rows_at(len(batches))
            for step in (0, len(batches) // 2, len(batches) - 1):
                again = dataset.batch_at(step)
                assert all(np.array_equal(again[key], batches[step][key]) for key in again)
                assert named(dataset.rows_at(step, epoch - 1 if epoch else 1, 0)) != rows_of(batches[step])


def test_a_row_that_two_passes_deliver_in_one_epoch_has_two_steps(root):
    [(loader, dataset)] = open_mixture(root, weights={"web": 0.2, "code": 0.2, "math": 0.6}, rows_per_epoch=120)
    delivered: dict[int, list[int]] = {}
    for step, batch in enumerate(loader):
        for source, row in rows_of(batch):
            if source == 2:
                delivered.setdefault(row, []).append(step)
    assert any(len(steps) == 2 for steps in delivered.values())
    for row in range(41):
        at = dataset.step_of("math/part-0.parquet", row)
        steps = [] if at is None else [step.step for step in (at, *at.others)]
        assert sorted(steps) == delivered.get(row, [])


def test_the_ledger_knows_the_steps_of_this_process_after_loads(root):
    loaders = open_mixture(root, 2, num_workers=1)
    first = [list(islice(loader, 3)) for loader, _ in loaders]
    states = [json.loads(json.dumps(loader.state_dict())) for loader, _ in loaders]
    weights = {"web": 0.1, "code": 0.1, "math": 0.8}
    [(loader, dataset)] = open_mixture(root, weights=weights)
    loader.load_state_dict(states, strict=False)
    rest = list(loader)
    require_ledger(dataset, 0, 0, range(3, 3 + len(rest)), rest)
    with pytest.raises(LedgerUnknownError, match="before an elastic load"):
        dataset.rows_at(2)
    loader.set_epoch(1)
    following = list(loader)
    require_ledger(dataset, 1, 0, range(len(following)), following)
    require_ledger(dataset, 0, 0, range(3, 3 + len(rest)), rest)  # where the sources stood then is still known

    (own, own_dataset), _ = loaders  # a process that goes on itself knows what it delivered
    own.load_state_dict(states, strict=False)
    other_rest = list(own)
    require_ledger(own_dataset, 0, 0, range(3), first[0])
    require_ledger(own_dataset, 0, 0, range(3, 3 + len(other_rest)), other_rest)
    own_dataset.set_weights(weights)
    expected = [own_dataset.rows_at(step, 1) for step in range(3)]
    own.set_epoch(1)
    assert list(map(rows_of, islice(own, 3))) == list(map(named, expected))


def test_the_ledger_of_an_epoch_before_a_loaded_one_is_not_known(root):
    [(loader, _)] = open_mixture(root)
    loader.set_epoch(2)
    whole = list(loader)
    loader.set_epoch(2)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    [(resumed, dataset)] = open_mixture(root)
    resumed.load_state_dict(loader.state_dict())
    require_ledger(dataset, 2, 0, range(len(whole)), whole)
    with pytest.raises(LedgerUnknownError, match="epoch 1 is before epoch 2"):
        dataset.rows_at(0, 1)


def test_a_filter_leaves_only_batches_to_be_known(root):
    sources = {
        "web": Source(root / "web", filters=pc.field("x") >= 30, count_rows=True),
        "code": Source(root / "code"),
    }
    [(loader, dataset)] = open_mixture(root, weights={"web": 1, "code": 1}, sources=sources)
    batches = list(loader)
    with pytest.raises(LedgerUnknownError, match="source 'web' has a filter"):
        dataset.rows_at(0)
    with pytest.raises(LedgerUnknownError, match="source 'web' has a filter"):
        dataset.step_of("web@0/part-0.parquet", 40)
    assert dataset.step_of("code/part-0.parquet", 3) is not None
    assert rows_of(dataset.batch_at(3)) == rows_of(batches[3])


@pytest.mark.parametrize("path", ["web/part-7.parquet", "wiki/part-0.parquet", "web@9/part-0.parquet"])
def test_a_path_that_is_no_file_is_named(root, path):
    [(_, dataset)] = open_mixture(root)
    with pytest.raises(ValueError, match=path):
        dataset.step_of(path, 0)


# Run log, audit, fingerprint -----------------------------------------------------------------------------------------


def test_a_run_log_knows_the_steps_before_elastic_loads_and_new_weights(root, tmp_path):
    delivered = {}

    def go_on(ranks, steps, states, weights=WEIGHTS, **options: Any):
        """Deliver some steps of each rank with new loaders, as a new process would."""
        opened = open_mixture(root, ranks, weights=weights, run_log=str(tmp_path), **options)
        saved = []
        for rank, (loader, dataset) in enumerate(opened):
            if states:
                loader.load_state_dict(states, strict=False)
            first = loader.state_dict()["batches_delivered"]
            for step, batch in enumerate(islice(loader, steps), start=first):
                delivered[dataset.epoch, step, rank] = rows_of(batch)
            saved.append(json.loads(json.dumps(loader.state_dict())))
        return opened, saved

    _, states = go_on(2, 3, None, num_workers=1)
    second = {"web": 0.2, "code": 0.2, "math": 0.6}
    [(loader, _)], _ = go_on(1, None, states, second)
    loader.set_epoch(1)
    for step, batch in enumerate(islice(loader, 4)):
        delivered[1, step, 0] = rows_of(batch)
    states = [json.loads(json.dumps(loader.state_dict()))]
    go_on(3, 2, states, second, batch_size=4)
    [(_, fresh)] = open_mixture(root, weights=WEIGHTS, run_log=str(tmp_path))
    for (epoch, step, rank), rows in delivered.items():
        found = fresh.rows_at(step, epoch, rank)
        assert named(found) == rows, (epoch, step, rank)
        path, row = next(iter(found))
        at = fresh.step_of(path, row, epoch)
        assert (at.step, at.rank, at.place) == (step, rank, 0)
    log = RunLog.read(tmp_path)
    assert [segment.weights for segment in log.segments] == [WEIGHTS, second, second, second]
    other = {"web": Source(root / "web"), "code": Source(root / "code", filters=pc.field("x") > 9, count_rows=True)}
    [(_, fresh)] = open_mixture(root, weights={"web": 1, "code": 1}, sources=other, run_log=str(tmp_path))
    with pytest.raises(LedgerUnknownError, match="sources"):
        fresh.rows_at(0, 0)
    other["math"] = Source(root / "math")
    [(_, fresh)] = open_mixture(root, sources=other, run_log=str(tmp_path))
    with pytest.raises(LedgerUnknownError, match="filters of source code"):
        fresh.rows_at(0, 0)


def test_an_audit_counts_the_files_of_each_pass(root, tmp_path):
    opened = open_mixture(root, 2)
    delivered = {}
    for epoch in range(3):
        for loader, _ in opened:
            loader.set_epoch(epoch)
            for step, batch in enumerate(loader):
                for pair in rows_of(batch):
                    delivered[pair] = delivered.get(pair, 0) + 1
                if epoch == 2 and step == 2:
                    break
    states = [json.loads(json.dumps(loader.state_dict())) for loader, _ in opened]
    [(_, today)] = open_mixture(root)
    for against in (None, today):
        found = audit(states, against)
        assert not found.problems
        counted = {}
        for file in found.files:
            head, _, name = file.path.partition("/")
            source, _, number = head.rpartition("@")
            counted.setdefault((source, name), {})[int(number)] = file.done + file.under_way
        for (source, name), passes in counted.items():
            part = int(name[len("part-")])
            first = sum(ROWS[source][:part])
            rows = range(first, first + ROWS[source][part])
            total = sum(delivered.get((list(ROWS).index(source), row), 0) for row in rows)
            assert min(passes) * len(rows) + sum(passes.values()) == total
    assert found.is_fine
    assert found.files_match
    with pytest.raises(ValueError, match="of a mixture"):
        audit(states, root / "web")
    table = pa.table({"x": np.arange(12)})
    (tmp_path / "code").mkdir()
    pq.write_table(table, tmp_path / "code" / "part-0.parquet")
    sources = {name: Source((tmp_path if name == "code" else root) / name) for name in ROWS}
    [(_, other)] = open_mixture(root, sources=sources)
    found = audit(states, other)
    assert not found.is_fine
    changed = {file.path for file in found.files if file.change is not None}
    assert changed
    assert all(path.startswith("code@") for path in changed)


def test_fingerprints_of_a_mixture_are_those_of_the_same_rows_in_the_same_order(root):
    grid = {"virtual_ranks": 2, "virtual_workers": 2, "fingerprint": True}
    [(one, dataset)] = open_mixture(root, 1, **grid)
    list(one)
    whole = dataset.get_metrics()["delivered_hash"]
    assert [(entry["rank"], entry["source"]) for entry in whole] == [(rank, name) for rank in (0, 1) for name in ROWS]
    assert sum(entry["rows"] for entry in whole) == 150
    found = []
    for rank in range(2):
        loader, resumed = open_mixture(root, 2, **{**grid, "batch_size": 6, "num_workers": 1})[rank]
        own, _ = open_mixture(root, 2, **{**grid, "batch_size": 6})[rank]
        taken = iter(own)
        for _ in range(5):
            next(taken)
        loader.load_state_dict(json.loads(json.dumps(own.state_dict())))
        list(loader)
        found += resumed.get_metrics()["delivered_hash"]
    assert found == whole
    [(other, dataset)] = open_mixture(root, 1, **grid, shuffle_seed=3)
    list(other)
    assert dataset.get_metrics()["delivered_hash"] != whole
