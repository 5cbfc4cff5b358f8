"""The ledger against real runs: every step's rows, every row's step, and batches again, without reading data."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import pickle
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.orc as pa_orc
import pyarrow.parquet as pq
import pytest
import torch
from deltas import commit, vector_on_disk
from pairwise import pairwise
from ranged import RangedFileSystem, ranged
from support import edited
from text_files import COMPRESSORS
from text_files import WRITERS as WRITERS_OF_TEXT

from torch_dataloader_utils import (
    DeltaDataset,
    LedgerUnknownError,
    Manifest,
    PackedBytes,
    Rows,
    RowStep,
    Shard,
    Split,
    StructuredDataset,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

FILES = ((60, 10), (3, 10), (81, 20), (28, 7))

MORE_ROWS = ((90, 10), (3, 10), (131, 20), (40, 7))
"""Enough that behind a filter the steps after a state are in fewer row groups than all are."""

ORDERS: dict[str, dict[str, Any]] = {
    "in order": {},
    "shards shuffled": {"shuffle": True},
    "rows shuffled": {"shuffle": True, "shuffle_buffer_size": 45},
    "rows shuffled in rounds": {"shuffle": True, "shuffle_buffer_size": 8, "shuffle_interleave": 3},
}

RANKS: dict[str, dict[str, Any]] = {
    "one rank": {"num_ranks": 1},
    "two workers": {"num_ranks": 1, "num_workers": 2},
    "three ranks": {"num_ranks": 3, "num_workers": 0},
    "uneven dropped": {"num_ranks": 3, "num_workers": 2, "uneven_ranks": "drop"},
    "uneven padded": {"num_ranks": 4, "num_workers": 0, "uneven_ranks": "pad"},
    "short batches dropped": {"num_ranks": 2, "num_workers": 2, "drop_last": True},
    "a grid": {"num_ranks": 2, "num_workers": 2, "virtual_ranks": 4, "virtual_workers": 4, "uneven_ranks": "pad"},
}


@dataclass(frozen=True)
class Table:
    """A dataset whose rows are known.

    Attributes:
        path: Its directory.
        format: Its format.
        values: Each file's column `value`, in the order of the rows.
    """

    path: Path
    format: str
    values: dict[str, list[int]]

    def open(self, **options: Any) -> tuple[Any, Any]:
        options = {"num_workers": 0, "batch_size": 4, "split_bytes": 400, **options}
        if self.format == "delta":
            return DeltaDataset.create_dataloader(self.path, **options)
        counting = {"count_rows": True} if self.format == "csv" else {}
        return StructuredDataset.create_dataloader(self.path, self.format, **{**counting, **options})

    def ranks(self, num_ranks: int, **options: Any) -> list[tuple[Any, Any]]:
        return [self.open(**options, num_ranks=num_ranks, rank=rank) for rank in range(num_ranks)]

    def values_of(self, rows: Any) -> list[int]:
        return [self.values[path][row] for path, row in rows]

    @property
    def rows(self) -> list[tuple[str, int]]:
        return [(path, row) for path, values in self.values.items() for row in range(len(values))]


def write_parquet(directory: Path, tables: dict[str, tuple[pa.Table, int]]) -> None:
    for name, (table, group_rows) in tables.items():
        pq.write_table(table, directory / f"{name}.parquet", row_group_size=group_rows)


def write_orc(directory: Path, tables: dict[str, tuple[pa.Table, int]]) -> None:
    for name, (table, group_rows) in tables.items():
        with pa_orc.ORCWriter(directory / f"{name}.orc", stripe_size=1, batch_size=1) as writer:
            for first in range(0, len(table), group_rows):
                writer.write(table.slice(first, group_rows))


def write_csv(directory: Path, tables: dict[str, tuple[pa.Table, int]]) -> None:
    for name, (table, _) in tables.items():
        lines = [f"{row['value']},{row['text']}\n" for row in table.to_pylist()]
        (directory / f"{name}.csv").write_text("value,text\n" + "".join(lines))


WRITERS: dict[str, Callable[[Path, dict[str, tuple[pa.Table, int]]], None]] = {
    "parquet": write_parquet,
    "orc": write_orc,
    "csv": write_csv,
}


def write_delta(directory: Path, tables: dict[str, tuple[pa.Table, int]]) -> dict[str, list[int]]:
    """Write a table of which the first rows, and every fifth of each file, are deleted."""
    write_parquet(directory, tables)
    fields = [
        {"name": name, "type": kind, "nullable": True, "metadata": {}}
        for name, kind in (("value", "long"), ("text", "string"))
    ]
    features = ["deletionVectors"]
    actions: list[dict[str, Any]] = [
        {
            "protocol": {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": features,
                "writerFeatures": features,
            }
        },
        {
            "metaData": {
                "id": "made-up",
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps({"type": "struct", "fields": fields}),
                "partitionColumns": [],
                "configuration": {"delta.enableDeletionVectors": "true"},
                "createdTime": 0,
            }
        },
    ]
    left = {}
    for name, (table, _) in tables.items():
        path = directory / f"{name}.parquet"
        deleted = sorted({0, 1, *range(0, len(table), 5)})
        left[path.name] = [value for row, value in enumerate(table["value"].to_pylist()) if row not in deleted]
        added = {"path": path.name, "size": path.stat().st_size, "partitionValues": {}, "modificationTime": 0}
        vector = vector_on_disk(directory, deleted)
        counted = {"stats": json.dumps({"numRecords": len(table)}), "dataChange": True}
        actions.append({"add": {**added, **counted, "deletionVector": vector}})
    commit(directory, 0, actions)
    return left


def write(directory: Path, kind: str, files: Sequence[tuple[int, int]] = FILES) -> Table:
    first = itertools.accumulate((rows for rows, _ in files), initial=0)
    tables = {
        f"part-{number}": (pa.table({"value": range(at, at + rows), "text": [f"row {at}"] * rows}), group_rows)
        for number, ((rows, group_rows), at) in enumerate(zip(files, first, strict=False))
    }
    directory.mkdir()
    if kind == "delta":
        return Table(directory, kind, write_delta(directory, tables))
    WRITERS[kind](directory, tables)
    return Table(directory, kind, {f"{name}.{kind}": table["value"].to_pylist() for name, (table, _) in tables.items()})


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Table]:
    """One table of each kind."""
    directory = tmp_path_factory.mktemp("tables")
    return {kind: write(directory / kind, kind) for kind in (*WRITERS, "delta")}


@pytest.fixture
def parquet(tables: dict[str, Table]) -> Table:
    return tables["parquet"]


@pytest.fixture(scope="module")
def with_more_rows(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return write(tmp_path_factory.mktemp("tables") / "parquet", "parquet", MORE_ROWS)


def values_of(batch: Any) -> list[int]:
    return [int(value) for value in batch["value"]]


def require_same(one: Any, other: Any) -> None:
    """Compare two batches bit for bit: their columns, their order, and each one's type."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for name, column in one.items():
            require_same(column, other[name])
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.numpy().tobytes() == other.numpy().tobytes()
    elif isinstance(one, PackedBytes):
        require_same(one._asdict(), other._asdict())
    else:
        assert one == other


