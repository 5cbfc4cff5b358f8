"""States that do not belong to the run that loads them, states that are none, and what a refused one leaves behind."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import (
    DEFAULT_FILES,
    batches_of,
    edited,
    examples,
    manifest_of,
    open_loader,
    row_ids,
    rows_of,
    write_dataset,
)

from torch_dataloader_utils import ChangedFilesWarning, CheckpointMismatchError
from torch_dataloader_utils.checkpoint import dump as state_module
from torch_dataloader_utils.checkpoint import saved_state
from torch_dataloader_utils.checkpoint.parse.states import parse_state
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.restore import check_states, place_states
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.errors import Difference
from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.planning.manifest import Manifest
from torch_dataloader_utils.planning.plan import DeliveredBaseline, Plan, PlanOptions, ShardSlice
from torch_dataloader_utils.planning.planner import make_plan
from torch_dataloader_utils.planning.topology import Topology

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

ROWS = sum(rows for rows, _ in DEFAULT_FILES)
OPTIONS = {"shuffle": True, "split_rows": 60}
"""Under which most states here are saved: several shards, of one or more row groups."""

MADE_UP = manifest_of([(50, 100), (50, 100), (30, 100)], [(7, 100)], [(40, 100)] * 5)
MADE_UP_OPTIONS = PlanOptions(10**6, split_rows=60, shuffle=True)


def made_up_plan(epoch: int, baseline: DeliveredBaseline | None = None) -> Plan:
    return make_plan(MADE_UP, MADE_UP_OPTIONS, epoch=epoch, num_ranks=2, num_workers=3, baseline=baseline)


def restored(state: dict[str, Any], run: Run) -> Progress:
    checked = check_states([parse_state(state)], run)
    return place_states(checked, made_up_plan(checked.epoch, checked.baseline))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A dataset that no test changes."""
    directory = tmp_path_factory.mktemp("data")
    write_dataset(directory)
    return directory


@pytest.fixture
def own_data(tmp_path) -> Path:
    """A dataset that a test may change."""
    write_dataset(tmp_path / "data")
    return tmp_path / "data"


def saved(path: Path, batches: int = 6, **options: Any) -> tuple[list[int], dict[str, Any]]:
    """Deliver some batches; return their rows and the state then, which may be edited: it is without its checksum."""
    loader, dataset = open_loader(path, **options)
    rows = [row for batch in itertools.islice(loader, batches) for row in rows_of(batch)]
    return rows, edited(json.loads(json.dumps(dataset.state_dict())))


def refused(path: Path, state: Any, **options: Any) -> CheckpointMismatchError:
    """Load a state that does not belong, see that nothing changes, and return the error."""
    loader, dataset = open_loader(path, **options)
    running = iter(loader)
    delivered = rows_of(next(running))
    before = dataset.state_dict()
    with pytest.raises(CheckpointMismatchError) as raised:
        dataset.load_state_dict(state)
    assert dataset.state_dict() == before
    assert not set(delivered) & {row for batch in running for row in rows_of(batch)}
    assert dataset.state_dict()["in_progress"] == []
    assert "nothing was changed" in str(raised.value)
    assert "What to do: " in str(raised.value)
    return raised.value


# Each setting of the plan ------------------------------------------------------------------------------------------

EVENS, ODDS = pa.array(range(0, 40, 2)), pa.array(range(1, 41, 2))

CHANGED_SETTINGS = {
    "num_workers": ({"num_workers": 8}, {"num_workers": 4}, "num_workers changed: checkpoint=8, current=4"),
    "no workers": ({"num_workers": 1}, {"num_workers": 0}, "num_workers changed: checkpoint=1, current=0"),
    "seed": ({"shuffle_seed": 1}, {"shuffle_seed": -2}, "shuffle_seed changed: checkpoint=1, current=-2"),
    "num_ranks": (
        {"num_ranks": 4, "rank": 1},
        {"num_ranks": 2, "rank": 1},
        "num_ranks changed: checkpoint=4, current=2",
    ),
    "rank": ({"num_ranks": 4, "rank": 1}, {"num_ranks": 4, "rank": 3}, "rank changed: checkpoint=1, current=3"),
    "shuffle": ({"shuffle": True}, {"shuffle": False}, "shuffle changed: checkpoint=True, current=False"),
    "shuffle_buffer_size": (
        {"shuffle_buffer_size": 100},
        {"shuffle_buffer_size": 101},
        "shuffle_buffer_size changed: checkpoint=100, current=101",
    ),
    "mixing": ({}, {"shuffle_buffer_size": 100}, "shuffle_buffer_size changed: checkpoint=None, current=100"),
    "split_bytes": (
        {"split_bytes": "1MiB"},
        {"split_bytes": "2MiB"},
        "split_bytes changed: checkpoint=1048576, current=2097152",
    ),
    "split_rows": ({"split_rows": 60}, {"split_rows": None}, "split_rows changed: checkpoint=60, current=None"),
}


