"""Mixtures: exact shares, each row once a pass, resumed to the batch."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pairwise import pairwise
from stops import each_stop

from torch_dataloader_utils import CheckpointMismatchError, MixedDataset, RankMismatchError, SmallWeightWarning, Source
from torch_dataloader_utils.distributed import own_state

ROWS = {"web": 400, "code": 180, "math": 74}
WEIGHTS = {"web": 0.7, "code": 0.2, "math": 0.1}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return a directory of three sources of two files each. `x` is a row's number in its source."""
    root = tmp_path_factory.mktemp("sources")
    for name, rows in ROWS.items():
        (root / name).mkdir()
        for part in range(2):
            values = np.arange(rows // 2) + part * (rows // 2)
            pq.write_table(pa.table({"x": values}), root / name / f"part-{part}.parquet", row_group_size=30)
    return root


def open_mixture(root, weights: Any = WEIGHTS, **options: Any):
    sources = {name: Source(root / name) for name in ROWS}
    given = {"rows_per_epoch": 300, "batch_size": 16, "num_workers": 0, "num_ranks": 1, "rank": 0}
    given |= {"shuffle": True, "shuffle_buffer_size": 100, "source_column": "source"}
    return MixedDataset.create_dataloader(sources, weights, **{**given, **options})


def rows_of(batch):
    return list(zip(batch["source"].tolist(), batch["x"].tolist(), strict=True))


def require_quota(batches, weights=WEIGHTS):
    """Raise unless every source has its share after every batch, less than one row off."""
    exact = [Fraction(repr(weight)) / sum(map(Fraction, map(repr, weights.values()))) for weight in weights.values()]
    counts, rows = Counter(), 0
    for batch in batches:
        counts.update(source for source, _ in batch)
        rows += len(batch)
        assert all(abs(counts[source] - rows * share) < 1 for source, share in enumerate(exact))


@cache
def passes_of(root, **options: Any):
    """Return the sequence of each source, as far as eight epochs in one process take it."""
    loader, _ = open_mixture(root, **{"num_workers": 0, **options})
    found = {source: [] for source in range(len(ROWS))}
    for epoch in range(8):
        loader.set_epoch(epoch)
        for batch in loader:
            for source, row in rows_of(batch):
                found[source].append(row)
    return found


@pytest.mark.parametrize("shuffled", [True, False], ids=["shuffled", "in order"])
@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_takes_the_next_rows_of_each_source_in_exact_shares(root, workers, shuffled):
    options = {} if shuffled else {"shuffle": False, "shuffle_buffer_size": None}
    sequences = passes_of(root, **options)
    loader, dataset = open_mixture(root, num_workers=workers, persistent_workers=workers > 0, **options)
    taken = Counter()
    for epoch in range(4):
        dataset.set_epoch(epoch)
        batches = [rows_of(batch) for batch in loader]
        assert len(batches) == len(loader) == 19
        require_quota(batches)
        for source, sequence in sequences.items():
            rows = [row for batch in batches for of, row in batch if of == source]
            expected = sequence[taken[source] : taken[source] + len(rows)]
            assert sorted(rows) == sorted(expected)
            taken[source] += len(rows)
    for source, rows in enumerate(ROWS.values()):
        whole = sequences[source][: len(sequences[source]) // rows * rows]
        for begin in range(0, len(whole), rows):
            assert sorted(whole[begin : begin + rows]) == list(range(rows))


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (3, 1), (2, 2)])
def test_what_the_ranks_deliver_together_is_the_beginning_of_each_sequence(root, ranks, workers):
    sequences = passes_of(root)
    together = {source: [] for source in sequences}
    for rank in range(ranks):
        loader, _ = open_mixture(root, num_workers=workers, num_ranks=ranks, rank=rank)
        batches = [rows_of(batch) for batch in loader]
        require_quota(batches)
        for source, row in (pair for batch in batches for pair in batch):
            together[source].append(row)
    assert sum(map(len, together.values())) == 300 // ranks * ranks
    for source, rows in together.items():
        assert sorted(rows) == sorted(sequences[source][: len(rows)])


