"""A function that makes other rows of rows: more, fewer or none. Each of them once, however it is stopped."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest
from pairwise import pairwise
from stops import each_stop
from support import write_dataset

from torch_dataloader_utils import (
    CheckpointMismatchError,
    ColumnError,
    LedgerUnknownError,
    LostRowsWarning,
    MixedDataset,
    Padded,
    Source,
    StructuredDataset,
    TransformError,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

FILES = ((40, 10), (3, 10), (61, 20), (20, 7), (24, 24))
ROWS = sum(rows for rows, _ in FILES)
ORDERS: dict[str, dict[str, Any]] = {
    "in order": {},
    "shards shuffled": {"shuffle": True},
    "row groups in parts": {"read_ahead_bytes": 300},
    "rows shuffled": {"shuffle": True, "shuffle_buffer_size": 45},
    "rows shuffled in rounds": {"shuffle": True, "shuffle_buffer_size": 8, "shuffle_interleave": 3},
}


def counts_of(makes: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return how many rows are made of each row."""
    if makes == "three of each":
        return np.full_like(rows, 3)
    if makes == "none of some row groups":
        return np.where((rows < 20) | (rows >= 90), 0, 2)
    if makes == "none at all":
        return np.zeros_like(rows)
    return np.where(rows == 37, 1000, 1)  # "a thousand of one"


MAKES = ("three of each", "none of some row groups", "none at all", "a thousand of one")


@dataclass(frozen=True)
class Making:
    """Makes of each row as many as it says, each with the row's number and its own. At module level: it is pickled."""

    makes: str

    def __call__(self, table: pa.Table) -> pa.Table:
        rows = table["value"].to_numpy()
        counts = counts_of(self.makes, rows)
        firsts = np.cumsum(counts) - counts
        parts = np.arange(counts.sum()) - np.repeat(firsts, counts)
        return pa.table({"row": np.repeat(rows, counts), "part": pa.array(parts, pa.int64())})


def wanted(makes: str) -> Counter[tuple[int, int]]:
    counts = counts_of(makes, np.arange(ROWS))
    return Counter((row, part) for row in range(ROWS) for part in range(counts[row]))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    assert write_dataset(directory, FILES) == ROWS
    return directory