@pytest.mark.parametrize("case", CHANGED_SETTINGS)
def test_a_setting_that_the_plan_depends_on_is_refused_with_both_values(data, case):
    before, now, message = CHANGED_SETTINGS[case]
    _, state = saved(data, batches=0, **{**OPTIONS, **before})
    now = {**OPTIONS, **now}
    loader, dataset = open_loader(data, **now)
    unchanged = dataset.state_dict()
    with pytest.raises(CheckpointMismatchError, match=re.escape(f"  - {message}\n")) as raised:
        loader.load_state_dict(state)
    assert dataset.state_dict() == unchanged
    name, checkpoint, current = re.fullmatch(r"(\w+) changed: checkpoint=(.+), current=(.+)", message).groups()
    [difference] = raised.value.differences
    assert (difference.name, repr(difference.checkpoint), repr(difference.current)) == (name, checkpoint, current)
    if name != "rank":
        assert f"create the loader with {name}={checkpoint}" in str(raised.value)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (None, pc.field("value") > 3),
        (pc.field("value") > 3, None),
        (pc.field("value") > 3, pc.field("value") > 4),
        (pc.field("value").isin(EVENS), pc.field("value").isin(ODDS)),
    ],
)
def test_another_filter_is_refused(data, before, now):
    _, state = saved(data, batches=1, filters=before)
    error = refused(data, state, filters=now)
    [difference] = error.differences
    assert difference.name == "filters"
    assert str(difference) in str(error)
    assert "use the filter that the checkpoint was saved with" in str(error)


def test_filters_of_the_same_text_but_other_values_are_refused(data):
    """The text leaves out the middle of a long list of values."""
    one, other = (pc.field("value").isin(pa.array([*range(50), middle, *range(100, 150)])) for middle in (60, 61))
    assert str(one) == str(other)
    _, state = saved(data, batches=1, filters=one)
    [difference] = refused(data, state, filters=other).differences
    assert difference.name == "filters"
    assert difference.checkpoint != difference.current


def test_the_same_filter_written_again_loads(data):
    rows, state = saved(data, batches=2, filters=pc.field("value").isin(pa.array([3, 50, 77, *range(100, 300)])))
    loader, dataset = open_loader(data, filters=pc.field("value").isin(pa.array([3, 50, 77, *range(100, 300)])))
    dataset.load_state_dict(state)
    after = [row for batch in batches_of(loader) for row in batch]
    assert sorted(rows + after) == [3, 50, 77, *range(100, 300)]


def test_another_plan_algorithm_is_refused(data):
    _, state = saved(data, **OPTIONS)
    state["plan_algorithm"] = 7
    error = refused(data, state, **OPTIONS)
    assert error.differences == (Difference("plan_algorithm", 7, 2),)
    assert "finish the epoch with the release that saved the checkpoint" in str(error)


def test_all_that_differs_is_named_at_once(own_data):
    _, state = saved(own_data, shuffle=True, shuffle_seed=1, num_workers=0)
    (own_data / "part-001.parquet").unlink()
    error = refused(own_data, state, shuffle=True, shuffle_seed=2, split_rows=50, num_workers=0)
    assert {one.name for one in error.differences} >= {"shuffle_seed", "split_rows"}
    assert error.files_removed == ("part-001.parquet",)
    assert "create the loader with shuffle_seed=1, split_rows=None" in str(error)
    assert "restore the files of the checkpoint" in str(error)


def test_no_workers_of_ones_own_takes_the_count_of_the_checkpoint(data):
    _, state = saved(data, batches=0, num_workers=3)
    loader, dataset = open_loader(data, num_workers=None)
    loader.load_state_dict(state)
    assert dataset.num_workers == 3
    assert edited(dataset.state_dict()) == state


# Files -------------------------------------------------------------------------------------------------------------


def test_an_added_file_is_refused_by_name(own_data):
    _, state = saved(own_data, **OPTIONS)
    shutil.copy(own_data / "part-000.parquet", own_data / "part-000-copy.parquet")
    error = refused(own_data, state, **OPTIONS)
    assert error.files_added == ("part-000-copy.parquet",)
    assert (error.files_removed, error.files_changed) == ((), ())
    assert "files added since the checkpoint: part-000-copy.parquet\n" in str(error)


def test_a_removed_file_is_refused_by_name(own_data):
    _, state = saved(own_data, **OPTIONS)
    (own_data / "part-003.parquet").unlink()
    error = refused(own_data, state, **OPTIONS)
    assert error.files_removed == ("part-003.parquet",)
    assert (error.files_added, error.files_changed) == ((), ())
    assert "files removed since the checkpoint: part-003.parquet\n" in str(error)


