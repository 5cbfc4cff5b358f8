"""Excluded rows: batches of the current epoch lose them, later epochs are planned without them, states keep them."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pairwise import pairwise
from row_hashes import entry_of
from stops import at_few_stops
from support import batches_of, edited, open_loader, rows_of, write_dataset
from torch.utils.data import DataLoader

from torch_dataloader_utils import (
    CheckpointMismatchError,
    LedgerUnknownError,
    ProgressUnknownError,
    RankMismatchError,
    audit,
)
from torch_dataloader_utils.distributed import load_gathered

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

FILES = ((90, 10), (3, 10), (131, 20), (40, 7), (60, 60))
ROWS = sum(rows for rows, _ in FILES)
FIRST = [0, *itertools.accumulate(rows for rows, _ in FILES)]

ORDERS: dict[str, dict[str, Any]] = {
    "rows shuffled in rounds": {
        "shuffle": True,
        "shuffle_buffer_size": 8,
        "shuffle_interleave": 3,
        "read_ahead_bytes": 100,  # or shards are read as a whole
    },
    "rows shuffled": {"shuffle": True, "shuffle_buffer_size": 45},
    "shards shuffled": {"shuffle": True},
    "in order": {},
}
"""Each of the first three is read in a way of its own, and the last one as the one before it."""

each_reading = pytest.mark.parametrize("order", [*list(ORDERS)[:3], pytest.param("in order", marks=pytest.mark.soak)])
KEPT = [row for row in range(ROWS) if row < 260 and not row & 32]
FILTERS: dict[str, Any] = {
    "all rows": None,
    "filtered": (pc.field("value") < 260) & (pc.bit_wise_and(pc.field("value"), 32) == 0),
}
BAD = {0, 1, 2, 9, 10, 35, *range(60, 93), 150, 171, 188, *range(224, 240), 263, 264, 300, ROWS - 1}
"""The first row and the last, neighbours over the end of a row group, whole row groups, and a whole file."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    assert write_dataset(directory, FILES) == ROWS
    return directory


