"""Resuming at every batch: what comes after is, batch by batch, what the uninterrupted run would have delivered."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeAlias

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from logged import LoggedFileSystem
from pairwise import pairwise
from stops import each_stop
from support import batches_of, open_loader, row_ids, rows_of, shards_of, write_dataset

from torch_dataloader_utils.planning.plan import PlanOptions, ShardSlice
from torch_dataloader_utils.planning.planner import make_plan
from torch_dataloader_utils.planning.shuffle import delivery_order
from torch_dataloader_utils.reading.requests import Step
from torch_dataloader_utils.reading.shuffled import ShuffledScan

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

FILES = ((90, 10), (3, 10), (131, 20), (40, 7), (60, 60))
ROWS = sum(rows for rows, _ in FILES)
BATCHES = 12
"""About how many batches a rank's epoch has."""

SHUFFLES: dict[str, dict[str, Any]] = {
    "in order": {},
    "shards shuffled": {"shuffle": True},
    "rows shuffled": {"shuffle": True, "shuffle_buffer_size": 25},
}

KEPT = [row for row in range(ROWS) if row < 260 and not row & 32]
FILTERS: dict[str, dict[str, Any]] = {
    "all rows": {},
    "filtered": {"filters": (pc.field("value") < 260) & (pc.bit_wise_and(pc.field("value"), 32) == 0)},
}
"""The first half of the filter is decided by statistics, the second only by reading: it leaves whole shards empty."""

Content: TypeAlias = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    assert write_dataset(directory, FILES) == ROWS
    return directory


def contents_of(batches: Iterable[Any]) -> list[Content]:
    """Return the row ids and the floats of every batch."""
    return [(rows_of(batch), [float(score) for score in batch["score"]]) for batch in batches]


def rows_in(contents: Iterable[Content]) -> list[int]:
    return list(chain.from_iterable(rows for rows, _ in contents))


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def run_and_save(loader: Any) -> tuple[list[Content], list[Any]]:
    """Return an epoch's batches, and the states before the first and after each of them."""
    iterator = iter(loader)
    states = [through_json(loader.state_dict())]
    contents = []
    for batch in iterator:
        contents += contents_of([batch])
        states.append(through_json(loader.state_dict()))
    assert [state["batches_delivered"] for state in states] == list(range(len(contents) + 1))
    return contents, states