def test_a_renamed_file_is_one_removed_and_one_added(own_data):
    _, state = saved(own_data, **OPTIONS)
    (own_data / "part-003.parquet").rename(own_data / "part-004.parquet")
    error = refused(own_data, state, **OPTIONS)
    assert (error.files_removed, error.files_added) == (("part-003.parquet",), ("part-004.parquet",))


def test_a_file_written_again_with_other_values_is_refused_by_name(own_data):
    _, state = saved(own_data, **OPTIONS)
    path = own_data / "part-002.parquet"
    table = pq.read_table(path)
    values = pc.add(table["value"], 1)
    pq.write_table(table.set_column(0, "value", values), path, row_group_size=40)
    error = refused(own_data, state, **OPTIONS)
    assert error.files_changed == ("part-002.parquet",)
    assert error.differences == ()
    assert "files changed since the checkpoint: part-002.parquet\n" in str(error)


def test_a_file_of_the_same_footer_but_another_size_is_refused_by_name(own_data):
    _, state = saved(own_data, **OPTIONS)
    path = own_data / "part-002.parquet"
    content = path.read_bytes()
    footer = int.from_bytes(content[-8:-4], "little") + 8
    path.write_bytes(content[:-footer] + bytes(100) + content[-footer:])
    assert refused(own_data, state, **OPTIONS).files_changed == ("part-002.parquet",)


def test_a_message_shows_the_first_files_and_the_error_holds_all(own_data):
    _, state = saved(own_data, **OPTIONS)
    for number in range(10, 30):
        shutil.copy(own_data / "part-000.parquet", own_data / f"part-{number}.parquet")
    error = refused(own_data, state, **OPTIONS)
    assert len(error.files_added) == 20
    assert "part-10.parquet" in str(error)
    assert "and 15 more" in str(error)
    assert len(str(error)) < 2000


@pytest.mark.parametrize("change", ["added", "removed", "rewritten"])
def test_more_files_than_a_state_lists_are_compared_by_their_fingerprint(own_data, change):
    with patch.object(saved_state, "MOST_FILES", 3):
        _, state = saved(own_data, **OPTIONS)
    assert state["files"] is None
    if change == "added":
        shutil.copy(own_data / "part-000.parquet", own_data / "part-004.parquet")
    elif change == "removed":
        (own_data / "part-003.parquet").unlink()
    else:
        pq.write_table(pq.read_table(own_data / "part-001.parquet").slice(1), own_data / "part-001.parquet")
    error = refused(own_data, state, **OPTIONS)
    assert re.search(r"the file list changed: checkpoint='\w{32}', current='\w{32}'", str(error))


def test_a_new_modification_time_alone_is_a_warning_that_names_the_file(own_data):
    rows, state = saved(own_data, **OPTIONS)
    os.utime(own_data / "part-002.parquet", (1, 1))
    loader, dataset = open_loader(own_data, **OPTIONS)
    with pytest.warns(ChangedFilesWarning, match=r"new modification time .*: part-002\.parquet;") as warned:
        dataset.load_state_dict(state)
    assert warned[0].filename == __file__
    after = [row for batch in batches_of(loader) for row in batch]
    assert sorted(rows + after) == list(range(ROWS))


@pytest.mark.filterwarnings("error::torch_dataloader_utils.ChangedFilesWarning")
def test_a_warning_made_an_error_leaves_everything_as_it_was(own_data):
    _, state = saved(own_data, **OPTIONS)
    os.utime(own_data / "part-002.parquet", (1, 1))
    _, dataset = open_loader(own_data, **OPTIONS)
    before = dataset.state_dict()
    with pytest.raises(ChangedFilesWarning):
        dataset.load_state_dict(state)
    assert dataset.state_dict() == before


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.ChangedFilesWarning")
def test_a_dataset_that_moved_loads_and_goes_on(own_data, tmp_path):
    rows, state = saved(own_data, **OPTIONS)
    moved = tmp_path / "elsewhere" / "and deeper"
    moved.parent.mkdir()
    own_data.rename(moved)
    loader, dataset = open_loader(moved, **OPTIONS)
    dataset.load_state_dict(state)
    after = [row for batch in batches_of(loader) for row in batch]
    assert sorted(rows + after) == list(range(ROWS))
    assert dataset.state_dict()["plan"]["root"] == str(moved)


def run_with_etag(etag: str | None) -> Run:
    first, *others = MADE_UP.files
    manifest = Manifest("s3://bucket/data", (first._replace(etag=etag), *others))
    return Run(manifest, MADE_UP_OPTIONS, filter_digest=None, topology=Topology(2, 1, 3))


