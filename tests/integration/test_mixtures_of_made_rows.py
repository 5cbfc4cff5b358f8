"""Sources with a transform in a mixture: what comes out is counted, mixed exactly, and resumed to the batch."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from torch_dataloader_utils import (
    CheckpointMismatchError,
    ColumnError,
    LedgerUnknownError,
    MixedDataset,
    Source,
    TransformError,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

ROWS = {"plain": 150, "made": 96}
WEIGHTS = {"plain": 0.25, "made": 0.75}
ORDERS: dict[str, dict[str, Any]] = {
    "in order": {},
    "shards shuffled": {"shuffle": True},
    "row groups in parts": {"read_ahead_bytes": 600},
    "rows shuffled": {"shuffle": True, "shuffle_buffer_size": 120},
    "buffer smaller than a row group": {"shuffle": True, "shuffle_buffer_size": 16},
}


def copies_of(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return how many rows are made of each: none of some row groups, 90 of one row."""
    return np.where((rows >= 24) & (rows < 48), 0, np.where(rows == 50, 90, rows % 4))


@dataclass(frozen=True)
class Copying:
    """Makes several rows of each. At module level: it is pickled."""

    more: int = 0
    calls: list[int] = field(default_factory=list, compare=False)

    def __call__(self, table: pa.Table) -> pa.Table:
        self.calls.append(table.num_rows)
        rows = table["x"].to_numpy()
        counts = copies_of(rows) + self.more
        copies = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        made = {"x": pa.array(np.repeat(rows, counts), pa.int64()), "copy": pa.array(copies, pa.int32())}
        if "id" in table.column_names:
            made["id"] = pa.array(np.repeat(table["id"].to_numpy(), counts), pa.int64())
        return pa.table(made)