@pytest.fixture(scope="module")
def fewer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first three files alone, for a test that asks of every row."""
    directory = tmp_path_factory.mktemp("fewer")
    assert write_dataset(directory, FILES[:3]) == FIRST[3]
    return directory


def named(rows: Iterable[int]) -> list[tuple[str, int]]:
    """Return rows as pairs of a path and a row number, in no order."""
    pairs = []
    for row in rows:
        file = max(number for number, first in enumerate(FIRST[:-1]) if first <= row)
        pairs.append((f"part-{file:03d}.parquet", row - FIRST[file]))
    random.Random(7).shuffle(pairs)
    return pairs


def ids(rows: Iterable[tuple[str, int]]) -> set[int]:
    """Return the row ids of rows that are given by path and row number."""
    return {FIRST[int(path.removeprefix("part-").removesuffix(".parquet"))] + row for path, row in rows}


def without(batches: Iterable[Sequence[int]], rows: Iterable[int]) -> list[list[int]]:
    """Return batches without some rows, and without the batches that then have none."""
    gone = set(rows)
    shorter = ([row for row in batch if row not in gone] for batch in batches)
    return [batch for batch in shorter if batch]


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


# The current epoch ---------------------------------------------------------------------------------------------------


@pairwise(most=4, order=ORDERS, kept=FILTERS, num_workers=[0, 2], output_format=["torch", "numpy", "arrow", "dict"])
def test_batches_of_the_current_epoch_lose_the_rows_and_nothing_else(path, order, kept, num_workers, output_format):
    options = {**ORDERS[order], "filters": FILTERS[kept], "batch_size": 7, "output_format": output_format}
    plain, _ = open_loader(path, **options)
    as_planned = [(rows_of(batch), list(map(str, batch["name"]))) for batch in plain]
    loader, dataset = open_loader(path, **options, num_workers=num_workers)
    iterator = iter(loader)
    seen = [rows_of(next(iterator)) for _ in range(3)]
    loader.exclude(named(BAD))
    seen += [rows_of(next(iterator))]
    if num_workers == 0:
        assert seen == [rows for rows, _ in as_planned[:4]]  # from the next `iter` on
    loader.load_state_dict(through_json(loader.state_dict()))
    _, plain = open_loader(path, **options, num_workers=num_workers)  # read in this process as planned for workers
    as_planned = [(rows_of(batch), list(map(str, batch["name"]))) for batch in plain]
    rest = [(rows_of(batch), list(map(str, batch["name"]))) for batch in loader]
    kept_rows = [[(row, name) for row, name in zip(*batch, strict=True) if row not in BAD] for batch in as_planned[4:]]
    assert [list(zip(*batch, strict=True)) for batch in rest] == [batch for batch in kept_rows if batch]
    lost = sum(row in BAD for rows, _ in as_planned[4:] for row in rows)
    metrics = dataset.get_metrics()
    assert metrics["rows_excluded"] == lost > 0
    assert metrics["batches_delivered"] == len(rest)
    assert metrics["rows_delivered"] == sum(len(rows) for rows, _ in as_planned[4:])
    assert loader.state_dict()["batches_delivered"] == len(as_planned)


GRID = {"virtual_ranks": 4, "virtual_workers": 2}
BALANCED: dict[str, dict[str, Any]] = {
    "uneven": {},
    "dropped": {"uneven_ranks": "drop"},
    "padded": {"uneven_ranks": "pad"},
    "grid dropped": {"uneven_ranks": "drop", **GRID},
    "grid padded": {"uneven_ranks": "pad", **GRID},
}


@at_few_stops
@pairwise(most=5, order=ORDERS, num_workers=[0, 2], balanced=BALANCED)
def test_state_after_any_batch_goes_on_without_the_rows(path, order, num_workers, balanced, stops):
    options: dict[str, Any] = {**ORDERS[order], **BALANCED[balanced], "batch_size": 8, "num_workers": num_workers}
    as_planned = batches_of(open_loader(path, **options)[1])  # read in this process as planned for workers
    loader = open_loader(path, **options)[0]
    loader.exclude(named(BAD))
    states, seen = [through_json(loader.state_dict())], []
    for batch in loader:
        seen.append(rows_of(batch))
        states.append(through_json(loader.state_dict()))
    assert seen == without(as_planned, BAD)
    last = through_json(loader.state_dict())  # of the end: empty steps may have followed the last batch
    again = open_loader(path, **options, persistent_workers=num_workers > 0)[0]
    for stop in stops(states):
        if num_workers == 0:
            again = open_loader(path, **options)[0]  # a new process: the state brings what is excluded
        again.load_state_dict(states[stop])
        assert batches_of(again) == seen[stop:]
        assert through_json(again.state_dict()) == last


def test_step_without_a_row_left_is_passed_and_counted(path):
    loader, dataset = open_loader(path, batch_size=10)
    loader.exclude({"part-000.parquet": range(90), "part-004.parquet": [59]})
    iterator = iter(loader)
    assert rows_of(next(iterator)) == list(range(90, 100))
    assert loader.state_dict()["batches_delivered"] == 10
    assert [rows_of(batch) for batch in iterator] == without(
        [list(range(first, min(first + 10, ROWS))) for first in range(100, ROWS, 10)], [ROWS - 1]
    )
    assert dataset.is_finished
    assert dataset.get_metrics()["batches_delivered"] == len(loader) - 9
    assert loader.state_dict()["batches_delivered"] == len(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epoch_of_which_no_row_is_left_is_passed(path, num_workers):
    loader, dataset = open_loader(path, num_workers=num_workers)
    loader.exclude(named(range(ROWS)))
    assert batches_of(loader) == []
    assert dataset.is_finished
    dataset.set_epoch(1)
    assert len(loader) == 0
    assert batches_of(loader) == []


def test_collate_function_sees_no_excluded_row_and_no_empty_batch(path):
    seen: list[list[int]] = []

    def collate(batch: dict[str, Any]) -> Any:
        seen.append(rows_of(batch))
        return batch

    loader, _ = open_loader(path, batch_size=10, collate_fn=collate)
    loader.exclude(named(BAD))
    wanted = without([list(range(first, min(first + 10, ROWS))) for first in range(0, ROWS, 10)], BAD)
    assert batches_of(loader) == seen == wanted


def test_values_of_every_form_stay_with_their_rows(tmp_path):
    table = pa.table(
        {
            "value": np.arange(50),
            "list": [list(range(row % 4)) for row in range(50)],
            "text": [f"text {row}" * (row % 3) for row in range(50)],
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(100.0)), 2),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=13)
    for output_format in ("torch", "numpy", "dict", "arrow"):
        loader, _ = open_loader(tmp_path, batch_size=8, output_format=output_format)
        loader.exclude([("a.parquet", row) for row in (0, 7, 8, 20, 21, 49)])
        for batch in loader:
            rows = rows_of(batch)
            lists = batch["list"].unbind() if output_format == "torch" else batch["list"]
            assert [np.asarray(one.as_py() if output_format == "arrow" else one).tolist() for one in lists] == [
                list(range(row % 4)) for row in rows
            ]
            assert list(map(str, batch["text"])) == [f"text {row}" * (row % 3) for row in rows]
            vectors = batch["vector"].to_pylist() if output_format == "arrow" else np.asarray(batch["vector"]).tolist()
            assert vectors == [[2.0 * row, 2.0 * row + 1] for row in rows]


# Later epochs --------------------------------------------------------------------------------------------------------


@at_few_stops
@pairwise(most=4, order=ORDERS, kept=FILTERS, num_workers=[0, 2], files=["numbers known", "text"])
def test_next_epoch_is_planned_without_the_rows(path, order, kept, num_workers, files, stops):  # noqa: PLR0917
    options = {**ORDERS[order], "filters": FILTERS[kept], "batch_size": 7, "num_workers": num_workers}
    if files == "numbers known":
        options["columns"] = ["score"]
    loader, dataset = open_loader(path, **options)
    loader.exclude(named(BAD))
    dataset.set_epoch(1)
    wanted = set(KEPT if kept == "filtered" else range(ROWS)) - BAD
    batches, states = [], [through_json(loader.state_dict())]
    for batch in loader:
        batches.append(rows_of(batch))
        states.append(through_json(loader.state_dict()))
    assert Counter(itertools.chain(*batches)) == Counter(wanted)
    assert [len(batch) for batch in batches].count(7) >= len(batches) - max(1, num_workers)
    if kept == "all rows":
        assert len(loader) == len(batches)
    assert dataset.get_metrics()["rows_excluded"] == 0
    again = open_loader(path, **options, persistent_workers=num_workers > 0)[0]
    for stop in stops(states):
        if num_workers == 0:
            again = open_loader(path, **options)[0]
        again.load_state_dict(states[stop])
        assert batches_of(again) == batches[stop:]


@pairwise(most=4, order=ORDERS, uneven=["drop", "pad"], num_workers=[0, 2])
def test_next_epoch_is_balanced_without_the_rows(path, order, uneven, num_workers):
    options = {**ORDERS[order], "uneven_ranks": uneven, "batch_size": 7, "num_workers": num_workers}
    seen, lengths = Counter[int](), set()
    for rank in range(3):
        loader, dataset = open_loader(path, **options, num_ranks=3, rank=rank)
        loader.exclude(named(BAD))
        dataset.set_epoch(1)
        batches = batches_of(loader)
        lengths.add(tuple(map(len, batches)))
        assert len(loader) == len(batches)
        seen.update(itertools.chain(*batches))
        uneven_rows = dataset.get_metrics()
    assert len(lengths) == 1
    dropped, repeated = ids(uneven_rows["uneven_rows_dropped"]), Counter(ids(uneven_rows["uneven_rows_repeated"]))
    assert len(dropped) < 3
    assert seen - repeated == Counter(set(range(ROWS)) - BAD - dropped)


@each_reading
def test_rows_excluded_while_an_epoch_runs_stay_in_its_plan(path, order):
    """Rows of two epochs: those that were excluded before are left out, those of this epoch are lost."""
    options = {**ORDERS[order], "batch_size": 7}
    loader, dataset = open_loader(path, **options)
    first, second = named(BAD)[:30], named(BAD)[30:]
    loader.exclude(first)
    dataset.set_epoch(1)
    as_planned = batches_of(loader)
    loader.exclude(second)
    dataset.set_epoch(0)
    dataset.set_epoch(1)
    assert batches_of(loader) == without(as_planned, ids(second))
    dataset.set_epoch(2)
    assert set(itertools.chain(*batches_of(loader))) == set(range(ROWS)) - BAD


# Resumes over epochs -------------------------------------------------------------------------------------------------


@pairwise(
    most=4, order=ORDERS, rows=[("allow", "all rows"), ("drop", "all rows"), ("pad", "all rows"), ("allow", "filtered")]
)
@pytest.mark.parametrize("run", [0, *(pytest.param(run, marks=pytest.mark.soak) for run in range(1, 40))])
def test_delivered_excluded_and_dropped_rows_are_the_epoch(path, order, rows, run):
    """Any ranks, resumed strictly or elastically at any batches, with rows excluded at any of these moments."""
    uneven, kept = rows
    draw = random.Random(f"{order} {uneven} {kept} {run}")
    options = {**ORDERS[order], "uneven_ranks": uneven, "filters": FILTERS[kept], "batch_size": draw.choice([4, 7, 12])}
    journey = Journey(path, options, draw)
    wanted = set(KEPT if kept == "filtered" else range(ROWS))
    for epoch in range(3):
        left_out = {row for row, since in journey.excluded.items() if since < epoch}
        seen, dropped = Counter[int](), set[int]()
        legs = draw.randint(1, 3)
        for leg in range(legs):
            loaders = journey.opened(epoch)
            taken = journey.delivered(loaders, None if leg == legs - 1 else draw.randint(0, 12))
            assert not set(taken) & journey.excluded.keys()
            seen.update(taken)
            dropped |= ids(loaders[0].dataset.get_metrics().get("uneven_rows_dropped", ()))
        assert set(seen) <= wanted - left_out
        assert set(seen) | journey.excluded.keys() | dropped >= wanted
        assert seen.total() - len(seen) <= (2 * legs if uneven == "pad" else 0)


class Journey:
    """A run that is killed and resumed, by as many ranks or by others, while rows are excluded.

    Attributes:
        excluded: The excluded rows, by the epoch in which they were excluded.
    """

    def __init__(self, path: Path, options: dict[str, Any], draw: random.Random) -> None:
        self._path, self._options, self._draw = path, options, draw
        self._num_ranks = draw.randint(1, 3)
        self._states: list[Any] = []
        self._epoch = 0
        self.excluded: dict[int, int] = {}

    def opened(self, epoch: int) -> list[Any]:
        """Open the loaders of all ranks, where the last ones stood, and exclude rows at one of three moments."""
        strict = self._draw.random() < 0.5
        self._num_ranks = self._num_ranks if strict else self._draw.randint(1, 3)
        new = self._draw.sample(range(ROWS), 25) if self._draw.random() < 0.6 else []
        moment = self._draw.choice(["before the load", "before the epoch", "in the epoch"])
        since = epoch if moment == "in the epoch" else self._epoch
        self.excluded = dict.fromkeys(new, since) | self.excluded
        loaders = []
        for rank in range(self._num_ranks):
            loader, dataset = open_loader(self._path, **self._options, num_ranks=self._num_ranks, rank=rank)
            if moment == "before the load":
                loader.exclude(named(new))
            if self._states:
                loader.load_state_dict(self._states, strict=strict)
            if moment == "before the epoch":
                loader.exclude(named(new))
            dataset.set_epoch(epoch)
            if moment == "in the epoch":
                loader.exclude(named(new))
            loaders.append(loader)
        self._epoch = epoch
        return loaders

    def delivered(self, loaders: Sequence[Any], stop: int | None) -> list[int]:
        """Deliver some batches of each rank, and save the states."""
        rows = [row for loader in loaders for batch in itertools.islice(loader, stop) for row in rows_of(batch)]
        self._states = [through_json(loader.state_dict()) for loader in loaders]
        return rows


# Expressions ---------------------------------------------------------------------------------------------------------

BY_SCORE = (pc.field("score") > 20) & (pc.bit_wise_and(pc.field("value"), 5) == 0)
BY_NAME = [("name", "in", [f"row {row}" for row in BAD])]
MATCHING = {row for row in range(ROWS) if row / 7 > 20 and row & 5 == 0}
EXPRESSIONS: dict[str, tuple[Any, set[int]]] = {
    "expression": (BY_SCORE, MATCHING),
    "conditions": (BY_NAME, BAD),
    "alternatives": ([[("value", "<", 5)], [("value", ">=", 300)]], {*range(5), *range(300, ROWS)}),
}


FORMS: dict[str, dict[str, Any]] = {
    "all columns": {"num_workers": 0},
    "one column": {"num_workers": 2, "columns": ["score"]},
    "row ids alone": {"num_workers": 0, "columns": []},
}


@pairwise(most=4, order=ORDERS, kept=FILTERS, form=FORMS, by=EXPRESSIONS)
def test_batches_lose_the_rows_for_which_an_expression_is_true(path, order, kept, form, by):
    options = {**ORDERS[order], "filters": FILTERS[kept], "batch_size": 7, **FORMS[form]}
    expression, rows = EXPRESSIONS[by]
    as_planned = batches_of(open_loader(path, **options)[1])  # read in this process as planned for workers
    loader, dataset = open_loader(path, **options)
    iterator = iter(loader)
    assert [rows_of(next(iterator)) for _ in range(2)] == as_planned[:2]
    loader.exclude(expression)
    loader.load_state_dict(through_json(loader.state_dict()))
    states, seen = [through_json(loader.state_dict())], []
    for batch in loader:  # of workers, those that had been started do not know the expression
        assert list(batch) == [*options.get("columns", ["value", "score", "name"]), "row"]
        seen.append(rows_of(batch))
        states.append(through_json(loader.state_dict()))
    assert seen == without(as_planned[2:], rows)
    assert dataset.get_metrics()["rows_excluded"] == len(rows & set(itertools.chain(*as_planned[2:])))
    for stop in [0, len(seen) // 2]:
        again = open_loader(path, **options)[0]
        with pytest.raises(
            CheckpointMismatchError, match=r"excludes rows by the expression .* which this run does not"
        ):
            again.load_state_dict(states[stop])
        again.exclude(expression)
        again.load_state_dict(states[stop])
        assert batches_of(again) == seen[stop:]


@pairwise(most=4, order=ORDERS, kept=FILTERS, form=FORMS, by=EXPRESSIONS)
def test_next_epoch_is_read_without_the_rows_for_which_an_expression_is_true(path, order, kept, form, by):
    options = {**ORDERS[order], "filters": FILTERS[kept], "batch_size": 7, **FORMS[form]}
    expression, rows = EXPRESSIONS[by]
    loader, dataset = open_loader(path, **options)
    loader.exclude(expression)
    dataset.set_epoch(1)
    with pytest.raises(TypeError, match=r"only reading tells how many rows the (filter|excluded expression) leaves"):
        len(loader)
    states, seen = [through_json(loader.state_dict())], []
    for batch in loader:
        seen.append(rows_of(batch))
        states.append(through_json(loader.state_dict()))
    assert Counter(itertools.chain(*seen)) == Counter(set(KEPT if kept == "filtered" else range(ROWS)) - rows)
    assert sum(len(batch) < 7 for batch in seen) <= 2
    for stop in [0, len(seen) // 2]:
        again = open_loader(path, **options)[0]
        again.exclude(expression)
        again.load_state_dict(states[stop])
        assert batches_of(again) == seen[stop:]


@each_reading
def test_elastic_loads_go_on_without_what_an_expression_excludes(path, order):
    options = {**ORDERS[order], "batch_size": 7}
    for epoch in (0, 1):
        seen, states = [], []
        for rank in range(3):
            loader, dataset = open_loader(path, **options, num_ranks=3, rank=rank)
            loader.exclude(BY_SCORE)
            loader.exclude(named(BAD))
            dataset.set_epoch(epoch)
            seen += [row for batch in itertools.islice(loader, 4) for row in rows_of(batch)]
            states.append(through_json(loader.state_dict()))
        for rank in range(2):
            loader, _ = open_loader(path, **options, num_ranks=2, rank=rank)
            loader.exclude(BY_SCORE)
            loader.load_state_dict(states, strict=False)
            seen += itertools.chain(*batches_of(loader))
        assert Counter(seen) == Counter(set(range(ROWS)) - BAD - MATCHING)


def test_null_is_not_true(tmp_path):
    values = pa.array([None if row % 3 == 0 else row for row in range(20)], pa.int64())
    pq.write_table(pa.table({"value": values}), tmp_path / "a.parquet")
    loader, dataset = open_loader(tmp_path, columns=[])
    loader.exclude(pc.field("value") > 10)
    wanted = [row for row in range(20) if row % 3 == 0 or row <= 10]
    assert list(itertools.chain(*batches_of(loader))) == wanted
    dataset.set_epoch(1)
    assert list(itertools.chain(*batches_of(loader))) == wanted


@pytest.mark.parametrize("uneven", ["drop", "pad"])
def test_an_expression_is_refused_where_ranks_are_balanced(path, uneven):
    loader, dataset = open_loader(path, uneven_ranks=uneven)
    before = dataset.plan_digest
    with pytest.raises(ValueError, match=f"exclude: uneven_ranks='{uneven}' needs the number of rows"):
        loader.exclude(BY_SCORE)
    assert dataset.plan_digest == before
    assert loader.state_dict()["excluded"] is None


# States and ranks ----------------------------------------------------------------------------------------------------


def test_ranks_that_exclude_differently_have_different_plans_and_states_that_do_not_fit(path):
    opened = [open_loader(path, num_ranks=2, rank=rank, batch_size=8) for rank in range(2)]
    assert opened[0][1].plan_digest == opened[1][1].plan_digest
    opened[0][0].exclude(named([5]))
    assert opened[0][1].plan_digest != opened[1][1].plan_digest
    states = [loader.state_dict() for loader, _ in opened]
    with pytest.raises(RankMismatchError, match=r"ranks \[1\] were saved under other exclusions than rank 0"):
        open_loader(path, num_ranks=1, rank=0)[0].load_state_dict(states, strict=False)
    opened[1][0].exclude({"part-000.parquet": np.array([5, 5], dtype=np.uint8)})
    assert opened[0][1].plan_digest == opened[1][1].plan_digest
    opened[0][0].exclude(BY_SCORE)
    assert opened[0][1].plan_digest != opened[1][1].plan_digest


def test_state_that_lacks_rows_keeps_them_excluded_in_its_own_epoch(path):
    loader, dataset = open_loader(path, batch_size=10)
    dataset.set_epoch(3)
    as_planned = batches_of(open_loader(path, batch_size=10)[0])
    iterator = iter(loader)
    next(iterator)
    state = through_json(loader.state_dict())
    loader.exclude(named(BAD))
    loader.load_state_dict(state)  # rolled back to before the call
    assert batches_of(loader) == without(as_planned[1:], BAD)
    fresh, dataset = open_loader(path, batch_size=10)
    fresh.exclude(named(BAD))  # in epoch 0
    fresh.load_state_dict(state)
    assert batches_of(fresh) == without(as_planned[1:], BAD)
    dataset.set_epoch(4)
    assert len(fresh) == -(-(ROWS - len(BAD)) // 10)


HOSTILE: dict[str, Any] = {
    "no dictionary": [],
    "no list": {"rows": {}, "expressions": []},
    "epoch missing": {"rows": [{"rows": [0, 1]}], "expressions": []},
    "negative epoch": {"rows": [{"epoch": -1, "rows": [0, 1]}], "expressions": []},
    "epochs fall": {"rows": [{"epoch": 2, "rows": [0, 1]}, {"epoch": 1, "rows": [4, 5]}], "expressions": []},
    "a row in two epochs": {"rows": [{"epoch": 1, "rows": [0, 9]}, {"epoch": 2, "rows": [8, 10]}], "expressions": []},
    "an odd number": {"rows": [{"epoch": 0, "rows": [0]}], "expressions": []},
    "no rows": {"rows": [{"epoch": 0, "rows": []}], "expressions": []},
    "texts": {"rows": [{"epoch": 0, "rows": ["0", "1"]}], "expressions": []},
    "booleans": {"rows": [{"epoch": 0, "rows": [False, True]}], "expressions": []},
    "negative row": {"rows": [{"epoch": 0, "rows": [-1, 1]}], "expressions": []},
    "falling rows": {"rows": [{"epoch": 0, "rows": [5, 3]}], "expressions": []},
    "beyond the end": {"rows": [{"epoch": 0, "rows": [0, ROWS + 1]}], "expressions": []},
    "a huge number": {"rows": [{"epoch": 0, "rows": [0, 10**30]}], "expressions": []},
    "no expressions": {"rows": []},
    "delivered is no list": {"rows": [], "expressions": [], "delivered": 3},
    "delivered but not excluded": {"rows": [{"epoch": 0, "rows": [0, 4]}], "expressions": [], "delivered": [3, 5]},
    "delivered falls": {"rows": [{"epoch": 0, "rows": [0, 9]}], "expressions": [], "delivered": [5, 3]},
    "expression without digest": {"rows": [], "expressions": [{"epoch": 0, "text": "x"}]},
    "expression twice": {"rows": [], "expressions": [{"epoch": 0, "digest": "a", "text": "x"}] * 2},
}


@pytest.mark.parametrize("value", HOSTILE)
def test_wrong_value_in_a_state_is_named(path, value):
    loader, _ = open_loader(path)
    loader.exclude(named([3]))
    state = edited(loader.state_dict(), excluded=HOSTILE[value])
    with pytest.raises(ValueError, match=r"not a state of this package: state\['excluded'\]"):
        open_loader(path)[0].load_state_dict(state)


def test_edited_rows_are_noticed_by_the_checksum(path):
    loader, _ = open_loader(path)
    loader.exclude(named([3]))
    state = loader.state_dict()
    state["excluded"]["rows"][0]["rows"] = [4, 5]
    with pytest.raises(ValueError, match="its checksum is"):
        open_loader(path)[0].load_state_dict(state)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "unknown file": ([("part-9.parquet", 0)], ValueError, "has no file 'part-9.parquet'.*did you mean 'part-0"),
    "whole path": ([("/data/part-000.parquet", 0)], ValueError, "has no file '/data/part-000.parquet'; paths are rel"),
    "row too large": ([("part-001.parquet", 3)], ValueError, "part-001.parquet has no row 3: its 3 rows have"),
    "row too small": ({"part-001.parquet": [-1]}, ValueError, "part-001.parquet has no row -1"),
    "range too long": ({"part-001.parquet": range(2, 5)}, ValueError, "part-001.parquet has no row 4"),
    "a huge row": ([("part-001.parquet", 10**30)], ValueError, "part-001.parquet has no row 1000000"),
    "no pairs": ([1, 2], TypeError, "1 is no pair of a path and a row number"),
    "a number": (7, TypeError, "expected pairs of a path and a row number"),
    "a text": ("part-001.parquet", TypeError, "expected pairs of a path and a row number"),
    "no path": ([(1, 2)], TypeError, "1 is int, expected a path"),
    "no row number": ([("part-001.parquet", 1.0)], TypeError, "expected row numbers"),
    "no row numbers": ({"part-001.parquet": 1}, TypeError, "expected row numbers"),
    "booleans": ({"part-001.parquet": [True]}, TypeError, "expected row numbers"),
    "a null among row numbers": ({"part-001.parquet": [1, None]}, TypeError, r"\[1, None\], expected row numbers"),
    "lists of row numbers": ({"part-001.parquet": [[1, 2], [0]]}, TypeError, "expected row numbers"),
    "no column": (pc.field("nam") == "x", ValueError, "there is no column 'nam'"),
    "no condition": (pc.field("value") + 1, ValueError, "not true or false"),
    "wrong operator": ([("value", "~", 1)], ValueError, "expected one of the operators"),
}


@pytest.mark.parametrize("rows", WRONG)
def test_rows_that_do_not_exist_are_named(path, rows):
    loader, _ = open_loader(path)
    value, error, message = WRONG[rows]
    with pytest.raises(error, match=message):
        loader.exclude(value)
    assert loader.state_dict()["excluded"] is None


def test_rows_of_a_path_that_a_mapping_has_twice_are_all_excluded(path):
    loader, _ = open_loader(path, batch_size=ROWS)
    loader.exclude({"part-000.parquet": [1], Path("part-000.parquet"): [2]})
    assert batches_of(loader) == [[row for row in range(ROWS) if row not in {1, 2}]]


def test_messages_name_the_filter_and_the_excluded_expression_beside_it(path):
    loader, dataset = open_loader(path, filters=pc.field("value") < 260)
    loader.exclude(BY_SCORE)
    dataset.set_epoch(1)
    with pytest.raises(LedgerUnknownError, match=r"how many rows the filter with the exclusion of \(\(score > 20"):
        dataset.rows_at(0)


def test_nothing_is_excluded_by_no_rows(path):
    loader, dataset = open_loader(path)
    digest = dataset.plan_digest
    for nothing in ([], {}, iter(()), {"part-000.parquet": []}, {"part-000.parquet": range(0)}):
        loader.exclude(nothing)
    assert loader.state_dict()["excluded"] is None
    assert dataset.plan_digest == digest


def test_rows_of_text_are_named_by_an_expression_unless_they_are_counted(tmp_path):
    (tmp_path / "a.csv").write_text("value\n" + "".join(f"{row}\n" for row in range(50)))
    loader, dataset = open_loader(tmp_path, format="csv", row_id_column=None, batch_size=6)
    with pytest.raises(ValueError, match=r"csv files do not tell how many rows .*; an expression can name them"):
        loader.exclude([("a.csv", 3)])
    loader.exclude(pc.field("value") < 9)
    gone = {*range(9)}
    assert [batch["value"].tolist() for batch in loader] == without(
        [list(range(first, min(first + 6, 50))) for first in range(0, 50, 6)], gone
    )
    dataset.set_epoch(1)
    assert [row for batch in loader for row in batch["value"].tolist()] == [*range(9, 50)]
    counted, dataset = open_loader(tmp_path, format="csv", count_rows=True, batch_size=6)
    counted.exclude([("a.csv", row) for row in (0, 3, 49)])
    assert sum(map(len, batches_of(counted))) == 47
    dataset.set_epoch(1)
    assert len(counted) == 8
    assert [row for batch in counted for row in rows_of(batch)] == [1, 2, *range(4, 49)]


# Skipped steps -------------------------------------------------------------------------------------------------------


@at_few_stops
@pairwise(most=4, order=ORDERS, kept=FILTERS, num_workers=[0, 2], epoch=[0, 1])
def test_skipped_steps_and_excluded_rows_leave_all_others(path, order, kept, num_workers, epoch, stops):  # noqa: PLR0917
    """Rows that are excluded in the epoch, or were before; skipped steps come last, without the excluded rows."""
    options = {**ORDERS[order], "filters": FILTERS[kept], "batch_size": 7}
    before, then = set(list(BAD)[:30]), set(list(BAD)[30:])

    # The epoch that has begun is planned with all rows: its steps keep their numbers, also those that lose all rows.
    gone = then if epoch else before | then

    def opened(excluded: set[int]) -> tuple[Any, Any]:
        loader, dataset = open_loader(path, **options, num_workers=num_workers)
        if excluded:
            loader.exclude(named(excluded))
        dataset.set_epoch(epoch)
        return loader, dataset

    as_planned = batches_of(opened(before - gone)[1])  # read in this process as planned for workers
    loader, _ = opened(before)
    loader.exclude(named(then))
    loader.skip_steps(3, 6)
    skipped = through_json(loader.state_dict())
    loader.restore_skipped()
    parts = (as_planned[:3], as_planned[6:], as_planned[3:6])
    wanted = list(itertools.chain(*(without(part, gone) for part in parts)))
    states, seen = [through_json(loader.state_dict())], []
    for batch in loader:
        seen.append(rows_of(batch))
        states.append(through_json(loader.state_dict()))
    in_own_turn = len(without(parts[0], gone)) + len(without(parts[1], gone))
    assert seen[:in_own_turn] == wanted[:in_own_turn]
    assert Counter(itertools.chain(*seen)) == Counter(itertools.chain(*wanted))
    again = open_loader(path, **options, num_workers=num_workers, persistent_workers=num_workers > 0)[0]
    for stop in stops(states):
        if num_workers == 0:
            again = open_loader(path, **options, num_workers=0)[0]
        again.load_state_dict(states[stop])
        assert batches_of(again) == seen[stop:]
    again = open_loader(path, **options, num_workers=num_workers)[0]
    again.load_state_dict(skipped)
    assert batches_of(again) == seen[:in_own_turn]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("epoch", [0, 1])
def test_skipped_steps_of_an_epoch_from_which_an_expression_leaves_rows_out_are_loaded(path, strict, epoch):
    options = {"shuffle": True, "shuffle_buffer_size": 45, "batch_size": 7}
    loader, dataset = open_loader(path, **options)
    loader.exclude(BY_SCORE)
    dataset.set_epoch(epoch)
    as_planned = batches_of(loader)
    dataset.set_epoch(0)
    dataset.set_epoch(epoch)
    loader.skip_steps(3, 6)
    state = through_json(loader.state_dict())
    again, _ = open_loader(path, **options)
    again.exclude(BY_SCORE)  # in epoch 0: the state's epoch counts
    again.load_state_dict(state, strict=strict)
    wanted = as_planned[:3] + as_planned[6:]
    got = batches_of(again)
    assert Counter(itertools.chain(*got)) == Counter(itertools.chain(*wanted))
    if strict or epoch == 1:  # else the steps' rows are known, and what is left is planned again without them
        assert got == wanted


# Files that changed, and plain loaders ------------------------------------------------------------------------------


@pairwise(most=5, order=ORDERS, epoch=[0, 1])
@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.LostRowsWarning")
def test_rows_of_a_rewritten_file_are_no_longer_excluded(tmp_path, order, epoch):
    """Its row numbers are those of other rows now. Those of other files stay excluded."""
    write_dataset(tmp_path, ((40, 10), (30, 10), (50, 10)))
    options = {**ORDERS[order], "batch_size": 5, "row_id_column": None, "columns": ["value"]}
    loader, dataset = open_loader(tmp_path, **options)
    loader.exclude({"part-000.parquet": [0, 39], "part-001.parquet": range(5, 9)})
    dataset.set_epoch(epoch)
    seen = [row for batch in itertools.islice(loader, 3) for row in batch["value"].tolist()]
    state = through_json(loader.state_dict())
    pq.write_table(pa.table({"value": np.arange(1000, 1020)}), tmp_path / "part-001.parquet")
    again, dataset = open_loader(tmp_path, **options)
    again.exclude({"part-001.parquet": [3]})  # of the new file
    try:
        again.load_state_dict(state, strict=False, on_changed_files="continue")
    except CheckpointMismatchError as error:
        assert "without excluded rows" in str(error)  # noqa: PT017
        assert epoch == 1
        assert again.state_dict()["excluded"]["rows"] == [{"epoch": 0, "rows": [43, 44]}]
        return
    seen += [row for batch in again for row in batch["value"].tolist()]
    assert not {0, 39, *range(45, 49), 1003} & set(seen)
    assert set(range(40)) - {0, 39} <= set(seen)
    assert len(set(seen)) == len(seen)
    dataset.set_epoch(epoch + 1)
    wanted = {*range(40), *range(1000, 1020), *range(70, 120)} - {0, 39, 1003}
    assert sorted(row for batch in again for row in batch["value"].tolist()) == sorted(wanted)


def test_state_with_more_delivered_rows_than_a_shard_has_left_is_refused(path):
    loader, dataset = open_loader(path, batch_size=7, split_rows=60)
    loader.exclude({"part-000.parquet": range(20)})
    dataset.set_epoch(1)
    next(iter(loader))
    state = through_json(loader.state_dict())
    [shard] = state["in_progress"]
    shard["rows_delivered"] = sum(split["row_length"] for split in shard["splits"])
    fresh = open_loader(path, batch_size=7, split_rows=60)[0]
    with pytest.raises(ValueError, match="delivered rows of a shard that has"):
        fresh.load_state_dict(edited(state), strict=False)
    with pytest.raises(CheckpointMismatchError):
        fresh.load_state_dict(edited(state))


@pytest.mark.parametrize("persistent", [False, True])
def test_plain_workers_exclude_the_rows_or_say_that_they_cannot(path, persistent):
    _, dataset = open_loader(path, batch_size=10)
    plain = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=persistent)
    assert sorted(itertools.chain(*batches_of(plain))) == list(range(ROWS))
    dataset.exclude(named(BAD))
    if persistent:
        with pytest.raises(ProgressUnknownError, match="rows were excluded after this plain DataLoader started"):
            batches_of(plain)
        plain = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=persistent)
    assert sorted(itertools.chain(*batches_of(plain))) == sorted(set(range(ROWS)) - BAD)


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.soak)])
def test_workers_however_started_exclude_by_an_expression(path, method):
    loader, dataset = open_loader(path, batch_size=10, num_workers=2, multiprocessing_context=method)
    loader.exclude(BY_SCORE)
    dataset.set_epoch(1)
    assert sorted(itertools.chain(*batches_of(loader))) == sorted(set(range(ROWS)) - MATCHING)


# The ledger and the fingerprint ---------------------------------------------------------------------------------------


def require_ledger(loader: Any, dataset: Any, steps: dict[int, list[int]], epoch: int) -> None:
    """Compare what the ledger answers with the rows of all steps; those that are not there have none left."""
    for step in range(max(steps) + 1):
        rows = steps.get(step, [])
        assert [next(iter(ids([row]))) for row in dataset.rows_at(step, epoch)] == rows
        for place, row in enumerate(rows):
            [(path, number)] = named([row])
            found = dataset.step_of(path, number, epoch)
            assert (found.step, found.place) == (step, place)
        if rows:
            if step % 8 == 0:  # it reads the files, so some steps must do
                assert rows_of(loader.batch_at(step, epoch)) == rows
        else:
            with pytest.raises(ValueError, match=f"step={step}: all rows of this step are excluded"):
                loader.batch_at(step, epoch)


@pairwise(most=4, order=ORDERS, balanced=["uneven", "grid dropped"])
def test_ledger_answers_without_the_rows(fewer, order, balanced):
    bad = {row for row in BAD if row < FIRST[3]} | {FIRST[3] - 1}
    options = {**ORDERS[order], **BALANCED[balanced], "batch_size": 8}
    as_planned = batches_of(open_loader(fewer, **options)[0])
    loader, dataset = open_loader(fewer, **options)
    iterator = iter(loader)
    seen = dict(enumerate([rows_of(next(iterator)), rows_of(next(iterator))]))
    loader.exclude(named(bad))
    loader.load_state_dict(through_json(loader.state_dict()))
    steps = {step: [row for row in rows if row not in bad] for step, rows in enumerate(as_planned)} | seen
    require_ledger(loader, dataset, {step: rows for step, rows in steps.items() if rows}, 0)  # before it is delivered
    assert batches_of(loader) == without(as_planned[2:], bad)
    require_ledger(loader, dataset, {step: rows for step, rows in steps.items() if rows}, 0)
    for row in bad - set(itertools.chain(*as_planned[:2])):
        assert dataset.step_of(*named([row])[0], 0) is None
    upcoming = [sorted(ids(dataset.rows_at(step, 1))) for step in range(3)]
    dataset.set_epoch(1)
    batches = batches_of(loader)
    assert [sorted(batch) for batch in batches[:3]] == upcoming
    require_ledger(loader, dataset, dict(enumerate(batches)), 1)
    assert all(dataset.step_of(*named([row])[0], 1) is None for row in bad)


def test_ledger_does_not_know_from_which_step_on_another_rank_excludes(path):
    """The ranks' states stand at different steps, and rank 1 delivers excluded rows before its own."""
    taken, opened, delivered = (2, 5), [], []
    for rank, batches in enumerate(taken):
        loader, dataset = open_loader(path, batch_size=8, num_ranks=2, rank=rank)
        seen = [rows_of(batch) for batch in itertools.islice(iter(loader), batches)]
        loader.exclude(named(BAD))
        loader.load_state_dict(through_json(loader.state_dict()))
        opened.append(dataset)
        delivered.append(seen + batches_of(loader))
    unknown = 0
    for step, rows in enumerate(delivered[1][: taken[1]]):
        assert [next(iter(ids([row]))) for row in opened[1].rows_at(step)] == rows  # its own rank knows
        lost = sorted(BAD.intersection(rows))
        if not lost:
            assert [next(iter(ids([row]))) for row in opened[0].rows_at(step, rank=1)] == rows
            continue
        unknown += 1
        with pytest.raises(LedgerUnknownError, match=f"step {step} of rank 1 has rows that were excluded in epoch 0"):
            opened[0].rows_at(step, rank=1)
        with pytest.raises(LedgerUnknownError, match="of rank 1 is not known here"):
            opened[0].step_of(*named(lost[:1])[0])
    assert unknown