def test_another_etag_is_a_changed_file():
    """The storage says so, though path, size and footer are the same."""
    run = run_with_etag("one")
    progress = Progress.fresh(made_up_plan(0).rank_streams(1))
    state = json.loads(json.dumps(state_module.dump_state(run, 0, progress)))
    assert restored(state, run) == progress
    with pytest.raises(CheckpointMismatchError, match=r"files changed since the checkpoint: a\.parquet\n") as raised:
        restored(state, run_with_etag("other"))
    assert raised.value.files_changed == ("a.parquet",)


@pytest.mark.parametrize(("before", "now"), [("one", None), (None, "one"), (None, None)])
def test_etags_are_compared_only_where_both_sides_have_one(before, now):
    progress = Progress.fresh(made_up_plan(0).rank_streams(1))
    state = state_module.dump_state(run_with_etag(before), 0, progress)
    assert restored(state, run_with_etag(now)) == progress


# Recorded ranges ---------------------------------------------------------------------------------------------------


def completed_split(state: dict[str, Any]) -> dict[str, Any]:
    return state["completed_shards"][0]["splits"][0]


def numbered(state: dict[str, Any], *, completed: list[int], in_progress: list[dict[str, Any]]) -> dict[str, Any]:
    """The state with its progress recorded as row numbers."""
    return {**state, "completed_shards": [], "completed_rows": completed, "in_progress": in_progress}


ROW_EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "shorter": lambda state: completed_split(state).update(row_length=completed_split(state)["row_length"] - 1),
    "later": lambda state: completed_split(state).update(
        row_offset=completed_split(state)["row_offset"] + 1, row_length=completed_split(state)["row_length"] - 1
    ),
    "beyond the file": lambda state: completed_split(state).update(row_offset=10**9),
    "another file": lambda state: completed_split(state).update(path=state["plan"]["root"] + "/part-9.parquet"),
    "half a shard in progress": lambda state: state["in_progress"][0].update(
        splits=[{**state["in_progress"][0]["splits"][0], "row_length": 16}], rows_delivered=16
    ),
    "progress beyond the file": lambda state: state["in_progress"][0]["splits"][0].update(row_offset=10**9),
}


@pytest.mark.parametrize("edit", ROW_EDITS)
def test_a_recorded_range_that_is_no_union_of_current_splits_is_refused_with_the_shard(data, edit):
    _, state = saved(data, **OPTIONS)
    ROW_EDITS[edit](state)
    error = refused(data, state, **OPTIONS)
    assert error.differences == ()
    assert error.shard
    assert all(set(split) == {"path", "row_offset", "row_length"} for split in error.shard)
    first = error.shard[0]
    rows = f"{first['path']} rows {first['row_offset']} to {first['row_offset'] + first['row_length']}"
    assert f"the shard [{rows}" in str(error)
    assert "of the checkpoint is not in this rank's plan of today" in str(error)


@pytest.mark.parametrize("rows", [[0, 1], [1, 50], [0, 49], [0, 130, 131, 140], [ROWS - 1, ROWS], [49, 51]])
def test_row_numbers_that_are_no_union_of_current_splits_are_refused(data, rows):
    _, state = saved(data, batches=0)
    assert refused(data, numbered(state, completed=rows, in_progress=[])).shard


def test_a_shard_that_is_half_done_is_refused(data):
    """Its first split is recorded as done, its second is not."""
    options = {"shuffle": True, "shuffle_buffer_size": 100}
    _, state = saved(data, batches=20, **options)
    shard = next(one for one in state["completed_shards"] if len(one["splits"]) > 1)
    shard["splits"].pop()
    assert refused(data, state, **options).shard


def test_rows_of_another_rank_are_refused(data):
    _, state = saved(data, num_ranks=2, rank=1, **OPTIONS)
    state["rank"] = 0
    assert refused(data, state, num_ranks=2, rank=0, **OPTIONS).shard


# What the error is -------------------------------------------------------------------------------------------------


def test_the_error_pickles_with_all_that_it_holds(own_data):
    _, state = saved(own_data, **OPTIONS)
    (own_data / "part-001.parquet").unlink()
    shutil.copy(own_data / "part-000.parquet", own_data / "part-005.parquet")
    pq.write_table(pq.read_table(own_data / "part-002.parquet").slice(1), own_data / "part-002.parquet")
    error = refused(own_data, {**state, "plan_algorithm": 1}, **OPTIONS)
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is CheckpointMismatchError
    assert str(copied) == str(error)
    assert vars(copied) == vars(error)
    assert copied.differences
    assert copied.files_added == ("part-005.parquet",)
    assert copied.files_removed == ("part-001.parquet",)
    assert copied.files_changed == ("part-002.parquet",)
    assert copied.shard