def require_answers(
    table: Table, dataset: Any, epoch: int, runs: Sequence[Sequence[Any]], begin: int = 0, *, all_rows: bool = True
) -> None:
    """Compare what a dataset says of an epoch with the batches of all ranks from a step on.

    `all_rows` says that no rows were delivered before.
    """
    steps: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for rank, batches in enumerate(runs):
        for step, batch in enumerate(batches, begin):
            rows = dataset.rows_at(step, epoch, rank)
            assert isinstance(rows, Rows)
            assert rows.bytes_read == 0
            assert table.values_of(rows) == values_of(batch)
            for place, value in enumerate(values_of(batch)):
                steps[value].append((step, rank, place))
        with pytest.raises(ValueError, match=f"rank {rank} makes "):
            dataset.rows_at(begin + len(batches), epoch, rank)
    for path, row in table.rows:
        expected = sorted(steps[table.values[path][row]])
        if not expected and not all_rows:
            continue
        found = dataset.step_of(path, row, epoch)
        answers = [] if found is None else [found, *found.others]
        assert [(at.step, at.rank, at.place) for at in answers] == expected
        assert all(at.epoch == epoch and at.bytes_read == 0 for at in answers)


# Every step's rows and every row's step ------------------------------------------------------------------------------


@pairwise(most=7, kind=["parquet", "orc", "csv", "delta"], order=ORDERS, ranks=RANKS)
def test_the_ledger_has_the_rows_that_a_real_run_delivers_and_reads_no_data(tables, tmp_path, kind, order, ranks):
    table = tables[kind]
    away = Table(tmp_path / "away", table.format, table.values)
    shutil.copytree(table.path, away.path)
    opened = away.ranks(**{"num_workers": 0, **ORDERS[order], **RANKS[ranks]})
    runs: dict[int, list[list[Any]]] = {}
    for epoch in (0, 3):
        for loader, _ in opened:
            loader.set_epoch(epoch)
        runs[epoch] = [list(loader) for loader, _ in opened]
    shutil.rmtree(away.path)  # from here on, whoever reads data fails

    for epoch, batches in runs.items():
        require_answers(away, opened[-1][1], epoch, batches)
    again = opened[0][1]
    assert list(again.rows_at(0, 0)) == list(opened[-1][1].rows_at(0, 0, 0))


