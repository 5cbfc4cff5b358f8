"""Which combinations of parameters `make test` takes, and that `make soak` leaves out none."""

from __future__ import annotations

import itertools

import pytest
from pairwise import covering, pairs_of, pairwise


@pytest.mark.parametrize("sizes", [(4, 3, 3, 2), (5, 4, 2), (2, 2, 2, 2, 2, 2), (7, 2), (3, 3, 3, 3)])
def test_every_pair_of_values_is_in_a_few_combinations(sizes):
    cells = list(itertools.product(*map(range, sizes)))
    chosen = covering(cells)
    assert set().union(*map(pairs_of, chosen)) == set().union(*map(pairs_of, cells))
    fewest = max(one * other for one, other in itertools.combinations(sizes, 2))
    assert fewest <= len(chosen) <= 2 * fewest
    assert chosen == covering(cells)


def test_all_combinations_are_there_and_those_that_are_not_chosen_are_for_the_soak():
    mark = pairwise(one=[1, 2, 3], other="ab", third=[None, {}]).mark
    names, cells = mark.args
    assert names == ["one", "other", "third"]
    assert [cell.values for cell in cells] == list(itertools.product([1, 2, 3], "ab", [None, {}]))
    soaked = [cell for cell in cells if pytest.mark.soak in cell.marks]
    assert len(cells) - len(soaked) == 6
    assert all(not cell.marks for cell in cells if cell not in soaked)


def test_fewer_combinations_are_the_first_ones_and_have_each_value_where_they_can():
    parameters = {"one": range(5), "other": "abcd", "third": [True, False]}
    cells = pairwise(**parameters, most=8).mark.args[1]
    taken = [cell.values for cell in cells if not cell.marks]
    assert len(taken) == 8
    assert [set(values) for values in zip(*taken, strict=True)] == [set(values) for values in parameters.values()]