def test_the_error_is_a_value_error(data):
    _, state = saved(data, **OPTIONS)
    assert isinstance(refused(data, state, shuffle=False), ValueError)


# After a refusal ---------------------------------------------------------------------------------------------------


def test_a_loaded_state_still_waits_after_another_one_was_refused(data):
    rows, state = saved(data, **OPTIONS)
    loader, dataset = open_loader(data, **OPTIONS)
    dataset.load_state_dict(state)
    with pytest.raises(CheckpointMismatchError):
        dataset.load_state_dict({**state, "plan_algorithm": 9})
    with pytest.raises(ValueError, match="not a state"):
        dataset.load_state_dict({})
    assert sorted(rows + [row for batch in batches_of(loader) for row in batch]) == list(range(ROWS))


def test_a_refused_state_does_not_change_the_epoch_or_the_number_of_workers(data):
    _, state = saved(data, batches=0, num_workers=3, shuffle=True)
    _, dataset = open_loader(data, num_workers=None, shuffle=True)
    before = dataset.num_workers, dataset.epoch, dataset.plan_digest
    with pytest.raises(CheckpointMismatchError):
        dataset.load_state_dict({**state, "epoch": 5, "_shuffle_seed": 7})
    assert (dataset.num_workers, dataset.epoch, dataset.plan_digest) == before


# What may change ---------------------------------------------------------------------------------------------------


def _row_tensor(batch: dict[str, Any]) -> dict[str, Any]:
    return {"row": batch["row"]}


@pytest.mark.parametrize(
    "change",
    [
        {"columns": ["score"]},
        {"columns": []},
        {"output_format": "numpy"},
        {"output_format": "dict"},
        {"batch_size": 1},
        {"batch_size": 7},
        {"batch_size": 1000},
        {"collate_fn": _row_tensor},
        {"pin_memory": True},
    ],
)
@pytest.mark.parametrize("mixing", [{}, {"shuffle_buffer_size": 70}], ids=["in file order", "mixed"])
def test_what_the_plan_does_not_depend_on_may_change_and_each_row_comes_once(data, change, mixing):
    options = {**OPTIONS, **mixing}
    rows, state = saved(data, **options)
    loader, dataset = open_loader(data, **{**options, **change})
    dataset.load_state_dict(state)
    after = [row for batch in batches_of(loader) for row in batch]
    assert sorted(rows + after) == list(range(ROWS))


def test_the_output_format_may_become_arrow(data):
    rows, state = saved(data, **OPTIONS)
    loader, dataset = open_loader(data, output_format="arrow", **OPTIONS)
    dataset.load_state_dict(state)
    after = [row for table in loader for row in table["row"].to_pylist()]
    assert sorted(rows + after) == list(range(ROWS))


def test_drop_last_may_change_and_then_only_the_short_end_is_missing(data):
    rows, state = saved(data, **OPTIONS)
    loader, dataset = open_loader(data, drop_last=True, **OPTIONS)
    dataset.load_state_dict(state)
    after = [row for batch in batches_of(loader) for row in batch]
    assert len(set(rows) | set(after)) == len(rows) + len(after) == ROWS - ROWS % 16
    assert dataset.get_metrics()["rows_dropped"] == ROWS % 16


def test_the_name_of_the_row_id_column_may_change(data):
    rows, state = saved(data, **OPTIONS)
    loader, dataset = open_loader(data, row_id_column="place", **OPTIONS)
    dataset.load_state_dict(state)
    assert sorted(rows + [int(row) for batch in loader for row in batch["place"]]) == list(range(ROWS))


def test_a_state_of_a_finished_epoch_loads_and_the_next_epoch_is_whole(data):
    rows, state = saved(data, batches=1000, **OPTIONS)
    assert sorted(rows) == list(range(ROWS))
    loader, dataset = open_loader(data, **OPTIONS)
    dataset.load_state_dict(state)
    assert batches_of(loader) == []
    dataset.set_epoch(1)
    assert sorted(row for batch in batches_of(loader) for row in batch) == list(range(ROWS))


@pytest.mark.parametrize("epoch", [1, 2**40])
def test_a_state_brings_its_epoch_along(data, epoch):
    loader, dataset = open_loader(data, **OPTIONS)
    dataset.set_epoch(epoch)
    running = iter(loader)
    before = [rows_of(next(running)) for _ in range(4)]
    state = dataset.state_dict()
    other_loader, other = open_loader(data, **OPTIONS)
    other.load_state_dict(state)
    assert other.epoch == epoch
    assert before + batches_of(other_loader) == before + batches_of(running)


# What is no state --------------------------------------------------------------------------------------------------