def rank_options(rows: int, num_workers: int, num_ranks: int, rank: int) -> dict[str, Any]:
    """Return what opens the loader of one of several ranks, for about as many batches as each should have."""
    workers = {"persistent_workers": True, "multiprocessing_context": "fork"} if num_workers else {}
    size = max(1, rows // num_ranks // BATCHES)
    return {"num_workers": num_workers, "num_ranks": num_ranks, "rank": rank, "batch_size": size, **workers}


@each_stop
@pairwise(most=4, num_workers=[3, 2, 0, 1], num_ranks=[1, 2, 3], order=SHUFFLES, kept=FILTERS)
def test_resume_at_every_batch_delivers_the_batches_that_were_to_come(
    path: Path, *, num_workers: int, num_ranks: int, order: str, kept: str, stops: Any
):
    delivered: list[int] = []
    for rank in range(num_ranks):
        options = {
            **SHUFFLES[order],
            **FILTERS[kept],
            **rank_options(len(KEPT) if kept == "filtered" else ROWS, num_workers, num_ranks, rank),
        }
        loader, dataset = open_loader(path, **options)
        dataset.set_epoch(3)
        whole, states = run_and_save(loader)
        assert len(whole) >= BATCHES // 2
        delivered += rows_in(whole)

        for number, state in enumerate(states):
            assert_state_records(state, rows_in(whole[:number]), path)
        for place, number in enumerate(stops(states)):
            if place % 5 == rank + 1:
                loader = open_loader(path, **options)[0]
            loader.load_state_dict(states[number])
            assert contents_of(loader) == whole[number:], number

    assert sorted(delivered) == (KEPT if kept == "filtered" else list(range(ROWS)))


def assert_state_records(state: Any, delivered: list[int], path: Path) -> None:
    """Check that completed shards hold delivered rows alone, and that shards in progress account for the others."""
    first_rows = accumulate((rows for rows, _ in FILES), initial=0)
    first = {str(file): row for file, row in zip(sorted(path.iterdir()), first_rows, strict=False)}

    def wanted_rows(shard: Any) -> set[int]:
        splits = [(first[one["path"]] + one["row_offset"], one["row_length"]) for one in shard["splits"]]
        return {row for start, length in splits for row in range(start, start + length)} & wanted

    wanted = set(range(ROWS)) if state["plan"]["filter"] is None else set(KEPT)
    completed = [row for shard in state["completed_shards"] for row in wanted_rows(shard)]
    assert len(completed) == len(set(completed))
    assert set(completed) <= set(delivered)
    left = set(delivered) - set(completed)
    for shard in state["in_progress"]:
        assert len(wanted_rows(shard) & left) == shard["rows_delivered"]
        assert 0 < shard["rows_delivered"] < sum(split["row_length"] for split in shard["splits"])
        left -= wanted_rows(shard)
    assert not left


@pytest.mark.parametrize("order", SHUFFLES)
def test_the_filter_of_these_tests_leaves_shards_empty_that_statistics_do_not_rule_out(path: Path, order: str):
    _, dataset = open_loader(path, num_workers=3, **SHUFFLES[order], **FILTERS["filtered"])
    dataset.set_epoch(3)

    manifest = dataset._opened_files.manifest
    shards = shards_of(dataset._epoch_state.plan)
    empty = [shard for shard in shards if not set(KEPT).intersection(row_ids(manifest, shard))]

    assert empty
    assert sum(shard.rows for shard in shards) < ROWS
    assert sorted(chain.from_iterable(batches_of(dataset))) == KEPT


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.soak)])
@pairwise(most=4, num_workers=[3, 0, 2, 1], order=SHUFFLES, kept=FILTERS)
def test_resumed_two_and_three_times_within_one_epoch(path: Path, num_workers: int, order: str, kept: str, every: int):
    rows = len(KEPT) if kept == "filtered" else ROWS
    options = {**SHUFFLES[order], **FILTERS[kept], **rank_options(rows, num_workers, 1, 0)}
    loader, _ = open_loader(path, **options)
    whole = contents_of(loader)

    for stops in ([1, 3], [4, 4, 1], [0, 6, 1], [2, 0, 7], [len(whole) - 1, 1, 0])[::every]:
        loader.dataset.set_epoch(0)
        contents = take_contents(iter(loader), stops[0])
        for number, stop in enumerate(stops[1:]):
            state = through_json(loader.state_dict())
            if number == 1:
                loader = open_loader(path, **options)[0]
            loader.load_state_dict(state)
            contents += take_contents(iter(loader), stop)
        loader.load_state_dict(through_json(loader.state_dict()))
        contents += contents_of(loader)
        assert contents == whole, stops


def take_contents(iterator: Any, count: int) -> list[Content]:
    return contents_of(next(iterator) for _ in range(count))


@pairwise(most=3, num_workers=[1, 2, 3], order=SHUFFLES)
def test_what_workers_have_read_ahead_does_not_count(path: Path, num_workers: int, order: str):
    options = {**rank_options(ROWS, num_workers, 1, 0), **SHUFFLES[order], "batch_size": 8, "prefetch_factor": 50}
    loader, _ = open_loader(path, **options)
    whole = contents_of(loader)

    for stop in (0, 1, num_workers, 7, len(whole) - 1):
        iterator = iter(loader)
        contents = take_contents(iterator, stop)
        time.sleep(0.15)  # by now every worker is at the end of its stream
        state = through_json(loader.state_dict())
        assert state["batches_delivered"] == stop
        loader.load_state_dict(state)
        assert contents + contents_of(loader) == whole


@each_stop
@pairwise(most=4, num_workers=[2, 0], output_format=["arrow", "numpy", "dict"])
def test_every_output_format_resumes_at_every_batch(path: Path, output_format: str, num_workers: int, stops: Any):
    options = {**rank_options(ROWS, num_workers, 1, 0), **SHUFFLES["rows shuffled"], "output_format": output_format}
    loader, _ = open_loader(path, collate_fn=plain_columns, **options)
    whole, states = run_and_save(loader)
    assert sorted(rows_in(whole)) == list(range(ROWS))
    _, in_this_process = open_loader(path, **{**options, "output_format": "torch"})  # as planned for the workers
    assert rows_in(whole) == rows_in(contents_of(in_this_process))

    for number in stops(states):
        loader.load_state_dict(states[number])
        assert contents_of(loader) == whole[number:], number


def plain_columns(batch: Any) -> Any:
    """Return any format's batch as a dictionary of columns, and check that its values belong together."""
    columns = batch.to_pydict() if isinstance(batch, pa.Table) else batch
    assert [f"row {row}" for row in columns["row"]] == list(columns["name"])
    return columns