@pytest.mark.parametrize("moment", ["before the load", "after the load"])
def test_ledger_knows_from_which_step_on_all_ranks_exclude_whose_states_are_of_one_step(path, moment):
    """Each rank loads the states of all ranks."""
    ranks = [open_loader(path, batch_size=8, num_ranks=3, rank=rank) for rank in range(3)]
    delivered = [[rows_of(batch) for batch in itertools.islice(iter(loader), 4)] for loader, _ in ranks]
    states = [through_json(loader.state_dict()) for loader, _ in ranks]
    ranks = [open_loader(path, batch_size=8, num_ranks=3, rank=rank) for rank in range(3)]
    for number, (loader, _) in enumerate(ranks):
        if moment == "before the load":
            loader.exclude(named(BAD))
        loader.load_state_dict(states)
        if moment == "after the load":
            loader.exclude(named(BAD))
        delivered[number] += batches_of(loader)
    steps = [range(loader.state_dict()["batches_delivered"]) for loader, _ in ranks]
    for _, dataset in ranks:
        for rank, batches in enumerate(delivered):
            planned = [[next(iter(ids([row]))) for row in dataset.rows_at(step, rank=rank)] for step in steps[rank]]
            assert [rows for rows in planned if rows] == batches
            for step in (0, 3):
                found = dataset.step_of(*named(batches[step][:1])[0])
                assert (found.step, found.rank) == (step, rank)


