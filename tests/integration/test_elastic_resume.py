"""An epoch shared by runs of other ranks and workers, over real files and with real worker processes."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pairwise import pairwise
from stops import at_few_stops
from support import batches_of, edited, open_loader, rows_of, write_dataset

from torch_dataloader_utils import CheckpointMismatchError, LostRowsWarning, RankMismatchError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

FILES = ((90, 10), (3, 10), (131, 20), (40, 7), (60, 60))
ROWS = sum(rows for rows, _ in FILES)
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
KEPT = [row for row in range(ROWS) if row < 260 and not row & 32]
FILTERS: dict[str, Any] = {
    "all rows": None,
    "filtered": (pc.field("value") < 260) & (pc.bit_wise_and(pc.field("value"), 32) == 0),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    assert write_dataset(directory, FILES) == ROWS
    return directory


@pytest.fixture(scope="module")
def numbers(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without strings, whose size is unknown ahead: row groups are read whole from the first on."""
    directory: Path = tmp_path_factory.mktemp("numbers")
    for file, (_, group) in zip(sorted(path.iterdir()), FILES, strict=True):
        pq.write_table(pq.read_table(file, columns=["value", "score"]), directory / file.name, row_group_size=group)
    return directory


def all_ranks(path: Path, num_ranks: int, num_workers: int, **options: Any) -> list[Any]:
    """Open the loaders of all ranks."""
    ranks = [{"num_ranks": num_ranks, "rank": rank, "num_workers": num_workers} for rank in range(num_ranks)]
    return [open_loader(path, **{"batch_size": 7, **options, **rank})[0] for rank in ranks]


def take(loaders: Sequence[Any], stops: Sequence[int]) -> tuple[list[int], list[Any]]:
    """Deliver some batches of each rank; return the rows and the states, through JSON."""
    rows: list[int] = []
    for loader, stop in zip(loaders, stops, strict=False):
        rows += [row for batch in itertools.islice(loader, stop) for row in rows_of(batch)]
    return rows, [json.loads(json.dumps(loader.state_dict())) for loader in loaders]


def take_up_to(loaders: Sequence[Any], most: int) -> list[list[tuple[list[int], Any]]]:
    """Deliver up to so many batches of each rank; return the rows and the state of each moment, of each rank."""
    moments = []
    for loader in loaders:
        rows: list[int] = []
        batches = itertools.islice(loader, most)
        moments.append([(rows, json.loads(json.dumps(loader.state_dict())))])  # after the iteration has begun
        for batch in batches:
            rows = rows + rows_of(batch)
            moments[-1].append((rows, json.loads(json.dumps(loader.state_dict()))))
        moments[-1].append((rows, json.loads(json.dumps(loader.state_dict()))))  # the loader may know now that it ended
    return moments


def load(loaders: Sequence[Any], states: list[Any], **how: Any) -> None:
    for loader in loaders:
        loader.load_state_dict(states, **how)


