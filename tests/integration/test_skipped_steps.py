"""Steps that are skipped with a record, over real files: which rows are delivered, skipped and restored."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import re
import signal
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairwise import pairwise
from stops import each_stop
from support import batches_of, edited, examples, open_loader, rows_of, write_dataset
from torch.utils.data import DataLoader

from torch_dataloader_utils import (
    CheckpointMismatchError,
    LostRowsWarning,
    ProgressUnknownError,
    RankMismatchError,
    SkippedStepsWarning,
    StructuredDataset,
    TokenBudget,
    WorkerError,
    audit,
    to_device,
)
from torch_dataloader_utils.planning.manifest import Split
from torch_dataloader_utils.planning.plan import Shard, ShardSlice
from torch_dataloader_utils.planning.shuffle import delivery_order

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

FILES = ((90, 10), (3, 10), (131, 20), (40, 7), (60, 60))
ROWS = sum(rows for rows, _ in FILES)
KEPT = [row for row in range(ROWS) if row < 260 and not row & 32]
FILTER = (pc.field("value") < 260) & (pc.bit_wise_and(pc.field("value"), 32) == 0)
ORDERS: dict[str, dict[str, Any]] = {
    "in order": {},
    "shards shuffled": {"shuffle": True},
    "rows shuffled": {"shuffle": True, "shuffle_buffer_size": 45},
    "rows shuffled in rounds": {"shuffle": True, "shuffle_buffer_size": 8, "shuffle_interleave": 3},
}
KINDS: dict[str, dict[str, Any]] = {
    "counted": {},
    "short batches dropped": {"drop_last": True},
    "filtered": {"filters": FILTER},
    "a grid": {"virtual_ranks": 2, "virtual_workers": 4, "uneven_ranks": "drop", "num_ranks": 1, "rank": 0},
}
SKIPS = {
    "some steps": [(3, 6)],
    "first steps": [(0, 4), (7, 8)],
    "last steps": [(9, 1000)],
    "every step": [(0, 1000)],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    assert write_dataset(directory, FILES) == ROWS
    return directory


FEWER = FILES[:3]
"""Those of a dataset for tests that try many sequences of calls."""
FEWER_ROWS = sum(rows for rows, _ in FEWER)
FEWER_KEPT = [row for row in range(FEWER_ROWS) if row < 180 and not row & 32]
FEWER_FILTER = (pc.field("value") < 180) & (pc.bit_wise_and(pc.field("value"), 32) == 0)
"""As of all files, statistics rule out the last row groups, and those before have no row that passes."""


def of_fewer(options: dict[str, Any]) -> dict[str, Any]:
    return options | ({"filters": FEWER_FILTER} if "filters" in options else {})


@pytest.fixture(scope="module")
def fewer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fewer")
    assert write_dataset(directory, FEWER) == FEWER_ROWS
    return directory


def is_in(step: int, skips: Iterable[tuple[int, int]]) -> bool:
    return any(start <= step < stop for start, stop in skips)


def parted(whole: Sequence[Any], skips: Sequence[tuple[int, int]]) -> tuple[list[Any], list[Any]]:
    """Return the batches that are left of an epoch, and those of the skipped steps."""
    left = [batch for step, batch in enumerate(whole) if not is_in(step, skips)]
    return left, [batch for step, batch in enumerate(whole) if is_in(step, skips)]


def opened(path: Path, **options: Any) -> Any:
    return open_loader(path, **{"batch_size": 12, **options})[0]


def whole_epoch(path: Path, **options: Any) -> list[list[int]]:
    """Return the batches of an epoch without skips as this process reads them when it plans for workers."""
    return batches_of(opened(path, **options).dataset)


def through_json(loader: Any) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


def test_restored_rows_that_balancing_drops_are_named_and_stay_skipped(path):
    options = {"uneven_ranks": "drop", "row_id_column": "row"}
    opened = [open_loader(path, batch_size=12, num_ranks=2, rank=rank, **options)[0] for rank in range(2)]
    delivered = []
    for loader in opened:
        loader.skip_steps(1, 2)
        loader.restore_skipped()
        delivered += [row for batch in itertools.islice(loader, 4) for row in rows_of(batch)]
    for num_ranks in (5, 7):  # 24 skipped rows: 4 are dropped, then 4 are left and no rank gets one
        states = [through_json(loader) for loader in opened]
        opened = [open_loader(path, batch_size=12, num_ranks=num_ranks, rank=r, **options)[0] for r in range(num_ranks)]
        for loader in opened:
            loader.load_state_dict(states, strict=False)
            delivered += [row for batch in loader for row in rows_of(batch)]
        states = [through_json(loader) for loader in opened]
        dataset = opened[0].dataset
        first = dataset._opened_files.manifest.first_rows
        dropped = [first[file] + row for file, row in dataset.get_metrics()["uneven_rows_dropped"]]
        assert Counter(delivered + dropped) == Counter(range(ROWS))
        total = audit(states, path).total
        assert (total.done + total.under_way, total.skipped + total.dropped) == (len(delivered), len(dropped))
        for rank, state in enumerate(states):
            resumed = open_loader(path, batch_size=12, num_ranks=num_ranks, rank=rank, **options)[0]
            resumed.load_state_dict(state)
            assert through_json(resumed) == state


# One rank, step by step ----------------------------------------------------------------------------------------------


@pairwise(most=4, order=ORDERS, kind=KINDS, skips=SKIPS, workers=[0, 2])
def test_all_other_steps_keep_their_batches_and_restored_ones_come_last(path, order, kind, skips, workers):
    options = {"num_workers": workers, **ORDERS[order], **KINDS[kind]}
    left, skipped = parted(whole_epoch(path, **options), SKIPS[skips])
    loader = opened(path, **options)
    for start, stop in SKIPS[skips]:
        loader.skip_steps(start, stop)
    if kind != "filtered":
        assert len(loader) == len(left)

    assert batches_of(loader) == left
    metrics = loader.dataset.get_metrics()
    assert (metrics["batches_skipped"], metrics["rows_skipped"]) == (len(skipped), sum(map(len, skipped)))
    loader.restore_skipped()
    assert batches_of(loader) == skipped
    assert batches_of(loader) == left + skipped  # a new pass over the epoch
    loader.set_epoch(1)
    assert len(batches_of(loader)) == len(left + skipped)
    assert loader.dataset.get_metrics()["batches_skipped"] == 0


@each_stop
@pairwise(most=4, order=ORDERS, kind=KINDS, workers=[0, 2])
def test_a_state_after_any_batch_continues_with_the_same_batches(path, order, kind, workers, stops):
    skips = [(2, 4), (7, 12)]
    options = {"num_workers": workers, **ORDERS[order], **KINDS[kind]}
    left, skipped = parted(whole_epoch(path, **options), skips)
    loader = opened(path, **options)
    for start, stop in skips:
        loader.skip_steps(start, stop)
    loader.restore_skipped()
    wanted = left + skipped
    states = [through_json(loader), *(through_json(loader) for _ in loader)]
    assert len(states) == len(wanted) + 1
    resumed = opened(path, **options, persistent_workers=workers > 0)
    for taken in stops(states)[:: 1 if workers == 0 else 4]:
        if workers == 0:
            resumed = opened(path, **options)  # elsewhere to start workers would take the time
        resumed.load_state_dict(states[taken])
        assert through_json(resumed) == states[taken]
        assert resumed.progress()["initial"] == taken
        assert batches_of(resumed) == wanted[taken:], taken


class Run:
    """A training run of one rank, and what a reader of the documentation expects of it."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.path, self.options = path, options
        self.whole = batches_of(opened(path, **options))
        self.loader, self.iterator = opened(path, **options), None
        self.next_step, self.restored, self.restores = 0, 0, False
        self.skipped: set[int] = set()

    @property
    def to_come(self) -> list[list[int]]:
        steps = [step for step in range(self.next_step, len(self.whole)) if step not in self.skipped]
        steps += sorted(self.skipped)[self.restored :] if self.restores else []
        return [self.whole[step] for step in steps]

    def take(self, count: int, _: int = 0) -> None:
        for _ in range(count if self.to_come else 0):
            self.iterator = self.iterator or iter(self.loader)
            batch, to_come = next(self.iterator, None), self.to_come
            assert (batch and rows_of(batch)) == (to_come[0] if to_come else None)
            if not to_come:
                self.iterator, self.next_step = None, len(self.whole)  # steps that are skipped at the end are passed
                return
            self.next_step = next(s for s in range(self.next_step, len(self.whole) + 1) if s not in self.skipped)
            self.restored += self.next_step == len(self.whole)
            self.next_step = min(self.next_step + 1, len(self.whole))

    def skip(self, ahead: int, count: int) -> None:
        start, stop = self.next_step + ahead, self.next_step + ahead + count
        if start < len(self.whole):
            if self.iterator is not None:  # it would take effect with the next iteration, which begins the epoch
                self.resume()
            self.loader.skip_steps(start, stop)
            self.skipped |= {*range(start, min(stop, len(self.whole)))}

    def resume(self, *_: int) -> None:
        state, self.iterator = through_json(self.loader), None
        self.loader = opened(self.path, **self.options)
        self.loader.load_state_dict(state)
        assert through_json(self.loader) == state

    def restore(self, *_: int) -> None:
        self.loader.restore_skipped()
        self.restores = True
        if not self.to_come or self.next_step == len(self.whole):
            self.iterator = None  # an iterator that has ended does not go on


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "take", "skip", "skip", "resume", "restore"]),
            st.integers(0, 12),
            st.integers(1, 9),
        ),
        max_size=9,
    ),
    st.sampled_from(list(ORDERS)),
    st.sampled_from(list(KINDS)),
)
@settings(examples(80, least=12, part=7), suppress_health_check=list(HealthCheck))
def test_any_sequence_of_skips_stops_and_resumes(fewer, calls, order, kind):
    run = Run(fewer, {**ORDERS[order], **of_fewer(KINDS[kind])})
    for verb, *numbers in [*calls, ("take", 1000, 1)]:
        getattr(run, verb)(*numbers)
    assert run.to_come == []


