"""Steps that are skipped with a record, over real files: which rows are delivered, skipped and restored."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairwise import pairwise
from support import batches_of, edited, examples, open_loader, rows_of, write_dataset

from torch_dataloader_utils import CheckpointMismatchError, ProgressUnknownError, RankMismatchError
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
    assert (metrics["batches_skipped"], metrics["rows_skipped"]) == (len(skipped), len(sum(skipped, [])))
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


@st.composite
def steps_of_runs(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """What a user does: takes batches, skips, restores, resumes in another process."""
    verbs = st.sampled_from(["take", "take", "skip", "skip", "resume", "restore"])
    return draw(st.lists(st.tuples(verbs, st.integers(0, 12), st.integers(1, 9)), min_size=3, max_size=9))


@given(steps_of_runs(), st.sampled_from(list(ORDERS)), st.sampled_from(list(KINDS)))
@settings(examples(80), suppress_health_check=list(HealthCheck))
def test_any_sequence_of_skips_stops_and_resumes(path, calls, order, kind):
    options = {**ORDERS[order], **KINDS[kind]}
    whole = batches_of(opened(path, **options))
    loader, iterator = opened(path, **options), None
    next_step, skips, restores = 0, [], False
    delivered: list[int] = []
    passed: list[int] = []
    for verb, number, count in calls:
        if verb == "skip":
            start, stop = next_step + number, next_step + number + count
            if start >= len(whole):
                continue
            if iterator is not None:  # it takes effect with the next iteration
                state, iterator = through_json(loader), None
                loader = opened(path, **options)
                loader.load_state_dict(state)
            loader.skip_steps(start, stop)
            skips.append((start, stop))
        elif verb == "resume":
            state, iterator = through_json(loader), None
            loader = opened(path, **options)
            loader.load_state_dict(state)
        elif verb == "restore":
            loader.restore_skipped()
            restores = True
        else:
            iterator = iterator or iter(loader)
            for batch in itertools.islice(iterator, number):
                while next_step < len(whole) and is_in(next_step, skips):
                    passed.append(next_step)
                    next_step += 1
                if next_step >= len(whole):  # restored
                    assert restores
                    due = sorted(passed)[next_step - len(whole)]
                    assert rows_of(batch) == whole[due]
                else:
                    assert rows_of(batch) == whole[next_step]
                    delivered.append(next_step)
                next_step += 1
    ahead = [step for step in range(min(next_step, len(whole)), len(whole)) if is_in(step, skips)]
    iterator = iterator or iter(loader)
    rest = batches_of(iterator)
    if not restores and not delivered + passed == list(range(len(whole))):
        rest_steps = [step for step in range(next_step, len(whole)) if step not in ahead]
        assert rest == [whole[step] for step in rest_steps]
    everything = delivered + [step for step in range(next_step, len(whole)) if not is_in(step, skips)]
    assert len(set(everything)) == len(everything)