@pytest.fixture(scope="module")
def text(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("text")
    for file in sorted(path.iterdir()):
        pcsv.write_csv(pq.read_table(file, columns=["value", "score"]), directory / f"{file.stem}.csv")
    return directory


def opened(path: Path, makes: str = "three of each", **options: Any) -> Any:
    given = {"transform": Making(makes), "columns": ["value"], "batch_size": 50, "num_workers": 0, **options}
    return StructuredDataset.create_dataloader(path, **given)[0]


def all_ranks(path: Path, makes: str, ranks: int, workers: int, **options: Any) -> list[Any]:
    return [opened(path, makes, num_ranks=ranks, rank=rank, num_workers=workers, **options) for rank in range(ranks)]


def contents(batch: Any) -> list[tuple[int, int]]:
    return list(zip(batch["row"].tolist(), batch["part"].tolist(), strict=True))


def saved(loader: Any) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


@each_stop
@pairwise(most=5, makes=MAKES, order=ORDERS, num_workers=[0, 2])
def test_stopped_at_every_batch_and_loaded_again_it_delivers_the_batches_to_come(
    path, makes, order, num_workers, stops
):
    options = {**ORDERS[order], "num_workers": num_workers}
    loader = opened(path, makes, **options)
    whole, states = [], [saved(loader)]
    for batch in loader:
        whole.append(contents(batch))
        states.append(saved(loader))
    assert Counter(itertools.chain(*whole)) == wanted(makes)
    short = sum(len(batch) < 50 for batch in whole)
    assert short <= max(1, num_workers)
    again = opened(path, makes, **options, persistent_workers=num_workers > 0)
    for number in stops(states):
        again.load_state_dict(states[number])
        assert [contents(batch) for batch in again] == whole[number:], number


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
@pairwise(
    most=5,
    makes=MAKES,
    order=ORDERS,
    topologies=[((1, 0), (3, 0)), ((3, 0), (2, 0)), ((2, 2), (1, 0)), ((2, 0), (1, 3))],
)
def test_other_ranks_and_workers_deliver_what_is_left_after_every_stop(path, makes, order, topologies, every):
    before, after = topologies
    has_workers = bool(before[1] + after[1])
    longest = wanted(makes).total() // 50 // before[0] + 3
    moments = []  # of each rank: what was delivered so far, and the state
    for one in all_ranks(path, makes, *before, **ORDERS[order]):
        delivered: list[tuple[int, int]] = []
        batches = itertools.islice(one, longest)
        moments.append([(delivered, saved(one))])  # after the iteration has begun
        for batch in batches:
            delivered = delivered + contents(batch)
            moments[-1].append((delivered, saved(one)))
        moments[-1].append((delivered, saved(one)))  # the loader may know now that it ended
    for stop in sorted({*range(0, longest, 4 if has_workers else every), longest - 1}):
        stopped = [moments[rank][: max(0, stop - rank) + 1][-1] for rank in range(before[0])]
        rows = [row for delivered, _ in stopped for row in delivered]
        states = [state for _, state in stopped]
        others = all_ranks(path, makes, *after, **ORDERS[order])
        for one in others:
            one.load_state_dict(states, strict=False)
        # a second elastic load in the middle: windows that others have left have a beginning and an end
        rows += [row for one in others for batch in itertools.islice(one, 1) for row in contents(batch)]
        states = list(map(saved, others))
        last = all_ranks(path, makes, *before, **ORDERS[order])
        for one in last:
            one.load_state_dict(states, strict=False)
        rows += [row for one in last for batch in one for row in contents(batch)]
        assert Counter(rows) == wanted(makes), stop


@pytest.mark.parametrize("count_rows", [False, True], ids=["uncounted", "counted"])
def test_the_rows_of_text_are_made_into_others_too(text, count_rows):
    options = {"format": "csv", "count_rows": count_rows, "split_bytes": 300}
    loader = opened(text, "three of each", **options)
    seen: Counter[tuple[int, int]] = Counter()
    for number, batch in enumerate(loader):
        seen.update(contents(batch))
        again = opened(text, "three of each", **options)
        again.load_state_dict(saved(loader))
        assert seen + Counter(row for later in again for row in contents(later)) == wanted("three of each"), number
        others = all_ranks(text, "three of each", 2, 0, **options)
        for one in others:
            one.load_state_dict([saved(loader)], strict=False)
        rest = Counter(row for one in others for later in one for row in contents(later))
        assert seen + rest == wanted("three of each"), number
    assert seen == wanted("three of each")


def test_it_sees_what_the_filter_leaves_with_row_ids_and_what_it_returns_is_delivered(path):
    seen = []

    def lists(table: pa.Table) -> pa.Table:
        seen.append(table)
        ids = table["id"].to_pylist()
        values = pa.array([[number] * (number % 4) for number in ids], pa.list_(pa.int32()))
        return pa.table({"tokens": values, "from": table["id"], "text": pa.array(map(str, ids), pa.string())})

    options = {"transform": lists, "row_id_column": "id", "filters": pc.field("value") >= 30, "columns": ["value"]}
    options |= {"column_formats": {"tokens": Padded(-1, 4)}, "batch_size": 40, "num_workers": 0, "shuffle": True}
    loader, dataset = StructuredDataset.create_dataloader(path, **options)
    assert [table.num_rows for table in seen] == [0]
    assert seen[0].column_names == ["value", "id"]
    assert dataset.schema.names == ["tokens", "from", "text"]
    ids = []
    for batch in loader:
        assert batch["tokens"].shape[1] == 4
        assert batch["tokens"].tolist() == [
            [number] * (number % 4) + [-1] * (4 - number % 4) for number in batch["from"].tolist()
        ]
        ids += batch["from"].tolist()
    assert sorted(ids) == list(range(30, ROWS))
    assert all(min(table["value"].to_pylist()) >= 30 for table in seen[1:])


def test_nulls_that_it_fills_are_no_error_and_those_that_it_makes_are(tmp_path):
    pq.write_table(pa.table({"x": pa.array([1, None, 3])}), tmp_path / "a.parquet")

    def filling(table: pa.Table) -> pa.Table:
        return pa.table({"x": pc.fill_null(table["x"], 0)})

    def nulling(table: pa.Table) -> pa.Table:
        return pa.table({"x": pc.if_else(pc.equal(table["x"], 3), pa.scalar(None, pa.int64()), table["x"])})

    loader, _ = StructuredDataset.create_dataloader(tmp_path, transform=filling, num_workers=0)
    assert next(iter(loader))["x"].tolist() == [1, 0, 3]
    loader, _ = StructuredDataset.create_dataloader(tmp_path, transform=nulling, num_workers=0)
    with pytest.raises(ColumnError, match=r"column 'x' holds 2 nulls.*row group 0 of .*a\.parquet"):
        next(iter(loader))
    loader, _ = StructuredDataset.create_dataloader(tmp_path, transform=nulling, num_workers=0, fill_nulls={"x": 7})
    assert next(iter(loader))["x"].tolist() == [1, 7, 7]


# Errors --------------------------------------------------------------------------------------------------------------


def returns_a_list(table: pa.Table) -> Any:
    return table.to_pylist()


def misses_a_column(table: pa.Table) -> pa.Table:
    return table.select(["tokens"])


def forgets_types(table: pa.Table) -> pa.Table:
    return pa.table({"tokens": pa.array([[value] for value in table["value"].to_pylist()])})


def has_two_of_one_name(table: pa.Table) -> pa.Table:
    return pa.Table.from_arrays([table["value"], table["value"]], names=["x", "x"])


def has_no_columns(table: pa.Table) -> pa.Table:
    return table.select([])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (returns_a_list, r"it returned \[\], expected a pyarrow.Table"),
        (misses_a_column, "it failed for a table without rows, .*KeyError"),
        (forgets_types, "column 'tokens' has the type null, .*give it its type"),
        (has_two_of_one_name, "its table has 2 columns 'x'"),
        (has_no_columns, "it returned one without columns"),
    ],
    ids=["a list", "an error", "no types", "two of a name", "no columns"],
)
def test_what_is_wrong_without_rows_is_an_error_at_once(path, function, message):
    with pytest.raises(TransformError, match=message) as raised:
        StructuredDataset.create_dataloader(path, transform=function, num_workers=0)
    assert (function is misses_a_column) == isinstance(raised.value.__cause__, KeyError)