# Other ranks and workers ---------------------------------------------------------------------------------------------


def all_ranks(path: Path, num_ranks: int, num_workers: int, **options: Any) -> list[Any]:
    """Open the loaders of all ranks."""
    ranks = [{"num_ranks": num_ranks, "rank": rank, "num_workers": num_workers} for rank in range(num_ranks)]
    return [opened(path, **{"batch_size": 7, **options, **rank}) for rank in ranks]


def recorded_as_skipped(states: Sequence[dict[str, Any]]) -> list[int]:
    """Return the ids of the rows that states of an epoch without a filter record as skipped."""
    rows = [row for state in states if "skipped" in state for row in _rows_of(state["skipped"], states[0])]
    base = states[0]["base"]
    restores = any(state.get("skipped", {}).get("restores") for state in states)
    return rows + (_rows_of(base["skipped"], states[0]) if base and "skipped" in base and not restores else [])


def _rows_of(record: dict[str, Any], state: dict[str, Any]) -> list[int]:
    firsts = dict(
        zip([file[0] for file in state["files"]], itertools.accumulate([0, *[rows for rows, _ in FILES]]), strict=False)
    )
    firsts = {f"{state['plan']['root']}/{path}": first for path, first in firsts.items()}
    seed = state["_shuffle_seed"] if state["plan"]["shuffle_buffer_size"] else None
    numbers = record.get("completed_rows", [])
    rows = [row for start, stop in zip(numbers[::2], numbers[1::2], strict=True) for row in range(start, stop)]
    for shard in record.get("completed_shards", []):
        rows += [row for split in shard["splits"] for row in _split_rows(split, firsts)]
    for part in (part for part in record["in_progress"] if not part.get("repeats")):
        splits = part["splits"]
        shard = Shard(tuple(Split(s["path"], s["row_offset"], s["row_length"]) for s in splits), part.get("rounds", 1))
        relative = [replace(s, path=s.path.removeprefix(state["plan"]["root"] + "/")) for s in shard.splits]
        in_file_order = [row for split in splits for row in _split_rows(split, firsts)]
        for start, stop in part.get("windows", [[0, part["rows_delivered"]]]):
            window = ShardSlice(replace(shard, splits=tuple(relative)), start, stop)
            rows += [in_file_order[at] for at in delivery_order(window, seed=seed, epoch=state["epoch"])]
    return rows


