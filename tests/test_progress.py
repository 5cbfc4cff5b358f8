"""Progress and state: from any stop through JSON and back, to the very rows and batches that are left."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import manifest_of, manifests, plan_options, row_ids

from torch_dataloader_utils import CheckpointMismatchError
from torch_dataloader_utils import state as state_module
from torch_dataloader_utils.model import Base, DataFile, Manifest, Piece, Plan, Receipt, RowGroup, Shard
from torch_dataloader_utils.planning import PlanOptions, delivery_order, make_plan, permutation, round_bounds
from torch_dataloader_utils.progress import Progress
from torch_dataloader_utils.restoring import restore_progress
from torch_dataloader_utils.saved import parse_state
from torch_dataloader_utils.state import Run, dump_state
from torch_dataloader_utils.topology import Topology

Walk: TypeAlias = Iterator[tuple[list[int] | None, Receipt]]

PLAIN = (dict, list, str, int, float, bool, type(None))


@dataclass(frozen=True)
class Delivery:
    """Delivers an epoch as a loader does, by receipts, without files.

    Attributes:
        run: The run.
        epoch: The epoch.
        takes_every: The filter takes each row whose id this number divides; 0 takes none.
        batch_size: Rows in a batch.
        drop_last: Whether the short batch at the end of a stream is left out.
        tells_ends_late: Whether a shard's last row does not tell that it is the last: so it is where the filter
            leaves nothing of the row groups after it.
    """

    run: Run
    epoch: int
    takes_every: int
    batch_size: int
    drop_last: bool
    tells_ends_late: bool

    def plan(self, epoch: int, base: Base | None = None) -> Plan:
        run = self.run
        topology = run.topology
        return make_plan(
            run.manifest,
            run.options,
            epoch=epoch,
            num_ranks=topology.planned_ranks,
            num_workers=topology.planned_workers,
            base=base,
        )

    def fresh(self, base: Base | None = None) -> Progress:
        topology = self.run.topology
        return Progress.fresh(topology.own_streams(self.plan(self.epoch, base)), topology.streams_per_turn, base)

    def rows_of(self, shard: Shard) -> list[int]:
        """The rows that a shard delivers, in order."""
        seed = self.run.options.shuffle_seed if self.run.options.mixes_rows else None
        everything = row_ids(self.run.manifest, shard)
        if not self.takes_every or seed is None:
            rows = [everything[place] for place in delivery_order(Piece(shard), seed=seed, epoch=self.epoch)]
            return [row for row in rows if not self.takes_every or row % self.takes_every]
        delivered = []
        for number in range(shard.rounds):
            starts = accumulate((split.row_length for split in shard.splits), initial=0)
            places = zip(starts, round_bounds(shard, number), strict=False)
            rows = [everything[first + row] for first, bounds in places for row in range(*bounds)]
            rows = [row for row in rows if row % self.takes_every]
            order = permutation(len(rows), seed=seed, epoch=self.epoch, shard=shard, number=number)
            delivered += [rows[place] for place in order]
        return delivered

    def rows_in(self, piece: Piece) -> list[int]:
        """The rows that a piece delivers, in order."""
        return self.rows_of(piece.shard)[piece.start : piece.stop]

    def go_on(self, progress: Progress) -> Iterator[tuple[list[int] | None, Progress]]:
        """Yield each batch, and None for each end of a stream, with the progress once it is handed over."""
        progress = progress.rebased()
        together = progress.streams_per_turn
        waiting = deque(
            self._together([self._walk(progress, turn * together + lane) for lane in range(together)])
            for turn in progress.turns()
        )
        while waiting:
            walk = waiting.popleft()
            batch, receipt = next(walk)
            if batch is None:
                progress = progress.ended(receipt)
            else:
                progress = progress.advanced(receipt)
                waiting.append(walk)
            yield batch, progress

    def batches_from(self, progress: Progress) -> list[list[int]]:
        return [batch for batch, _ in self.go_on(progress) if batch is not None]

    def _together(self, walks: list[Walk]) -> Walk:
        """The batches of streams of a grid, put together step by step."""
        for parts in zip(*walks, strict=True):
            (batch, receipt), *others = parts
            rows = None if batch is None else [row for part, _ in parts if part is not None for row in part]
            yield rows, replace(receipt, beside=tuple(beside for _, beside in others))

    def _walk(self, progress: Progress, stream: int) -> Walk:
        pieces = progress.streams[stream].pieces
        due = [
            (row, position, number + 1, number + 1 == min(piece.stop, len(self.rows_of(piece.shard))))
            for position, piece in enumerate(pieces)
            for number, row in enumerate(self.rows_of(piece.shard))
            if piece.start <= number < piece.stop
        ]
        size = self.batch_size // progress.streams_per_turn
        dropped = len(due) % size if self.drop_last else 0
        for start in range(0, len(due) - dropped, size):
            rows = due[start : start + size]
            _, position, delivered, last = rows[-1]
            if last and not self.tells_ends_late:
                position, delivered = position + 1, 0
            yield [row for row, *_ in rows], Receipt(stream, position, delivered, rows=len(rows))
        yield None, Receipt(stream, len(pieces), 0, rows=0, rows_dropped=dropped)

    def state(self, progress: Progress) -> dict[str, Any]:
        return dump_state(self.run, self.epoch, progress)

    def restored(self, state: dict[str, Any]) -> Progress:
        return restore_progress([parse_state(state)], self.run, self.plan)


@st.composite
def deliveries(draw: st.DrawFn) -> Delivery:
    num_ranks = draw(st.integers(1, 3))
    rank = draw(st.integers(0, num_ranks - 1))
    run = Run(
        manifest=draw(manifests()),
        options=draw(plan_options()),
        filter_digest=None,
        topology=Topology(num_ranks, rank, num_workers=draw(st.integers(0, 4))),
    )
    takes_every = draw(st.sampled_from([0, 0, 1, 2, 3, 7]))
    return Delivery(
        run=run if not takes_every else replace(run, filter_digest=f"every {takes_every}"),
        epoch=draw(st.one_of(st.integers(0, 3), st.just(2**60))),
        takes_every=takes_every,
        batch_size=draw(st.one_of(st.integers(1, 20), st.just(1000))),
        drop_last=draw(st.booleans()),
        tells_ends_late=draw(st.booleans()),
    )


stops = st.integers(0, 60)
"""After how many batches and ends of streams to stop."""


def stopped(delivery: Delivery, progress: Progress, after: int) -> tuple[list[list[int]], Progress]:
    """Deliver until the stop, or to the end: what was delivered, and the progress then."""
    batches = []
    for _, (batch, now) in zip(range(after), delivery.go_on(progress), strict=False):
        progress = now
        if batch is not None:
            batches.append(batch)
    return batches, progress


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state, allow_nan=False))


# Resuming ----------------------------------------------------------------------------------------------------------


@given(deliveries(), stops)
@settings(deadline=None, max_examples=200)
def test_a_state_through_json_brings_back_what_is_left_and_whose_turn_it_is(delivery, after):
    _, progress = stopped(delivery, delivery.fresh(), after)
    restored = delivery.restored(through_json(delivery.state(progress)))
    assert [stream.left for stream in restored.streams] == [stream.left for stream in progress.streams]
    assert [stream.done for stream in restored.streams] == [stream.done for stream in progress.streams]
    assert restored.turns() == progress.turns()
    assert restored.batches_delivered == progress.batches_delivered
    assert delivery.state(restored) == delivery.state(progress)


@given(deliveries(), stops)
@settings(deadline=None, max_examples=200)
def test_the_batches_after_a_resume_are_the_very_batches_that_were_still_to_come(delivery, after):
    whole = delivery.batches_from(delivery.fresh())
    before, progress = stopped(delivery, delivery.fresh(), after)
    restored = delivery.restored(through_json(delivery.state(progress)))
    assert before + delivery.batches_from(restored) == whole


@given(deliveries(), st.lists(stops, max_size=8))
@settings(deadline=None)
def test_any_number_of_stops_and_resumes_changes_no_batch(delivery, all_stops):
    progress, batches = delivery.fresh(), []
    for after in all_stops:
        more, progress = stopped(delivery, progress, after)
        batches += more
        progress = delivery.restored(through_json(delivery.state(progress)))
    assert batches + delivery.batches_from(progress) == delivery.batches_from(delivery.fresh())


@given(deliveries(), stops)
@settings(deadline=None)
def test_at_every_stop_each_row_is_either_delivered_or_left_exactly_once(delivery, after):
    delivery = replace(delivery, drop_last=False)
    batches, progress = stopped(delivery, delivery.fresh(), after)
    progress = delivery.restored(through_json(delivery.state(progress)))
    done = [row for stream in progress.streams for piece in stream.done for row in delivery.rows_in(piece)]
    left = [row for stream in progress.streams for piece in stream.left for row in delivery.rows_in(piece)]
    everything = [row for stream in progress.streams for piece in stream.planned for row in delivery.rows_in(piece)]
    assert sorted(done) == sorted(row for batch in batches for row in batch)
    assert sorted(done + left) == sorted(everything)
    assert len(set(everything)) == len(everything)


@given(deliveries())
@settings(deadline=None)
def test_the_state_of_a_finished_epoch_leaves_nothing(delivery):
    *_, (_, progress) = delivery.go_on(delivery.fresh())
    restored = delivery.restored(through_json(delivery.state(progress)))
    assert all(stream.left == () for stream in restored.streams)
    assert delivery.batches_from(restored) == []


@given(deliveries(), stops)
@settings(deadline=None)
def test_the_number_of_batches_is_exact_at_every_stop(delivery, after):
    delivery = replace(delivery, takes_every=0)
    expected = len(delivery.batches_from(delivery.fresh()))
    size, drop_last = delivery.batch_size, delivery.drop_last
    batches, progress = stopped(delivery, delivery.fresh(), after)
    assert progress.batches_delivered == len(batches)
    for one in (progress, progress.rebased(), delivery.restored(delivery.state(progress))):
        assert one.batches(size, drop_last=drop_last) == expected


@given(deliveries(), stops)
@settings(deadline=None)
def test_the_progress_of_a_rank_names_no_row_of_another(delivery, after):
    _, progress = stopped(delivery, delivery.fresh(), after)
    state = delivery.state(progress)
    own = {piece.shard.splits for stream in delivery.fresh().streams for piece in stream.planned}
    recorded = parse_state(state)
    assert {shard.splits for shard in (*recorded.completed, *recorded.in_progress)} <= own


# Row numbers and unlisted files ------------------------------------------------------------------------------------


def by_number() -> AbstractContextManager[Any]:
    """Makes every state record row numbers, as only a large one does otherwise."""
    return patch.object(state_module, "MOST_BYTES", -1)


@given(deliveries(), stops)
@settings(deadline=None, max_examples=200)
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
@settings(deadline=None)
def test_row_numbers_are_the_rows_of_the_shards_and_no_others(delivery, after):
    _, progress = stopped(delivery, delivery.fresh(), after)
    with by_number():
        state = delivery.state(progress)
    pieces = [piece for stream in progress.streams for piece in stream.done]
    done = [piece.shard for piece in pieces if piece.stop == piece.shard.rows]
    started = [piece.shard for piece in pieces if piece.stop < piece.shard.rows]
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
@settings(deadline=None)
def test_more_files_than_are_listed_are_left_out_and_the_state_loads_all_the_same(delivery, after):
    _, progress = stopped(delivery, delivery.fresh(), after)
    most = len(delivery.run.manifest.files) - 1
    with patch.object(state_module, "MOST_FILES", most):
        state = through_json(delivery.state(progress))
    assert state["files"] is None
    restored = delivery.restored(state)
    assert delivery.batches_from(restored) == delivery.batches_from(progress)


@pytest.mark.parametrize("change", ["size", "digest", "path", "removed"])
def test_a_changed_file_is_refused_also_where_files_are_not_listed(change):
    delivery = _plain_delivery(manifest_of([(10, 100)] * 3, [(10, 100)] * 3))
    first, second = delivery.run.manifest.files
    changed = {
        "size": (first, replace(second, size=second.size + 1)),
        "digest": (first, replace(second, digest="0" * 16)),
        "path": (first, replace(second, path="c.parquet")),
        "removed": (first,),
    }
    with patch.object(state_module, "MOST_FILES", 1):
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
@settings(deadline=None)
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
@settings(deadline=None)
def test_changing_a_state_changes_neither_the_progress_nor_the_next_state(delivery, after):
    _, progress = stopped(delivery, delivery.fresh(), after)
    state = delivery.state(progress)
    untouched = copy.deepcopy(state)
    for value in list(_places(state)):
        if isinstance(value, (dict, list)):
            value.clear()
    assert delivery.state(progress) == untouched


def test_the_state_has_the_documented_keys():
    delivery = _plain_delivery(manifest_of([(10, 100)] * 8))
    _, progress = stopped(delivery, delivery.fresh(), 5)
    state = delivery.state(progress)
    path = "/data/a.parquet"
    assert state["version"] == 1
    assert state["plan_algorithm"] == 1
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


def _plain_delivery(manifest: Manifest, options: PlanOptions | None = None, num_ranks: int = 1) -> Delivery:
    options = options or PlanOptions(2**27)
    run = Run(manifest, options, filter_digest=None, topology=Topology(num_ranks, 0, 0))
    return Delivery(run, epoch=0, takes_every=0, batch_size=7, drop_last=False, tells_ends_late=False)


# How large a state is ----------------------------------------------------------------------------------------------


def _many_row_groups(files: int, groups: int, rows: int, root: str = "s3://bucket/data") -> Manifest:
    row_groups = (RowGroup(rows, 1000),) * groups
    return Manifest(
        root, tuple(DataFile(f"part-{number:05d}.parquet", 10**8, "0" * 16, row_groups) for number in range(files))
    )


def _size(state: dict[str, Any]) -> int:
    """Bytes of a state in JSON, the file table apart."""
    return len(json.dumps({**state, "files": None}))


def _delivered(delivery: Delivery, shards: int) -> Progress:
    """The progress once a stream's first shards are done."""
    return delivery.fresh().advanced(Receipt(0, shards, 0, rows=1))


