"""Transforms where something else decides what is read or delivered: packing, tables, run logs."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pairwise import pairwise
from stops import each_stop
from support import write_dataset

from torch_dataloader_utils import DeltaDataset, LedgerUnknownError, Packing, RunLog, StructuredDataset, audit

pytestmark = pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning")

FILES = ((40, 10), (3, 10), (41, 20))
ROWS = sum(rows for rows, _ in FILES)
ORDERS: dict[str, dict[str, Any]] = {
    "in order": {},
    "rows shuffled": {"shuffle": True, "shuffle_buffer_size": 25},
    "rows shuffled in rounds": {"shuffle": True, "shuffle_buffer_size": 8},
}


def documents_of(row: int) -> list[list[int]]:
    """Three documents of some rows, none of others, many of one: each token tells its row, document and place."""
    count = 300 if row == 36 else (3, 0, 1)[row % 3]
    return [[row * 10_000 + part * 10 + place for place in range(row % 7)] for part in range(count)]


def documents(table: pa.Table) -> pa.Table:
    made = [document for row in table["value"].to_pylist() for document in documents_of(row)]
    return pa.table({"tokens": pa.array(made, pa.list_(pa.int64()))})


def twice(table: pa.Table) -> pa.Table:
    return table.take(pa.array(np.repeat(np.arange(len(table)), 2)))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    assert write_dataset(directory, FILES) == ROWS
    return directory


def packed(path, strategy: str, **options: Any) -> Any:
    chosen = Packing("tokens", 16, pad_value=-1, strategy=strategy)
    given = {"transform": documents, "columns": ["value"], "batch_size": 3, "num_workers": 0, **options}
    return StructuredDataset.create_dataloader(path, packing=chosen, split_rows=25, **given)[0]


def tokens_of(batches) -> Counter[int]:
    return Counter(token for batch in batches for token in batch["tokens"].flatten().tolist() if token >= 0)


@each_stop
@pairwise(most=3, order=ORDERS, strategy=["concat", "best_fit"])
def test_documents_that_a_transform_makes_are_packed_each_token_once_stopped_at_every_batch(
    path, strategy, order, stops
):
    wanted = Counter(token for row in range(ROWS) for document in documents_of(row) for token in document)
    loader = packed(path, strategy, **ORDERS[order])
    whole, states = [], [loader.state_dict()]
    for batch in loader:
        whole.append(batch["tokens"].tolist())
        states.append(json.loads(json.dumps(loader.state_dict())))
    for number in stops(states):
        again = packed(path, strategy, **ORDERS[order])
        again.load_state_dict(states[number])
        rest = list(again)
        assert [batch["tokens"].tolist() for batch in rest] == whole[number:]
    assert states[1]["plan"]["unit"] == "sequences"
    for stop in range(0, len(whole), 7):
        loaders = [packed(path, strategy, num_ranks=2, rank=rank, **ORDERS[order]) for rank in range(2)]
        delivered = tokens_of(
            batch for rank, one in enumerate(loaders) for batch in itertools.islice(one, stop // (rank + 1))
        )
        saved = [one.state_dict() for one in loaders]
        others = [packed(path, strategy, num_ranks=3, rank=rank, **ORDERS[order]) for rank in range(3)]
        for one in others:
            one.load_state_dict(saved, strict=False)
        assert delivered + tokens_of(itertools.chain(*others)) == wanted, stop


def test_packing_takes_a_row_id_column_for_the_transform_alone(path):
    seen = []

    def numbered(table: pa.Table) -> pa.Table:
        seen.append(table.column_names)
        return pa.table({"tokens": pa.array([[number] for number in table["id"].to_pylist()], pa.list_(pa.int64()))})

    loader = packed(path, "concat", transform=numbered, row_id_column="id")
    assert tokens_of(loader) == Counter(range(ROWS))
    assert seen[0] == ["value", "id"]


@pytest.mark.parametrize("order", ORDERS)
def test_rows_of_a_delta_table_are_transformed_and_resumed_at_every_batch(tmp_path, order):
    deltalake = pytest.importorskip("deltalake")
    for first in (0, 30):
        rows = pa.table({"value": range(first, first + 30)})
        deltalake.write_deltalake(str(tmp_path / "table"), rows, mode="append")
    options = {"transform": twice, "batch_size": 7, "num_workers": 0, **ORDERS[order]}
    loader, _ = DeltaDataset.create_dataloader(tmp_path / "table", **options)
    before: Counter[int] = Counter()
    for batch in loader:
        before.update(batch["value"].tolist())
        again, _ = DeltaDataset.create_dataloader(tmp_path / "table", **options)
        again.load_state_dict(loader.state_dict())
        assert before + Counter(row for later in again for row in later["value"].tolist()) == Counter([*range(60)] * 2)


def test_a_run_log_and_an_audit_of_a_transformed_run_can_be_read_and_the_ledger_says_what_it_does_not_know(
    path, tmp_path
):
    options = {"batch_size": 10, "num_workers": 0, "columns": ["value"], "run_log": tmp_path / "log"}
    loader, dataset = StructuredDataset.create_dataloader(path, transform=twice, transform_id="twice", **options)
    list(itertools.islice(loader, 3))
    state = loader.state_dict()
    resumed, dataset = StructuredDataset.create_dataloader(path, transform=twice, transform_id="twice", **options)
    resumed.load_state_dict([state], strict=False)
    list(itertools.islice(resumed, 2))
    state = resumed.state_dict()
    assert [segment.first_step for segment in RunLog.read(tmp_path / "log").segments] == [0, 3]
    with pytest.raises(LedgerUnknownError, match="only reading tells how many rows the transform makes"):
        dataset.rows_at(1)
    found = audit([state], path)
    assert found.total.rows == ROWS
    assert found.total.done + found.total.under_way + found.total.left == ROWS
    assert any("transformed rows" in note for note in found.notes)
    _, plain = StructuredDataset.create_dataloader(path, **options)
    with pytest.raises(LedgerUnknownError, match="transform_id"):
        plain.rows_at(1)