@each_stop
@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_at_any_batch_equal_batches_follow(root, workers, stops):
    loader, _ = open_mixture(root, num_workers=workers)
    loader.set_epoch(1)
    whole = [rows_of(batch) for batch in loader]
    loader.set_epoch(2)
    following = [rows_of(batch) for batch in loader]
    loader.set_epoch(1)
    states = [json.loads(json.dumps(loader.state_dict()))]
    loader.set_epoch(0)
    loader.set_epoch(1)
    states += [json.loads(json.dumps(loader.state_dict())) for _ in loader]
    resumed, _ = open_mixture(root, num_workers=workers, persistent_workers=workers > 0)
    for step in stops(states)[:: 1 if workers == 0 else 6]:
        if workers == 0:
            resumed, _ = open_mixture(root, num_workers=0)  # elsewhere to start workers would take the time
        resumed.load_state_dict(states[step])
        assert len(resumed) == 19
        assert [rows_of(batch) for batch in resumed] == whole[step:]
        resumed.set_epoch(2)
        assert [rows_of(batch) for batch in resumed] == following


def test_a_finished_pass_is_a_number_in_a_state(root):
    loader, _ = open_mixture(root)
    loader.set_epoch(5)
    next(iter(loader))
    sources = {source["name"]: source for source in loader.state_dict()["mixture"]["sources"]}
    assert sources["web"]["position"] == [5 * 210 // 400, 5 * 210 % 400]
    assert [entry[0] for entry in sources["web"]["files"]] == ["part-0.parquet", "part-1.parquet"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": {"web": 0.6, "code": 0.3, "math": 0.1}}, r"weights\['web'\].*7/10.*3/5"),
        ({"rows_per_epoch": 400}, "rows_per_epoch.*300.*400"),
        ({"shuffle_seed": 3}, "shuffle_seed.*42.*3"),
    ],
    ids=["weights", "rows", "seed"],
)
def test_a_strict_load_names_what_differs(root, changes, message):
    loader, _ = open_mixture(root)
    next(iter(loader))
    other, _ = open_mixture(root, **changes)
    with pytest.raises(CheckpointMismatchError, match=message):
        other.load_state_dict(loader.state_dict())
    assert len(list(other)) == len(other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": {"web": 0.6, "code": 0.3, "math": 0.1}}, "weights={.*} and {.*'web': '3/5'}$"),
        ({"weights": {"web": 0.1, "code": 0.3, "math": 0.6}}, "weights={.*} and {.*'web': '1/10'}$"),
        ({"weights": [(0, WEIGHTS), (100, {**WEIGHTS, "web": 0})]}, r"schedule=\[\] and \[\["),
        ({"rows_per_epoch": 400}, "rows_per_epoch=300 and 400"),
    ],
    ids=["weights", "weights of other passes", "schedule", "rows"],
)
def test_ranks_of_other_mixtures_are_told_what_differs(root, changes, message):
    options = [{}, changes]
    states = [open_mixture(root, num_ranks=2, rank=rank, **options[rank])[0].state_dict() for rank in range(2)]
    with pytest.raises(RankMismatchError, match=rf"Rank 0 and rank 1 have {message}"):
        own_state(states, rank=0)


@pytest.mark.parametrize("sources", [None, 5, [None], [{}]])
def test_damaged_sources_of_a_ranks_state_are_no_obstacle_to_the_error(root, sources):
    states = [open_mixture(root, num_ranks=2, rank=rank)[0].state_dict() for rank in range(2)]
    states[1] |= {"mixture": {**states[1]["mixture"], "sources": sources}, "plan_digest": "other"}
    with pytest.raises(RankMismatchError, match="ranks planned different epochs"):
        own_state(states, rank=0)