@dataclass(frozen=True)
class FailingAt:
    """Does something else for the row group that has a row."""

    row: int
    how: str

    def __call__(self, table: pa.Table) -> pa.Table:
        if self.row not in table["value"].to_pylist():
            return table.select(["value"])
        if self.how == "raises":
            raise OSError("no vocabulary")
        return (
            None if self.how == "returns nothing" else table.select(["value"]).cast(pa.schema([("value", pa.int8())]))
        )


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "it failed for rows of {}: OSError: no vocabulary"),
        ("returns nothing", "for rows of {}, it returned None, expected a pyarrow.Table"),
        ("returns other types", r"for rows of {}, it returned the columns 'value' \(int8\), .*'value' \(int64\)"),
    ],
    ids=["an error", "nothing", "other types"],
)
@pytest.mark.parametrize("order", ["in order", "rows shuffled in rounds"])
def test_what_is_wrong_later_names_the_row_group_and_its_file(path, num_workers, how, message, order):
    options = {"columns": ["value"], "num_workers": num_workers, "batch_size": 5, **ORDERS[order]}
    loader, _ = StructuredDataset.create_dataloader(path, transform=FailingAt(25, how), **options)
    first = min(path.iterdir())
    with pytest.raises(TransformError, match=message.format(f"row group 2 of {first}")) as raised:
        list(loader)
    if num_workers == 0 and how == "raises":
        assert isinstance(raised.value.__cause__, OSError)


def test_fewer_rows_of_a_shard_than_were_delivered_are_named(path):
    for order in ("in order", "rows shuffled", "rows shuffled in rounds"):
        loader = opened(path, **ORDERS[order], split_rows=200)
        next(iter(loader))
        state = saved(loader)
        again = opened(path, "none at all", **ORDERS[order], split_rows=200)
        again.load_state_dict(state)
        with pytest.raises(
            TransformError, match=r"it makes 0 rows of the shard that begins with row \d+ of part.*records \d+"
        ):
            list(again)