def test_100_000_completed_ranges_that_cannot_be_merged_take_at_most_1_mb_and_32_bytes_each():
    """Every second row group is another rank's, so no two ranges are neighbours; row numbers are long."""
    manifest = _many_row_groups(files=100, groups=2000, rows=10_000_019)
    delivery = _plain_delivery(manifest, PlanOptions(1), num_ranks=2)
    progress = _delivered(delivery, 99_999)
    state = delivery.state(progress)
    assert _size(state) <= 10**6 + 32 * 100_000
    restored = delivery.restored(through_json(state))
    assert [stream.left for stream in restored.streams] == [stream.left for stream in progress.streams]


def test_100_000_completed_ranges_that_can_be_merged_take_next_to_nothing():
    delivery = _plain_delivery(_many_row_groups(files=10, groups=20_000, rows=10), PlanOptions(1))
    assert _size(delivery.state(_delivered(delivery, 100_000))) < 2000


@pytest.mark.timeout(60)  # loading it once took time quadratic in the row groups of a file
def test_a_shard_of_100_000_ranges_in_progress_takes_at_most_1_mb_and_32_bytes_each():
    """Rows are mixed from row groups of one row: a single shard has as many ranges as the buffer has rows."""
    options = PlanOptions(2**40, shuffle=True, shuffle_buffer_size=100_000)
    delivery = _plain_delivery(_many_row_groups(files=1, groups=100_000, rows=1), options)
    progress = delivery.fresh().advanced(Receipt(0, 0, 5, rows=5))
    state = delivery.state(progress)
    assert _size(state) <= 10**6 + 32 * 100_000
    restored = delivery.restored(through_json(state))
    assert [stream.left for stream in restored.streams] == [stream.left for stream in progress.streams]


@pytest.mark.parametrize("completed", [100, 2000, 2048, 2049])
def test_long_paths_do_not_take_a_state_over_its_limit(completed):
    manifest = _many_row_groups(files=3, groups=2000, rows=10, root="s3://bucket/" + "long/" * 190)
    delivery = _plain_delivery(manifest, PlanOptions(1), num_ranks=2)
    assert _size(delivery.state(_delivered(delivery, completed))) <= 10**6 + 32 * completed