@pairwise(most=4, order=ORDERS, strict=[True, False])
def test_ledger_knows_of_rows_that_are_excluded_between_a_load_and_its_iteration(path, order, strict):
    options = {**ORDERS[order], "batch_size": 8}
    loader, _ = open_loader(path, **options)
    for _ in itertools.islice(loader, 5):
        pass
    state = through_json(loader.state_dict())
    loader, dataset = open_loader(path, **options)
    loader.load_state_dict(state, strict=strict)
    loader.exclude(named(BAD))
    planned = [sorted(ids(dataset.rows_at(step))) for step in range(5, 12)]
    batches = {}
    for batch in loader:
        batches[loader.state_dict()["batches_delivered"] - 1] = rows_of(batch)
    assert planned == [sorted(batches.get(step, [])) for step in range(5, 12)]
    for step, rows in batches.items():
        assert [next(iter(ids([row]))) for row in dataset.rows_at(step)] == rows
        assert dataset.step_of(*named(rows[-1:])[0]).step == step
    assert BAD & set(itertools.chain(*planned)) == set()


@pairwise(most=5, order=ORDERS, first=[0, 4], has_begun=[False, True], with_log=[False, True])
def test_ledger_knows_in_another_process_what_the_batches_before_a_state_lost(  # noqa: PLR0917
    path, tmp_path, order, first, has_begun, with_log
):
    options = {**ORDERS[order], "batch_size": 7, **({"run_log": tmp_path / "log"} if with_log else {})}
    loader, _ = open_loader(path, **options)
    delivered = [rows_of(batch) for batch in itertools.islice(loader, first)]
    loader.load_state_dict(through_json(loader.state_dict()))
    lost = [*BAD, *(delivered[0][:2] if delivered else [])]  # of these the second ones were delivered
    loader.exclude(named(lost))
    planned = [rows_of(batch) for batch in open_loader(path, **{**ORDERS[order], "batch_size": 7})[0]]
    delivered += without(planned[first:9], lost)
    for batch in itertools.islice(loader, len(delivered) - first):
        assert rows_of(batch) in delivered
    state = through_json(loader.state_dict())
    again, dataset = open_loader(path, **options)
    if has_begun:
        next(iter(again))
    again.load_state_dict(state)
    steps = [step for step in range(9) if not set(planned[step]) <= set(lost) or step < first]
    for step, rows in zip(steps, delivered, strict=True):
        assert [next(iter(ids([row]))) for row in dataset.rows_at(step)] == rows
        found = dataset.step_of(*named(rows[-1:])[0])
        assert (found.step, found.place) == (step, len(rows) - 1)
    for row in BAD:
        found = dataset.step_of(*named([row])[0])
        assert (found is not None) == any(row in batch for batch in delivered[:first])