@pairwise(most=4, order=ORDERS, kinds=["plain", "a grid", "padded"])
def test_three_ranks_then_two_then_five_have_the_steps_of_their_loads(tables, order, kinds):
    table = tables["delta" if kinds == "padded" else "parquet"]
    options: dict[str, Any] = dict(ORDERS[order])
    if kinds != "plain":
        options["uneven_ranks"] = "pad"
    states: list[Any] = []
    begin = 0
    for num_ranks in (3, 2, 5):
        grid = {"virtual_ranks": num_ranks, "virtual_workers": 2} if kinds == "a grid" else {}
        opened = table.ranks(num_ranks, **{**options, **grid, "num_workers": 2 if num_ranks == 2 else 0})
        for loader, _ in opened:
            if states:
                loader.load_state_dict(states, strict=False)
        runs = [list(itertools.islice(loader, 3)) for loader, _ in opened]
        states = [json.loads(json.dumps(loader.state_dict())) for loader, _ in opened]
        rests = [list(loader) for loader, _ in (table_again(table, opened, options | grid, states))]
        whole = [run + rest for run, rest in zip(runs, rests, strict=True)]
        require_answers(table, opened[0][1], 0, whole, begin, all_rows=not begin)
        if begin:
            with pytest.raises(LedgerUnknownError, match=rf"before step {begin} .* elastic load .*run_log="):
                opened[0][1].rows_at(begin - 1)
            delivered = {value for run in whole for batch in run for value in values_of(batch)}
            before = next(row for row in table.rows if table.values[row[0]][row[1]] not in delivered)
            with pytest.raises(LedgerUnknownError, match="run_log="):
                opened[0][1].step_of(*before)
        begin = max(state["batches_delivered"] for state in states)


def table_again(table: Table, opened: list[Any], options: dict[str, Any], states: list[Any]) -> list[Any]:
    """The same ranks, which continue strictly."""
    workers = opened[0][1].num_workers
    again = table.ranks(len(opened), **options, num_workers=workers)
    for (loader, _), state in zip(again, states, strict=True):
        loader.load_state_dict(state)
    return again


# Loads ---------------------------------------------------------------------------------------------------------------


