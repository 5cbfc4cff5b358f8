"""Steps that are skipped with a record, over real files: which rows are delivered, skipped and restored."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairwise import pairwise
from support import batches_of, examples, open_loader, rows_of, write_dataset

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


def is_in(step: int, skips: Iterable[tuple[int, int]]) -> bool:
    return any(start <= step < stop for start, stop in skips)


def parted(whole: Sequence[Any], skips: Sequence[tuple[int, int]]) -> tuple[list[Any], list[Any]]:
    """Return the batches that are left of an epoch, and those of the skipped steps."""
    left = [batch for step, batch in enumerate(whole) if not is_in(step, skips)]
    return left, [batch for step, batch in enumerate(whole) if is_in(step, skips)]


def opened(path: Path, **options: Any) -> Any:
    return open_loader(path, **{"batch_size": 12, **options})[0]


def through_json(loader: Any) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


# One rank, step by step ----------------------------------------------------------------------------------------------


@pairwise(most=14, order=ORDERS, kind=KINDS, skips=SKIPS, workers=[0, 2])
def test_all_other_steps_keep_their_batches_and_restored_ones_come_last(path, order, kind, skips, workers):
    options = {"num_workers": workers, **ORDERS[order], **KINDS[kind]}
    left, skipped = parted(batches_of(opened(path, **options)), SKIPS[skips])
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


@pairwise(most=8, order=ORDERS, kind=KINDS, workers=[0, 2])
def test_a_state_after_any_batch_continues_with_the_same_batches(path, order, kind, workers):
    skips = [(2, 4), (7, 12)]
    options = {"num_workers": workers, **ORDERS[order], **KINDS[kind]}
    left, skipped = parted(batches_of(opened(path, **options)), skips)
    loader = opened(path, **options)
    for start, stop in skips:
        loader.skip_steps(start, stop)
    loader.restore_skipped()
    wanted = left + skipped
    stops = range(0, len(wanted) + 1, 1 if workers == 0 else 7)
    states = {0: through_json(loader)}
    for taken, _ in enumerate(loader, start=1):
        states[taken] = through_json(loader)
    for taken in stops:
        resumed = opened(path, **options)
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
@settings(examples(80), suppress_health_check=list(HealthCheck))
def test_any_sequence_of_skips_stops_and_resumes(path, calls, order, kind):
    run = Run(path, {**ORDERS[order], **KINDS[kind]})
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
@settings(examples(120), suppress_health_check=list(HealthCheck))
def test_delivered_and_skipped_rows_are_the_epoch_under_every_resume(path, legs, order, uneven):
    epoch = Epoch(path, **ORDERS[order], **UNEVEN[uneven])
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
        assert len(counts) > ROWS - 2 * len(epoch.loaders)  # of the epoch's own rows, and of what is restored of others
    else:
        assert sorted(counts) == (KEPT if uneven == "filtered" else list(range(ROWS)))
    if uneven == "allow":
        assert sorted(recorded) == sorted(restored)