def test_ledger_answers_for_an_iterator_that_began_before_rows_were_excluded(path):
    loader, dataset = open_loader(path, batch_size=8)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    loader.exclude(named(BAD))
    for step, batch in enumerate(iterator, 3):
        assert [next(iter(ids([row]))) for row in dataset.rows_at(step)] == rows_of(batch)


def test_ledger_scans_where_an_expression_left_rows_out(path):
    loader, dataset = open_loader(path, shuffle=True, shuffle_buffer_size=45, batch_size=7)
    loader.exclude(BY_SCORE)
    with pytest.raises(LedgerUnknownError, match="only reading tells which; batch_at"):
        dataset.rows_at(0, scan=True)
    assert rows_of(loader.batch_at(3)) == [row for row in batches_of(loader)[3] if row not in MATCHING]
    loader.exclude(named(BAD))
    dataset.set_epoch(1)
    rows = r"how many rows the exclusion of .+ leaves"
    with pytest.raises(
        LedgerUnknownError, match=rf"{rows}; scan=True reads the columns that the exclusion of \(\(score"
    ):
        dataset.rows_at(0)
    upcoming = [[next(iter(ids([row]))) for row in dataset.rows_at(step, scan=True)] for step in range(5)]
    batches = batches_of(loader)
    assert batches[:5] == upcoming
    for place, row in enumerate(batches[4]):
        found = dataset.step_of(*named([row])[0], scan=True)
        assert (found.step, found.place) == (4, place)
    assert rows_of(loader.batch_at(4, scan=True)) == batches[4]
    assert dataset.step_of(*named([min(BAD)])[0], scan=True) is None


