"""Packed sequences beside a packer of a few lines that goes token by token."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_dataloader_utils.columns import packed as columns_packed
from torch_dataloader_utils.columns.convert import ColumnSlice, join, sendable, split
from torch_dataloader_utils.columns.options import PACKED_OUTPUTS, PACKING_STRATEGIES, Packing
from torch_dataloader_utils.columns.packed import document_lengths, packed
from torch_dataloader_utils.columns.ragged import Ragged
from torch_dataloader_utils.planning.packing import pack

DOCUMENTS = st.lists(st.lists(st.integers(3, 99), max_size=12), max_size=20)


def ragged_of(documents, *, tensors):
    values = np.array([token for document in documents for token in document], np.int16)
    offsets = np.cumsum([0, *map(len, documents)])
    return Ragged(torch.from_numpy(values) if tensors else values, offsets, "jagged")


def packed_of(documents, packing, *, tensors=False):
    tokens = ragged_of(documents, tensors=tensors)
    lengths = document_lengths(tokens, packing)
    pieces = pack(lengths, length=packing.length, strategy=packing.strategy, split_documents=packing.split_documents)
    return packed({packing.column: tokens}, pieces, packing), pieces


def token_by_token(documents, pieces, packing):
    """Return (token, document id, position id) of each place of each sequence."""
    ended = [document if packing.separator is None else [*document, packing.separator] for document in documents]
    parts = list(zip(pieces.documents.tolist(), pieces.firsts.tolist(), pieces.lengths.tolist(), strict=True))
    sequences = []
    for begin, end in pairwise(pieces.bounds.tolist()):
        rows = [
            (ended[document][first + place], number, place)
            for number, (document, first, length) in enumerate(parts[begin:end])
            for place in range(length)
        ]
        sequences.append(rows + [(packing.pad_value, -1, place) for place in range(packing.length - len(rows))])
    return sequences


@given(
    documents=DOCUMENTS,
    length=st.integers(1, 9),
    strategy=st.sampled_from(PACKING_STRATEGIES),
    separator=st.none() | st.just(2),
    splits=st.booleans(),
)
def test_sequences_are_those_of_one_token_after_the_other(documents, length, strategy, separator, splits):
    packing = Packing("t", length, split_documents=splits, separator=separator, pad_value=1, strategy=strategy)
    made, pieces = packed_of(documents, packing)
    expected = token_by_token(documents, pieces, packing)
    for place, name in enumerate(("t", "document_ids", "position_ids")):
        assert made[name].tolist() == [[row[place] for row in sequence] for sequence in expected]
    assert made["t"].dtype == np.int16
    assert made["document_ids"].dtype == made["position_ids"].dtype == np.int32


@given(documents=DOCUMENTS, length=st.integers(1, 9), sizes=st.lists(st.integers(1, 4), min_size=1), sent=st.booleans())
def test_cu_seqlens_are_where_the_flattened_batch_has_its_segments(documents, length, sizes, sent):
    packing = Packing("t", length, outputs=("document_ids", "cu_seqlens", "max_seqlen"))
    made, pieces = packed_of(documents, packing, tensors=True)
    batches = []
    while sum(batches) < pieces.sequences:
        batches.append(min(sizes[len(batches) % len(sizes)], pieces.sequences - sum(batches)))
    columns = join([ColumnSlice(made, 0, pieces.sequences)])
    for batch in split(sendable(columns, batches) if sent else columns, batches):
        ends = [
            place + 1 + number * length
            for number, sequence in enumerate(batch["document_ids"].tolist())
            for place in range(length)
            if place == length - 1 or sequence[place] != sequence[place + 1]
        ]
        assert batch["cu_seqlens"].dtype == torch.int32
        assert batch["cu_seqlens"].tolist() == [0, *ends]
        assert batch["max_seqlen"] == max(np.diff([0, *ends]))
        assert type(batch["max_seqlen"]) is int


@given(documents=DOCUMENTS, parts=st.integers(1, 3))
def test_joined_parts_have_the_outputs_of_all_their_sequences(documents, parts):
    made, pieces = packed_of(documents, Packing("t", 4), tensors=True)
    cuts = [pieces.sequences * number // parts for number in range(parts + 1)]
    whole = next(split(made, [pieces.sequences]))
    joined = next(split(join([ColumnSlice(made, *cut) for cut in pairwise(cuts)]), [pieces.sequences]))
    for name in ("t", *PACKED_OUTPUTS):
        assert np.array_equal(joined[name], whole[name])


@pytest.mark.parametrize("short_run", [0, 4, 1_000], ids=["by Arrow", "by either", "by NumPy"])
@given(
    documents=DOCUMENTS, seed=st.integers(0, 9), dtype=st.sampled_from(["int16", "float16", "bool", "M8[us]", "M8[D]"])
)
def test_documents_are_gathered_in_any_order(documents, seed, dtype, short_run):
    tokens = ragged_of(documents, tensors=False)
    values = tokens.values.astype(dtype)
    order = np.random.default_rng(seed).permutation(len(documents))
    starts, lengths = tokens.offsets[order], np.diff(tokens.offsets)[order]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns_packed, "SHORT_RUN", short_run)
        patch.setattr(columns_packed, "RUNS_TOGETHER", 3)
        gathered = columns_packed._gathered(values, starts, lengths)
    assert gathered.dtype == values.dtype
    expected = [np.array(documents[place], np.int16).astype(dtype) for place in order]
    assert np.array_equal(gathered, np.concatenate([values[:0], *expected]))


@pytest.mark.parametrize("strategy", PACKING_STRATEGIES)
def test_no_token_attends_across_documents(strategy):
    """Each document has one token, many times over: tokens that attend to one another are equal."""
    documents = [[number] * (3 + number * 7 % 11) for number in range(40)]
    made, pieces = packed_of(documents, Packing("t", 16, strategy=strategy), tensors=True)
    batch = next(split(made, [pieces.sequences]))
    ids, tokens = batch["document_ids"], batch["t"]
    attends = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
    equal = tokens[:, :, None] == tokens[:, None, :]
    assert equal[attends].all()
    padding = (ids < 0)[:, :, None] | (ids < 0)[:, None, :]
    assert attends[equal & ~padding].all()