@pairwise(most=4, num_workers=[0, 2], order=ORDERS)
def test_after_a_strict_load_the_steps_before_and_after_it_are_known_also_of_other_ranks(parquet, num_workers, order):
    options = {**ORDERS[order], "num_workers": num_workers}
    opened = parquet.ranks(2, **options)
    states = []
    for loader, _ in opened:
        list(itertools.islice(loader, 7))
        states.append(loader.state_dict())
        loader.set_epoch(0)
    whole = [list(loader) for loader, _ in opened]
    for rank, state in enumerate(states):
        for saved in (state, edited({key: state[key] for key in state if key not in ("batch_size", "drop_last")})):
            loader, dataset = parquet.open(**options, num_ranks=2, rank=rank)
            loader.load_state_dict(saved)
            require_answers(parquet, dataset, 0, whole)


def test_a_strict_load_with_batches_of_another_size_knows_both_sizes(parquet):
    loader, dataset = parquet.open(num_workers=2, batch_size=6, shuffle=True)
    before = list(itertools.islice(loader, 7))
    state = loader.state_dict()
    loader, dataset = parquet.open(num_workers=2, batch_size=10, shuffle=True)
    loader.load_state_dict(state)
    whole = [*before, *loader]
    assert {len(values_of(batch)) for batch in whole} >= {6, 10}
    loader.load_state_dict(state)
    require_answers(parquet, dataset, 0, [whole])
    for step in (3, 9):
        require_same(loader.batch_at(step), whole[step])

    del state["batch_size"]
    loader, dataset = parquet.open(num_workers=2, batch_size=10, shuffle=True)
    loader.load_state_dict(edited(state))
    with pytest.raises(LedgerUnknownError, match=r"at step 7 of epoch 0 .* other sizes .*run_log="):
        dataset.rows_at(6)
    assert parquet.values_of(dataset.rows_at(7)) == values_of(whole[7])


def test_a_process_knows_the_steps_before_its_own_elastic_loads(parquet):
    loader, dataset = parquet.open(shuffle=True, shuffle_buffer_size=45)
    first = list(itertools.islice(loader, 5))
    loader.load_state_dict([loader.state_dict()], strict=False)
    second = list(itertools.islice(loader, 4))
    state = loader.state_dict()
    loader.load_state_dict([state], strict=False)
    third = list(loader)
    require_answers(parquet, dataset, 0, [[*first, *second, *third]])

    loader.load_state_dict(state)  # back to where the second part ended
    again = list(loader)
    require_answers(parquet, dataset, 0, [[*first, *second, *again]])
    loader.set_epoch(0)
    require_answers(parquet, dataset, 0, [list(loader)])


def test_a_virtual_topology_knows_the_steps_before_its_real_ranks_changed(parquet):
    grid = {"virtual_ranks": 4, "virtual_workers": 2, "uneven_ranks": "drop", "shuffle": True}
    opened = parquet.ranks(4, **grid, batch_size=3)
    before = [list(itertools.islice(loader, 5)) for loader, _ in opened]
    states = [loader.state_dict() for loader, _ in opened]
    fewer = parquet.ranks(2, **grid, batch_size=6, num_workers=2)
    for loader, _ in fewer:
        loader.load_state_dict(states)
    after = [list(loader) for loader, _ in fewer]
    for _, dataset in fewer:
        for rank, batches in enumerate(before):
            assert [parquet.values_of(dataset.rows_at(step, rank=rank)) for step in range(5)] == [
                values_of(batch) for batch in batches
            ]
        for rank, batches in enumerate(after):
            for step, batch in enumerate(batches, 5):
                assert parquet.values_of(dataset.rows_at(step, rank=rank)) == values_of(batch)
        with pytest.raises(ValueError, match=r"rank=3: there are 2 ranks, from 0, at step 5"):
            dataset.rows_at(5, rank=3)
    value = values_of(before[3][4])[0]
    path, row = next(row for row in parquet.rows if parquet.values[row[0]][row[1]] == value)
    assert fewer[0][1].step_of(path, row) == RowStep(0, 4, 3, 0, 0)