@pairwise(most=4, order=ORDERS, num_workers=[0, 2], balanced=["uneven", "grid padded"])
def test_fingerprint_is_that_of_the_rows_that_were_delivered(path, order, num_workers, balanced):
    options = {**ORDERS[order], **BALANCED[balanced], "batch_size": 8, "num_workers": num_workers}
    grid = balanced != "uneven"
    loader, dataset = open_loader(path, **options, fingerprint=True)
    loader.exclude(named(BAD))
    for epoch in (0, 1):
        dataset.set_epoch(epoch)
        batches = batches_of(loader)
        assert batches
        rows = [row for batch in batches for row in batch]
        hashes = dataset.get_metrics()["delivered_hash"]
        assert sum(entry["rows"] for entry in hashes) == len(rows)
        if not grid:
            assert hashes == [entry_of(loader.state_dict()["files"], rows)]


@pytest.mark.parametrize(
    "rows",
    [pa.array([1, 2]), pa.chunked_array([[1], [2]]), np.array([1, 2], object)],
    ids=["an array", "chunks", "objects"],
)
def test_row_numbers_may_be_a_column_of_arrow_or_objects(path, rows):
    loader, dataset = open_loader(path)
    dataset.exclude({"part-001.parquet": rows})
    assert set(range(ROWS)) - set(itertools.chain(*batches_of(loader))) == {FIRST[1] + 1, FIRST[1] + 2}


