"""The hash of delivered rows: by rows and order alone, exact after every resume, equal under every number of ranks."""

from __future__ import annotations

import json
import logging
import shutil
import signal
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.orc as pa_orc
import pyarrow.parquet as pq
import pytest
from jobs.forked import start
from pairwise import pairwise
from row_hashes import entry_of
from support import all_rows_of, open_loader, rows_of, write_dataset
from text_files import csv_of

from torch_dataloader_utils import CheckpointMismatchError, StructuredDataset, to_device
from torch_dataloader_utils.distributed import load_rank_state

ROWS_SHUFFLED = {"shuffle": True, "shuffle_buffer_size": 60}
FEW = pc.field("score") > 23.4
GRID = {"virtual_ranks": 4, "virtual_workers": 2, "uneven_ranks": "drop", **ROWS_SHUFFLED}


@pytest.fixture
def data(tmp_path):
    write_dataset(tmp_path / "data")
    return tmp_path / "data"


def open_hashed(path: Any, **options: Any) -> Any:
    return open_loader(path, fingerprint=True, **options)[0]


def hash_of(loader: Any) -> Any:
    """Return the hash that the metrics have, once the state has the same."""
    state = json.loads(json.dumps(loader.state_dict()))
    shown = loader.dataset.get_metrics()["delivered_hash"]
    assert state.get("delivered_hash") == shown
    return shown


def expected(loader: Any, rows: list[int]) -> list[dict[str, Any]]:
    """Return the hash of rows, given by their ids, from its definition."""
    return [entry_of(loader.state_dict()["files"], rows, loader.dataset.rank)]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "workers": {"num_workers": 2},
    "shards shuffled": {"shuffle": True, "split_rows": 25, "num_workers": 2},
    "rows shuffled": ROWS_SHUFFLED,
    "rounds": {"shuffle": True, "shuffle_buffer_size": 20, "num_workers": 2},
    "rounds in parts": {"shuffle": True, "shuffle_buffer_size": 20, "read_ahead_bytes": 500},
    "filter": {"filters": FEW},
    "filter and rows shuffled": {"filters": FEW, **ROWS_SHUFFLED},
    "short batches dropped": {"drop_last": True, "num_workers": 2},
    "rows repeated": {"num_ranks": 3, "rank": 1, "uneven_ranks": "pad"},
    "arrays": {"output_format": "numpy"},
    "lists, and no column": {"output_format": "dict", "columns": []},
    "tables": {"output_format": "arrow", "shuffle": True},
    "parts of row groups": {"read_ahead_bytes": 2000, "batch_size": 7},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_is_that_of_the_rows_in_the_order_of_delivery(data, options):
    loader = open_hashed(data, **options)
    assert hash_of(loader) == expected(loader, [])
    rows = []
    for batch in loader:
        rows += [int(row) for row in (batch["row"].to_pylist() if isinstance(batch, pa.Table) else batch["row"])]
        assert hash_of(loader)[0]["rows"] == len(rows)
    assert hash_of(loader) == expected(loader, rows)


def open_orc(path: Path) -> Any:
    with pa_orc.ORCWriter(path / "a.orc", stripe_size=1) as writer:
        for first in (0, 50):
            writer.write(pa.table({"value": list(range(first, first + 50))}))
    return open_hashed(path, format="orc", shuffle=True)


def open_counted_text(path: Path) -> Any:
    for number in range(3):
        (path / f"{number}.csv").write_bytes(csv_of(range(40 * number, 40 * number + 40)))
    return open_hashed(path, format="csv", count_rows=True, split_bytes=300, shuffle=True, row_id_column="id")


def open_described(path: Path) -> Any:
    """A directory whose footers are in a file `_metadata`."""
    write_dataset(path)
    found = []
    for file in sorted(path.glob("*.parquet")):
        found.append(pq.read_metadata(file))
        found[-1].set_file_path(file.name)
    for other in found[1:]:
        found[0].append_row_groups(other)
    found[0].write_metadata_file(path / "_metadata")
    return open_hashed(path)


@pytest.mark.parametrize("open_other", [open_orc, open_counted_text, open_described])
def test_it_is_that_of_the_rows_of_other_formats(tmp_path, open_other):
    loader = open_other(tmp_path)
    column = "id" if open_other is open_counted_text else "row"
    rows = [int(row) for batch in loader for row in batch[column]]
    assert hash_of(loader) == expected(loader, rows)


@pytest.mark.parametrize("options", [{}, ROWS_SHUFFLED], ids=["in order", "shuffled"])
def test_batch_sizes_and_a_worker_that_reads_make_no_difference(data, options):
    hashes = []
    for others in ({}, {"batch_size": 1}, {"batch_size": 1000}, {"batch_size": 7, "num_workers": 1}):
        loader = open_hashed(data, **options, **others)
        all_rows_of(loader)
        hashes.append(hash_of(loader))
    assert hashes[1:] == hashes[:1] * 3