def test_a_strict_load_names_the_source_whose_files_differ(root, tmp_path):
    loader, _ = open_mixture(root)
    next(iter(loader))
    for name in ROWS:
        (tmp_path / name).symlink_to(root / name)
    (tmp_path / "code").unlink()
    (tmp_path / "code").mkdir()
    pq.write_table(pa.table({"x": np.arange(180)}), tmp_path / "code" / "other.parquet")
    other, _ = open_mixture(tmp_path)
    with pytest.raises(CheckpointMismatchError, match=r"code/other\.parquet"):
        other.load_state_dict(loader.state_dict())


def test_epochs_before_a_loaded_one_are_refused(root):
    loader, _ = open_mixture(root)
    loader.set_epoch(3)
    next(iter(loader))
    resumed, _ = open_mixture(root)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="epoch 2 is before epoch 3"):
        resumed.set_epoch(2)


def test_the_losses_of_a_grid_are_the_same_on_one_and_two_ranks(root):
    grid = {"virtual_ranks": 2, "virtual_workers": 2}
    one, _ = open_mixture(root, batch_size=16, **grid)
    whole = [rows_of(batch) for batch in one]
    two = [open_mixture(root, batch_size=8, num_ranks=2, rank=rank, **grid)[0] for rank in range(2)]
    parts = [[rows_of(batch) for batch in loader] for loader in two]
    assert [first + second for first, second in zip(*parts, strict=True)] == whole


NEW_WEIGHTS = {"web": 0.2, "code": 0.3, "math": 0.5}


@pairwise(most=2, begun=[2, 0], new_weights=[False, True])
def test_no_row_is_lost_or_repeated_by_elastic_loads(root, begun, new_weights):
    """Two ranks with two workers, one with one, three in process, then two epochs to their ends."""
    weights = NEW_WEIGHTS if new_weights else WEIGHTS
    sequences = passes_of(root)
    taken = Counter()
    before, _ = open_mixture(root)
    for epoch in range(begun):
        before.set_epoch(epoch)
        taken.update(row for batch in before for row in rows_of(batch))

    loaders = [open_mixture(root, num_workers=2, num_ranks=2, rank=rank, batch_size=8)[0] for rank in range(2)]
    states = [json.loads(json.dumps(before.state_dict()))] if begun else None
    if states:
        for loader in loaders:
            loader.load_state_dict(states, strict=False)
            loader.set_epoch(begun)
    states = stop_after(loaders, 5, taken, WEIGHTS)
    loaders = [open_mixture(root, weights, num_workers=1)[0]]
    for loader in loaders:
        loader.load_state_dict(states, strict=False)
    states = stop_after(loaders, 4, taken, weights)
    loaders = [open_mixture(root, weights, num_ranks=3, rank=rank, batch_size=4)[0] for rank in range(3)]
    for loader in loaders:
        loader.load_state_dict(states, strict=False)
    stop_after(loaders, None, taken, weights)
    for epoch in range(begun + 1, begun + 4):
        for loader in loaders:
            loader.set_epoch(epoch)
        stop_after(loaders, None, taken, weights)
    for source, sequence in sequences.items():
        rows = Counter({row: count for (of, row), count in taken.items() if of == source})
        counts = {rows[row] for row in range(list(ROWS.values())[source])}
        assert max(counts) - min(counts) <= 1
        if weights is WEIGHTS:  # else passes that begin later have another share of the buffer
            assert rows == Counter(sequence[: rows.total()])


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.soak)])
def test_after_an_elastic_load_a_strict_resume_delivers_equal_batches(root, every):
    loaders = [open_mixture(root, num_workers=2, num_ranks=2, rank=rank, batch_size=8)[0] for rank in range(2)]
    states = stop_after(loaders, 5, Counter(), WEIGHTS)
    loader, _ = open_mixture(root, NEW_WEIGHTS)
    loader.load_state_dict(states, strict=False)
    for epoch in range(3):  # the rest of epoch 0, the epoch that begins with what was carried over, and the next
        loader.set_epoch(epoch)
        kept = [json.loads(json.dumps(loader.state_dict()))]
        carried = kept[0]["mixture"]["carried"]
        assert bool(carried["completed_rows"] or carried["in_progress"]) == (epoch >= 1)
        whole = []
        for batch in loader:
            whole.append(rows_of(batch))
            kept.append(json.loads(json.dumps(loader.state_dict())))
        loader.set_epoch(epoch + 1)
        following = rows_of(next(iter(loader)))
        for step in range(0, len(kept), every):
            resumed, _ = open_mixture(root, NEW_WEIGHTS)
            resumed.load_state_dict(kept[step])
            assert [rows_of(batch) for batch in resumed] == whole[step:]
            resumed.set_epoch(epoch + 1)
            assert rows_of(next(iter(resumed))) == following
        loader.set_epoch(epoch + 1)