@pairwise(most=4, saved_by=[0, 2], order=SHUFFLES)
def test_batch_size_columns_and_format_may_change_at_a_resume(path: Path, order: str, saved_by: int):
    options = {**rank_options(ROWS, saved_by, 1, 0), **SHUFFLES[order]}
    loader, _ = open_loader(path, **options)
    iterator = iter(loader)
    delivered = rows_in(take_contents(iterator, 5))

    changed, _ = open_loader(path, **{**options, "batch_size": 31, "columns": ["score"], "output_format": "numpy"})
    changed.load_state_dict(loader.state_dict())

    assert sorted(delivered + rows_in(contents_of(changed))) == list(range(ROWS))


# What once went wrong elsewhere ---------------------------------------------------------------------------------------


def test_break_at_batch_1_of_8000_rows_loses_and_repeats_nothing(tmp_path: Path):
    write_dataset(tmp_path, ((8000, 1000),))
    options = {"batch_size": 100, "num_workers": 2}
    loader, _ = open_loader(tmp_path, **options)
    delivered = []
    for batch in loader:
        delivered += rows_of(batch)
        time.sleep(0.2)  # the workers read on
        break

    resumed, _ = open_loader(tmp_path, **options)
    resumed.load_state_dict(through_json(loader.state_dict()))

    assert len(delivered) == 100
    assert sorted(delivered + list(chain.from_iterable(batches_of(resumed)))) == list(range(8000))