def test_the_same_rows_in_other_files_of_the_same_content_have_the_same_hash(data, tmp_path):
    moved = shutil.copytree(data, tmp_path / "elsewhere")
    (moved / "part-000.parquet").rename(moved / "first.parquet")
    first, other = open_hashed(data), open_hashed(moved)
    assert all_rows_of(first)
    assert all_rows_of(other)
    assert hash_of(first) == hash_of(other)


def test_a_file_with_one_other_value_has_another_hash(data, tmp_path):
    other = shutil.copytree(data, tmp_path / "other")
    table = pq.read_table(other / "part-001.parquet")
    scores = table["score"].to_pylist()
    changed = table.set_column(1, "score", pa.array([*scores[:-1], scores[-1] + 1]))
    pq.write_table(changed, other / "part-001.parquet", row_group_size=50)
    loaders = open_hashed(data), open_hashed(other)
    for loader in loaders:
        all_rows_of(loader)
    assert hash_of(loaders[0]) != hash_of(loaders[1])


def test_batches_are_the_same_with_and_without_it(data):
    for options in ({}, {"output_format": "arrow"}, {**ROWS_SHUFFLED, "num_workers": 2}):
        plain, hashed = open_loader(data, **options)[0], open_hashed(data, **options)
        assert plain.dataset.schema == hashed.dataset.schema
        for own, other in zip(plain, hashed, strict=True):
            assert repr(own) == repr(other)


def test_batches_that_were_copied_ahead_count_as_they_are_handed_over(data):
    loader = open_hashed(data)
    batches = iter(to_device(loader, "cpu", depth=3))
    rows = [int(row) for _ in range(4) for row in next(batches)["row"]]
    assert hash_of(loader) == expected(loader, rows)


def test_without_it_neither_metrics_nor_states_have_it(data):
    loader, dataset = open_loader(data)
    next(iter(loader))
    assert "delivered_hash" not in loader.state_dict()
    assert "delivered_hash" not in dataset.get_metrics()


def test_each_epoch_has_its_own(data):
    loader = open_hashed(data, shuffle=True)
    hashes = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        all_rows_of(loader)
        hashes.append(hash_of(loader))
    assert hashes[0] == hashes[2] != hashes[1]


RESUMED: dict[str, dict[str, Any]] = {
    "plain": {},
    "workers": {"num_workers": 2, **ROWS_SHUFFLED},
    "filter": {"filters": FEW},
}


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("options", RESUMED.values(), ids=RESUMED)
def test_break_after_any_batch_then_resume_ends_with_the_hash_of_an_uninterrupted_run(data, options, every):
    whole = open_hashed(data, **options)
    batches = len(list(whole))
    loader = open_hashed(data, **options)
    states = [(json.loads(json.dumps(loader.state_dict())), hash_of(loader)) for _ in loader]
    for stop in {*range(1, batches, every), batches - 1}:
        state, hashed = states[stop - 1]
        resumed = open_hashed(data, **options)
        resumed.load_state_dict(state)
        assert hash_of(resumed) == hashed
        all_rows_of(resumed)
        assert hash_of(resumed) == hash_of(whole)