def torchdata_state() -> dict[str, Any]:
    """What torchdata's StatefulDataLoader saves of a dataset that it knows nothing of."""
    return {
        "_snapshot": {
            "_snapshot_step": 3,
            "_last_yielded_worker_id": 0,
            "_main_snapshot": {"_num_workers": 1, "_sampler_iter_state": None, "_IterableDataset_len_called": None},
            "_worker_snapshots": {"worker_0": {"worker_id": 0, "dataset_state": None, "fetcher_state": None}},
        },
        "_steps_since_snapshot": 0,
        "_iterator_finished": False,
    }


NO_STATES = {
    "None": None,
    "a list": [],
    "a text": "x",
    "bytes": b"x",
    "a number": 3,
    "an empty dictionary": {},
    "a list of a dictionary": [{"version": 1}],
    "only a version": {"version": 1},
    "a state of torchdata": torchdata_state(),
    "a model's": {"layer.weight": torch.zeros(2)},
    "an optimizer's": {"state": {}, "param_groups": []},
    "a type": dict,
}


@pytest.mark.parametrize("name", NO_STATES)
def test_what_is_no_state_is_a_value_error_that_says_so(data, name):
    loader, dataset = open_loader(data)
    before = dataset.state_dict()
    with pytest.raises(ValueError, match="not a state of this package: state") as raised:
        loader.load_state_dict(NO_STATES[name])
    assert not isinstance(raised.value, CheckpointMismatchError)
    assert dataset.state_dict() == before


KEYS = (
    "version",
    "plan_algorithm",
    "epoch",
    "batches_delivered",
    "next_worker",
    "_num_workers",
    "_shuffle_seed",
    "num_ranks",
    "rank",
    "plan",
    "files",
    "completed_shards",
    "in_progress",
    "base",
)


@pytest.mark.parametrize("version", [0, 2, 99])
def test_another_version_of_the_layout_is_named(data, version):
    _, state = saved(data)
    _, dataset = open_loader(data)
    with pytest.raises(ValueError, match=f"the state has version {version}, this release reads version 1"):
        dataset.load_state_dict({**state, "version": version})


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key_is_named(data, key):
    _, state = saved(data)
    assert set(state) == {*KEYS, "excluded", "plan_digest", "refused_by_dcp", "batch_size", "drop_last"}
    del state[key]
    _, dataset = open_loader(data)
    with pytest.raises(ValueError, match=re.escape(f"state['{key}'] is missing")):
        dataset.load_state_dict(state)


OVERLAPS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "completed twice": lambda state: {**state, "completed_shards": state["completed_shards"] * 2},
    "in progress twice": lambda state: {**state, "in_progress": state["in_progress"] * 2},
    "completed and in progress": lambda state: {
        **state,
        "completed_shards": [*state["completed_shards"], {"splits": state["in_progress"][0]["splits"]}],
    },
    "a part of a completed one": lambda state: {
        **state,
        "completed_shards": [
            *state["completed_shards"],
            {"splits": [{**completed_split(state), "row_length": 1}]},
        ],
    },
    "completed row numbers and in progress": lambda state: numbered(
        state, completed=[0, 50], in_progress=[{"splits": [], "rows": [0, 50], "rows_delivered": 3}]
    ),
    "row numbers twice": lambda state: numbered(state, completed=[0, 50, 0, 50], in_progress=[]),
    "row numbers that overlap": lambda state: numbered(state, completed=[0, 60, 50, 100], in_progress=[]),
    "row numbers in progress twice": lambda state: numbered(
        state,
        completed=[],
        in_progress=[
            {"splits": [], "rows": [0, 50], "rows_delivered": 16},
            {"splits": [], "rows": [0, 50], "rows_delivered": 3},
        ],
    ),
    "in progress by number and written out": lambda state: numbered(
        state,
        completed=[],
        in_progress=[
            {"splits": [], "rows": [0, 50], "rows_delivered": 16},
            {
                "splits": [{"path": state["plan"]["root"] + "/part-000.parquet", "row_offset": 0, "row_length": 50}],
                "rows": [],
                "rows_delivered": 3,
            },
        ],
    ),
}


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_rows_that_are_recorded_twice_are_refused(data, overlap):
    options = {"split_rows": 50}
    _, state = saved(data, batches=4, **options)
    broken = OVERLAPS[overlap](state)
    _, dataset = open_loader(data, **options)
    before = dataset.state_dict()
    with pytest.raises(ValueError, match=r"not a state of this package|not in this rank's plan"):
        dataset.load_state_dict(broken)
    assert dataset.state_dict() == before


@pytest.mark.parametrize("rows", [61, 10**9, -1, 1.5, "3", None, True, math.nan])
def test_a_number_of_rows_delivered_that_cannot_be_is_refused_by_name(data, rows):
    _, state = saved(data, **OPTIONS)
    state["in_progress"][0]["rows_delivered"] = rows
    _, dataset = open_loader(data, **OPTIONS)
    with pytest.raises(ValueError, match=r"state\['in_progress'\]\[0\]\['rows_delivered'\]"):
        dataset.load_state_dict(state)


