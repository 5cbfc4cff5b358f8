"""Packing: each token of a document is in one sequence or is counted as dropped, and sequences are well filled."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torch_dataloader_utils.planning import packing
from torch_dataloader_utils.planning.packing import STRATEGIES, pack

LENGTHS = st.lists(st.integers(0, 40) | st.sampled_from([0, 1, 7, 8, 16]), max_size=60)
"""Documents beside sequences of 1 to 16 tokens: empty ones, and some that are much longer."""


def tokens_of(pieces):
    """The tokens of each sequence, as (document, token)."""
    parts = list(zip(pieces.documents.tolist(), pieces.firsts.tolist(), pieces.lengths.tolist(), strict=True))
    bounds = pieces.bounds.tolist()
    return [
        [(document, first + place) for document, first, length in parts[begin:end] for place in range(length)]
        for begin, end in pairwise(bounds)
    ]


@given(lengths=LENGTHS, length=st.integers(1, 16), strategy=st.sampled_from(STRATEGIES), split=st.booleans())
def test_each_token_is_in_one_sequence_or_in_a_document_that_is_too_long(lengths, length, strategy, split):
    pieces = pack(np.array(lengths, np.int64), length=length, strategy=strategy, split_documents=split)
    sequences = tokens_of(pieces)
    assert all(0 < len(sequence) <= length for sequence in sequences)
    delivered = sorted(token for sequence in sequences for token in sequence)
    kept = [number for number, tokens in enumerate(lengths) if split or tokens <= length]
    assert delivered == [(number, token) for number in kept for token in range(lengths[number])]
    assert pieces.dropped == sum(lengths) - len(delivered)
    assert (pieces.lengths > 0).all()


@given(lengths=LENGTHS, length=st.integers(1, 16))
def test_concat_keeps_the_order_and_fills_every_sequence_but_the_last(lengths, length):
    sequences = tokens_of(pack(np.array(lengths, np.int64), length=length, strategy="concat", split_documents=True))
    flat = [token for sequence in sequences for token in sequence]
    assert flat == sorted(flat)
    assert all(len(sequence) == length for sequence in sequences[:-1])


@given(lengths=LENGTHS, length=st.integers(1, 16))
def test_concat_of_whole_documents_takes_each_one_that_fits(lengths, length):
    lengths = [min(tokens, length) for tokens in lengths]
    sequences = tokens_of(pack(np.array(lengths, np.int64), length=length, strategy="concat", split_documents=False))
    assert [token for sequence in sequences for token in sequence] == [
        (number, token) for number, tokens in enumerate(lengths) for token in range(tokens)
    ]
    for sequence, following in pairwise(sequences):
        assert len(sequence) + lengths[following[0][0]] > length


def one_after_the_other(lengths, length):
    """Best-fit decreasing as textbooks have it: the tokens of each sequence."""
    filled = []
    for tokens in sorted(lengths, reverse=True):
        fitting = [number for number, used in enumerate(filled) if used + tokens <= length]
        if fitting:
            filled[max(fitting, key=lambda number: filled[number])] += tokens
        else:
            filled.append(tokens)
    return filled


@given(lengths=st.lists(st.integers(1, 16), max_size=60), length=st.just(16) | st.just(17))
@example(lengths=[3] * 7 + [2] * 9 + [5] * 2, length=17)
def test_best_fit_fills_sequences_as_one_document_after_the_other_would(lengths, length):
    sequences = tokens_of(pack(np.array(lengths, np.int64), length=length, strategy="best_fit", split_documents=False))
    assert sorted(map(len, sequences)) == sorted(one_after_the_other(lengths, length))


def test_best_fit_cuts_no_document_that_fits_and_packs_windows_each_for_itself(monkeypatch):
    monkeypatch.setattr(packing, "WINDOW_DOCUMENTS", 100)
    lengths = np.random.default_rng(1).integers(1, 200, 1_000)
    pieces = pack(lengths, length=128, strategy="best_fit", split_documents=True)
    counts = np.bincount(pieces.documents)
    assert (counts[lengths <= 128] == 1).all()
    windows = pieces.documents // 100
    assert (np.diff(windows) >= 0).all()
    assert (windows[pieces.bounds[:-1]] == windows[pieces.bounds[1:] - 1]).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_real_document_lengths_fill_sequences(strategy):
    """Lengths as those of web pages: log-normal, a mean of 580 tokens, the longest of many thousands."""
    lengths = np.random.default_rng(0).lognormal(5.8, 1.1, 60_000).astype(np.int64) + 1
    pieces = pack(lengths, length=4096, strategy=strategy, split_documents=True)
    assert lengths.sum() == pieces.lengths.sum()
    assert lengths.sum() / (pieces.sequences * 4096) >= (0.999 if strategy == "concat" else 0.98)


@given(lengths=LENGTHS, length=st.integers(1, 16), seed=st.integers(0, 9))
def test_taken_sequences_are_the_same_in_another_order(lengths, length, seed):
    pieces = pack(np.array(lengths, np.int64), length=length, strategy="concat", split_documents=True)
    order = np.random.default_rng(seed).permutation(pieces.sequences)[: max(0, pieces.sequences - 1)]
    sequences = tokens_of(pieces)
    assert tokens_of(pieces.taken(order)) == [sequences[number] for number in order]


@given(st.lists(st.integers(0, 4) | st.sampled_from([2**16 - 1, 2**16, 2**16 + 1])))
def test_an_order_is_stable_for_numbers_of_any_size(numbers):
    order = packing._stable_order(np.array(numbers, np.int64))
    assert order.tolist() == sorted(range(len(numbers)), key=numbers.__getitem__)