def rest(loaders: Sequence[Any]) -> list[int]:
    return [row for loader in loaders for batch in loader for row in rows_of(batch)]


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.soak)])
@pairwise(
    most=5,
    topologies=[((1, 0), (3, 0)), ((3, 0), (2, 2)), ((2, 2), (1, 0)), ((2, 1), (1, 3)), ((4, 0), (4, 1))],
    order=ORDERS,
    kept=FILTERS,
)
def test_other_ranks_and_workers_deliver_what_is_left(path, topologies, order, kept, every):
    before, after = topologies
    options = {**ORDERS[order], "filters": FILTERS[kept]}
    wanted = KEPT if kept == "filtered" else list(range(ROWS))
    options["batch_size"] = 12
    longest = len(wanted) // 12 // before[0] + 3
    moments = take_up_to(all_ranks(path, *before, **options), longest)
    for stop in {*range(0, longest, every), longest // 2, longest - 1}:
        stopped = [moments[rank][: max(0, stop - rank) + 1][-1] for rank in range(before[0])]
        rows = [row for delivered, _ in stopped for row in delivered]
        states = [state for _, state in stopped]
        others = all_ranks(path, *after, **options)
        load(others, states[::-1], strict=False)
        assert sorted(rows + rest(others)) == wanted, stop


@pairwise(most=4, order=ORDERS, uneven=["allow", "drop", "pad"], columns=["texts", "numbers"])
def test_an_epoch_goes_through_many_hands(path, numbers, order, uneven, columns):
    path = path if columns == "texts" else numbers
    rows: list[int] = []
    states: list[Any] = []
    sizes = [(2, 0), (3, 1), (1, 2), (4, 0), (1, 0), (2, 2)]
    for number, (num_ranks, num_workers) in enumerate(sizes):
        loaders = all_ranks(path, num_ranks, num_workers, **ORDERS[order], uneven_ranks=uneven)
        if states:
            load(loaders, states, strict=False)
        if number == len(sizes) - 1:
            rows += rest(loaders)
            break
        more, states = take(loaders, [2] * num_ranks)
        rows += more
    counts = Counter(rows)
    least = ROWS - 1 if uneven == "drop" else ROWS
    assert least <= len(counts) <= ROWS
    assert counts.total() - len(counts) <= (1 if uneven == "pad" else 0)


@at_few_stops
@pairwise(most=4, num_workers=[0, 2], order=ORDERS, kept=FILTERS)
def test_after_an_elastic_resume_strict_ones_deliver_the_same_batches_again(path, num_workers, order, kept, stops):
    options = {**ORDERS[order], "filters": FILTERS[kept]}
    _, states = take(all_ranks(path, 3, 0, **options), [3, 2, 1])
    loader = all_ranks(path, 1, num_workers, **options)[0]
    loader.load_state_dict(states, strict=False)
    seen, saved = [], [loader.state_dict()]
    for batch in loader:
        seen.append(rows_of(batch))
        saved.append(json.loads(json.dumps(loader.state_dict())))
    again = all_ranks(path, 1, num_workers, **options, persistent_workers=num_workers > 0)[0]
    for number in stops(saved):
        if num_workers == 0:
            again = all_ranks(path, 1, 0, **options)[0]  # elsewhere to start workers would take the time
        again.load_state_dict(saved[number])
        assert batches_of(again) == seen[number:]
        assert again.state_dict() == saved[-1]


def test_the_length_counts_what_was_delivered_before(path):
    _, states = take(all_ranks(path, 2, 0), [3, 5])
    loader = all_ranks(path, 1, 0)[0]
    loader.load_state_dict(states, strict=False)
    left = len(loader) - 5
    assert len(batches_of(loader)) == left
    assert len(loader) == 5 + left


def test_the_next_epoch_and_a_new_iteration_are_whole(path):
    _, states = take(all_ranks(path, 2, 0), [3, 5])
    loader = all_ranks(path, 1, 0)[0]
    loader.load_state_dict(states, strict=False)
    loader.dataset.set_epoch(0)
    assert len(rest([loader])) < ROWS
    assert sorted(rest([loader])) == list(range(ROWS))
    loader.load_state_dict(states, strict=False)
    loader.dataset.set_epoch(1)
    assert sorted(rest([loader])) == list(range(ROWS))


def test_a_list_of_all_ranks_states_loads_strictly_where_nothing_changed(path):
    loaders = all_ranks(path, 2, 0)
    _, states = take(loaders, [3, 5])
    expected = [batches_of(iter(loader)) for loader in all_ranks(path, 2, 0)]
    again = all_ranks(path, 2, 0)
    load(again, states[::-1])
    assert [batches_of(loader) for loader in again] == [expected[0][3:], expected[1][5:]]


@pytest.mark.parametrize("options", [{}, {"virtual_ranks": 2, "virtual_workers": 1, "uneven_ranks": "drop"}])
@pytest.mark.parametrize("strict", [True, False])
def test_states_of_two_epochs_are_refused(path, options, strict):
    options = {"batch_size": 8, **options}
    loaders = all_ranks(path, 2, 0, **options)
    states = [loader.state_dict() for loader in loaders]
    loaders[1].set_epoch(1)
    states[1] = loaders[1].state_dict()
    loader = all_ranks(path, 2, 0, **options)[0]
    before = loader.state_dict()
    for given in (states, states[::-1]):
        with pytest.raises(RankMismatchError, match="epoch"):
            loader.load_state_dict(given, strict=strict)
    assert loader.state_dict() == before


def test_a_refused_elastic_load_changes_nothing(path):
    _, states = take(all_ranks(path, 2, 0), [3, 5])
    loader = all_ranks(path, 1, 0)[0]
    iterator = iter(loader)
    next(iterator)
    before = loader.state_dict()
    for wrong, error in (([states[0]], RankMismatchError), ([states[0]] * 2, RankMismatchError), ([], ValueError)):
        with pytest.raises(error):
            loader.load_state_dict(wrong, strict=False)
        assert loader.state_dict() == before
    assert len([row for batch in iterator for row in rows_of(batch)]) == ROWS - 7


def test_changed_files_are_no_business_of_a_strict_load(path):
    loader = all_ranks(path, 1, 0)[0]
    with pytest.raises(ValueError, match="on_changed_files='continue' needs strict=False"):
        loader.load_state_dict(loader.state_dict(), on_changed_files="continue")
    with pytest.raises(ValueError, match="on_changed_files='ignore' is not one of 'error', 'continue'"):
        loader.load_state_dict(loader.state_dict(), strict=False, on_changed_files="ignore")


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.soak)])
@pairwise(
    most=3,
    order=["shards shuffled", "rows shuffled", "rows shuffled in rounds"],
    uneven=["drop", "pad"],
    num_workers=[0, 2],
)
def test_balanced_ranks_resume_with_the_same_batches_at_every_step(numbers, order, uneven, num_workers, every):
    options = {**ORDERS[order], "uneven_ranks": uneven, "batch_size": 9}
    options["persistent_workers"] = num_workers > 0  # each rank loads several states
    for number, loader in enumerate(all_ranks(numbers, 5, num_workers, **options)):
        seen, states = [], [loader.state_dict()]
        for batch in loader:
            seen.append(rows_of(batch))
            states.append(json.loads(json.dumps(loader.state_dict())))
        assert len(seen) == len(loader) == 8
        for step in range(number % every, len(states), every):  # other ones on each rank
            loader.load_state_dict(states[step])
            assert batches_of(loader) == seen[step:]