def test_the_transform_is_known_by_its_id_and_by_being_there(path):
    def state_of(**options: Any) -> Any:
        loader = StructuredDataset.create_dataloader(path, num_workers=0, columns=["value"], **options)[0]
        next(iter(loader))
        return saved(loader)

    named, unnamed, plain = (
        {"transform": Making("three of each"), "transform_id": "v1"},
        {"transform": Making("three of each")},
        {},
    )
    other = named | {"transform_id": "v2"}
    for strict in (True, False):
        for saving, loading, names in (
            (named, other, {"transform_id"}),
            (named, unnamed, {"transform_id"}),
            (named, plain, {"transform_id", "unit"}),
            (unnamed, plain, {"transform_id", "unit"}),
            (plain, unnamed, {"transform_id", "unit"}),
        ):
            loader, _ = StructuredDataset.create_dataloader(path, num_workers=0, columns=["value"], **loading)
            with pytest.raises(
                CheckpointMismatchError, match="use the transform that the checkpoint was saved with"
            ) as raised:
                loader.load_state_dict([state_of(**saving)], strict=strict)
            assert {difference.name for difference in raised.value.differences} == names
        loader, _ = StructuredDataset.create_dataloader(path, num_workers=0, columns=["value"], **named)
        loader.load_state_dict([state_of(**named)], strict=strict)
    assert state_of(**named)["plan"]["transform_id"] == "v1"
    assert "transform_id" not in state_of()["plan"]


# What has to know the rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"uneven_ranks": "drop"}, "with a filter or a transform only reading tells.*in_step"),
        ({"uneven_ranks": "pad"}, "with a filter or a transform only reading tells.*in_step"),
        ({"fingerprint": True}, "fingerprint=True"),
        ({"transform": None, "transform_id": "v1"}, "transform_id='v1'"),
        ({"transform_id": ""}, "transform_id=''"),
    ],
    ids=["drop", "pad", "fingerprint", "an id alone", "an empty id"],
)
def test_what_needs_the_rows_of_files_is_refused(path, options, message):
    with pytest.raises(ValueError, match=message):
        opened(path, **options)


def test_a_mixture_wants_it_of_each_source(path):
    with pytest.raises(TypeError, match="transform: give that to each source"):
        MixedDataset.create_dataloader({"a": Source(path)}, weights={"a": 1}, transform=Making("none at all"))


def test_lengths_the_ledger_and_exclusions_say_that_they_do_not_know(path):
    loader = opened(path)
    with pytest.raises(TypeError, match="only reading tells how many rows the transform makes"):
        len(loader)
    dataset = loader.dataset
    name = min(path.iterdir()).name
    for scan in (False, True):
        with pytest.raises(LedgerUnknownError, match="only reading tells how many rows the transform makes"):
            dataset.rows_at(0, scan=scan)
        with pytest.raises(LedgerUnknownError, match="only reading tells how many rows the transform makes"):
            dataset.step_of(name, 0, scan=scan)
        with pytest.raises(LedgerUnknownError, match="only reading tells how many rows the transform makes"):
            loader.batch_at(0, scan=scan)
    with pytest.raises(ValueError, match="exclude is not possible with a transform"):
        dataset.exclude([(name, 3)])


@pytest.mark.parametrize("order", ["in order", "rows shuffled in rounds"])
def test_skipped_steps_are_read_and_thrown_away_and_can_be_restored(path, order):
    whole = [contents(batch) for batch in opened(path, **ORDERS[order])]
    loader = opened(path, **ORDERS[order])
    loader.dataset.skip_steps(2, 4)
    seen, states = [], []
    for batch in loader:
        seen.append(contents(batch))
        states.append(saved(loader))
    assert seen == [*whole[:2], *whole[4:]]
    for number, state in enumerate(states):
        again = opened(path, **ORDERS[order])
        again.load_state_dict(state)
        again.dataset.restore_skipped()
        rest = Counter(row for batch in again for row in contents(batch))
        assert rest + Counter(itertools.chain(*seen[: number + 1])) == wanted("three of each"), number
        others = all_ranks(path, "three of each", 2, 0, **ORDERS[order])
        for one in others:
            one.load_state_dict([state], strict=False)
        left = Counter(row for one in others for batch in one for row in contents(batch))
        if number >= 2:
            assert left == Counter(itertools.chain(*seen[number + 1 :])), number