def wanted(source: int) -> set[tuple[int, int]]:
    if not source:
        return {(row, -1) for row in range(ROWS["plain"])}
    return {
        (row, copy) for row, count in enumerate(copies_of(np.arange(ROWS["made"])).tolist()) for copy in range(count)
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("sources")
    for name, rows in ROWS.items():
        (root / name).mkdir()
        for part, numbers in enumerate(np.array_split(np.arange(rows), 3)):
            table = pa.table({"x": numbers, "copy": pa.array(np.full(len(numbers), -1), pa.int64())})
            pq.write_table(
                table if name == "plain" else table.select(["x"]), root / name / f"{part}.parquet", row_group_size=12
            )
    return root


def made(root: Path, **options: Any) -> Source:
    return Source(root / "made", **{"transform": Copying(), "transform_id": "copies", "count_rows": True, **options})


def opened(root: Path, weights: Any = WEIGHTS, source: Source | None = None, **options: Any) -> Any:
    sources = {"plain": Source(root / "plain"), "made": source or made(root)}
    given = {"rows_per_epoch": 120, "batch_size": 8, "num_workers": 0, "num_ranks": 1, "rank": 0}
    return MixedDataset.create_dataloader(sources, weights, **{**given, "source_column": "source", **options})


def rows_of(batch: Any) -> list[tuple[int, int, int]]:
    assert batch["copy"].dtype == batch["x"].dtype
    return list(zip(*(batch[name].tolist() for name in ("source", "x", "copy")), strict=True))


def saved(loader: Any) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


def require_quota(batches: list[list[tuple[int, int, int]]], weights: dict[str, float]) -> None:
    shares = [Fraction(repr(weight)) for weight in weights.values()]
    counts: Counter[int] = Counter()
    for batch in batches:
        counts.update(source for source, *_ in batch)
        assert all(abs(counts[source] - counts.total() * share) < 1 for source, share in enumerate(shares))


def require_once_a_pass(rows: Counter[tuple[int, int, int]]) -> None:
    """Raise unless the rows of each source are whole passes, and a part of one more."""
    for source in range(len(ROWS)):
        counts = {rows[source, row, copy] for row, copy in wanted(source)}
        assert max(counts) - min(counts) <= 1
    assert set(rows) <= {(source, *row) for source in range(len(ROWS)) for row in wanted(source)}


@pytest.mark.parametrize("every", [8, pytest.param(4, marks=pytest.mark.soak)], ids=["some states", "more states"])
@pytest.mark.parametrize("order", ORDERS)
def test_each_row_that_comes_out_is_delivered_once_a_pass_and_batches_follow_from_every_state(root, order, every):
    """Other states in each epoch."""
    loader, _ = opened(root, **ORDERS[order])
    rows: Counter[tuple[int, int, int]] = Counter()
    for epoch in range(4):
        loader.set_epoch(epoch)
        batches, states = [], [saved(loader)]
        for batch in loader:
            batches.append(rows_of(batch))
            states.append(saved(loader))
        assert len(batches) == len(loader) == 15
        require_quota(batches, WEIGHTS)
        rows.update(itertools.chain(*batches))
        require_once_a_pass(rows)
        for step in range(epoch, 15, every):
            again, _ = opened(root, **ORDERS[order])
            again.load_state_dict(states[step])
            assert [rows_of(batch) for batch in again] == batches[step:]
    assert rows.total() == 480


def test_workers_deliver_what_one_process_does(root):
    options = ORDERS["rows shuffled"]
    sequences = {}
    for workers in (0, 2):
        loader, _ = opened(root, num_workers=workers, **options)
        rows = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            batches = [rows_of(batch) for batch in loader]
            require_quota(batches, WEIGHTS)
            rows += sorted(itertools.chain(*batches))
        sequences[workers] = sorted(rows)
    assert sequences[0] == sequences[2]


NEW_WEIGHTS = {"plain": 0.5, "made": 0.5}


@pytest.mark.parametrize("stops", [(0, 6), pytest.param((0, 2, 4, 6), marks=pytest.mark.soak)], ids=["some", "all"])
@pytest.mark.parametrize(
    ("order", "workers", "weights"),
    [("rows shuffled", 0, WEIGHTS), ("row groups in parts", 0, NEW_WEIGHTS), ("shards shuffled", 2, NEW_WEIGHTS)],
    ids=["rows shuffled", "new weights", "workers and new weights"],
)
def test_other_ranks_and_weights_go_on_from_any_batch(root, order, workers, weights, stops):
    for stop in (stops[0], stops[-1]) if workers else stops:
        rows: Counter[tuple[int, int, int]] = Counter()
        states: list[Any] | None = None
        for ranks, steps, shares in ((2, stop, WEIGHTS), (3, 2, weights), (1, None, weights)):
            loaders = [
                opened(root, shares, num_ranks=ranks, rank=rank, num_workers=workers, **ORDERS[order])[0]
                for rank in range(ranks)
            ]
            for loader in loaders:
                if states is not None:
                    loader.load_state_dict(states, strict=False)
            rows.update(itertools.chain(*delivered(loaders, steps, shares)))
            states = list(map(saved, loaders))
        for epoch in range(1, 4):
            for loader in loaders:
                loader.set_epoch(epoch)
            rows.update(itertools.chain(*delivered(loaders, None, weights)))
            require_once_a_pass(rows)


def delivered(loaders: list[Any], steps: int | None, weights: dict[str, float]) -> Iterator[list[tuple[int, int, int]]]:
    for loader in loaders:
        batches = [rows_of(batch) for batch in itertools.islice(loader, steps)]
        require_quota(batches, weights)
        yield from batches


def test_counts_are_kept_in_the_manifest_of_a_source_with_an_id(root):
    _, dataset = opened(root)
    kept = Copying()
    again, _ = opened(root, source=made(root, transform=kept, manifest=dataset.dump_manifest("made")))
    assert kept.calls == [0]  # to learn the columns
    assert [rows_of(batch) for batch in again] == [rows_of(batch) for batch in opened(root)[0]]
    other = Copying()
    opened(root, source=made(root, transform=other, transform_id="more", manifest=dataset.dump_manifest("made")))
    assert sum(other.calls) == ROWS["made"]
    unnamed = Copying()
    _, without = opened(root, source=made(root, transform_id=None))
    opened(root, source=made(root, transform=unnamed, transform_id=None, manifest=without.dump_manifest("made")))
    assert sum(unnamed.calls) == ROWS["made"]


def test_rows_that_a_filter_keeps_are_made_into_others_with_their_ids(root):
    source = made(root, filters=pc.field("x") >= 48)
    loader, dataset = opened(root, source=source, row_id_column="id", **ORDERS["rows shuffled"])
    rows: Counter[tuple[int, int, int]] = Counter()
    for epoch in range(3):
        loader.set_epoch(epoch)
        for batch in loader:
            rows.update(rows_of(batch))
            assert batch["id"].tolist() == batch["x"].tolist()
    assert {row[1:] for row in rows if row[0] == 1} == {row for row in wanted(1) if row[0] >= 48}
    with pytest.raises(LedgerUnknownError, match="source 'made' has a transform"):
        dataset.rows_at(0)


def without_ids(table: pa.Table) -> pa.Table:
    return Copying()(table.select(["x"]))


def failing(table: pa.Table) -> pa.Table:
    if table.num_rows and table["x"][0].as_py() >= 60:
        raise KeyError("sixty")
    return table


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        ({"count_rows": False}, {}, ValueError, "source 'made' .*only reading tells how many rows the transform makes"),
        ({"transform": failing}, {}, TransformError, "source 'made': .*failed for rows of row group . of .*KeyError"),
        ({"transform": without_ids}, {"row_id_column": "id"}, ColumnError, "source 'made': .*does not return it"),
        ({}, {"fingerprint": True}, ValueError, "fingerprint.*transform of source 'made'"),
        ({}, {"source_column": "copy"}, ColumnError, "source_column='copy' .*source"),
    ],
    ids=["uncounted", "failing", "no row ids", "fingerprint", "taken"],
)
def test_what_is_wrong_names_the_source(root, given, options, error, message):
    with pytest.raises(error, match=message):
        opened(root, source=made(root, **given), **options)