def stop_after(loaders, steps, taken, weights):
    """Deliver some steps of each rank, or all that are left, and return the states of the ranks."""
    states = []
    for loader in loaders:
        batches = []
        for batch in loader:
            batches.append(rows_of(batch))
            if len(batches) == steps:
                break
        require_quota(batches, weights)
        taken.update(row for batch in batches for row in batch)
        states.append(json.loads(json.dumps(loader.state_dict())))
    return states


def test_weights_change_at_the_beginning_of_an_epoch(root):
    sequences = passes_of(root)
    loader, dataset = open_mixture(root)
    taken = Counter(row for batch in loader for row in rows_of(batch))
    dataset.set_weights({"web": 0, "code": 3, "math": 1})
    loader.set_epoch(1)
    batches = []
    states = [loader.state_dict()]
    for batch in loader:
        batches.append(rows_of(batch))
        states.append(loader.state_dict())
    require_quota(batches, {"web": 0, "code": 3, "math": 1})
    taken.update(row for batch in batches for row in batch)
    for source, sequence in sequences.items():
        rows = Counter({row: count for (of, row), count in taken.items() if of == source})
        size = list(ROWS.values())[source]
        whole = min(rows.total(), size)  # the pass that was open goes on with its share of the buffer
        assert all(rows[row] for row in sequence[:whole])
        assert max(rows.values()) - min(rows[row] for row in sequence[:whole]) <= 1

    resumed, other = open_mixture(root)
    with pytest.raises(CheckpointMismatchError, match=r"weights\['web'\]"):
        other.load_state_dict(states[7])
    other.set_weights({"web": 0, "code": 3, "math": 1})
    other.load_state_dict(states[7])
    assert [rows_of(batch) for batch in resumed] == batches[7:]


def test_weights_change_by_a_schedule_from_the_first_step_that_begins_there(root):
    schedule = [(0, {"web": 1, "code": 0, "math": 0}), (100, {"web": 0, "code": 1, "math": 1}), (400, WEIGHTS)]
    loader, dataset = open_mixture(root, schedule)
    with pytest.raises(ValueError, match="schedule"):
        dataset.set_weights(WEIGHTS)
    whole = [rows_of(batch) for batch in loader]
    first = 7  # 7 steps of 16 rows begin before row 100
    assert {source for batch in whole[:first] for source, _ in batch} == {0}
    assert {source for batch in whole[first:] for source, _ in batch} == {1, 2}
    require_quota(whole[first:], {"web": 0, "code": 1, "math": 1})
    loader.set_epoch(1)
    state = None
    second = []
    for batch in loader:
        second.append(rows_of(batch))
        if len(second) == 5:
            state = loader.state_dict()
    require_quota(second[:7], {"web": 0, "code": 1, "math": 1})
    require_quota(second[7:])
    resumed, _ = open_mixture(root, schedule)
    resumed.load_state_dict(state)
    assert [rows_of(batch) for batch in resumed] == second[5:]
    fresh, _ = open_mixture(root, schedule)
    fresh.set_epoch(1)
    assert [rows_of(batch) for batch in fresh] == second