def test_half_of_an_epoch_with_two_workers_and_the_other_half_after_a_resume_is_the_epoch(tmp_path: Path):
    write_dataset(tmp_path, tuple((1000, 250) for _ in range(8)))
    options = {"batch_size": 100, "num_workers": 2, "shuffle": True}
    whole = batches_of(open_loader(tmp_path, **options)[0])
    loader, _ = open_loader(tmp_path, **options)
    iterator = iter(loader)
    delivered = [rows_of(next(iterator)) for _ in range(len(whole) // 2)]

    resumed, _ = open_loader(tmp_path, **options)
    resumed.load_state_dict(through_json(loader.state_dict()))
    delivered += batches_of(resumed)

    assert delivered == whole
    assert sorted(chain.from_iterable(delivered)) == list(range(8000))


def test_a_break_just_before_the_end_leaves_just_the_end(tmp_path: Path):
    write_dataset(tmp_path, tuple((1000, 250) for _ in range(4)))
    options = {"batch_size": 100, "num_workers": 2, "shuffle": True, "shuffle_buffer_size": 500}
    loader, _ = open_loader(tmp_path, **options)
    iterator = iter(loader)
    delivered = [rows_of(next(iterator)) for _ in range(len(loader) - 1)]
    time.sleep(0.2)  # the workers have come to their ends

    resumed, _ = open_loader(tmp_path, **options)
    resumed.load_state_dict(through_json(loader.state_dict()))
    rest = batches_of(resumed)

    assert len(rest) == 1
    assert sorted(chain.from_iterable(delivered + rest)) == list(range(4000))


# What a resume reads --------------------------------------------------------------------------------------------------


class Storage:
    """The dataset as a storage that keeps a log of what is read of it."""

    def __init__(self, path: Path, log: Path) -> None:
        self.path = path
        self._log = log
        self.places: dict[str, list[tuple[int, int, int]]] = {}
        self.rows: dict[tuple[str, int], set[int]] = {}
        first = 0
        for file in sorted(path.iterdir()):
            metadata = pq.read_metadata(file)
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            self.places[str(file)] = [(number, *_stored_range(group)) for number, group in enumerate(groups)]
            for number, group in enumerate(groups):
                self.rows[str(file), number] = set(range(first, first + group.num_rows))
                first += group.num_rows

    def open_loader(self, **options: Any) -> Any:
        return open_loader(f"logged://{self.path}", storage_options={"log": str(self._log)}, **options)[0]

    def take_log(self) -> list[list[Any]]:
        """Return what was done since the last call."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.write_text("")
        return [json.loads(line) for line in lines]

    def row_groups_read(self, log: list[list[Any]]) -> set[tuple[str, int]]:
        """Return the row groups that reads fall into, and check that no read falls elsewhere."""
        found = set()
        for what, path, *span in log:
            if what == "open":
                continue
            assert what == "read"
            start, stop = span
            inside = [number for number, first, last in self.places[path] if first <= start <= stop <= last]
            assert inside, f"{start} to {stop} of {path} lies in no row group"
            found.add((path, inside[0]))
        return found

    def row_groups_with(self, rows: set[int]) -> set[tuple[str, int]]:
        return {place for place, held in self.rows.items() if held & rows}


def _stored_range(group: Any) -> tuple[int, int]:
    columns = [group.column(number) for number in range(group.num_columns)]
    starts = [column.dictionary_page_offset or column.data_page_offset for column in columns]
    stops = [start + column.total_compressed_size for start, column in zip(starts, columns, strict=True)]
    return min(starts), max(stops)


@pytest.fixture
def storage(path: Path, tmp_path: Path) -> Storage:
    fsspec.register_implementation("logged", LoggedFileSystem, clobber=True)
    return Storage(path, tmp_path / "log")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resume_reads_from_the_row_group_of_the_next_row_on_and_opens_no_completed_file(
    storage: Storage, num_workers: int
):
    options = rank_options(ROWS, num_workers, 1, 0)
    loader = storage.open_loader(**options)
    whole, states = run_and_save(loader)
    assert storage.row_groups_read([one for one in storage.take_log() if one[0] != "range"]) == set(storage.rows)
    opened = []

    for number, state in enumerate(states):
        if number % 5 == 1:
            loader = storage.open_loader(**options)
        storage.take_log()
        loader.load_state_dict(state)
        assert contents_of(loader) == whole[number:]
        log = storage.take_log()
        needed = storage.row_groups_with(set(rows_in(whole[number:])))
        assert storage.row_groups_read(log) == needed, number
        opened.append({path for what, path, *_ in log if what == "open"})
        assert opened[-1] == {path for path, _ in needed}, number

    assert opened[0] == set(storage.places)
    assert opened[-2] < opened[len(opened) // 2] < opened[0]
    assert opened[-1] == set()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_footers_are_read_once_at_construction_and_never_again(storage: Storage, num_workers: int):
    loader = storage.open_loader(**rank_options(ROWS, num_workers, 1, 0), shuffle=True, **FILTERS["filtered"])
    log = storage.take_log()
    assert Counter(path for _, path, *_ in log) == dict.fromkeys(storage.places, 1)
    assert all(end == Path(path).stat().st_size for _, path, _, end in log)

    for epoch in range(3):
        loader.dataset.set_epoch(epoch)
        assert storage.take_log() == []
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        list(iterator)
        storage.row_groups_read(storage.take_log())
        loader.load_state_dict(state)
        assert storage.take_log() == []
        list(loader)
        storage.row_groups_read(storage.take_log())


@pytest.mark.parametrize("reads", ["as a whole", "in parts"])
def test_rows_shuffled_in_rounds_come_in_the_order_of_the_rounds_however_their_shard_is_read(path, reads, monkeypatch):
    """A small shard is read as a whole. A state of one kind of reading is continued by the other."""
    in_parts: list[Step] = []
    read_rounds = ShuffledScan._rounds
    monkeypatch.setattr(ShuffledScan, "_rounds", lambda scan, step: in_parts.append(step) or read_rounds(scan, step))
    order: dict[str, Any] = {
        "shuffle": True,
        "shuffle_seed": 5,
        "shuffle_buffer_size": 8,
        "shuffle_interleave": 3,
    }
    memory: dict[str, dict[str, Any]] = {"as a whole": {}, "in parts": {"read_ahead_bytes": 100}}
    options = {"columns": ["value", "score"], "batch_size": 7, **order}  # of strings the footers do not tell the size
    loader, dataset = open_loader(path, **options, **memory[reads])
    dataset.set_epoch(3)
    manifest = dataset._opened_files.manifest
    plan = make_plan(manifest, PlanOptions(2**27, **order), epoch=3, num_ranks=1, num_workers=0)
    assert max(shard.rounds for shard in shards_of(plan)) > 2
    correct = []
    for shard in shards_of(plan):
        rows = row_ids(manifest, shard)
        correct += [rows[place] for place in delivery_order(ShardSlice(shard), seed=5, epoch=3)]

    delivered: list[int] = []
    states = []
    for batch in loader:
        delivered += rows_of(batch)
        states.append((len(delivered), dataset.state_dict()))
    assert delivered == correct
    assert bool(in_parts) == (reads == "in parts")

    other = memory["in parts" if reads == "as a whole" else "as a whole"]
    for count, state in states[::5]:
        resumed, dataset = open_loader(path, **options, **other)
        dataset.load_state_dict(state)
        assert [row for batch in resumed for row in rows_of(batch)] == correct[count:]