@pytest.mark.parametrize("order", ["in order", "row groups in parts", "rows shuffled"])
@pytest.mark.parametrize("more", [1, -1], ids=["more", "fewer"])
def test_other_numbers_of_rows_than_were_counted_are_named_when_they_are_read(root, order, more):
    @dataclass
    class Changing:
        more: int = 0

        def __call__(self, table: pa.Table) -> pa.Table:
            return Copying(self.more)(table) if self.more > 0 else Copying()(table.slice(0, len(table) + self.more))

    transform = Changing()
    loader, _ = opened(root, source=made(root, transform=transform), rows_per_epoch=400, **ORDERS[order])
    transform.more = more
    with pytest.raises(TransformError, match=r"transform of source 'made': it makes \d+ rows of row group .*counted"):
        list(loader)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "elastic"])
def test_a_state_names_another_transform_and_one_that_makes_other_numbers_of_rows(root, strict):
    loader, _ = opened(root)
    list(itertools.islice(loader, 3))
    state = saved(loader)
    given = state if strict else [state]
    for source, message in (
        (made(root, transform_id="others"), "transform_id of source 'made'"),
        (Source(root / "made"), "transform_id of source 'made'"),
        (made(root, transform=Copying(1)), "rows that the transform of source 'made' makes of 0.parquet"),
    ):
        other, _ = opened(root, source=source) if source.transform else opened_plain(root)
        with pytest.raises(CheckpointMismatchError, match=message):
            other.load_state_dict(given, strict=strict)


def opened_plain(root: Path) -> Any:
    """Open the mixture without the transform; the column that it adds is in the other source."""
    return opened(root, source=Source(root / "made"), fill_nulls={"copy": -1})


def test_rows_of_text_and_of_a_table_are_made_into_others(root, tmp_path):
    lines = [json.dumps({"x": row}) for row in range(ROWS["made"])]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    write_deltalake(tmp_path / "table", pa.table({"x": range(ROWS["made"])}))
    transform = {"transform": Copying(), "transform_id": "copies", "count_rows": True}
    for source in (
        Source(tmp_path / "lines.jsonl", "jsonl", **transform),
        Source.delta(tmp_path / "table", **transform),
    ):
        loader, _ = opened(root, source=source, rows_per_epoch=None, **ORDERS["rows shuffled"])
        rows: Counter[tuple[int, int, int]] = Counter()
        for epoch in range(2):
            loader.set_epoch(epoch)
            batches = [rows_of(batch) for batch in loader]
            require_quota(batches, WEIGHTS)
            rows.update(itertools.chain(*batches))
            require_once_a_pass(rows)
    with pytest.raises(ValueError, match=r"source 'made' .*only reading tells how many rows the transform makes"):
        opened(root, source=Source.delta(tmp_path / "table", transform=Copying()))


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.LostRowsWarning")
def test_rows_of_files_that_did_not_change_come_once_a_pass_when_others_do(root, tmp_path):
    copied = tmp_path / "sources"
    shutil.copytree(root, copied)
    loaders = [opened(copied, num_ranks=2, rank=rank, **ORDERS["rows shuffled"])[0] for rank in range(2)]
    rows = Counter(itertools.chain(*delivered(loaders, 3, WEIGHTS)))
    states = list(map(saved, loaders))
    (copied / "made" / "2.parquet").unlink()
    loaders = [opened(copied, num_ranks=3, rank=rank, **ORDERS["rows shuffled"])[0] for rank in range(3)]
    for loader in loaders:
        loader.load_state_dict(states, strict=False, on_changed_files="continue")
    for epoch in range(4):
        for loader in loaders:
            if epoch:
                loader.set_epoch(epoch)
        rows.update(itertools.chain(*delivered(loaders, None, WEIGHTS)))
    counts = {rows[1, row, copy] for row, copy in wanted(1) if row < 64}
    assert max(counts) - min(counts) <= 1
    assert max(rows[1, row, copy] for row, copy in wanted(1) if row >= 64) <= 1