RISING = [(0, {"web": 1, "code": 0, "math": 0}), (100, {"web": 0, "code": 1, "math": 1})]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(RISING, [RISING[0], (150, RISING[1][1])]), (RISING, RISING[0][1]), (RISING[0][1], RISING)],
    ids=["later", "weights alone", "a schedule now"],
)
def test_another_schedule_is_refused_also_before_it_changes_the_weights(root, saved, loaded):
    loader, _ = open_mixture(root, saved, rows_per_epoch=210)
    next(iter(loader))
    state = loader.state_dict()
    resumed, _ = open_mixture(root, loaded, rows_per_epoch=210)
    with pytest.raises(CheckpointMismatchError, match=r"strict=False") as refused:
        resumed.load_state_dict(state)
    [difference] = refused.value.differences
    assert difference.name == "weights"
    schedule = "from row 0: web 1, code 0, math 0; from row 100: web 0, code 1/2, math 1/2"
    assert schedule in (difference.checkpoint, difference.current)
    resumed.load_state_dict([state], strict=False)
    assert len(list(resumed)) == 210 // 16
    del state["mixture"]["schedule"], state["checksum"]  # as releases before did not record it
    other, _ = open_mixture(root, loaded, rows_per_epoch=210)
    other.load_state_dict(state)


def test_weights_that_were_announced_before_a_state_hold_from_the_next_epoch_on(root):
    loader, dataset = open_mixture(root)
    batches = iter(loader)
    next(batches)
    dataset.set_weights({"web": 0, "code": 3, "math": 1})
    state = loader.state_dict()
    list(batches)
    loader.set_epoch(1)
    following = [rows_of(batch) for batch in loader]
    require_quota(following, {"web": 0, "code": 3, "math": 1})
    resumed, _ = open_mixture(root)
    resumed.load_state_dict(state)
    require_quota([rows_of(batch) for batch in resumed])
    resumed.set_epoch(1)
    assert [rows_of(batch) for batch in resumed] == following


@pytest.mark.parametrize("way", ["loader", "set_weights"])
def test_a_running_epoch_keeps_its_number_of_rows_under_other_weights(root, way):
    options = {"rows_per_epoch": None, "batch_size": 10}
    loader, _ = open_mixture(root, **options)
    assert len(loader) == 58  # 400 rows of `web` / 0.7 are 571
    first = next(iter(loader))
    changed = {"web": 0.1, "code": 0.8, "math": 0.1}  # of these an epoch has 225 rows
    other, dataset = open_mixture(root, changed if way == "loader" else WEIGHTS, **options)
    if way == "set_weights":
        dataset.set_weights(changed)
    other.load_state_dict([loader.state_dict()], strict=False)
    batches = iter(other)
    rows = len(first["x"]) + sum(len(next(batches)["x"]) for _ in range(20))
    again, dataset = open_mixture(root, changed, **options)
    again.load_state_dict(json.loads(json.dumps(other.state_dict())))
    rest = [rows_of(batch) for batch in again]
    assert [rows_of(batch) for batch in batches] == rest
    assert rows + sum(map(len, rest)) == 571
    again.set_epoch(1)
    following = [rows_of(batch) for batch in again]
    assert sum(map(len, following)) == 225
    other.set_epoch(2)
    again.set_epoch(2)
    assert [rows_of(batch) for batch in again] == [rows_of(batch) for batch in other]


def test_the_buffer_of_a_pass_follows_the_weights_that_hold_where_it_begins(root):
    loader, _ = open_mixture(root, RISING, rows_per_epoch=210, shuffle_buffer_size=120)
    buffers = {source["name"]: source["buffers"] for source in loader.state_dict()["mixture"]["sources"]}
    assert {name: of[0][1] for name, of in buffers.items()} == {"web": 120, "code": 60, "math": 60}


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnusedStateWarning")
def test_a_pass_that_begins_with_an_epoch_has_its_buffer_by_the_weights_of_that_epoch_also_after_a_load(root):
    found = []
    for is_resumed in (False, True):
        loader, dataset = open_mixture(root, {"web": 1, "code": 0, "math": 0}, rows_per_epoch=400)
        batches = iter(loader)
        next(batches)
        if is_resumed:
            state = loader.state_dict()
            loader, dataset = open_mixture(root, {"web": 1, "code": 0, "math": 0}, rows_per_epoch=400)
            loader.load_state_dict(state)
        dataset.set_weights({"web": 1, "code": 1, "math": 0})
        loader.set_epoch(1)
        found.append([rows_of(batch) for batch in loader])
    assert found[0] == found[1]


