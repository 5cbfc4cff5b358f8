"""The hash of a sequence of rows: by definition, however it is cut, and another one for other sequences."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from row_hashes import hash_of, key_of, splitmix64
from support import examples

from torch_dataloader_utils.planning.manifest import DataFile
from torch_dataloader_utils.planning.row_hash import (
    BLOCK,
    MULTIPLIERS,
    NO_ROWS,
    PRIMES,
    RowHash,
    file_key,
    hash_batches,
    row_marks,
)

MARKS = st.lists(st.integers(0, 2**64 - 1), max_size=40)
SPLITMIX_OF_1234567 = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431)
"""The first outputs from the seed 1234567 that https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64 lists."""


def hashed(marks: list[int]) -> RowHash:
    [own] = hash_batches(np.array(marks, dtype=np.uint64), [len(marks)])
    return own


def prime_factors(number: int) -> set[int]:
    factors, divisor = set(), 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.add(divisor)
            number //= divisor
        divisor += 1
    return factors | ({number} if number > 1 else set())


def test_the_primes_are_primes_and_the_multipliers_primitive_roots_drawn_by_splitmix64():
    drawn = (splitmix64(0, number) for number in range(10**6))
    for prime, multiplier in zip(PRIMES, MULTIPLIERS, strict=True):
        assert prime_factors(prime) == {prime}
        factors = prime_factors(prime - 1)
        roots = (root for root in (output % prime for output in drawn) if is_primitive(root, prime, factors))
        assert next(roots) == multiplier


def is_primitive(root: int, prime: int, factors: set[int]) -> bool:
    return all(pow(root, (prime - 1) // factor, prime) != 1 for factor in factors)


def test_the_marks_of_a_file_are_the_outputs_of_splitmix64():
    assert tuple(row_marks(1234567, 0, 4).tolist()) == SPLITMIX_OF_1234567
    assert row_marks(1234567, 2, 2).tolist() == list(SPLITMIX_OF_1234567[2:])
    key = 2**64 - 5
    assert row_marks(key, 10**12, 3).tolist() == [splitmix64(key, 10**12 + row) for row in range(3)]


def test_the_hash_of_some_rows_is_the_published_one():
    file = DataFile("a.parquet", 1000, "0123456789abcdef", ())
    assert file_key(file) == key_of(1000, "0123456789abcdef")
    assert hashed(row_marks(file_key(file), 0, 10).tolist()).digest == "bbcbd5cac0d69c0036fc574f0333b01b"


@examples(100)
@given(MARKS)
def test_it_is_the_polynomial_of_its_definition(marks):
    assert hashed(marks) == hash_of(marks)


@pytest.mark.parametrize("rows", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 77])
def test_long_batches_of_the_largest_marks_do_not_overflow(rows):
    assert hashed([2**64 - 1] * rows) == hash_of([2**64 - 1] * rows)


@examples(100)
@given(MARKS, st.lists(st.integers(0, 40), max_size=6))
def test_it_is_the_same_wherever_a_sequence_is_cut(marks, cuts):
    bounds = [0, *sorted(min(cut, len(marks)) for cut in cuts), len(marks)]
    sizes = [stop - start for start, stop in pairwise(bounds)]
    parts = hash_batches(np.array(marks, dtype=np.uint64), sizes)
    assert [part.rows for part in parts] == sizes
    assert sum(parts, NO_ROWS) == hash_of(marks)


@examples(100)
@given(MARKS, MARKS, MARKS)
def test_the_combination_is_associative_and_nothing_changes_by_no_rows(first, second, third):
    a, b, c = map(hashed, (first, second, third))
    assert (a + b) + c == a + (b + c) == hash_of(first + second + third)
    assert NO_ROWS + a == a + NO_ROWS == a


@examples(100)
@given(MARKS.filter(bool), st.data())
def test_another_row_another_order_or_a_missing_row_gives_another_hash(marks, data):
    index = data.draw(st.integers(0, len(marks) - 1))
    changed = [*marks]
    changed[index] = data.draw(st.integers(0, 2**64 - 1).filter(lambda mark: mark != marks[index]))
    assert hashed(changed) != hashed(marks)
    assert hashed(marks[:index] + marks[index + 1 :]) != hashed(marks)
    swapped = data.draw(st.permutations(marks))
    assert (hashed(swapped) == hashed(marks)) == (swapped == marks)


@examples(100)
@given(MARKS)
def test_a_digest_and_a_number_of_rows_give_the_hash_back(marks):
    own = hashed(marks)
    assert RowHash.of_digest(own.rows, own.digest) == own


WRONG = {
    "empty": "",
    "short": "0" * 31,
    "long": "0" * 33,
    "no digits": "g" * 32,
    "above the primes": "f" * 32,
    "negative": "-" + "0" * 31,
    "upper case": "A" * 32,
    "underscores": "1_0" + "0" * 29,
}


@pytest.mark.parametrize("digest", WRONG.values(), ids=WRONG)
def test_what_is_no_digest_gives_none(digest):
    assert RowHash.of_digest(3, digest) is None
