"""States saved by earlier code load today, and the rest of the epoch is what that code went on to deliver.

`resources/old_states` holds the data, the states, and beside each state the batches that followed it in the run that
saved it. `generate.py` there shows how they were made.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from torch_dataloader_utils import (
    ChangedFilesWarning,
    CheckpointMismatchError,
    LostRowsWarning,
    RankMismatchError,
    Shard,
    Split,
)
from torch_dataloader_utils.distributed import CheckpointEntry, load_rank_state, own_state

sys.path.append(str(Path(__file__).parents[1] / "resources" / "old_states"))

import old_states as old
from old_states import Run, ids_of, open_rank, read_states

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

GROUPS = (1, 3)
"""Numbers of ranks that load what was saved under others."""

groups_in_turn = pytest.mark.parametrize(
    "shares", [2, pytest.param(1, marks=pytest.mark.soak)], ids=["in turn", "each"]
)
"""Gives a test among how many states of a run the numbers of ranks are shared: of two, each is loaded by one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data, in another folder than where the states were saved."""
    folder: Path = tmp_path_factory.mktemp("old states")
    old.copy_data(folder)
    return folder


def batches_of(loader: Any) -> list[list[int]]:
    return [ids_of(batch) for batch in loader]


def group(run: Run, folder: Path, num_ranks: int, **changed: Any) -> list[Any]:
    """Open the loaders of so many ranks."""
    return [open_rank(run, folder, rank, num_ranks=num_ranks, **changed)[0] for rank in range(num_ranks)]


def left_to(loaders: Iterable[Any], states: Any, **how: Any) -> list[int]:
    """Let loaders go on from the states of other ranks; return the ids of all rows that they deliver."""
    loaders = list(loaders)
    for loader in loaders:
        loader.load_state_dict(states, strict=False, **how)
    return sorted(one for loader in loaders for batch in batches_of(loader) for one in batch)


def flat(ranks: Any) -> list[int]:
    """Return the ids of all batches of all ranks."""
    return [one for rank in ranks for batch in rank for one in batch]


# The run that saved it ----------------------------------------------------------------------------------------------


each_state = pytest.mark.parametrize(
    "every", [4, pytest.param(1, marks=pytest.mark.soak)], ids=["some states", "every state"]
)
"""Gives a test by how many states to go on. Ranks begin at different ones."""


@each_state
@pytest.mark.parametrize("name", old.STRICT)
def test_the_batches_that_were_to_come_follow(folder, name, every):
    """One loader loads all states of a rank: opening the data, and starting workers, takes the time."""
    run = old.STRICT[name]
    old.prepare_memory([run])
    for rank, kept in enumerate(read_states("strict", name)):
        loader, dataset = open_rank(run, folder, rank, persistent_workers="num_workers" in run.options)
        require_continued(loader, dataset, kept, slice((rank + 2) % every, None, every))


def require_continued(loader: Any, dataset: Any, kept: Any, chosen: slice = slice(None)) -> None:
    """Load each state of a rank and compare the rest of its epoch; from one at its end go on to the next epoch."""
    for epoch, delivered, state in kept["saved"][chosen]:
        loader.load_state_dict(state)
        assert dataset.epoch == epoch
        assert dataset.state_dict()["batches_delivered"] == delivered
        assert batches_of(loader) == kept["epochs"][str(epoch)][delivered:]
    epoch = old.FIRST_EPOCH
    end = next(state for *at, state in kept["saved"] if at == [epoch, len(kept["epochs"][str(epoch)])])
    loader.load_state_dict(end)
    assert batches_of(loader) == []
    dataset.set_epoch(epoch + 1)
    assert batches_of(loader) == kept["epochs"][str(epoch + 1)]


def test_the_number_of_workers_is_adopted(folder):
    name = "rows shuffled, two workers, two ranks"
    [kept, _] = read_states("strict", name)
    _, dataset = open_rank(old.STRICT[name], folder, num_workers=None)
    dataset.load_state_dict(kept["saved"][2][2])
    assert dataset.num_workers == 2


@pytest.mark.parametrize("name", old.STORED)
def test_files_on_s3_are_known_by_their_etags(s3, name):
    run = old.STORED[name]
    kept = read_states("stored", name)
    bucket = s3.new_bucket(old.DATA)
    stored = Run(f"s3://{bucket}/{run.path}", options={**run.options, "storage_options": s3.storage_options()})
    loader, dataset = open_rank(stored, old.DATA)
    assert all(file[3] for file in dataset.state_dict()["files"])
    require_continued(loader, dataset, kept)


def test_more_files_than_a_state_lists(folder):
    old.prepare_memory([old.MANY])
    kept = read_states("other", "many files")
    state = kept["state"]
    assert state["files"] is None
    loader, _ = open_rank(old.MANY, folder)
    loader.load_state_dict(state)
    assert batches_of(loader) == [kept["last"]]
    assert left_to([loader], state) == sorted(kept["last"])


def test_a_manifest_stands_for_the_files(folder):
    run = old.STRICT["in memory"]
    old.prepare_memory([run])
    [kept] = read_states("strict", "in memory")
    manifest = base64.b64decode(read_states("other", "manifest"))
    loader, dataset = open_rank(run, folder, manifest=manifest)
    require_continued(loader, dataset, kept)


# The states of all ranks --------------------------------------------------------------------------------------------


def gathered_by_torch() -> list[Any]:
    checkpoint = torch.load(old.STATES / "gathered.pt", map_location="cpu", weights_only=True)
    assert checkpoint["weight"].tolist() == [0, 1, 2]
    return checkpoint["loaders"]


@pytest.mark.parametrize("way", ["own state", "all states", "rank files", "checkpoint entry"])
def test_each_rank_finds_its_own_state(folder, way):
    later = read_states("other", "gathered")["later"]
    for rank in range(old.GATHERED.ranks):
        loader, _ = open_rank(old.GATHERED, folder, rank)
        if way == "own state":
            loader.load_state_dict(own_state(gathered_by_torch(), rank))
        elif way == "all states":
            loader.load_state_dict(gathered_by_torch())
        elif way == "rank files":
            load_rank_state(loader, old.STATES / "rank_files")
        else:
            CheckpointEntry(loader).load_state_dict(read_states("other", "entries"))
        assert batches_of(loader) == later[rank]


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")  # that there is one process
def test_other_ranks_load_the_entries_of_a_distributed_checkpoint_by_their_names(folder, tmp_path):
    dcp.save({"loader": read_states("other", "entries")}, checkpoint_id=tmp_path)
    saved = {"loader": {f"rank-{rank}-of-{old.GATHERED.ranks}": "" for rank in range(old.GATHERED.ranks)}}
    dcp.load(saved, checkpoint_id=tmp_path)
    states = [json.loads(text) for text in saved["loader"].values()]
    for num_ranks in GROUPS:
        assert left_to(group(old.GATHERED, folder, num_ranks), states) == read_states("other", "gathered")["left"]
    [loader] = group(old.GATHERED, folder, 1)
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: loader\.states_of_all_ranks"):
        dcp.load({"loader": CheckpointEntry(loader, elastic=True)}, checkpoint_id=tmp_path)


def test_other_ranks_share_what_all_ranks_left(folder):
    left = read_states("other", "gathered")["left"]
    for num_ranks in GROUPS:
        assert left_to(group(old.GATHERED, folder, num_ranks), gathered_by_torch()) == left
    [loader] = group(old.GATHERED, folder, 1)
    load_rank_state(loader, old.STATES / "rank_files", strict=False)
    assert sorted(flat([batches_of(loader)])) == left


# Other ranks --------------------------------------------------------------------------------------------------------


@groups_in_turn
@pytest.mark.parametrize("name", old.ELASTIC)
def test_runs_of_other_ranks_go_on_with_what_is_left(folder, name, shares):
    """States of each stage: loaded by other numbers of ranks, and by the ranks that saved them."""
    stages = old.ELASTIC[name]
    old.prepare_memory(stage.run for stage in stages)
    for number, (stage, kept) in enumerate(zip(stages, read_states("elastic", name), strict=True)):
        for num_ranks in GROUPS[number % shares :: shares]:
            assert left_to(group(stage.run, folder, num_ranks, **old.UNBALANCED), kept["states"]) == kept["left"]
        for rank, later in enumerate(kept["later"]):
            loader, _ = open_rank(stage.run, folder, rank)
            loader.load_state_dict(kept["states"][rank])
            assert batches_of(loader) == later


@groups_in_turn
@pytest.mark.parametrize("name", old.CHANGING)
def test_files_that_went_and_came_in_between(folder, name, shares):
    stages = old.CHANGING[name]
    kept = read_states("changing", name)
    for number, stage in enumerate(stages):
        old.fill_changing(*stage.files)
        states = kept[number]["states"]
        for num_ranks in GROUPS[number % shares :: shares]:
            assert left_to(group(stage.run, folder, num_ranks), states) == kept[number]["left"]
        for rank, later in enumerate(kept[number]["later"]):
            loader, _ = open_rank(stage.run, folder, rank)
            loader.load_state_dict(states)
            assert batches_of(loader) == later


@groups_in_turn
@pytest.mark.parametrize("name", old.CHANGING)
def test_files_change_after_the_states_were_saved(folder, name, shares):
    before, after, last = read_states("changing", name)
    stages = old.CHANGING[name]
    old.fill_changing(*stages[1].files)
    for num_ranks in GROUPS[::shares]:
        with pytest.warns(LostRowsWarning) as warned:
            left = left_to(group(stages[1].run, folder, num_ranks), before["states"], on_changed_files="continue")
        assert left == sorted(flat(after["delivered"]) + after["left"])
        warnings = {str(one.message) for one in warned if one.category is LostRowsWarning}
        assert {tuple(lost_of(one)) for one in warnings} == {tuple(lost_of(after["lost"]))}
    old.fill_changing(*stages[2].files)
    for num_ranks in GROUPS[1 % shares :: shares]:
        left = left_to(group(stages[2].run, folder, num_ranks), after["states"], on_changed_files="continue")
        assert left == sorted(flat(last["delivered"]) + last["left"])


def lost_of(message: str) -> list[str]:
    """Return what a warning says is lost: each file with the number of its rows."""
    found = re.findall(r"\S+\.parquet \(\d+ rows\)", message)
    assert found
    return found


# Grids --------------------------------------------------------------------------------------------------------------

GLOBAL_BATCH = 32


@groups_in_turn
@pytest.mark.parametrize("name", old.GRIDS)
def test_a_virtual_topology_makes_the_steps_that_were_to_come(folder, name, shares):
    kept = read_states("grids", name)
    for number, (delivered, states, left) in enumerate(kept["saved"]):
        for num_ranks in (1, 4)[number % shares :: shares]:
            loaders = group(old.GRIDS[name], folder, num_ranks, batch_size=GLOBAL_BATCH // num_ranks)
            for loader in loaders:
                loader.load_state_dict(states)
            assert steps_of(loaders) == kept["steps"][delivered:]
        loaders = group(old.GRIDS[name], folder, 2)
        for loader, state in zip(loaders, states, strict=True):
            loader.load_state_dict(state)
        assert steps_of(loaders) == kept["steps"][delivered:]
        assert left_to(group(old.GRIDS[name], folder, 1, **old.UNBALANCED), states) == left


def test_a_virtual_topology_makes_the_steps_that_were_to_come_by_workers(folder):
    name = "dropping, rows shuffled"
    kept = read_states("grids", name)
    [loader] = group(old.GRIDS[name], folder, 1, batch_size=GLOBAL_BATCH, num_workers=2, persistent_workers=True)
    for delivered, states, _ in kept["saved"]:
        loader.load_state_dict(states)
        assert steps_of([loader]) == kept["steps"][delivered:]


def steps_of(loaders: list[Any]) -> list[list[int]]:
    """Return the ids of every step, over all ranks in order."""
    return [[one for batch in batches for one in ids_of(batch)] for batches in zip(*loaders, strict=True)]


# What is refused ----------------------------------------------------------------------------------------------------


class FilesInOrder:
    """A split strategy: each file is a shard."""

    def shards(self, manifest, epoch):  # noqa: ARG002 - what strategies take
        return [Shard((Split(file.path, 0, file.rows),)) for file in manifest.files]


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "another seed": ("rows shuffled", {"shuffle_seed": 7}, {"shuffle_seed": (42, 7)}),
    "a seed beyond 64 bits": ("small shards", {"shuffle_seed": 2**70}, {"shuffle_seed": (-(2**70), 2**70)}),
    "other workers": ("in order", {"num_workers": 2}, {"num_workers": (0, 2)}),
    "fewer workers": ("in order, two workers", {"num_workers": 0}, {"num_workers": (2, 0)}),
    "other ranks": ("in order, three ranks", {"num_ranks": 2}, {"num_ranks": (3, 2)}),
    "another rank": ("in order, three ranks", {"rank": 1}, {"rank": (0, 1)}),
    "not shuffled": ("shards shuffled", {"shuffle": False}, {"shuffle": (True, False)}),
    "another buffer": ("rows shuffled", {"shuffle_buffer_size": 50}, {"shuffle_buffer_size": (100, 50)}),
    "another interleaving": ("rows shuffled in rounds", {"shuffle_interleave": 2}, {"shuffle_interleave": (3, 2)}),
    "smaller shards": ("a glob", {"split_rows": 80}, {"split_rows": (90, 80)}),
    "smaller shards in bytes": ("csv", {"split_bytes": 1000}, {"split_bytes": (2048, 1000)}),
    "other balancing": ("ranks balanced by dropping", {"uneven_ranks": "pad"}, {"uneven_ranks": ("drop", "pad")}),
    "another step": ("ranks balanced by dropping", {"batch_size": 8}, {"global_batch_size": (48, 24)}),
    "another grid": (
        "ranks balanced by dropping",
        {"virtual_ranks": 3, "virtual_workers": 2},
        {"virtual_ranks": (None, 3), "virtual_workers": (None, 2)},
    ),
    "another version": ("a Delta version", {"version": 0}, {"version": (1, 0), "rows": (180, 120)}),
    "no filter": ("filtered", {"filters": None}, {"filters": (..., None)}),
    "another filter": ("filtered", {"filters": pc.field("id") > 90}, {"filters": (..., ...)}),
    "counted": ("csv", {"count_rows": True}, {"format_options": (..., ...), "rows": (..., 529)}),
    "other text": ("csv with options", {"format_options": {"delimiter": ";"}}, {"format_options": (..., ...)}),
    "no strategy": ("a strategy", {"split_strategy": None}, {"split_strategy": (..., None)}),
    "another strategy": ("a strategy", {"split_strategy": FilesInOrder()}, {"split_strategy": (..., ...)}),
}
"""For each: whose states, the option that is another one, and the differences that the error names, with both values
where these are no digests."""


@pytest.mark.parametrize("what", REFUSED)
def test_a_state_of_other_options_is_refused_by_name(folder, what):
    name, changed, differences = REFUSED[what]
    state = halfway(name)
    _, dataset = open_rank(old.STRICT[name], folder, **changed)
    error = refused(dataset, state, CheckpointMismatchError)
    named = {one.name: (one.checkpoint, one.current) for one in error.differences}
    assert named.keys() == differences.keys()
    for one, values in differences.items():
        for found, expected in zip(named[one], values, strict=True):
            assert found is not None if expected is ... else found == expected
        assert one in str(error)


def halfway(name: str) -> Any:
    """Return the state that rank 0 of a run saved in the middle of an epoch."""
    return read_states("strict", name)[0]["saved"][2][2]


def refused(dataset: Any, state: Any, kind: type[Exception], **how: Any) -> Any:
    """Return the error of a state that is not loaded, if that changed nothing."""
    before = dataset.state_dict()
    with pytest.raises(kind) as raised:
        dataset.load_state_dict(state, **how)
    assert dataset.state_dict() == before
    return raised.value


def test_files_that_changed_are_refused_by_name(folder):
    first, *_ = read_states("changing", "in order")
    stage = old.CHANGING["in order"][1]
    old.fill_changing(*stage.files)
    _, dataset = open_rank(stage.run, folder)
    for how in ({}, {"strict": False}):
        error = refused(dataset, first["states"], CheckpointMismatchError, **how)
        changes = error.files_added, error.files_removed, error.files_changed
        assert changes == (("e.parquet",), ("b.parquet",), ("d.parquet",))


def test_a_modified_text_file_is_refused_and_a_modified_parquet_file_is_a_warning(folder, tmp_path):
    for name in ("csv", "parts"):
        shutil.copytree(folder / name, tmp_path / name)
        for path in (tmp_path / name).iterdir():
            os.utime(path, (old.MODIFIED, old.MODIFIED))
    os.utime(tmp_path / "csv" / "c.csv", (1, 1))
    os.utime(tmp_path / "parts" / "part-2.parquet", (1, 1))
    _, dataset = open_rank(old.STRICT["csv"], tmp_path)
    assert refused(dataset, halfway("csv"), CheckpointMismatchError).files_changed == ("c.csv",)
    _, dataset = open_rank(old.STRICT["in order"], tmp_path)
    with pytest.warns(ChangedFilesWarning, match=r"part-2\.parquet"):
        dataset.load_state_dict(halfway("in order"))


def test_another_snapshot_is_refused_by_name(folder):
    name = "an Iceberg snapshot"
    state = halfway(name)
    _, dataset = open_rank(old.STRICT[name], folder)
    assert state["plan"]["snapshot_id"] == old.second_snapshot()
    state["plan"]["snapshot_id"] += 1
    [difference] = refused(dataset, state, CheckpointMismatchError).differences
    assert (difference.name, difference.current) == ("snapshot_id", old.second_snapshot())


def test_states_that_do_not_fit_together_are_refused_by_rank(folder):
    first, second, third = gathered_by_torch()
    _, dataset = open_rank(old.GATHERED, folder)
    assert "[1]" in str(refused(dataset, [first, third], RankMismatchError, strict=False))
    assert "[2]" in str(refused(dataset, [first, second, third, third], RankMismatchError, strict=False))
    twin = {**json.loads(json.dumps(first)), "rank": 1}
    assert "overlap" in str(refused(dataset, [first, twin, third], RankMismatchError, strict=False))


# The fixture itself -------------------------------------------------------------------------------------------------


def test_every_file_of_states_is_loaded():
    kinds = {"strict": old.STRICT, "stored": old.STORED, "elastic": old.ELASTIC, "grids": old.GRIDS}
    kinds |= {"changing": old.CHANGING, "other": ("many files", "manifest", "entries", "gathered")}
    files = {old.states_path(kind, name) for kind, names in kinds.items() for name in names}
    assert set(old.STATES.rglob("*.json.gz")) == files


FORMS = {
    "files": lambda state: state["files"] is not None,
    "no files": lambda state: state["files"] is None,
    "an etag": lambda state: any(file[3] for file in state["files"] or ()),
    "a footer that _metadata describes": lambda state: any(file[2][0] == "_" for file in state["files"] or ()),
    "completed shards": lambda state: state["completed_shards"],
    "completed ranges of bytes": lambda state: any("byte_offset" in split for split in completed(state)),
    "completed whole files": lambda state: any(split.keys() == WHOLE for split in completed(state) if in_text(split)),
    "completed row numbers": lambda state: state.get("completed_rows"),
    "windows": lambda state: any("windows" in shard for shard in state["in_progress"]),
    "rounds": lambda state: any("rounds" in shard for shard in state["in_progress"]),
    "row numbers in progress": lambda state: any("rows" in shard for shard in state["in_progress"]),
    "ranges of bytes in progress": lambda state: any(
        "byte_offset" in split for shard in state["in_progress"] for split in shard["splits"]
    ),
    "repeats": lambda state: any(shard.get("repeats") for shard in state["in_progress"]),
    "absent splits": lambda state: any("absent" in shard for shard in state["in_progress"]),
    "a base": lambda state: state["base"] is not None,
    "a base under way": lambda state: state["base"] and state["base"]["in_progress"],
    "a base by row numbers": lambda state: state["base"] and any("rows" in s for s in state["base"]["in_progress"]),
    "a base without files": lambda state: state["base"] and state["base"]["left_out"],
    "a base with absent splits": lambda state: (
        state["base"] and any("absent" in shard for shard in state["base"]["in_progress"])
    ),
}
WHOLE = {"path", "row_offset", "row_length"}


def completed(state: Any) -> list[dict[str, Any]]:
    return [split for shard in state["completed_shards"] for split in shard["splits"]]


def in_text(split: dict[str, Any]) -> bool:
    return split["row_offset"] is None


def test_states_of_every_form_are_there():
    states = [
        state
        for path in old.STATES.rglob("*.json.gz")
        if path.stem not in ("manifest.json", "entries.json")
        for state in states_in(read_states(path.parent.name, path.name.removesuffix(".json.gz")))
    ]
    missing = [form for form, has in FORMS.items() if not any(map(has, states))]
    assert missing == []
    plans = [state["plan"] for state in states]
    for setting in ("snapshot_id", "version", "split_strategy", "format_options", "filter", "virtual_ranks"):
        assert any(plan[setting] is not None for plan in plans), setting
    assert {plan["format"] for plan in plans} == {"parquet", "orc", "csv", "jsonl"}
    assert {plan["uneven_ranks"] for plan in plans} == {"allow", "drop", "pad"}
    assert {state["_num_workers"] for state in states} == {0, 2}
    assert {state["num_ranks"] for state in states} == {1, 2, 3}


def states_in(content: Any) -> Iterable[Any]:
    """Yield the states in what is kept of a run."""
    if isinstance(content, dict) and "plan_algorithm" in content:
        yield content
    elif isinstance(content, (dict, list)):
        for inner in content.values() if isinstance(content, dict) else content:
            yield from states_in(inner)