def test_a_state_does_not_grow_with_the_passes_of_an_epoch(root):
    lengths = []
    for rows in (1_000, 6_000):  # 6 passes of `math`, and 33
        loader, _ = open_mixture(root, {"web": 3, "code": 3, "math": 4}, rows_per_epoch=rows)
        batches = iter(loader)
        next(batches)
        lengths.append(len(json.dumps(loader.state_dict()["mixture"])))
    assert lengths[1] < lengths[0] + 20
    state = json.loads(json.dumps(loader.state_dict()))
    for source in state["mixture"]["sources"]:  # as releases before recorded it
        source["buffers"] = [rows for passes, rows in source["buffers"] for _ in range(passes)]
    del state["checksum"]
    resumed, _ = open_mixture(root, {"web": 3, "code": 3, "math": 4}, rows_per_epoch=6_000)
    resumed.load_state_dict(state)
    again = iter(resumed)
    assert [rows_of(next(again)) for _ in range(20)] == [rows_of(next(batches)) for _ in range(20)]


def test_a_weight_of_less_than_a_row_an_epoch_is_warned_of(root):
    with pytest.warns(SmallWeightWarning, match=r"no row of 'math' \(0.001\): each rank has 300 rows"):
        loader, _ = open_mixture(root, {"web": 0.999, "code": 0, "math": 0.001})
    assert {source for batch in loader for source, _ in rows_of(batch)} == {0}


def test_metrics_tell_the_rows_and_the_shares_of_each_source(root):
    loader, dataset = open_mixture(root)
    loader.set_epoch(2)  # rows 420 to 630 of the 400 that a pass of `web` has
    batches = iter(loader)
    for _ in range(10):
        next(batches)
    metrics = dataset.get_metrics()["sources"]
    assert {name: of["rows"] for name, of in metrics.items()} == {"web": 112, "code": 32, "math": 16}
    assert {name: of["pass"] for name, of in metrics.items()} == {"web": 1, "code": 0, "math": 1}
    assert metrics["web"]["share_asked"] == metrics["web"]["share_delivered"] == 0.7


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "elastic"])
def test_metrics_count_from_the_beginning_of_the_epoch_also_after_a_load(root, strict):
    loader, _ = open_mixture(root)
    loader.set_epoch(1)  # from row 210 of the 400 of a pass of `web` on
    batches = iter(loader)
    taken = Counter(source for _ in range(18) for source, _ in rows_of(next(batches)))
    resumed, dataset = open_mixture(root)
    resumed.load_state_dict(loader.state_dict(), strict=strict)
    assert dataset.get_metrics()["sources"] == loader.dataset.get_metrics()["sources"]
    taken.update(source for source, _ in rows_of(next(iter(resumed))))
    assert taken.total() == 300
    metrics = dataset.get_metrics()["sources"].values()
    assert {source: found["rows"] for source, found in enumerate(metrics)} == taken


def test_metrics_of_ranks_add_up_to_the_epoch_also_after_an_elastic_load(root):
    states, taken = [], Counter()
    for rank in range(2):
        loader, _ = open_mixture(root, num_ranks=2, rank=rank)
        batches = iter(loader)
        for _ in range(5):
            taken.update(source for source, _ in rows_of(next(batches)))
        states.append(loader.state_dict())
    found = Counter()
    for rank in range(3):
        loader, dataset = open_mixture(root, {"web": 0, "code": 1, "math": 1}, num_ranks=3, rank=rank)
        loader.load_state_dict(states, strict=False)
        taken.update(source for source, _ in rows_of(next(iter(loader))))
        metrics = dataset.get_metrics()["sources"]
        found.update({number: of["rows"] for number, of in enumerate(metrics.values())})
    assert taken == {0: 112, 1: 56, 2: 40}
    assert all(0 <= taken[source] - found[source] < 3 for source in taken)  # equal parts, rounded down
    assert metrics["web"]["share_delivered"] == 112 / 208


