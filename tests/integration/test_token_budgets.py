"""Batches of as many rows as fit: the same after every stop, each row once on any ranks."""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dataloader_utils import ColumnError, LedgerUnknownError, StructuredDataset, TokenBudget
from torch_dataloader_utils.reading.token_budget import fitting

ROWS, TOKENS = 400, 100
ORDERS = {
    "in order": {},
    "rows shuffled": {"shuffle": True, "shuffle_buffer_size": 90},
    "in rounds": {"shuffle": True, "shuffle_buffer_size": 11},
}


def row_tokens():
    found = np.random.default_rng(5).integers(0, 60, ROWS)
    found[[3, 4, 250]] = 100, 0, 99
    return found


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("budgets")
    documents = [[row] * tokens for row, tokens in enumerate(row_tokens())]
    for number, (first, stop) in enumerate([(0, 130), (130, 131), (131, ROWS)]):
        table = pa.table({"tokens": pa.array(documents[first:stop], pa.list_(pa.int32()))})
        pq.write_table(table, directory / f"{number}.parquet", row_group_size=30)
    return directory


def open_budget(dataset, budget=None, **options):  # noqa: ANN003
    chosen = {"row_id_column": "row", "num_workers": 0, "split_rows": 70, **options}
    return StructuredDataset.create_dataloader(dataset, batching=budget or TokenBudget("tokens", TOKENS), **chosen)[0]


def batches_of(loader):
    return [batch["row"].tolist() for batch in loader]


def size_of(batch, budget):
    tokens = row_tokens()[batch]
    return int(tokens.max(initial=0)) * len(batch) if budget.padded else int(tokens.sum())


@given(rows=st.lists(st.integers(0, 30), max_size=40), tokens=st.integers(1, 60), padded=st.booleans())
def test_as_many_rows_fit_as_one_after_the_other(rows, tokens, padded):
    expected = 0
    while expected < len(rows):
        held = rows[: expected + 1]
        if (max(held) * len(held) if padded else sum(held)) > tokens:
            break
        expected += 1
    assert fitting(np.array(rows, np.int64), TokenBudget("tokens", tokens, padded=padded)) == expected


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_batches_are_as_large_as_they_may_be_and_the_same_after_every_stop(dataset, order, padded):
    budget = TokenBudget("tokens", TOKENS, padded=padded)
    whole = batches_of(open_budget(dataset, budget, **ORDERS[order]))
    assert sorted(row for batch in whole for row in batch) == list(range(ROWS))
    for batch, following in pairwise(whole):
        assert size_of(batch, budget) <= TOKENS < size_of([*batch, following[0]], budget)
    loader = open_budget(dataset, budget, **ORDERS[order])
    for number, state in enumerate([loader.state_dict(), *(loader.state_dict() for _ in loader)]):
        resumed = open_budget(dataset, budget, **ORDERS[order])
        resumed.load_state_dict(state)
        assert batches_of(resumed) == whole[number:]


@pytest.mark.parametrize("order", ORDERS)
def test_other_ranks_and_workers_go_on(dataset, order):
    delivered, states = [], None
    for ranks, stops in ((2, (5, 9)), (3, (4, 0, 6)), (1, (None,))):
        saved = []
        for rank, stop in enumerate(stops):
            loader = open_budget(dataset, num_ranks=ranks, rank=rank, num_workers=int(ranks == 1), **ORDERS[order])
            if states is not None:
                loader.load_state_dict(states, strict=False)
            batches = iter(loader)
            delivered += batches_of(islice(batches, stop))
            saved.append(loader.state_dict())
        states = saved
    assert sorted(row for batch in delivered for row in batch) == list(range(ROWS))


@pytest.mark.parametrize("output_format", ["torch", "numpy", "arrow", "dict"])
def test_a_worker_makes_the_same_batches_in_every_output_format(dataset, output_format):
    def found(num_workers):
        loader = open_budget(dataset, output_format=output_format, num_workers=num_workers, **ORDERS["rows shuffled"])
        arrow = output_format == "arrow"
        return [batch["row"].to_pylist() if arrow else list(map(int, batch["row"])) for batch in loader]

    assert found(1) == found(0)


def test_a_row_that_is_too_large_is_an_error_or_a_batch_of_its_own(dataset):
    with pytest.raises(ColumnError, match=r"a list of 100 tokens, .* row 3, .* row 0 of 0\.parquet; oversized='alone'"):
        batches_of(open_budget(dataset, TokenBudget("tokens", 99)))
    whole = batches_of(open_budget(dataset, TokenBudget("tokens", 99, oversized="alone")))
    assert [3] in whole
    assert sorted(row for batch in whole for row in batch) == list(range(ROWS))


def test_skipped_steps_are_left_out(dataset):
    whole = batches_of(open_budget(dataset))
    loader = open_budget(dataset)
    loader.skip_steps(2, 5)
    assert batches_of(loader) == whole[:2] + whole[5:]


@pytest.mark.parametrize(("name", "given"), [("batch_size", 8), ("uneven_ranks", "drop")])
def test_what_needs_the_number_of_rows_is_refused(dataset, name, given):
    with pytest.raises(ValueError, match=f"{name}=.* beside batching"):
        open_budget(dataset, **{name: given})


def test_what_is_known_when_all_is_read_is_not_known_before(dataset):
    loader = open_budget(dataset)
    with pytest.raises(TypeError, match="only reading tells how many rows fit"):
        len(loader)
    with pytest.raises(LedgerUnknownError, match="only reading tells how many rows fit"):
        loader.batch_at(1)
    with pytest.raises(ColumnError, match="there is no such column"):
        open_budget(dataset, TokenBudget("words", 10))