@pytest.mark.parametrize("order", ["in order", "rows shuffled in rounds"])
def test_a_state_between_restored_steps_loads(path, order):
    loader = opened(path, **ORDERS[order])
    loader.dataset.skip_steps(1, 6)
    loader.dataset.restore_skipped()
    seen: Counter[tuple[int, int]] = Counter()
    states = []
    for batch in loader:
        seen.update(contents(batch))
        states.append((Counter(seen), saved(loader)))
    assert seen == wanted("three of each")
    for before, state in states:
        again = opened(path, **ORDERS[order])
        again.load_state_dict(state)
        assert before + Counter(row for batch in again for row in contents(batch)) == seen


# Workers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["forkserver", pytest.param("spawn", marks=pytest.mark.soak)])
def test_workers_that_are_not_forked_from_this_process_get_it_pickled(path, start):
    loader = opened(path, num_workers=1, multiprocessing_context=start)
    assert Counter(row for batch in loader for row in contents(batch)) == wanted("three of each")
    assert Counter(row for batch in pickle.loads(pickle.dumps(loader.dataset)) for row in contents(batch)) == wanted(
        "three of each"
    )


def rows_in(batches: Sequence[Any]) -> int:
    return sum(len(batch["row"]) for batch in batches)


def test_batches_stay_full_and_metrics_count_the_rows_that_are_delivered(path):
    loader = opened(path, "a thousand of one", batch_size=64)
    batches = list(loader)
    assert {len(batch["row"]) for batch in batches[:-1]} == {64}
    metrics = loader.dataset.get_metrics()
    assert metrics["rows_delivered"] == rows_in(batches) == ROWS + 999


def test_a_file_that_changed_is_left_out_unless_its_rows_are_mixed_with_others(path, tmp_path):
    """Of a shard that was partly delivered, nothing tells which of its rows the delivered ones were made of."""
    for order, is_refused in (("in order", False), ("rows shuffled", True)):
        data = tmp_path / order
        shutil.copytree(path, data)
        loader = opened(data, **ORDERS[order], batch_size=30)
        delivered = Counter(row for batch in itertools.islice(loader, 2) for row in contents(batch))
        state = saved(loader)
        last = max(data.iterdir()) if order == "in order" else min(data.iterdir())
        pq.write_table(pq.read_table(last).slice(1), last)
        again = opened(data, **ORDERS[order])
        if is_refused and state["in_progress"]:
            with pytest.raises(CheckpointMismatchError, match="as transformed rows: which of the others"):
                again.load_state_dict([state], strict=False, on_changed_files="continue")
            continue
        with pytest.warns(LostRowsWarning, match="24 rows can no longer be delivered"):
            again.load_state_dict([state], strict=False, on_changed_files="continue")
        rest = Counter(row for batch in again for row in contents(batch))
        expected = {key: 1 for key in wanted("three of each") if key[0] < ROWS - 24}
        assert delivered + rest == Counter(expected)


WEIGHTS = np.ones(100, np.float64)


def with_what_is_kept(table: pa.Table) -> pa.Table:
    """Return a column of memory that stays, and one column twice."""
    weights = pa.array(WEIGHTS[: table.num_rows])
    return pa.table({"value": table["value"], "label": table["value"], "weight": weights})


@pytest.mark.parametrize("output_format", ["torch", "numpy"])
def test_what_is_written_to_a_batch_is_in_no_other_column_and_no_other_batch(path, output_format):
    loader = opened(path, transform=with_what_is_kept, output_format=output_format, batch_size=5)
    values = []
    for batch in loader:
        assert set(batch["weight"].tolist()) == {1.0}
        batch["weight"][:] = 5
        batch["label"][:] = -100
        values += batch["value"].tolist()
    assert sorted(values) == list(range(ROWS))
    assert set(WEIGHTS.tolist()) == {1.0}
