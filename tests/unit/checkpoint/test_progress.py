"""Progress and state: from any stop through JSON and back, to exactly the rows and batches that are left."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deliveries import Delivery, deliveries, plain_delivery, stopped, stops, through_json
from hypothesis import given
from hypothesis import strategies as st
from support import examples, manifest_of, row_ids

from torch_dataloader_utils import CheckpointMismatchError
from torch_dataloader_utils.checkpoint import dump as state_module
from torch_dataloader_utils.checkpoint import saved_state
from torch_dataloader_utils.checkpoint.parse.states import parse_state
from torch_dataloader_utils.checkpoint.progress import Progress, StreamProgress
from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.planning.manifest import Manifest
from torch_dataloader_utils.planning.plan import Shard

PLAIN = (dict, list, str, int, float, bool, type(None))


# Resuming ----------------------------------------------------------------------------------------------------------


@given(deliveries(), stops)
@examples(200, part=10)
def test_a_state_through_json_brings_back_what_is_left_and_whose_turn_it_is(delivery, after):
    _, progress = stopped(delivery, delivery.fresh(), after)
    restored = delivery.restored(through_json(delivery.state(progress)))
    assert [stream.left for stream in restored.streams] == [stream.left for stream in progress.streams]
    assert [stream.done for stream in restored.streams] == [stream.done for stream in progress.streams]
    assert restored.turns() == progress.turns()
    assert restored.batches_delivered == progress.batches_delivered
    assert delivery.state(restored) == delivery.state(progress)


@given(deliveries(), stops)
@examples(200, part=10)
def test_the_batches_after_a_resume_are_the_batches_that_were_still_to_come(delivery, after):
    whole = delivery.batches_from(delivery.fresh())
    before, progress = stopped(delivery, delivery.fresh(), after)
    restored = delivery.restored(through_json(delivery.state(progress)))
    assert before + delivery.batches_from(restored) == whole


@given(deliveries(), st.lists(stops, max_size=8))
@examples(100, part=5)
def test_any_number_of_stops_and_resumes_changes_no_batch(delivery, all_stops):
    progress, batches = delivery.fresh(), []
    for after in all_stops:
        more, progress = stopped(delivery, progress, after)
        batches += more
        progress = delivery.restored(through_json(delivery.state(progress)))
    assert batches + delivery.batches_from(progress) == delivery.batches_from(delivery.fresh())


@given(deliveries(), stops)
@examples(100, part=5)
def test_at_every_stop_each_row_is_either_delivered_or_left_exactly_once(delivery, after):
    delivery = replace(delivery, drop_last=False)
    batches, progress = stopped(delivery, delivery.fresh(), after)
    progress = delivery.restored(through_json(delivery.state(progress)))
    done = [row for stream in progress.streams for shard_slice in stream.done for row in delivery.rows_in(shard_slice)]
    left = [row for stream in progress.streams for shard_slice in stream.left for row in delivery.rows_in(shard_slice)]
    everything = [
        row for stream in progress.streams for shard_slice in stream.planned for row in delivery.rows_in(shard_slice)
    ]
    assert sorted(done) == sorted(row for batch in batches for row in batch)
    assert sorted(done + left) == sorted(everything)
    assert len(set(everything)) == len(everything)


@given(deliveries())
@examples(100, part=5)
def test_the_state_of_a_finished_epoch_leaves_nothing(delivery):
    *_, (_, progress) = delivery.go_on(delivery.fresh())
    restored = delivery.restored(through_json(delivery.state(progress)))
    assert all(stream.left == () for stream in restored.streams)
    assert delivery.batches_from(restored) == []


@given(deliveries(), stops)
@examples(100, part=5)
def test_the_number_of_batches_is_exact_at_every_stop(delivery, after):
    delivery = replace(delivery, takes_every=0)
    expected = len(delivery.batches_from(delivery.fresh()))
    size, drop_last = delivery.batch_size, delivery.drop_last
    batches, progress = stopped(delivery, delivery.fresh(), after)
    assert progress.batches_delivered == len(batches)
    for one in (progress, progress.rebased(), delivery.restored(delivery.state(progress))):
        assert one.batches(size, drop_last=drop_last) == expected


@given(deliveries(), stops)
@examples(100, part=5)
def test_the_progress_of_a_rank_names_no_row_of_another(delivery, after):
    _, progress = stopped(delivery, delivery.fresh(), after)
    state = delivery.state(progress)
    own = {shard_slice.shard.splits for stream in delivery.fresh().streams for shard_slice in stream.planned}
    recorded = parse_state(state)
    assert {shard.splits for shard in (*recorded.completed, *recorded.in_progress)} <= own


# Row numbers and unlisted files ------------------------------------------------------------------------------------


def test_a_delivered_batch_changes_nothing_of_the_progress_but_its_place() -> None:
    marks: dict[str, Any] = {name: object() for name in Progress._fields}
    before = Progress(
        **marks
        | {"streams": (StreamProgress((), ()),), "next_turn": 0, "batches_delivered": 4, "streams_per_turn": 1}
        | {"restored": None, "hashes": None}
    )
    after = before.advanced(Receipt(0, 0, 3, 3))
    changed = {name for name in marks if getattr(after, name) is not getattr(before, name)}
    assert changed == {"streams", "batches_delivered"}
    assert after.batches_delivered == 5


def by_number() -> AbstractContextManager[Any]:
    """Makes every state record row numbers, as only a large one does otherwise."""
    return patch.object(state_module, "MOST_BYTES", -1)


@given(deliveries(), stops)
@examples(200, part=10)
def test_row_numbers_bring_back_the_same_as_ranges_written_out(delivery, after):
    batches, progress = stopped(delivery, delivery.fresh(), after)
    written_out = delivery.state(progress)
    with by_number():
        numbered = through_json(delivery.state(progress))
    assert numbered["completed_shards"] == []
    assert bool(numbered["completed_rows"]) == bool(written_out["completed_shards"])
    restored = delivery.restored(numbered)
    assert delivery.state(restored) == written_out
    assert batches + delivery.batches_from(restored) == delivery.batches_from(delivery.fresh())


@given(deliveries(), stops)
@examples(100, part=5)
def test_row_numbers_are_the_rows_of_the_shards_and_no_others(delivery, after):
    _, progress = stopped(delivery, delivery.fresh(), after)
    with by_number():
        state = delivery.state(progress)
    slices = [shard_slice for stream in progress.streams for shard_slice in stream.done]
    done = [shard_slice.shard for shard_slice in slices if shard_slice.stop == shard_slice.shard.rows]
    started = [shard_slice.shard for shard_slice in slices if shard_slice.stop < shard_slice.shard.rows]
    assert rows_in(state["completed_rows"]) == sorted(rows_of_all(delivery, done))
    assert [rows_in(entry["rows"]) for entry in state["in_progress"]] == [
        rows_of_all(delivery, [one]) for one in started
    ]
    numbers = state["completed_rows"]
    assert all(stop < start for stop, start in zip(numbers[1::2], numbers[2::2], strict=False))


def rows_in(numbers: list[int]) -> list[int]:
    return [row for start, stop in zip(numbers[::2], numbers[1::2], strict=True) for row in range(start, stop)]


def rows_of_all(delivery: Delivery, shards: list[Shard]) -> list[int]:
    return [row for shard in shards for row in row_ids(delivery.run.manifest, shard)]


@given(deliveries(), stops)
@examples(100, part=5)
def test_more_files_than_are_listed_are_left_out_and_the_state_loads_all_the_same(delivery, after):
    _, progress = stopped(delivery, delivery.fresh(), after)
    most = len(delivery.run.manifest.files) - 1
    with patch.object(saved_state, "MOST_FILES", most):
        state = through_json(delivery.state(progress))
    assert state["files"] is None
    restored = delivery.restored(state)
    assert delivery.batches_from(restored) == delivery.batches_from(progress)


@pytest.mark.parametrize("change", ["size", "digest", "path", "removed"])
def test_a_changed_file_is_refused_also_where_files_are_not_listed(change):
    delivery = plain_delivery(manifest_of([(10, 100)] * 3, [(10, 100)] * 3))
    first, second = delivery.run.manifest.files
    changed = {
        "size": (first, second._replace(size=second.size + 1)),
        "digest": (first, second._replace(digest="0" * 16)),
        "path": (first, second._replace(path="c.parquet")),
        "removed": (first,),
    }
    with patch.object(saved_state, "MOST_FILES", 1):
        state = delivery.state(delivery.fresh())
    today = replace(delivery, run=replace(delivery.run, manifest=Manifest("/data", changed[change])))
    with pytest.raises(CheckpointMismatchError, match=r"the file list changed: checkpoint='\w{32}', current='\w{32}'"):
        today.restored(state)


# What a state is made of -------------------------------------------------------------------------------------------


def _places(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from _places(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _places(one)


@given(deliveries(), stops, st.booleans())
@examples(100, part=5)
def test_a_state_is_made_of_plain_values_and_survives_json_pickle_and_torch(delivery, after, numbered):
    _, progress = stopped(delivery, delivery.fresh(), after)
    with by_number() if numbered else nullcontext():
        state = delivery.state(progress)
    assert all(type(value) in PLAIN for value in _places(state))
    assert through_json(state) == state
    assert pickle.loads(pickle.dumps(state)) == state
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state


@given(deliveries(), stops)
@examples(100, part=5)
def test_changing_a_state_changes_neither_the_progress_nor_the_next_state(delivery, after):
    _, progress = stopped(delivery, delivery.fresh(), after)
    state = delivery.state(progress)
    untouched = copy.deepcopy(state)
    for value in list(_places(state)):
        if isinstance(value, (dict, list)):
            value.clear()
    assert delivery.state(progress) == untouched


def test_the_state_has_the_documented_keys():
    delivery = plain_delivery(manifest_of([(10, 100)] * 8))
    _, progress = stopped(delivery, delivery.fresh(), 5)
    state = delivery.state(progress)
    path = "/data/a.parquet"
    assert state["version"] == 1
    assert state["plan_algorithm"] == 2
    assert (state["epoch"], state["batches_delivered"], state["next_worker"]) == (0, 5, 0)
    assert (state["_num_workers"], state["_shuffle_seed"], state["num_ranks"], state["rank"]) == (0, 42, 1, 0)
    assert state["completed_shards"] == [{"splits": [{"path": path, "row_offset": 0, "row_length": 20}]}]
    assert state["in_progress"] == [
        {"splits": [{"path": path, "row_offset": 20, "row_length": 20}], "rows_delivered": 15}
    ]
    assert "completed_rows" not in state
    assert state["files"] == [["a.parquet", 108, delivery.run.manifest.files[0].digest, None, None, 80]]
    assert state["plan"]["root"] == "/data"
    assert state["plan"]["rows"] == 80
    assert state["plan"]["fingerprint"] == delivery.run.manifest.fingerprint
    assert state["base"] is None