def test_what_a_grid_delivered_before_it_was_excluded_stays_known_after_a_strict_load_under_fewer_ranks(path):
    options = {"virtual_ranks": 4, "virtual_workers": 1, "uneven_ranks": "drop"}
    states, delivered = [], []
    for rank in range(2):
        loader, _ = open_loader(path, rank=rank, num_ranks=2, batch_size=8, **options)
        delivered += [rows_of(batch) for batch in itertools.islice(loader, 2)]
        loader.exclude({"part-000.parquet": range(40)})
        loader.load_state_dict(loader.state_dict())
        states.append(loader.state_dict())
    seen = {row for rows in delivered for row in rows}
    assert seen & set(range(40))
    loader, dataset = open_loader(path, batch_size=16, **options)
    loader.load_state_dict(states)
    total = audit(loader.state_dict(), str(path)).total
    assert (total.done + total.under_way, total.excluded) == (len(seen), len(set(range(40)) - seen))
    assert all(dataset.step_of(path, row) is not None for path, row in named(seen))
    assert [sorted(dataset.rows_at(1, rank=rank).rows) for rank in range(2)] == [
        sorted(delivered[1]),
        sorted(delivered[3]),
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_grid_whose_ranks_passed_over_different_steps_is_loaded_again_by_planning_the_rest(path, ranks):
    def grid(num_ranks: int) -> list[Any]:
        options = {"virtual_ranks": 2, "virtual_workers": 1, "uneven_ranks": "drop", "global_batch_size": 8}
        return [
            open_loader(path, num_ranks=num_ranks, rank=rank, batch_size=None, **options)[0]
            for rank in range(num_ranks)
        ]

    loaders = grid(2)
    emptied = list(loaders[1].dataset.rows_at(3))
    for loader in loaders:
        loader.exclude(emptied)
    seen = [row for loader in loaders for batch in itertools.islice(loader, 4) for row in rows_of(batch)]
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    assert [state["batches_delivered"] for state in states] == [4, 5]
    resumed = grid(ranks)
    for loader in resumed:
        with pytest.raises(CheckpointMismatchError, match=r"(?s)rank 0 step 4, rank 1 step 5.*strict=False"):
            loader.load_state_dict(states)
        load_gathered(loader, states)
    seen += [row for loader in resumed for batch in loader for row in rows_of(batch)]
    assert len(set(seen)) == len(seen)
    whole = {row for loader in grid(2) for batch in loader for row in rows_of(batch)}
    lost = {FIRST[int(name.split("-")[1].split(".")[0])] + row for name, row in emptied}
    assert set(seen) == whole - lost
