"""Which rows a token budget puts into a batch: the same as going through them one by one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torch_dataloader_utils.planning.token_budget import TokenBudget, batch_stops

LENGTHS = st.lists(st.integers(0, 30) | st.sampled_from([0, 1, 10, 10_000]), max_size=200)
BUDGETS = st.builds(TokenBudget, st.just("tokens"), st.integers(1, 400), st.booleans())


def tokens_of(lengths, budget):
    return max(lengths, default=0) * len(lengths) if budget.padded else sum(lengths)


def row_by_row(lengths, budget):
    """Where batches end, and the rows that are left, found by adding a row at a time."""
    stops, batch = [], []
    for number, length in enumerate(lengths):
        if batch and tokens_of([*batch, length], budget) > budget.tokens:
            stops.append(number)
            batch = []
        batch.append(length)
        if length > budget.tokens:  # nothing fits beside it
            stops.append(number + 1)
            batch = []
    return stops


@given(lengths=LENGTHS, budget=BUDGETS)
@example(lengths=[0] * 300, budget=TokenBudget("tokens", 1, padded=True))
@example(lengths=[1] * 300, budget=TokenBudget("tokens", 129, padded=True))
@example(lengths=[5, 5, 0, 0, 1], budget=TokenBudget("tokens", 10))
@example(lengths=[0, 11, 0], budget=TokenBudget("tokens", 10))
def test_batches_end_where_a_row_does_not_fit(lengths, budget):
    assert batch_stops(np.array(lengths, np.int64), budget) == row_by_row(lengths, budget)


@given(lengths=LENGTHS, budget=BUDGETS, data=st.data())
def test_rows_that_follow_change_no_complete_batch_and_a_batch_is_a_function_of_its_begin(lengths, budget, data):
    lengths = np.array(lengths, np.int64)
    stops = batch_stops(lengths, budget)
    seen = data.draw(st.integers(0, len(lengths)))
    assert batch_stops(lengths[:seen], budget) == [
        stop for stop in stops if stop < seen or (stop == seen and lengths[stop - 1] > budget.tokens)
    ]
    for begin in [0, *stops]:
        assert batch_stops(lengths[begin:], budget) == [stop - begin for stop in stops if stop > begin]


@given(lengths=LENGTHS, budget=BUDGETS)
def test_a_batch_has_no_more_than_its_tokens_unless_it_is_one_row(lengths, budget):
    stops = batch_stops(np.array(lengths, np.int64), budget)
    for start, stop in pairwise([0, *stops]):
        assert stop - start == 1 or tokens_of(lengths[start:stop], budget) <= budget.tokens
    assert tokens_of(lengths[stops[-1] if stops else 0 :], budget) <= budget.tokens


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ((3, 10), TypeError),
        (("tokens", 0), ValueError),
        (("tokens", 1.5), ValueError),
        (("tokens", True), ValueError),
        (("tokens", 10, "no"), TypeError),
        (("tokens", 10, False, "cut"), ValueError),
    ],
    ids=["column", "no tokens", "half a token", "a flag for tokens", "padded", "oversized"],
)
def test_a_wrong_value_is_named(values, error):
    with pytest.raises(error, match=r"^TokenBudget\("):
        TokenBudget(*values)