def test_recorded_rows_beyond_the_dataset_are_refused(data):
    _, state = saved(data, batches=0)
    state["plan"]["rows"] = 10**6
    error = refused(data, numbered(state, completed=[0, 10**6], in_progress=[]))
    assert Difference("rows", 10**6, ROWS) in error.differences


@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [10**6, 10**9, 10**30])
def test_an_absurd_number_of_workers_is_refused_at_once(data, workers):
    """It is not planned for, though the loader would adopt the checkpoint's number."""
    _, state = saved(data, batches=0, num_workers=2)
    _, dataset = open_loader(data, num_workers=None)
    before = dataset.state_dict()
    with pytest.raises(ValueError, match="_num_workers"):
        dataset.load_state_dict({**state, "_num_workers": workers})
    assert dataset.state_dict() == before


@pytest.mark.parametrize(
    "modified",
    [10**400, math.nan, math.inf, -math.inf, "yesterday", True],
    ids=["huge", "nan", "inf", "minus inf", "text", "true"],
)
def test_a_modification_time_that_is_no_number_is_refused_by_name(data, modified):
    _, state = saved(data)
    state["files"][2][4] = modified
    _, dataset = open_loader(data)
    with pytest.raises(ValueError, match=r"state\['files'\]\[2\]\[4\]"):
        dataset.load_state_dict(state)


# Any damage at all -------------------------------------------------------------------------------------------------

Place = tuple[Any, ...]
"""The keys and indices that lead to a value."""

VALUES = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    3,
    50,
    10**9,
    10**400,
    -(10**20),
    0.0,
    1.5,
    math.nan,
    math.inf,
    "",
    "x",
    "\ud800",
    "/",
    b"",
    b"x",
    bytearray(b"ab"),
    (),
    [],
    {},
    [[]],
    [None],
    [0, 1],
    [1, 0],
    {"splits": []},
    {"x": 1},
    {1: 2},
    torch.tensor(1),
    object(),
)


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    yield place
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in pairs:
        yield from places(one, (*place, key))


def at(state: Any, place: Place) -> Any:
    for key in place:
        state = state[key]
    return state


@st.composite
def damages(draw: st.DrawFn, states: list[dict[str, Any]]) -> dict[str, Any]:
    """A state with one to three of its values changed."""
    state = copy.deepcopy(draw(st.sampled_from(states)))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from([place for place in places(state) if place]))
        owner, key = at(state, place[:-1]), place[-1]
        kind = draw(st.sampled_from(["replace", "remove", "nudge", "nudge", "repeat", "copy"]))
        value = owner[key]
        if kind == "remove":
            del owner[key]
        elif kind == "nudge" and type(value) is int:
            owner[key] = value + draw(st.sampled_from([-50, -1, 1, 50]))
        elif kind == "repeat" and isinstance(owner, list):
            owner.insert(draw(st.integers(0, len(owner))), copy.deepcopy(value))
        elif kind == "copy":
            owner[key] = copy.deepcopy(at(state, draw(st.sampled_from([place for place in places(state) if place]))))
        else:
            owner[key] = copy.copy(draw(st.sampled_from(VALUES)))
    return state


@functools.cache
def made_up_states() -> tuple[Run, list[dict[str, Any]]]:
    run = Run(MADE_UP, MADE_UP_OPTIONS, filter_digest=None, topology=Topology(2, 1, 3))
    progress = Progress.fresh(made_up_plan(2).rank_streams(1))
    for receipt in (Receipt(0, 0, 5, rows=5), Receipt(1, 1, 0, rows=9), Receipt(2, 0, 7, rows=7)):
        progress = progress.advanced(receipt)
    with patch.object(state_module, "MOST_BYTES", -1):
        by_number = state_module.dump_state(run, 2, progress)
    return run, [state_module.dump_state(run, 2, progress), by_number]


@given(st.data())
@examples(1500, part=6)
def test_a_damaged_state_of_many_streams_is_refused_or_leaves_exactly_what_it_does_not_record(data_of_test):
    run, states = made_up_states()
    damaged = data_of_test.draw(damages(states))
    try:
        progress = restored(damaged, run)
    except ValueError:
        return
    own = [
        shard_slice
        for stream in made_up_plan(damaged["epoch"], progress.baseline).rank_streams(1)
        for shard_slice in stream
    ]
    left = [shard_slice for stream in progress.streams for shard_slice in stream.left]
    assert sorted(rows_in(left) + recorded_rows(damaged)) == sorted(rows_in(own))


