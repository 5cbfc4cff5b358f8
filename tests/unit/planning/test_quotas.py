"""Quotas: after every step each source has its share of the rows, less than one row off."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torch_dataloader_utils.planning import quotas as module
from torch_dataloader_utils.planning.quotas import Quotas

PARTS = st.lists(st.integers(0, 10**9) | st.integers(0, 3), min_size=1, max_size=8).filter(any)


def shares(parts):
    return tuple(Fraction(part, sum(parts)) for part in parts)


def steps_of(quotas):
    return quotas.counts.tolist()


@given(parts=PARTS, rows=st.integers(0, 400), step_rows=st.integers(1, 50))
def test_each_source_has_its_share_after_every_step(parts, rows, step_rows):
    weights = shares(parts)
    taken, done = [0] * len(parts), 0
    for step in Quotas(((0, weights),), rows, step_rows).counts.tolist():
        assert sum(step) == min(step_rows, rows - done)
        assert min(step) >= 0
        done += sum(step)
        taken = [before + more for before, more in zip(taken, step, strict=True)]
        assert all(abs(count - done * weight) < 1 for count, weight in zip(taken, weights, strict=True))
    assert done == rows


@given(parts=PARTS, rows=st.integers(1, 300), step_rows=st.integers(1, 30), workers=st.integers(1, 5))
def test_the_workers_together_take_what_the_steps_take(parts, rows, step_rows, workers):
    quotas = Quotas(((0, shares(parts)),), rows, step_rows)
    of_workers = [quotas.of_worker(worker, workers) for worker in range(workers)]
    assert [sum(counts) for counts in zip(*of_workers, strict=True)] == list(quotas.of_worker(0, 1))
    assert sum(quotas.of_worker(0, 1)) == rows


@given(first=PARTS, change=st.integers(1, 200), rows=st.integers(1, 300), step_rows=st.integers(1, 30))
def test_a_section_counts_anew_from_the_first_step_that_begins_in_it(first, change, rows, step_rows):
    then = shares(list(reversed(first)))
    steps = steps_of(Quotas(((0, shares(first)), (change, then)), rows, step_rows))
    before = -(-change // step_rows)
    assert steps[:before] == steps_of(Quotas(((0, shares(first)),), rows, step_rows))[:before]
    left = rows - before * step_rows
    assert steps[before:] == (steps_of(Quotas(((0, then),), left, step_rows)) if left > 0 else [])


@given(
    parts=st.lists(st.integers(1, 9), min_size=1, max_size=5), step_rows=st.integers(9, 60), steps=st.integers(2, 40)
)
def test_all_steps_at_once_have_what_one_after_the_other_have(parts, step_rows, steps):
    step_rows = max(step_rows, -(-sum(parts) // min(parts)))  # each source gives a row to each step
    stops = [number * step_rows for number in range(steps)]
    in_turn = module._reached_in_turn(parts, sum(parts), stops, [0] * len(parts))
    assert np.array_equal(module._reached_at_once(parts, sum(parts), np.array(stops)), in_turn)


def test_shares_of_which_no_int64_holds_the_parts_are_exact():
    weights = [Fraction(str(number)) for number in (1 / 3, 0.12345678901234567, math.pi / 10)]
    weights = tuple(weight / sum(weights) for weight in weights)
    taken = [0, 0, 0]
    for number, step in enumerate(steps_of(Quotas(((0, weights),), 10**12, 10**11)), 1):
        taken = [before + more for before, more in zip(taken, step, strict=True)]
        assert all(abs(count - number * 10**11 * weight) < 1 for count, weight in zip(taken, weights, strict=True))