def _split_rows(split: dict[str, Any], firsts: dict[str, int]) -> range:
    first = firsts[split["path"]] + split["row_offset"]
    return range(first, first + split["row_length"])


UNEVEN: dict[str, dict[str, Any]] = {
    "allow": {},
    "drop": {"uneven_ranks": "drop"},
    "pad": {"uneven_ranks": "pad"},
    "filtered": {"filters": FILTER},
}


@dataclass(frozen=True)
class Leg:
    """A part of a run, by some ranks with some batch size: what they load, skip and deliver."""

    is_strict: bool
    ranks: int
    batch_size: int
    skips: list[tuple[int, int]]
    stops: list[int]
    restores: bool


class Epoch:
    """An epoch that goes through many hands."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path, self.options = path, options
        self.rows: list[int] = []
        self.states: list[Any] = []
        self.made_by = (1, 7)
        self.restores = False

    def load(self, *, is_strict: bool, made_by: tuple[int, int]) -> None:
        self.made_by = self.made_by if is_strict and self.states else made_by
        ranks, batch_size = self.made_by
        self.loaders = all_ranks(self.path, ranks, 0, **self.options, batch_size=batch_size)
        for loader in self.loaders if self.states else []:
            loader.load_state_dict(self.states, strict=is_strict)

    def go(self, leg: Leg) -> None:
        self.load(is_strict=leg.is_strict, made_by=(leg.ranks, leg.batch_size))
        for ahead, count in leg.skips:
            first = ahead + max(loader.state_dict()["batches_delivered"] for loader in self.loaders)
            for loader in self.loaders:
                with contextlib.suppress(ValueError):  # beyond the last step
                    loader.skip_steps(first, first + count)
        self.restores |= leg.restores
        for loader in self.loaders if leg.restores else []:
            loader.restore_skipped()
        self.deliver(leg.stops)

    def deliver(self, stops: Sequence[int | None]) -> None:
        for loader, stop in zip(self.loaders, stops, strict=False):
            self.rows += [row for batch in itertools.islice(loader, stop) for row in rows_of(batch)]
        self.states = [through_json(loader) for loader in self.loaders]


LEGS = st.builds(
    Leg,
    is_strict=st.sampled_from([False, False, True]),
    ranks=st.integers(1, 3),
    batch_size=st.sampled_from([5, 8]),
    skips=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), max_size=2),
    stops=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    restores=st.sampled_from([False] * 4 + [True]),
)


@given(st.lists(LEGS, min_size=1, max_size=4), st.sampled_from(list(ORDERS)), st.sampled_from(list(UNEVEN)))
@settings(examples(120, least=12, part=10), suppress_health_check=list(HealthCheck))
def test_delivered_and_skipped_rows_are_the_epoch_under_every_resume(fewer, legs, order, uneven):
    epoch = Epoch(fewer, **ORDERS[order], **of_fewer(UNEVEN[uneven]))
    for leg in legs:
        epoch.go(leg)
    epoch.load(is_strict=True, made_by=epoch.made_by)
    epoch.deliver([None] * 3)
    recorded = [] if uneven == "filtered" else recorded_as_skipped(epoch.states)
    delivered = len(epoch.rows)
    for loader in epoch.loaders:
        loader.restore_skipped()
    epoch.deliver([0 if loader.dataset.is_finished else None for loader in epoch.loaders])
    restored = epoch.rows[delivered:]

    if epoch.restores:  # they came after the last step
        assert restored == recorded == []
    counts = Counter(epoch.rows)
    assert uneven == "pad" or set(counts.values()) == {1}
    if uneven == "drop":
        # Of the epoch's own rows, and of what is restored of others.
        assert len(counts) > FEWER_ROWS - 2 * len(epoch.loaders)
    else:
        assert sorted(counts) == (FEWER_KEPT if uneven == "filtered" else list(range(FEWER_ROWS)))
    if uneven == "allow":
        assert sorted(recorded) == sorted(restored)


# What is refused, and what others see --------------------------------------------------------------------------------


def test_the_past_and_what_is_no_range_of_steps_are_refused(path):
    loader = opened(path)
    for _ in itertools.islice(loader, 5):
        pass
    loader.skip_steps(5, 6)
    for steps, message in {
        (4, 6): "step 4 is in the past, the next one is 5",
        (7, 7): "skips nothing",
        (8, 7): "skips nothing",
        (27, 30): "the epoch has 27 steps",
        (-1, 3): "start=-1",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            loader.skip_steps(*steps)
    with pytest.raises(TypeError, match="start='3'"):
        loader.skip_steps("3", 4)
    loader.load_state_dict(loader.state_dict())
    loader.skip_steps(5, 8)
    assert loader.state_dict()["skipped"]["steps"] == [[5, 8]]


def test_steps_of_a_finished_pass_are_past_until_the_epoch_is_begun_again(path):
    loader = opened(path)
    batches = [rows_of(batch) for batch in loader]
    with pytest.raises(
        ValueError, match=r"step 2 is in the past, the next one is 27; .* begin the epoch again with set_e"
    ):
        loader.skip_steps(2, 4)
    loader.set_epoch(0)
    loader.skip_steps(2, 4)
    assert [rows_of(batch) for batch in loader] == batches[:2] + batches[4:]


@pytest.mark.parametrize("strict", [True, False])
def test_a_load_that_forgets_which_steps_were_to_be_skipped_says_so(path, strict):
    loader = opened(path)
    before = loader.state_dict()
    loader.skip_steps(3, 6)
    loader.skip_steps(9, 10)
    message = r"steps 3 to 5, 9 were to be skipped, .* call skip_steps after load_state_dict"
    with pytest.warns(SkippedStepsWarning, match=message):
        loader.load_state_dict(before, strict=strict)
    assert len(batches_of(loader)) == 27


def test_a_load_that_forgets_to_restore_skipped_steps_says_so(path):
    loader = opened(path)
    loader.skip_steps(3, 6)
    before = loader.state_dict()
    loader.restore_skipped()
    with pytest.warns(SkippedStepsWarning, match=r"to be restored, .* call restore_skipped after load_state_dict"):
        loader.load_state_dict(before)
    assert len(batches_of(loader)) == 24


def test_of_steps_that_are_behind_a_loaded_state_or_that_it_skips_nothing_is_said(path):
    loader = opened(path)
    loader.skip_steps(3, 9)
    other = opened(path)
    other.skip_steps(7, 8)
    list(itertools.islice(other, 5))
    with pytest.warns(SkippedStepsWarning, match="steps 5 to 6, 8 were to be skipped"):
        loader.load_state_dict(other.state_dict())
    assert sum(1 for _ in loader) == 27 - 5 - 1


@pytest.mark.parametrize("strict", [True, False])
def test_a_load_that_forgets_no_skipped_steps_says_nothing(path, strict):
    loader = opened(path)
    loader.skip_steps(3, 6)
    skipping = loader.state_dict()
    elastic = opened(path)
    elastic.load_state_dict(skipping, strict=False)
    after, finished, later = (opened(path) for _ in range(3))
    list(itertools.islice(after, 8))
    batches_of(finished)
    later.set_epoch(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for other in (skipping, elastic.state_dict(), after.state_dict(), finished.state_dict(), later.state_dict()):
            fresh = opened(path)
            fresh.skip_steps(3, 6)
            fresh.load_state_dict(other, strict=strict)
        restoring = opened(path)
        restoring.restore_skipped()
        restoring.load_state_dict(after.state_dict(), strict=strict)


def test_a_range_may_end_after_the_last_step_of_a_rank_that_has_fewer(path):
    ranks = all_ranks(path, 2, 0, batch_size=20)
    steps = [len(loader) for loader in ranks]
    assert min(steps) < max(steps)
    for loader in ranks:
        loader.skip_steps(min(steps), 1000)
    assert [len(loader) for loader in ranks] == [min(steps)] * 2
    assert [len(batches_of(loader)) for loader in ranks] == [min(steps)] * 2
    assert len({loader.dataset.plan_digest for loader in ranks}) == 1


def test_ranks_that_skip_different_steps_are_found(path):
    ranks = all_ranks(path, 2, 0)
    before = {loader.dataset.plan_digest for loader in ranks}
    ranks[0].skip_steps(3, 5)
    digests = {loader.dataset.plan_digest for loader in ranks}
    assert (len(before), len(digests)) == (1, 2)
    with pytest.raises(RankMismatchError, match="other plans"):
        all_ranks(path, 1, 0)[0].load_state_dict([through_json(loader) for loader in ranks], strict=False)


def test_a_skip_during_an_iteration_is_in_its_states_and_begins_with_the_next(path):
    whole = batches_of(opened(path))
    loader = opened(path)
    iterator = iter(loader)
    seen = [rows_of(next(iterator)) for _ in range(4)]
    loader.skip_steps(5, 8)
    seen.append(rows_of(next(iterator)))
    state = through_json(loader)
    seen += [rows_of(next(iterator)) for _ in range(2)]
    assert seen == whole[:7]
    later = through_json(loader)
    for saved, rest in ((state, whole[8:]), (later, whole[8:])):
        resumed = opened(path)
        resumed.load_state_dict(saved)
        assert batches_of(resumed) == rest


def test_another_batch_size_is_refused_where_skipped_steps_lie_ahead_and_not_behind_them(path):
    loader = opened(path)
    loader.skip_steps(3, 6)
    states = [through_json(loader), *(through_json(loader) for _ in loader)]
    with pytest.raises(CheckpointMismatchError, match="skips steps 3 to 5, and with batch_size=6"):
        opened(path, batch_size=6).load_state_dict(states[2])
    other = opened(path, batch_size=6)
    other.load_state_dict(states[5])
    rest = batches_of(other)
    other.restore_skipped()
    whole = batches_of(opened(path, batch_size=6))
    assert rest == whole[16:]
    assert [row for batch in batches_of(other) for row in batch] == [row for batch in whole[6:12] for row in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_loader_of_torch_skips_in_this_process_and_refuses_to_with_workers(path, workers):
    whole = batches_of(opened(path))
    loader = opened(path, num_workers=workers)
    plain = DataLoader(loader.dataset, batch_size=None, num_workers=workers)
    loader.dataset.skip_steps(2, 5)
    if workers == 0:
        assert batches_of(plain) == whole[:2] + whole[5:]
        return
    batches = iter(plain)
    with pytest.raises(ProgressUnknownError, match="cannot skip steps"):
        next(batches)
    batches._shutdown_workers()  # at once, not when the traceback is collected: torch then waits for each


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_copies_ahead_skips_and_restores_the_same_steps(path, workers):
    left, skipped = parted(whole_epoch(path, num_workers=workers), [(3, 6)])
    loader = to_device(opened(path, num_workers=workers), "cpu", depth=3)
    loader.skip_steps(3, 6)
    loader.restore_skipped()
    bar = loader.progress()
    states = [through_json(loader)]
    seen = []
    for batch in loader:
        seen.append(rows_of(batch))
        states.append(through_json(loader))
    assert seen == left + skipped
    assert bar == {"initial": 0, "total": len(seen)}
    for taken in (2, 3, 4, len(left), len(left) + 2) if workers == 0 else (3, len(left) + 2):
        resumed = opened(path, num_workers=workers)
        resumed.load_state_dict(states[taken])
        assert resumed.progress() == {"initial": taken, "total": len(seen)}
        assert batches_of(resumed) == seen[taken:]


def test_row_groups_that_are_skipped_as_a_whole_are_not_read(path):
    whole = opened(path, batch_size=10)
    everything = batches_of(whole)
    loader = opened(path, batch_size=10)
    loader.skip_steps(2, 8)  # rows 20 to 80 of a file with row groups of 10
    assert batches_of(loader) == everything[:2] + everything[8:]
    groups = pq.read_metadata(min(path.iterdir()))
    sizes = [sum(groups.row_group(n).column(c).total_compressed_size for c in range(3)) for n in range(2, 8)]
    read = [one.dataset.get_metrics()["bytes_read"] for one in (whole, loader)]
    assert read[0] - read[1] >= sum(sizes)


def test_the_ledger_says_that_skipped_rows_have_no_step(path):
    loader = opened(path, shuffle=True)
    dataset = loader.dataset
    rows = list(dataset.rows_at(4))
    assert dataset.step_of(*rows[0]).step == 4
    loader.skip_steps(4, 6)
    assert [dataset.step_of(*row) for row in rows] == [None] * len(rows)
    assert list(dataset.rows_at(4)) == rows
    for _ in itertools.islice(loader, 5):
        pass
    others = all_ranks(path, 2, 0, shuffle=True)
    for other in others:
        other.load_state_dict([through_json(loader)], strict=False)
        assert [other.dataset.step_of(*row) for row in rows] == [None] * len(rows)


@pytest.mark.parametrize("restores", [False, True])
def test_the_ledger_answers_for_the_iterator_that_runs_when_steps_are_skipped(path, restores):
    """They are skipped from the next `iter` on."""
    whole = batches_of(opened(path))
    loader = opened(path)
    dataset, iterator = loader.dataset, iter(loader)
    seen = [rows_of(next(iterator)) for _ in range(2)]
    loader.skip_steps(4, 6)
    if restores:
        loader.restore_skipped()
    planned = list(dataset.rows_at(4))
    assert [dataset.step_of(*row).step for row in planned] == [4] * len(planned)
    assert loader.progress()["total"] == len(whole)
    seen += [rows_of(batch) for batch in iterator]
    assert seen == whole
    if restores:
        return
    iterator = iter(loader)
    assert [dataset.step_of(*row) for row in planned] == [None] * len(planned)
    assert [rows_of(batch) for batch in iterator] == whole[:4] + whole[6:]


# Files that changed, and states that are damaged ---------------------------------------------------------------------


def test_skipped_rows_of_a_changed_file_are_lost_and_those_of_others_are_restored(tmp_path):
    write_dataset(tmp_path, FILES)
    loader = opened(tmp_path, batch_size=10, shuffle=True)
    whole = batches_of(opened(tmp_path, batch_size=10, shuffle=True))
    loader.skip_steps(3, 20)
    delivered = [row for batch in itertools.islice(loader, 5) for row in rows_of(batch)]
    skipped = [row for batch in whole[3:20] for row in batch]
    state = through_json(loader)
    changed = sorted(tmp_path.iterdir())[2]
    lost_ids = range(93, 93 + 131)
    pq.write_table(pq.read_table(changed).slice(0, 100), changed, row_group_size=20)
    resumed = opened(tmp_path, batch_size=10, shuffle=True, row_id_column=None)
    lost = len(set(lost_ids) - set(delivered))
    with pytest.warns(LostRowsWarning, match=f"{lost} rows"):
        resumed.load_state_dict([state], strict=False, on_changed_files="continue")
    rest = [int(row) for batch in resumed for row in batch["value"]]
    resumed.restore_skipped()
    restored = [int(row) for batch in resumed for row in batch["value"]]
    assert sorted(restored) == sorted(set(skipped) - set(lost_ids))
    assert sorted(delivered + rest + restored) == sorted(set(range(ROWS)) - (set(lost_ids) - set(delivered)))


@pytest.mark.parametrize("skip", range(4))
@pytest.mark.parametrize("steps", range(3))
def test_a_shard_of_which_a_file_is_gone_is_delivered_once_over_several_elastic_loads(tmp_path, skip, steps):
    """The rows of both files are one shard of shuffled rows."""
    write_dataset(tmp_path, ((8, 4), (9, 3)))
    options = {"batch_size": 2, "shuffle": True, "shuffle_buffer_size": 100, "row_id_column": None}

    def deliver(loader: Any, steps: int | None) -> list[int]:
        return [int(row) for batch in itertools.islice(loader, steps) for row in batch["value"]]

    loader = opened(tmp_path, **options)
    loader.skip_steps(skip, skip + 1)
    delivered = deliver(loader, steps)
    state = through_json(loader)
    min(tmp_path.iterdir()).unlink()
    for taken in (3, 0, 2, None, None):
        loader = opened(tmp_path, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LostRowsWarning)
            loader.load_state_dict(state, strict=False, on_changed_files="continue")
        delivered += deliver(loader, taken)
        state = through_json(loader)
    loader.restore_skipped()
    delivered += deliver(loader, None)
    assert len(delivered) == len(set(delivered))
    assert set(delivered) >= set(range(8, 17))


@pytest.mark.parametrize("skips", [[(2, 3)], []], ids=["skipped", "nothing"])
@pytest.mark.parametrize(
    ("by_filter", "is_drained"),  # with a filter only reading tells that no step is left
    [(False, True), (False, False), (True, True)],
    ids=["to the end", "to the last batch", "to the end, with a filter"],
)
def test_a_rank_that_skipped_nothing_restores_nothing(tmp_path, skips, by_filter, is_drained):
    write_dataset(tmp_path, ((50, 10),))
    delivered = []
    for rank in range(2):
        filters = {"filters": [("value", ">=", 0)]} if by_filter else {}
        loader = open_loader(tmp_path, batch_size=10, num_ranks=2, rank=rank, **filters)[0]
        for start, stop in skips:
            loader.skip_steps(start, stop)
        iterator = iter(loader)
        steps = [rows_of(next(iterator)) for _ in range(2 if skips or rank else 3)]
        assert not is_drained or next(iterator, None) is None
        loader.restore_skipped()
        restored = batches_of(loader)
        assert len(restored) == (1 if skips and not rank else 0)
        assert batches_of(loader) == steps + restored  # a pass of its own
        delivered += [row for batch in steps + restored for row in batch]
    assert sorted(delivered) == list(range(50))


def _damages() -> dict[str, Any]:
    """Ways to damage what a state records of skipped steps."""

    def put(*keys: Any, value: Any) -> Any:
        def damage(skipped: dict[str, Any]) -> None:
            *before, last = keys
            target: Any = skipped
            for key in before:
                target = target[key]
            target[last] = value

        return damage

    return {
        "no steps": put("steps", value=None),
        "steps that fall": put("steps", value=[[8, 9], [3, 5]]),
        "an empty range": put("steps", value=[[3, 3]]),
        "a text for a step": put("steps", value=[["3", 5]]),
        "a huge step": put("steps", value=[[3, 10**200]]),
        "other steps": put("steps", value=[[4, 9]]),
        "no marks": put("marks", value=[]),
        "half a mark": put("marks", 0, value=[{"step": 3, "next_worker": 0, "places": [[0, 3]]}]),
        "marks in no order": put("marks", 0, 1, "step", value=1),
        "a place in no slice": put("marks", 0, 1, "places", value=[[99, 0], [99, 0]]),
        "a row in no slice": put("marks", 0, 1, "places", 0, value=[0, 10**6]),
        "places of no streams": put("marks", 0, 1, "places", value=[]),
        "a worker that is not there": put("marks", 0, 0, "next_worker", value=7),
        "restores is no flag": put("restores", value=1),
        "restored without restores": put("restored", value={"number": 0, "next_worker": 0, "places": [[0, 0], [0, 0]]}),
        "rows of no file": put("in_progress", value=[{"splits": [{"path": "x"}], "rows_delivered": 1}]),
        "no rows": put("in_progress", value=None),
        "rows that fall": put("completed_rows", value=[5, 3]),
    }


@pytest.mark.parametrize("damage", list(_damages()))
@pytest.mark.parametrize("is_edited", [False, True], ids=["damaged", "edited"])
def test_a_state_with_damaged_skips_is_refused_and_changes_nothing(path, damage, is_edited):
    loader = opened(path, num_workers=2)
    loader.skip_steps(3, 6)
    state = through_json(loader)
    damaged = edited(copy.deepcopy(state)) if is_edited else copy.deepcopy(state)
    _damages()[damage](damaged["skipped"])
    with pytest.raises(ValueError, match=r"not a state of this package|the checkpoint skips steps"):
        loader.load_state_dict(damaged)
    assert through_json(loader) == state


# Random numbers, text, workers that die ------------------------------------------------------------------------------


def _with_random(batch: dict[str, Any]) -> tuple[list[int], float]:
    return rows_of(batch), float(torch.rand(()))


@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_of_a_collate_fn_are_those_of_the_same_step_without_skips(path, workers):
    options = {"num_workers": workers, "collate_fn": _with_random, "shuffle": True, "shuffle_buffer_size": 45}
    left, skipped = parted(list(opened(path, **options)), [(3, 6), (9, 10)])
    loader = opened(path, **options)
    loader.skip_steps(3, 6)
    loader.skip_steps(9, 10)
    loader.restore_skipped()
    assert list(loader) == left + skipped


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_of_text_that_is_not_counted_are_thrown_away_and_come_back(tmp_path, workers):
    for number in range(4):
        lines = [json.dumps({"value": 50 * number + row}) for row in range(50 - number)]
        (tmp_path / f"part-{number}.jsonl").write_text("\n".join(lines) + "\n")

    def opened_text(**options: Any) -> Any:
        options |= {"batch_size": 7, "num_workers": workers, "shuffle": True}
        return StructuredDataset.create_dataloader(tmp_path, format="jsonl", **options)[0]

    def values(batches: Iterable[Any]) -> list[list[int]]:
        return [batch["value"].tolist() for batch in batches]

    left, skipped = parted(values(opened_text()), [(2, 9)])
    loader = opened_text()
    loader.skip_steps(2, 9)
    seen, states = [], [through_json(loader)]
    for batch in loader:
        seen += values([batch])
        states.append(through_json(loader))
    loader.restore_skipped()
    assert (seen, values(loader)) == (left, skipped)
    resumed = opened_text(persistent_workers=workers > 0)
    for taken in (1, 2, 3, len(left)):
        if workers == 0:
            resumed = opened_text()  # elsewhere to start workers would take the time
        resumed.load_state_dict(states[taken])
        assert values(resumed) == left[taken:]
        resumed.restore_skipped()
        assert values(resumed) == skipped
    with pytest.raises(TypeError, match="not known ahead"):
        len(loader)


@pytest.mark.parametrize("taken", [2, 6, 23])
def test_a_worker_that_is_killed_before_or_after_skipped_steps_loses_no_batch(path, taken):
    """Before them, after them, and among the restored ones."""
    options = {"num_workers": 2, "shuffle": True}
    left, skipped = parted(whole_epoch(path, **options), [(4, 9)])
    loader = opened(path, **options, prefetch_factor=1)
    loader.skip_steps(4, 9)
    loader.restore_skipped()
    iterator = iter(loader)
    seen = [rows_of(next(iterator)) for _ in range(taken)]
    os.kill(loader._answers().workers[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerError):
        seen.extend(rows_of(batch) for batch in iterator)
    loader.load_state_dict(through_json(loader))
    assert seen + batches_of(loader) == left + skipped


@pytest.mark.parametrize("restores", [False, True], ids=["skipped", "restored"])
def test_a_state_after_any_batch_loads_though_the_last_steps_of_the_epoch_are_skipped(tmp_path, restores):
    write_dataset(tmp_path, ((130, 13), (195, 20)))

    def opened(**options: Any) -> Any:
        return open_loader(tmp_path, batch_size=25, num_workers=2, **options)[0]

    loader = opened()
    steps = len(loader)
    loader.skip_steps(steps - 3, steps)
    if restores:
        loader.restore_skipped()
    states = []
    batches = []
    for batch in loader:
        batches.append(rows_of(batch))
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert len(batches) == (steps if restores else steps - 3)
    again = opened(persistent_workers=True)
    for number in range(1, 5):
        again.load_state_dict(states[number - 1])
        assert batches_of(again) == batches[number:]


def test_a_state_loads_that_says_of_another_worker_that_it_goes_on_after_the_epochs_end(tmp_path):
    """As it was written before: of the worker that was next when the steps were skipped."""
    write_dataset(tmp_path, ((130, 13), (195, 20)))
    loader = open_loader(tmp_path, batch_size=25, num_workers=2)[0]
    loader.skip_steps(len(loader) - 3, len(loader))
    batches = iter(loader)
    next(batches)
    state = edited(loader.state_dict())
    end = state["skipped"]["marks"][0][1]
    assert end["next_worker"] == 0
    end["next_worker"] = 1
    again = open_loader(tmp_path, batch_size=25, num_workers=2)[0]
    again.load_state_dict(state)
    assert batches_of(again) == batches_of(batches)


@pairwise(most=4, workers=[0, 2], at=[-3, -2, -1])
def test_steps_restored_while_the_last_ones_are_copied_ahead_come_with_the_next_pass_at_the_latest(path, workers, at):
    whole = whole_epoch(path, num_workers=workers)
    left, skipped = parted(whole, [(3, 6)])
    loader = to_device(opened(path, num_workers=workers), "cpu")
    loader.skip_steps(3, 6)
    seen = []
    for batch in loader:
        seen.append(rows_of(batch))
        if loader.state_dict()["batches_delivered"] == len(whole) + 1 + at:
            loader.restore_skipped()
    seen += [] if len(seen) == len(whole) else batches_of(loader)
    assert seen == left + skipped
    assert batches_of(loader) == left + skipped  # the epoch begins again


@pytest.mark.parametrize("other", [{"batch_size": 6}, {"drop_last": True}])
def test_steps_ahead_of_a_filtered_state_need_its_batches_as_well(path, other):
    loader = opened(path, filters=FILTER, num_workers=0)
    loader.skip_steps(3, 6)
    state = through_json(loader)
    with pytest.raises(CheckpointMismatchError, match="skips steps 3 to 5"):
        opened(path, filters=FILTER, num_workers=0, **other).load_state_dict(state)
    opened(path, filters=FILTER, num_workers=0).load_state_dict(state)
    batches_of(loader)
    passed = opened(path, filters=FILTER, num_workers=0, **other)
    passed.load_state_dict(through_json(loader))  # no such step lies ahead
    assert batches_of(passed) == []


class Refuses:
    """A `collate_fn` that fails with some rows, by an error whose class cannot be pickled."""

    def __init__(self, *values: int) -> None:
        self.values = values

    def __call__(self, batch: Any) -> Any:
        class RefusedError(ValueError):
            pass

        for value in self.values:
            if value in batch["value"].tolist():
                raise RefusedError(f"value {value} is refused")
        return batch


@pairwise(most=4, order=ORDERS, workers=[0, 2], kind=["counted", "filtered"])
def test_steps_that_break_collate_fn_can_be_skipped(path, order, workers, kind):
    options = {"num_workers": workers, **ORDERS[order], **KINDS[kind]}
    whole = whole_epoch(path, **options)
    first, second = whole[3][5], whole[6][0]
    loader = opened(path, collate_fn=Refuses(first, second), **options)
    found = []
    with pytest.raises((ValueError, RuntimeError), match=f"value {first} is refused"):
        found.extend(rows_of(batch) for batch in loader)
    assert len(found) <= 3
    loader.load_state_dict(loader.state_dict())
    loader.skip_steps(3, 4)
    with pytest.raises((ValueError, RuntimeError), match=f"value {second} is refused"):
        found.extend(rows_of(batch) for batch in loader)
    loader.load_state_dict(through_json(loader))
    loader.skip_steps(6, 7)
    found.extend(rows_of(batch) for batch in loader)
    assert found == whole[:3] + whole[4:6] + whole[7:]
    loader.restore_skipped()
    with pytest.raises((ValueError, RuntimeError), match=f"value {first} is refused"):
        list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_collate_fn_did_not_make_is_neither_copied_nor_delivered(path, workers):
    options = {"filters": FILTER, "num_workers": workers}
    whole = whole_epoch(path, **options)
    loader = opened(path, collate_fn=Refuses(whole[5][0]), **options)
    loader.skip_steps(7, 8)
    with pytest.raises((ValueError, RuntimeError), match="is refused"):
        list(to_device(loader, "meta"))
    loader.load_state_dict(loader.state_dict())
    reached = loader.state_dict()["batches_delivered"]
    loader.skip_steps(5, 6)
    assert [len(batch["value"]) for batch in to_device(loader, "meta")] == [
        len(rows) for step, rows in enumerate(whole) if step >= reached and step not in (5, 7)
    ]


BUDGET = TokenBudget("tokens", 8)


@pytest.fixture
def documents(tmp_path):
    lists = [[number] * (1 + number % 5) for number in range(60)]
    pq.write_table(pa.table({"tokens": lists, "other": lists}), tmp_path / "part.parquet")
    return tmp_path


def of_budget(documents, budget):
    loader, _ = StructuredDataset.create_dataloader(documents, num_workers=0, output_format="dict", batching=budget)
    return loader


@pytest.mark.parametrize("budget", [TokenBudget("tokens", 9), TokenBudget("tokens", 8, padded=True)], ids=repr)
def test_steps_ahead_of_a_state_need_its_token_budget(documents, budget):
    loader = of_budget(documents, BUDGET)
    next(iter(loader))
    loader.skip_steps(3, 6)
    state, other = through_json(loader), of_budget(documents, budget)
    with pytest.raises(CheckpointMismatchError, match="skips steps 3 to 5") as caught:
        other.load_state_dict(state)
    assert repr(budget) in str(caught.value)
    assert repr(BUDGET) in str(caught.value)
    assert [(found.checkpoint, found.current) for found in caught.value.differences] == [(BUDGET, budget)]
    other.load_state_dict([state], strict=False)
    assert len(list(other)) > 1
    loader = of_budget(documents, BUDGET)
    iterator = iter(loader)
    delivered = [row for _ in range(7) for row in next(iterator)["tokens"]]
    state = through_json(loader)
    other.load_state_dict(state)  # nothing is skipped
    rest = [row for batch in other for row in batch["tokens"]]
    assert delivered + rest == [[number] * (1 + number % 5) for number in range(60)]


def test_steps_ahead_are_the_same_where_a_token_budget_no_longer_refuses_long_rows(documents):
    alone = TokenBudget("tokens", 8, oversized="alone")
    loader = of_budget(documents, BUDGET)
    loader.skip_steps(3, 6)
    state, other = through_json(loader), of_budget(documents, alone)
    other.load_state_dict(state)
    assert list(other) == list(loader)


def test_a_state_of_an_earlier_release_that_does_not_know_its_token_budget_is_loaded(documents):
    loader = of_budget(documents, BUDGET)
    loader.skip_steps(3, 6)
    state = through_json(loader)
    del state["plan"]["batching"], state["checksum"]
    resumed = of_budget(documents, BUDGET)
    resumed.load_state_dict(state)
    assert list(resumed) == list(loader)


def test_only_a_state_of_a_token_budget_has_one(documents):
    loader, _ = StructuredDataset.create_dataloader(documents, num_workers=0, batch_size=4)
    assert "batching" not in loader.state_dict()["plan"]
    state = through_json(of_budget(documents, BUDGET))
    for name, wrong in (("column", 3), ("tokens", 0), ("padded", None), ("oversized", "all")):
        edited = {**state, "plan": {**state["plan"], "batching": {**state["plan"]["batching"], name: wrong}}}
        with pytest.raises(ValueError, match=rf"\['batching'\]\['{name}'\]"):
            loader.load_state_dict(edited)


def test_steps_ahead_of_a_state_are_not_those_of_a_token_budget(tmp_path):
    pq.write_table(pa.table({"tokens": [[1, 2]] * 40}), tmp_path / "part.parquet")
    loader, _ = StructuredDataset.create_dataloader(tmp_path, num_workers=0, batch_size=4)
    loader.skip_steps(3, 6)
    other, _ = StructuredDataset.create_dataloader(tmp_path, num_workers=0, batching=TokenBudget("tokens", 8))
    with pytest.raises(CheckpointMismatchError, match=r"skips steps 3 to 5, and with TokenBudget\(column='tokens'"):
        other.load_state_dict(loader.state_dict())