def test_a_loaded_epoch_that_begins_again_and_other_epochs_have_their_own_steps(parquet):
    loader, _ = parquet.open(shuffle=True)
    later = list(epoch_of(loader, 1))
    list(itertools.islice(epoch_of(loader, 0), 5))
    other, dataset = parquet.open(shuffle=True)
    other.load_state_dict([loader.state_dict()], strict=False)
    require_answers(parquet, dataset, 1, [later])
    with pytest.raises(LedgerUnknownError):
        dataset.rows_at(0)
    list(other)
    with pytest.raises(LedgerUnknownError):  # it has ended, and is still the current one
        dataset.rows_at(0)
    whole = list(other)
    require_answers(parquet, dataset, 0, [whole])
    assert [values_of(batch) for batch in epoch_of(loader, 0)] == [values_of(batch) for batch in whole]


def test_copies_answer_as_the_dataset_does(parquet):
    loader, dataset = parquet.open(shuffle=True, batch_size=6)
    first = list(itertools.islice(loader, 5))
    loader.load_state_dict([loader.state_dict()], strict=False)
    second = list(itertools.islice(loader, 4))
    for copied in (copy.copy(dataset), copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        require_answers(parquet, copied, 0, [[*first, *second, *copied]])


def epoch_of(loader: Any, epoch: int) -> Any:
    loader.set_epoch(epoch)
    return iter(loader)


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.LostRowsWarning")
@pytest.mark.parametrize("order", ["shards shuffled", "rows shuffled", "rows shuffled in rounds"])
def test_what_is_left_of_an_epoch_whose_files_changed_has_the_steps_of_its_load(tables, tmp_path, order):
    table = Table(tmp_path / "changing", "parquet", dict(tables["parquet"].values))
    shutil.copytree(tables["parquet"].path, table.path)
    opened = table.ranks(2, **ORDERS[order])
    delivered = {value for loader, _ in opened for batch in itertools.islice(loader, 5) for value in values_of(batch)}
    states = [loader.state_dict() for loader, _ in opened]
    pq.write_table(pa.table({"value": range(900, 950), "text": ["new"] * 50}), table.path / "part-3.parquet")
    pq.write_table(pa.table({"value": range(700, 760), "text": ["new"] * 60}), table.path / "part-4.parquet")
    (table.path / "part-1.parquet").unlink()
    del table.values["part-1.parquet"]
    table.values.update({"part-3.parquet": list(range(900, 950)), "part-4.parquet": list(range(700, 760))})

    loader, dataset = table.open(**ORDERS[order])
    loader.load_state_dict(states, strict=False, on_changed_files="continue")
    require_answers(table, dataset, 0, [list(loader)], begin=5, all_rows=False)
    assert dataset.step_of("part-3.parquet", 0) is None  # nothing of a rewritten file is delivered in this epoch
    with pytest.raises(ValueError, match=r"part-1\.parquet' is no file"):
        dataset.step_of("part-1.parquet", 0)
    for path, row in table.rows:
        if table.values[path][row] in delivered:
            with pytest.raises(LedgerUnknownError, match="run_log="):
                dataset.step_of(path, row)


class LastFileFirst:
    """A split strategy: one shard for each file."""

    def shards(self, manifest: Manifest, epoch: int) -> list[Shard]:
        shards = [Shard((Split(file.path, 0, file.rows),)) for file in manifest.files]
        return shards[::-1] if epoch % 2 else shards


@pytest.mark.parametrize("buffer", [None, 30])
def test_the_shards_of_a_split_strategy_have_their_steps(parquet, buffer):
    shuffles = {} if buffer is None else {"shuffle": True, "shuffle_buffer_size": buffer}
    loader, dataset = parquet.open(split_strategy=LastFileFirst(), **shuffles)
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        require_answers(parquet, dataset, epoch, [list(loader)])


# A batch again -------------------------------------------------------------------------------------------------------


def noisy(batch: Any) -> Any:
    """What a collate_fn may do: draw random numbers of every kind."""
    rows = len(batch["value"])
    drawn = {"torch": torch.rand(rows), "numpy": torch.from_numpy(np.random.rand(rows))}  # noqa: NPY002
    return {**batch, **drawn, "python": torch.tensor([random.random() for _ in range(rows)])}


FORMS: dict[str, dict[str, Any]] = {
    "tensors": {},
    "python": {"output_format": "dict"},
    "with random numbers": {"collate_fn": noisy},
    "packed texts": {"column_formats": {"text": "packed"}},
}


@pairwise(most=5, order=ORDERS, form=FORMS, ranks=["two workers", "uneven padded", "a grid"])
def test_a_batch_comes_again_bit_for_bit_and_nothing_else_changes(parquet, order, form, ranks):
    options = {"num_workers": 0, **RANKS[ranks]}
    rank = options["num_ranks"] - 1
    loader, dataset = parquet.open(**{**ORDERS[order], **FORMS[form], **options, "rank": rank})
    batches = list(loader)
    loader.set_epoch(1)
    following = list(loader)
    loader.set_epoch(0)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    before = loader.state_dict(), dataset.get_metrics(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    state = torch.get_rng_state()
    for step in (0, 2, 3, len(batches) - 1):
        require_same(loader.batch_at(step), batches[step])
        require_same(dataset.batch_at(step, 1), following[step])
    after = loader.state_dict(), dataset.get_metrics(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert after == before
    assert torch.equal(torch.get_rng_state(), state)
    for expected, batch in zip(batches[3:], iterator, strict=True):
        require_same(batch, expected)


@pytest.mark.parametrize("order", ["in order", "rows shuffled in rounds"])
def test_a_batch_again_reads_the_row_groups_of_its_rows_alone(tmp_path, monkeypatch, order):
    table = pa.table({"value": range(4000), "other": np.random.default_rng(0).random(4000)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    group = pq.read_metadata(tmp_path / "a.parquet").row_group(0)
    size = group.column(0).total_compressed_size
    options = {**ORDERS[order], "shuffle_buffer_size": 100, "shuffle_interleave": 3} if order != "in order" else {}
    loader, dataset = StructuredDataset.create_dataloader(
        ranged(tmp_path), num_workers=2, batch_size=60, columns=["value"], **options
    )
    fetched: list[int] = []
    monkeypatch.setattr(RangedFileSystem, "on_fetch", staticmethod(lambda _, start, end: fetched.append(end - start)))
    rows = dataset.rows_at(7)
    assert not fetched
    batch = loader.batch_at(7)
    assert values_of(batch) == rows.rows.tolist()
    groups = {row // 100 for row in rows.rows.tolist()}
    assert size / 2 < sum(fetched) < 2.5 * size * (len(groups) if order == "in order" else 4)


# Where only reading tells --------------------------------------------------------------------------------------------


FILTER = (pc.field("value") > 66) & (pc.bit_wise_and(pc.field("value"), 12) != 4)


@pytest.mark.parametrize("every", [8, pytest.param(4, marks=pytest.mark.soak)])
@pairwise(most=4, order=ORDERS, ranks=["one rank", "two workers", "three ranks", "short batches dropped"])
def test_behind_a_filter_a_scan_of_its_columns_tells_the_steps(with_more_rows, order, ranks, caplog, every):
    caplog.set_level(logging.INFO, logger="torch_dataloader_utils")
    filters = (pc.field("value") > 100) & (pc.bit_wise_and(pc.field("value"), 12) != 4)
    options = {"num_workers": 0, **RANKS[ranks], **ORDERS[order], "filters": filters, "columns": ["text", "value"]}
    options |= {"batch_size": 6, "split_bytes": 600}
    opened = with_more_rows.ranks(**options)
    loader, dataset = opened[-1]
    runs = [list(loader) for loader, _ in opened]
    middle, last = len(runs[-1]) // 2, len(runs[-1]) - 1
    state = None
    for step, batch in enumerate(loader):
        state = loader.state_dict() if step == middle else state
        if step % every == 2:
            require_scanned(with_more_rows, loader, dataset, step, batch)
    with pytest.raises(
        LedgerUnknownError, match=r"only reading tells .* scan=True reads the columns that the filter needs, of"
    ):
        dataset.rows_at(0)
    for rank, batches in enumerate(runs):
        assert with_more_rows.values_of(dataset.rows_at(2, 0, rank, scan=True)) == values_of(batches[2])
        with pytest.raises(ValueError, match=f"rank {rank} makes steps 0 to {len(batches) - 1}"):
            dataset.rows_at(len(batches), 0, rank, scan=True)
    assert dataset.step_of("part-0.parquet", 5) is None  # statistics rule it out, so that nothing is read
    assert dataset.step_of("part-2.parquet", 116 - 93, scan=True) is None
    assert "bytes to find the rows of step 2 of rank 0" in caplog.text

    loader, dataset = with_more_rows.open(**options, rank=len(opened) - 1)
    loader.load_state_dict(state)
    whole = with_more_rows.open(**options, rank=len(opened) - 1)[1].rows_at(last, scan=True).bytes_read
    since_state = dataset.rows_at(last, scan=True).bytes_read
    assert since_state < whole if order == "in order" else since_state <= whole
    for step in (1, middle + 1, last):  # before and after the state
        require_scanned(with_more_rows, loader, dataset, step, runs[-1][step])


def require_scanned(table: Table, loader: Any, dataset: Any, step: int, batch: Any) -> None:
    rows = dataset.rows_at(step, scan=True)
    assert table.values_of(rows) == values_of(batch)
    assert rows.bytes_read > 0
    require_same(loader.batch_at(step, scan=True), batch)
    for place, (path, row) in list(enumerate(rows))[::5]:
        found = dataset.step_of(path, row, scan=True)
        assert (found.step, found.rank, found.place) == (step, dataset.rank, place)


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("sizes", "are_known"), [((6, 6), True), ((8, 4), False)])
@pytest.mark.parametrize(("ranks", "order"), [(1, "in order"), (2, "rows shuffled")])
def test_behind_a_filter_batches_before_a_state_are_known_if_those_of_its_size_lead_there(
    parquet, *, sizes, are_known, ranks, order, every
):
    options = {"filters": FILTER, **ORDERS[order], "num_ranks": ranks, "rank": ranks - 1}
    delivered, state = [], None
    for size in sizes:
        loader, dataset = parquet.open(**options, batch_size=size)
        if state is not None:
            loader.load_state_dict(state)
        delivered += itertools.islice(loader, 2)
        state = loader.state_dict()
        require_scanned(parquet, loader, dataset, 0, delivered[0])  # also before the state, which records their size

    loader, dataset = parquet.open(**options, batch_size=sizes[-1])
    loader.load_state_dict(state)
    for step, batch in enumerate(loader):
        if step % every == 0:
            require_scanned(parquet, loader, dataset, step + 4, batch)
    loader.load_state_dict(state)
    for step in (0, 3) if are_known else ():
        require_scanned(parquet, loader, dataset, step, delivered[step])
    if not are_known:
        with pytest.raises(LedgerUnknownError, match=r"at step 4 of epoch 0 continues batches of other sizes"):
            dataset.rows_at(3, scan=True)
        path, row = next(row for row in parquet.rows if parquet.values[row[0]][row[1]] == values_of(delivered[0])[0])
        loader.load_state_dict(state)
        with pytest.raises(LedgerUnknownError):
            dataset.step_of(path, row, scan=True)


def test_behind_a_filter_rows_that_were_delivered_before_an_elastic_load_are_not_known(parquet):
    loader, _ = parquet.open(filters=FILTER, shuffle=True)
    before = [value for batch in itertools.islice(loader, 5) for value in values_of(batch)]
    state = loader.state_dict()
    loader, dataset = parquet.open(filters=FILTER, shuffle=True, batch_size=5)
    loader.load_state_dict([state], strict=False)
    for step, batch in enumerate(loader, 5):
        if step % 5 == 1:
            require_scanned(parquet, loader, dataset, step, batch)
    path, row = next(row for row in parquet.rows if parquet.values[row[0]][row[1]] == before[0])
    with pytest.raises(LedgerUnknownError, match=r"before step 5 .*elastic load"):
        dataset.step_of(path, row, scan=True)


def test_a_filter_of_partition_columns_alone_is_scanned_too(tmp_path):
    for day in (1, 2, 3):
        (tmp_path / f"day={day}").mkdir()
        values = range(day * 100, day * 100 + 50)
        pq.write_table(pa.table({"value": values}), tmp_path / f"day={day}" / "a.parquet", row_group_size=20)
    loader, dataset = StructuredDataset.create_dataloader(
        tmp_path, partitioning="hive", filters=[("day", ">", 1)], num_workers=0, batch_size=7
    )
    for step, batch in enumerate(loader):
        rows = dataset.rows_at(step, scan=True)
        expected = [(f"day={value // 100}/a.parquet", value % 100) for value in values_of(batch)]
        assert list(rows) == expected
        assert rows.bytes_read == 0  # the filter needs no column of the files
    assert dataset.step_of("day=1/a.parquet", 3) is None


@pairwise(most=4, format=["csv", "csv.gz", "jsonl"], order=["in order", "rows shuffled"], num_workers=[0, 2])
def test_uncounted_text_is_scanned_and_its_rows_are_counted_on_the_way(tmp_path, format, order, num_workers):  # noqa: A002
    kind, _, compression = format.partition(".")
    values = {}
    for number, rows in enumerate((90, 4, 150)):
        values[f"{number}.{format}"] = list(range(number * 1000, number * 1000 + rows))
        text = WRITERS_OF_TEXT[kind](values[f"{number}.{format}"])
        (tmp_path / f"{number}.{format}").write_bytes(COMPRESSORS[f".{compression}" if compression else ""](text))
    options = {**ORDERS[order], "shuffle_buffer_size": 200} if order != "in order" else {}
    loader, dataset = StructuredDataset.create_dataloader(
        tmp_path, kind, num_workers=num_workers, batch_size=8, split_bytes=4000, **options
    )
    with pytest.raises(LedgerUnknownError, match=r"do not tell how many rows .* scan=True reads the rank's text"):
        dataset.rows_at(0)
    for step, batch in enumerate(loader):
        if step % 7 == 3:
            rows = dataset.rows_at(step, scan=True)
            assert [values[path][row] for path, row in rows] == batch["row"].tolist()
            require_same(loader.batch_at(step, scan=True), batch)
            path, row = list(rows)[-1]
            found = dataset.step_of(path, row, scan=True)
            assert (found.step, found.place) == (step, len(rows) - 1)
    with pytest.raises(ValueError, match=rf"row=4: 1\.{format} has fewer rows"):
        dataset.step_of(f"1.{format}", 4, scan=True)


def test_what_is_not_there_is_named(parquet):
    loader, dataset = parquet.open(num_ranks=2, rank=1)
    with pytest.raises(ValueError, match=r"'part-9\.parquet' is no file of the dataset.*did you mean 'part-"):
        dataset.step_of("part-9.parquet", 0)
    with pytest.raises(ValueError, match=r"row=60: part-0\.parquet has 60 rows"):
        dataset.step_of("part-0.parquet", 60)
    with pytest.raises(ValueError, match=r"rank=2: there are 2 ranks"):
        dataset.rows_at(0, rank=2)
    with pytest.raises(ValueError, match=r"step=1000: rank 1 makes steps 0 to "):
        loader.batch_at(1000)
    with pytest.raises(ValueError, match="step"):
        dataset.rows_at(-1)
    with pytest.raises(TypeError, match="path=0"):
        dataset.step_of(0, 0)
    with pytest.raises(TypeError, match="scan"):
        dataset.rows_at(0, scan=1)
    with pytest.raises(ValueError, match="epoch"):
        dataset.rows_at(0, 2**64)
