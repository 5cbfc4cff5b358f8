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
import pytest
from pairwise import pairwise
from support import batches_of, open_loader, rows_of, write_dataset

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

FILES = ((90, 10), (3, 10), (131, 20), (40, 7), (60, 60))
ROWS = sum(rows for rows, _ in FILES)
FIRST = [0, *itertools.accumulate(rows for rows, _ in FILES)]

ORDERS: dict[str, dict[str, Any]] = {
    "in order": {},
    "shards shuffled": {"shuffle": True},
    "rows shuffled": {"shuffle": True, "shuffle_buffer_size": 45},
    "rows shuffled in rounds": {"shuffle": True, "shuffle_buffer_size": 8, "shuffle_interleave": 3},
}
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


@pairwise(most=12, order=ORDERS, kept=FILTERS, num_workers=[0, 2], output_format=["torch", "numpy", "arrow", "dict"])
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
    plain, _ = open_loader(path, **options, num_workers=num_workers)
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


@pairwise(most=10, order=ORDERS, num_workers=[0, 2], balanced=BALANCED)
def test_state_after_any_batch_goes_on_without_the_rows(path, order, num_workers, balanced):
    options: dict[str, Any] = {**ORDERS[order], **BALANCED[balanced], "batch_size": 8, "num_workers": num_workers}
    as_planned = batches_of(open_loader(path, **options)[0])
    loader = open_loader(path, **options)[0]
    loader.exclude(named(BAD))
    states, seen = [through_json(loader.state_dict())], []
    for batch in loader:
        seen.append(rows_of(batch))
        states.append(through_json(loader.state_dict()))
    assert seen == without(as_planned, BAD)
    last = through_json(loader.state_dict())  # of the end: empty steps may have followed the last batch
    for stop in [0, 1, 5, len(seen) // 2, len(seen) - 1]:
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
    pa.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=13)
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


@pairwise(most=12, order=ORDERS, kept=FILTERS, num_workers=[0, 2], files=["numbers known", "text"])
def test_next_epoch_is_planned_without_the_rows(path, order, kept, num_workers, files):
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
    for stop in [0, 1, len(batches) // 2, len(batches) - 1]:
        again = open_loader(path, **options)[0]
        again.load_state_dict(states[stop])
        assert batches_of(again) == batches[stop:]


@pairwise(most=8, order=ORDERS, uneven=["drop", "pad"], num_workers=[0, 2])
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


@pytest.mark.parametrize("order", ORDERS)
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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("uneven", "kept"), [("allow", "all rows"), ("drop", "all rows"), ("pad", "all rows"), ("allow", "filtered")]
)
@pytest.mark.parametrize("run", [0, 1, *(pytest.param(run, marks=pytest.mark.soak) for run in range(2, 40))])
def test_delivered_excluded_and_dropped_rows_are_the_epoch(path, order, uneven, kept, run):
    """Any ranks, resumed strictly or elastically at any batches, with rows excluded at any of these moments."""
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
            rows = journey.delivered(loaders, None if leg == legs - 1 else draw.randint(0, 12))
            assert not set(rows) & journey.excluded.keys()
            seen.update(rows)
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