def rows_in(slices: list[ShardSlice]) -> list[int]:
    return [
        row
        for shard_slice in slices
        for row in row_ids(MADE_UP, shard_slice.shard)[shard_slice.start : shard_slice.stop]
    ]


def recorded_rows(state: dict[str, Any]) -> list[int]:
    """The rows that a state says are delivered, where rows keep their order in a shard."""
    root = state["plan"]["root"]
    first = MADE_UP.first_rows

    def written_out(splits: list[dict[str, Any]]) -> list[int]:
        return [
            first[split["path"].removeprefix(f"{root}/")] + split["row_offset"] + row
            for split in splits
            for row in range(split["row_length"])
        ]

    def by_number(numbers: list[int]) -> list[int]:
        return [row for start, stop in zip(numbers[::2], numbers[1::2], strict=True) for row in range(start, stop)]

    rows = [row for shard in state["completed_shards"] for row in written_out(shard["splits"])]
    rows += by_number(state.get("completed_rows", []))
    for shard in state["in_progress"]:
        delivered = [*written_out(shard["splits"]), *by_number(shard.get("rows", []))]
        for start, stop in shard.get("windows", [(0, shard["rows_delivered"])]):
            rows += delivered[start:stop]
    return rows


@given(st.data())
@examples(300)
@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.ChangedFilesWarning")
def test_a_damaged_state_is_refused_and_changes_nothing_or_loads_and_repeats_no_row(data, data_of_test):
    loader, dataset = open_loader(data, split_rows=60, batch_size=48, num_workers=0)
    running = iter(loader)
    begun = [rows_of(next(running)) for _ in range(3)]
    before = dataset.state_dict()
    damaged = data_of_test.draw(damages([before]))
    try:
        dataset.load_state_dict(damaged)
    except ValueError:
        assert dataset.state_dict() == before
        assert begun + batches_of(running) == WHOLE
    else:
        rows = [row for batch in batches_of(loader) for row in batch]
        assert len(set(rows)) == len(rows)
        assert set(rows) <= set(range(ROWS))
        json.dumps(dataset.state_dict())


WHOLE = [list(range(first, min(first + 48, ROWS))) for first in range(0, ROWS, 48)]
"""The batches of the dataset in file order."""


# What no run can have delivered ---------------------------------------------------------------------------------------


def test_a_state_without_the_optional_keys_is_read(data):
    _, state = saved(data)
    assert "completed_rows" not in state
    assert all(set(shard) == {"splits", "rows_delivered"} for shard in state["in_progress"])
    _, dataset = open_loader(data)
    dataset.load_state_dict(state)
    assert edited(dataset.state_dict()) == state


def test_shards_done_out_of_their_order_are_refused(data):
    loader, dataset = open_loader(data)
    list(loader)
    state = edited(dataset.state_dict())
    assert len(state["completed_shards"]) > 2
    state["completed_shards"] = state["completed_shards"][1:]
    _, fresh = open_loader(data)
    before = fresh.state_dict()
    with pytest.raises(ValueError, match="shards are done in their order, and these are not"):
        fresh.load_state_dict(state)
    assert fresh.state_dict() == before


def test_a_shard_begun_after_one_that_is_not_done_is_refused(data):
    loader, dataset = open_loader(data)
    list(loader)
    state = edited(dataset.state_dict())
    last = state["completed_shards"].pop()
    state["completed_shards"].pop()
    state["in_progress"] = [{**last, "rows_delivered": 1}]
    with pytest.raises(ValueError, match="shards are done in their order, and these are not"):
        open_loader(data)[1].load_state_dict(state)


def test_more_batches_than_rows_are_refused(data):
    _, state = saved(data)
    with pytest.raises(ValueError, match="it records 100000 batches of"):
        open_loader(data)[1].load_state_dict({**state, "batches_delivered": 100_000})


def test_a_number_that_python_could_not_write_is_refused(data):
    loader, _ = open_loader(data, num_workers=0)
    next(iter(loader))
    resumed, _ = open_loader(data, num_workers=3)
    resumed.load_state_dict([loader.state_dict()], strict=False)
    state = edited(resumed.state_dict())
    state["base"]["batches_delivered"] = 10**5000
    with pytest.raises(ValueError, match=r"state\['base'\]\['batches_delivered'\].*an integer of at most 100 digits"):
        open_loader(data, num_workers=3)[0].load_state_dict(state)


def test_the_advice_names_each_way_out(data):
    _, state = saved(data)
    _, dataset = open_loader(data, num_workers=3)
    with pytest.raises(CheckpointMismatchError) as raised:
        dataset.load_state_dict(state)
    assert "What to do: create the loader with num_workers=" in str(raised.value)
    assert "; or start the epoch from its beginning, without a state" in str(raised.value)