def test_rows_of_a_short_last_step_that_is_left_out_come_first_in_the_next_epoch(root):
    sequences = passes_of(root)
    loader, _ = open_mixture(root, drop_last=True)
    taken = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        batches = [rows_of(batch) for batch in loader]
        assert list(map(len, batches)) == [16] * 18
        assert len(loader) == 18
        taken += [row for batch in batches for row in batch]
    for source, sequence in sequences.items():
        rows = [row for of, row in taken if of == source]
        assert rows == sequence[: len(rows)]


def test_what_a_mixture_cannot_do_is_refused(root):
    loader, _ = open_mixture(root)
    with pytest.raises(ValueError, match="restore_skipped"):
        loader.restore_skipped()
    with pytest.raises(ValueError, match="exclude"):
        loader.exclude([("web/part-0.parquet", 0)])


def test_a_filter_and_text_mix_once_their_rows_are_counted(root, tmp_path):
    lines = [json.dumps({"x": number}) for number in range(120)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    sources = {
        "web": Source(root / "web", filters=pc.field("x") >= 250, count_rows=True),
        "lines": Source(tmp_path / "lines.jsonl", "jsonl", count_rows=True),
    }
    loader, dataset = MixedDataset.create_dataloader(
        sources,
        {"web": 1, "lines": 1},
        batch_size=10,
        num_workers=0,
        num_ranks=1,
        rank=0,
        shuffle=True,
        shuffle_buffer_size=20,
        row_id_column="row",
        source_column="source",
    )
    batches = list(loader)
    assert sum(len(batch["x"]) for batch in batches) == 240
    for source, expected in ((0, set(range(250, 400))), (1, set(range(120)))):
        rows = [row for batch in batches for of, row in rows_of(batch) if of == source]
        assert len(rows) == len(set(rows)) == 120
        assert set(rows) <= expected
    assert all(batch["x"].tolist() == batch["row"].tolist() for batch in batches)
    manifest = dataset.dump_manifest("web")
    again = Source(root / "web", filters=pc.field("x") >= 250, count_rows=True, manifest=manifest)
    copy, _ = MixedDataset.create_dataloader(
        {**sources, "web": again}, {"web": 1, "lines": 1}, batch_size=10, num_workers=0, num_ranks=1, rank=0
    )
    assert len(copy) == 24


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"uneven_ranks": "allow"}, ValueError, "uneven_ranks"),
        ({"columns": ["x"]}, TypeError, "columns"),
        ({"rows_per_epoch": 0}, ValueError, "rows_per_epoch"),
        ({"source_column": 3}, TypeError, "source_column"),
        ({"source_column": "x"}, ValueError, "source 'web'"),
        ({"weights": {"web": 1, "code": 1}}, ValueError, "source 'math'"),
        ({"weights": {**WEIGHTS, "wiki": 1}}, ValueError, "'wiki'"),
        ({"weights": {**WEIGHTS, "web": -1}}, ValueError, "source 'web'"),
        ({"weights": {**WEIGHTS, "web": float("nan")}}, ValueError, "source 'web'"),
        ({"weights": dict.fromkeys(WEIGHTS, 0)}, ValueError, "all are 0"),
        ({"batch_sise": 3}, TypeError, "batch_size"),
    ],
    ids=["allow", "columns", "rows", "no column name", "taken", "missing", "unknown", "less", "nan", "zero", "typo"],
)
def test_wrong_arguments_are_named(root, options, error, message):
    with pytest.raises(error, match=message):
        open_mixture(root, **options)