# A grid --------------------------------------------------------------------------------------------------------------


@pairwise(most=4, order=ORDERS, uneven=["drop", "pad"], topologies=["2x1, 4x0, 1x2", "2x2, 1x1, 4x2", "all"])
def test_a_virtual_topology_delivers_the_same_global_batches_under_all_topologies_and_goes_on_under_others(
    path, order, uneven, topologies
):
    def grid(num_ranks: int, num_workers: int) -> list[Any]:
        options = {"virtual_ranks": 4, "virtual_workers": 2, "uneven_ranks": uneven, "batch_size": 12 // num_ranks}
        return all_ranks(path, num_ranks, num_workers, **ORDERS[order], **options)

    def global_batches(loaders: list[Any], stop: int | None = None) -> list[list[int]]:
        parts = [batches_of(itertools.islice(loader, stop)) for loader in loaders]
        return [[row for part in step for row in part] for step in zip(*parts, strict=True)]

    whole = global_batches(grid(1, 0))
    assert len({len(batch) for batch in whole[:-1]}) == 1
    seen: list[list[int]] = []
    states: list[Any] = []
    every = "2x1, 4x0, 1x2, 2x2, 1x1, 4x2"
    for topology in (every if topologies == "all" else topologies).split(", "):
        num_ranks, num_workers = map(int, topology.split("x"))
        loaders = grid(num_ranks, num_workers)
        if states:
            load(loaders, states)
        assert len(loaders[0]) == len(whole)
        seen += global_batches(loaders, 3)
        states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
        assert seen == whole[: len(seen)]
    loaders = grid(2, 0)
    load(loaders, states)
    assert seen + global_batches(loaders) == whole


def test_states_of_a_virtual_topology_are_of_one_step(path):
    loaders = all_ranks(path, 2, 0, virtual_ranks=4, virtual_workers=2, uneven_ranks="drop", batch_size=6)
    _, states = take(loaders, [2, 3])
    other = all_ranks(path, 1, 0, virtual_ranks=4, virtual_workers=2, uneven_ranks="drop", batch_size=12)[0]
    with pytest.raises(RankMismatchError, match="rank 0 step 2, rank 1 step 3"):
        other.load_state_dict(states)


def test_a_virtual_topology_of_another_global_batch_size_is_refused(path):
    loaders = all_ranks(path, 2, 0, virtual_ranks=4, virtual_workers=2, uneven_ranks="drop", batch_size=6)
    _, states = take(loaders, [2, 2])
    other = all_ranks(path, 1, 0, virtual_ranks=4, virtual_workers=2, uneven_ranks="drop", batch_size=16)[0]
    with pytest.raises(CheckpointMismatchError, match="global_batch_size changed: checkpoint=12, current=16"):
        other.load_state_dict(states)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"virtual_ranks": 4}, "virtual_ranks=4 and virtual_workers=None: give both or neither"),
        ({"virtual_ranks": 4, "virtual_workers": 2}, "virtual_ranks needs uneven_ranks='drop' or 'pad'"),
        (
            {"virtual_ranks": 4, "virtual_workers": 2, "uneven_ranks": "drop", "num_ranks": 3, "rank": 0},
            "virtual_ranks=4 is not a multiple of the number of ranks, 3",
        ),
        (
            {"virtual_ranks": 4, "virtual_workers": 2, "uneven_ranks": "drop", "num_workers": 3},
            "virtual_workers=2 is not a multiple of num_workers=3",
        ),
        (
            {"virtual_ranks": 4, "virtual_workers": 2, "uneven_ranks": "drop", "batch_size": 6},
            "batch_size=6 of 1 ranks cannot be divided among virtual_ranks=4: batch_size needs to be a multiple of 4",
        ),
        ({"uneven_ranks": "even"}, "uneven_ranks='even' is not one of 'allow', 'drop', 'pad'"),
        ({"uneven_ranks": "drop", "filters": FILTERS["filtered"]}, "use distributed.in_step"),
    ],
)
def test_what_does_not_fit_together_is_refused_at_construction(path, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        open_loader(path, **options)


def test_workers_that_were_not_requested_are_lowered_to_what_divides_the_virtual_topology(path, monkeypatch):
    monkeypatch.setattr("torch_dataloader_utils.dataset.options.default_num_workers", lambda _: 5)
    options = {"virtual_ranks": 2, "virtual_workers": 6, "uneven_ranks": "drop"}
    assert open_loader(path, num_workers=None, **options)[1].num_workers == 3


# Files that change ---------------------------------------------------------------------------------------------------


@pytest.fixture
def own(path: Path, tmp_path: Path) -> Path:
    """A copy of the files that the test may change, with an id of its own in every row."""
    return Path(shutil.copytree(path, tmp_path / "own"))


def ids_of(loaders: Sequence[Any]) -> list[int]:
    """Return the values of the column that holds each row's first place; row numbers change with the files."""
    return [int(value) for loader in loaders for batch in loader for value in batch["value"]]


def write_new(path: Path, first: int, rows: int) -> None:
    values = np.arange(first, first + rows)
    names = pa.array([f"new {value}" for value in values], pa.string())
    pq.write_table(pa.table({"value": values, "score": values / 7, "name": names}), path, row_group_size=11)


def begun(path: Path, stops: Sequence[int], **options: Any) -> tuple[list[int], list[Any]]:
    loaders = all_ranks(path, len(stops), 0, **options)
    values = []
    for loader, stop in zip(loaders, stops, strict=True):
        values += [int(value) for batch in itertools.islice(loader, stop) for value in batch["value"]]
    return values, [loader.state_dict() for loader in loaders]


FIRST = list(itertools.accumulate((rows for rows, _ in FILES), initial=0))


@pairwise(most=4, stops=[(0, 0), (2, 1), (6, 9), (20, 30)], order=ORDERS)
def test_files_may_come_go_and_change_in_the_middle_of_an_epoch(own, order, stops):
    before, states = begun(own, stops, **ORDERS[order])
    (own / "part-000.parquet").unlink()
    write_new(own / "part-002.parquet", 5000, 77)
    write_new(own / "part-007.parquet", 9000, 33)
    gone = set(range(FIRST[1])) | set(range(FIRST[2], FIRST[3]))
    lost = len(gone - set(before))

    for num_ranks, num_workers in ((1, 0), (3, 1)):
        loaders = all_ranks(own, num_ranks, num_workers, **ORDERS[order])
        with pytest.warns(LostRowsWarning, match=f"^{lost} rows can no longer be delivered") as warned:
            load(loaders, states, strict=False, on_changed_files="continue")
        for name, start in (("part-000", 0), ("part-002", 2)):
            rows = len(set(range(FIRST[start], FIRST[start + 1])) - set(before))
            assert f"{name}.parquet ({rows} rows)" in str(warned[0].message)
        after = ids_of(loaders)
        assert len(after) == len(set(after))
        assert set(after) == (set(range(ROWS)) - gone - set(before)) | set(range(9000, 9033))


@pytest.mark.parametrize("order", [*list(ORDERS)[:3], pytest.param("in order", marks=pytest.mark.soak)])
def test_files_that_changed_twice_and_a_strict_resume_between(own, order):
    before, states = begun(own, (4, 5), **ORDERS[order])
    (own / "part-003.parquet").unlink()
    loader = all_ranks(own, 1, 0, **ORDERS[order])[0]
    with pytest.warns(LostRowsWarning):
        loader.load_state_dict(states, strict=False, on_changed_files="continue")
    iterator = iter(loader)
    before += [int(value) for batch in itertools.islice(iterator, 5) for value in batch["value"]]
    state = json.loads(json.dumps(loader.state_dict()))
    expected = batches_of(iterator)
    again = all_ranks(own, 1, 0, **ORDERS[order])[0]
    again.load_state_dict(state)
    assert batches_of(again) == expected

    (own / "part-004.parquet").unlink()
    write_new(own / "part-008.parquet", 9000, 12)
    loaders = all_ranks(own, 2, 0, **ORDERS[order], uneven_ranks="pad")
    with pytest.warns(LostRowsWarning):
        load(loaders, [state], strict=False, on_changed_files="continue")
    after = Counter(ids_of(loaders))
    present = set(range(FIRST[3])) | set(range(9000, 9012))
    assert set(after) == present - set(before)
    assert after.total() - len(after) <= 1


def test_changed_files_are_an_error_unless_they_are_allowed(own):
    _, states = begun(own, (4, 5))
    (own / "part-003.parquet").unlink()
    write_new(own / "part-008.parquet", 9000, 12)
    with pytest.raises(CheckpointMismatchError, match="on_changed_files='continue'") as raised:
        all_ranks(own, 1, 0)[0].load_state_dict(states, strict=False)
    assert raised.value.files_removed == ("part-003.parquet",)
    assert raised.value.files_added == ("part-008.parquet",)


def test_what_was_delivered_through_a_filter_of_a_shard_that_changed_is_not_known(own):
    options = {"filters": FILTERS["filtered"], **ORDERS["rows shuffled"]}
    _, states = begun(own, (2, 3), **options)
    (own / "part-000.parquet").unlink()
    with pytest.raises(CheckpointMismatchError, match=r"part-000\.parquet changed while .* through a filter"):
        all_ranks(own, 1, 0, **options)[0].load_state_dict(states, strict=False, on_changed_files="continue")


def test_new_files_are_read_with_a_filter_too(own):
    options = {"filters": FILTERS["filtered"], **ORDERS["rows shuffled"]}
    before, states = begun(own, (2, 3), **options)
    write_new(own / "part-007.parquet", 128, 20)
    loader = all_ranks(own, 1, 0, **options)[0]
    loader.load_state_dict(states, strict=False, on_changed_files="continue")
    assert sorted(before + ids_of([loader])) == sorted([*KEPT, *range(128, 148)])


@pairwise(most=3, uneven=["drop", "pad"], num_workers=[0, 2], num_ranks=[2, 3, 7], buffer=[None, 100])
def test_one_row_group_is_shared_by_ranks_and_by_what_is_left_of_it(tmp_path, uneven, num_workers, num_ranks, buffer):
    pq.write_table(pa.table({"value": range(40)}), tmp_path / "a.parquet")
    options = {"uneven_ranks": uneven, "shuffle": buffer is not None, "shuffle_buffer_size": buffer, "batch_size": 2}
    rows, seen, states = Counter[int](), [], []
    for loader in all_ranks(tmp_path, num_ranks, num_workers, **options):
        iterator = iter(loader)
        seen += rest([itertools.islice(iterator, 2)])
        states.append(json.loads(json.dumps(loader.state_dict())))
        rows.update(rest([iterator]))
    rows.update(seen)
    assert 40 - len(rows) <= (num_ranks - 1 if uneven == "drop" else 0)
    assert rows.total() - len(rows) <= (num_ranks - 1 if uneven == "pad" else 0)
    loader = all_ranks(tmp_path, 1, num_workers, **options)[0]
    loader.load_state_dict(states, strict=False)
    both = Counter(seen + rest([loader]))
    assert set(both) == set(range(40))
    assert both.total() - 40 <= (num_ranks - 1 if uneven == "pad" else 0)


def test_a_file_that_went_and_came_back_is_not_delivered_again(own, tmp_path):
    before, states = begun(own, (4, 5))
    (own / "part-000.parquet").rename(tmp_path / "kept")
    loader = all_ranks(own, 1, 0)[0]
    with pytest.warns(LostRowsWarning):
        loader.load_state_dict(states, strict=False, on_changed_files="continue")
    before += [int(value) for batch in itertools.islice(loader, 2) for value in batch["value"]]
    state = loader.state_dict()
    (tmp_path / "kept").rename(own / "part-000.parquet")
    again = all_ranks(own, 1, 0)[0]
    again.load_state_dict(state, strict=False, on_changed_files="continue")
    after = ids_of([again])
    assert not set(after) & set(before)
    assert set(after) == set(range(FIRST[1], ROWS)) - set(before)


def test_files_of_another_directory_are_not_taken_for_those_that_were_there(own, tmp_path):
    other = shutil.copytree(own, tmp_path / "other")
    paths = [str(own / "part-000.parquet"), str(other / "part-000.parquet")]
    loader = open_loader(paths, batch_size=7, num_workers=0)[0]
    _, states = take([loader], [3])
    with pytest.raises(CheckpointMismatchError, match="the directory that contains all of them"):
        open_loader(paths[:1], num_workers=0)[0].load_state_dict(states, strict=False, on_changed_files="continue")


def test_files_that_a_metadata_file_describes_now_cannot_be_compared(own):
    _, states = begun(own, (4, 5))
    files = sorted(own.glob("*.parquet"))
    metadata = []
    for file in files:
        one = pq.read_metadata(file)
        one.set_file_path(file.name)
        metadata.append(one)
    for one in metadata[1:]:
        metadata[0].append_row_groups(one)
    metadata[0].write_metadata_file(own / "_metadata")
    with pytest.raises(CheckpointMismatchError, match="cannot be compared") as raised:
        all_ranks(own, 1, 0)[0].load_state_dict(states, strict=False, on_changed_files="continue")
    assert "continue" not in str(raised.value)


def test_a_damaged_base_is_refused(path):
    _, states = take(all_ranks(path, 2, 0), [3, 5])
    loader = all_ranks(path, 1, 0)[0]
    loader.load_state_dict(states, strict=False)
    state = edited(loader.state_dict())
    state["base"]["completed_rows"] = [0, 5]
    with pytest.raises(CheckpointMismatchError, match="rows 0 to 5"):
        all_ranks(path, 1, 0)[0].load_state_dict(state)