KILLED = """
import os, signal, sys
from support import open_loader
from torch_dataloader_utils.distributed import save_rank_state

loader, _ = open_loader(sys.argv[1], fingerprint=True, num_workers=2, shuffle=True, shuffle_buffer_size=60)
for number, _ in enumerate(loader):
    save_rank_state(loader, sys.argv[2])
    if number == 9:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_that_resumes_ends_with_the_hash_of_an_uninterrupted_one(data, tmp_path):
    script, states = tmp_path / "killed.py", tmp_path / "states"
    script.write_text(KILLED)
    process = start(script, str(data), str(states), output=tmp_path / "output.txt", environment={})
    process.join()
    assert process.exitcode == -signal.SIGKILL, (tmp_path / "output.txt").read_text()
    whole, resumed = (open_hashed(data, num_workers=2, **ROWS_SHUFFLED) for _ in range(2))
    load_rank_state(resumed, states)
    assert hash_of(resumed)[0]["rows"] == 160
    for loader in (whole, resumed):
        all_rows_of(loader)
    assert hash_of(resumed) == hash_of(whole)


# The ledger ---------------------------------------------------------------------------------------------------------


def foretold(dataset: Any, steps: int, *, scan: bool = False) -> list[dict[str, Any]]:
    """Return the hash of each planned rank after each of some steps, of the rows that the ledger says they have."""
    state = dataset.state_dict()
    files = state["files"]
    firsts = dict(zip([file[0] for file in files], accumulate((file[5] for file in files), initial=0), strict=False))
    ranks = [entry["rank"] for entry in state["delivered_hash"]]
    rows: list[list[int]] = [[] for _ in ranks]
    entries = []
    for step in range(state["batches_delivered"], steps):
        found = [firsts[path] + row for path, row in dataset.rows_at(step, scan=scan)]
        each = len(found) // len(ranks)
        for number, own in enumerate(rows):
            own.extend(found[number * each : (number + 1) * each])
        entries.append([entry_of(files, own, rank) for own, rank in zip(rows, ranks, strict=True)])
    return entries


@pytest.mark.parametrize("name", ["plain", "rounds", "rows repeated", "filter and rows shuffled", "a grid"])
def test_the_ledger_foretells_the_hash_after_each_step(data, name):
    options = {**GRID, "num_ranks": 2, "rank": 1} if name == "a grid" else OPTIONS[name]
    loader = open_hashed(data, **options)
    steps = foretold(loader.dataset, 8, scan="filters" in options)
    iterator = iter(loader)
    for number, entries in enumerate(steps):
        next(iterator)
        assert hash_of(loader) == entries, number
    assert len(steps) == 8


def test_a_batch_that_is_read_again_does_not_count(data):
    for options in ({}, {"output_format": "arrow"}, {"filters": FEW}):
        loader = open_hashed(data, **options)
        batches = [repr(batch) for batch in loader]
        end = hash_of(loader)
        assert repr(loader.batch_at(3, scan=True)) == batches[3]
        assert hash_of(loader) == end


# Rows that are not delivered ----------------------------------------------------------------------------------------

BAD = [("part-000.parquet", row) for row in range(10, 60)]
WITHOUT = {
    "skipped": lambda loader: loader.skip_steps(3, 6),
    "skipped, then restored": lambda loader: (loader.skip_steps(3, 6), loader.restore_skipped()),
    "excluded": lambda loader: loader.exclude(BAD),
    "skipped and excluded": lambda loader: (loader.skip_steps(3, 6), loader.exclude(BAD)),
}


@pairwise(most=6, run=RESUMED, without=WITHOUT)
def test_only_rows_that_are_delivered_count_also_after_a_resume(data, run, without):
    options = RESUMED[run]
    loader = open_hashed(data, **options)
    WITHOUT[without](loader)
    rows, state = [], None
    for number, batch in enumerate(loader):
        rows += rows_of(batch)
        if number == 8:
            state = json.loads(json.dumps(loader.state_dict()))
    assert hash_of(loader) == expected(loader, rows)
    resumed = open_hashed(data, **options)
    resumed.load_state_dict(state)
    all_rows_of(resumed)
    assert hash_of(resumed) == hash_of(loader)


def test_virtual_ranks_have_the_same_hashes_under_every_number_of_ranks_where_rows_are_left_out(data):
    hashes = []
    for num_ranks in (1, 2, 4):
        loaders = open_grid(data, num_ranks)
        for loader in loaders:
            loader.skip_steps(2, 4)
            loader.exclude(BAD)
        hashes.append(take(loaders))
    assert hashes[0] == hashes[1] == hashes[2]
    assert sum(entry["rows"] for entry in hashes[0]) < 443 - len(BAD)


# Virtual ranks ------------------------------------------------------------------------------------------------------


def open_grid(path: Path, num_ranks: int, **options: Any) -> list[Any]:
    shares = {**GRID, "batch_size": 16 // num_ranks, "num_ranks": num_ranks, **options}
    return [open_hashed(path, rank=rank, **shares) for rank in range(num_ranks)]


def take(loaders: list[Any], steps: int | None = None) -> list[dict[str, Any]]:
    """Take some steps, or all that are left, on all ranks; return the hash of each virtual rank."""
    for loader in loaders:
        iterator = iter(loader)
        for _ in iterator if steps is None else range(steps):
            if steps is not None:
                next(iterator)
    return [entry for loader in loaders for entry in hash_of(loader)]


def test_each_virtual_rank_has_the_same_hash_under_every_number_of_ranks(data):
    few = {num_ranks: take(open_grid(data, num_ranks), 7) for num_ranks in (1, 2, 4)}
    assert few[1] == few[2] == few[4]
    assert [entry["rank"] for entry in few[1]] == [0, 1, 2, 3]
    assert len({entry["hash"] for entry in few[1]}) == len(few[1])
    whole = [take(open_grid(data, num_ranks, num_workers=workers)) for num_ranks, workers in ((1, 2), (2, 0), (4, 1))]
    assert whole[0] == whole[1] == whole[2]


def test_the_hash_of_a_virtual_rank_is_that_of_its_rows(data):
    [loader] = open_grid(data, 1)
    rows: list[list[int]] = [[], [], [], []]
    for batch in loader:
        each = len(batch["row"]) // 4
        for rank, own in enumerate(rows):
            own.extend(batch["row"][rank * each : (rank + 1) * each].tolist())
    files = loader.state_dict()["files"]
    assert hash_of(loader) == [entry_of(files, own, rank) for rank, own in enumerate(rows)]


@pytest.mark.parametrize("strict", [True, False])
def test_the_hash_of_a_virtual_rank_goes_on_under_another_number_of_ranks(data, strict):
    loaders = open_grid(data, 4)
    before = take(loaders, 3)
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    after = []
    for num_ranks in (1, 2):
        resumed = open_grid(data, num_ranks)
        for loader in resumed:
            loader.load_state_dict(states, strict=strict)
        assert [entry for loader in resumed for entry in hash_of(loader)] == before
        after.append(take(resumed))
    whole = take(open_grid(data, 1))
    assert after[0] == after[1]
    assert [entry["rows"] for entry in after[0]] == [entry["rows"] for entry in whole]
    assert (after[0] == whole) == strict


# Loads --------------------------------------------------------------------------------------------------------------


def test_after_an_elastic_load_each_rank_begins_anew_and_states_keep_what_was_before(data):
    options = {"num_workers": 0, "uneven_ranks": "drop"}
    loaders = [open_hashed(data, num_ranks=2, rank=rank, **options) for rank in range(2)]
    before = take(loaders, 4)
    states = [loader.state_dict() for loader in loaders]
    resumed = open_hashed(data, **options)
    resumed.load_state_dict(states, strict=False)
    assert hash_of(resumed) == expected(resumed, [])
    iterator = iter(resumed)
    rows = [int(row) for _ in range(3) for row in next(iterator)["row"]]
    assert hash_of(resumed) == expected(resumed, rows)
    state = resumed.state_dict()
    assert state["base"]["delivered_hash"] == [before]

    again = open_hashed(data, **options)
    again.load_state_dict(json.loads(json.dumps(state)))
    assert hash_of(again) == hash_of(resumed)
    assert again.state_dict()["base"] == state["base"]
    twice = open_hashed(data, num_ranks=1, rank=0, batch_size=8)
    twice.load_state_dict([state], strict=False)
    assert twice.state_dict()["base"]["delivered_hash"] == [before, state["delivered_hash"]]


def test_a_state_without_it_loads_and_the_hash_is_known_from_the_next_epoch_on(data, caplog):
    plain, _ = open_loader(data)
    next(iter(plain))
    loader = open_hashed(data)
    with caplog.at_level(logging.WARNING, "torch_dataloader_utils"):
        loader.load_state_dict(plain.state_dict())
    assert "the hash of the rows delivered in epoch 0 is not known" in caplog.text
    all_rows_of(loader)
    assert hash_of(loader) is None
    loader.set_epoch(1)
    rows = all_rows_of(loader)
    assert hash_of(loader) == expected(loader, rows)


def test_a_state_without_it_of_an_epoch_that_has_not_begun_is_no_obstacle(data, caplog):
    loader = open_hashed(data)
    loader.load_state_dict(open_loader(data)[0].state_dict())
    rows = all_rows_of(loader)
    assert hash_of(loader) == expected(loader, rows)
    assert not caplog.records


def test_a_state_with_it_loads_where_it_is_not_asked_for(data):
    hashed = open_hashed(data)
    iterator = iter(hashed)
    next(iterator)
    plain, _ = open_loader(data)
    plain.load_state_dict(hashed.state_dict())
    assert "delivered_hash" not in plain.state_dict()
    assert all_rows_of(plain) == all_rows_of(iterator)


def damaged(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    [entry] = state["delivered_hash"]
    return {**state, "delivered_hash": [{**entry, **changes}]}


CHANGES: dict[str, dict[str, Any]] = {
    "other hash": {"hash": "0" * 32},
    "other rows": {"rows": 15},
    "no hash": {"hash": "x"},
    "negative rows": {"rows": -1},
    "no rank": {"rank": "0"},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_a_state_whose_hash_was_changed_is_refused(data, changes):
    loader = open_hashed(data)
    next(iter(loader))
    with pytest.raises(ValueError, match="not a state of this package"):
        open_hashed(data).load_state_dict(damaged(loader.state_dict(), **changes))


def test_a_state_that_another_plan_saved_is_refused_as_without_it(data):
    with pytest.raises(CheckpointMismatchError, match="shuffle_seed"):
        open_hashed(data).load_state_dict(open_hashed(data, shuffle_seed=3).state_dict())


def test_text_without_a_row_count_is_refused_by_name(tmp_path):
    (tmp_path / "a.csv").write_bytes(csv_of(range(3)))
    with pytest.raises(ValueError, match=r"fingerprint=True has to know how many rows there are: .*count_rows=True"):
        StructuredDataset.create_dataloader(tmp_path, "csv", fingerprint=True)
