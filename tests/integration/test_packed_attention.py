"""Packed sequences feed attention as they are: no token attends across documents."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from torch_dataloader_utils import Packing, StructuredDataset

attention = pytest.importorskip("torch.nn.attention.flex_attention", reason="torch has flex_attention from 2.5 on")

LENGTH, HEADS, WIDTH, WORDS = 64, 2, 8, 1_000
EMBEDDINGS = torch.randn((3, WORDS, HEADS, WIDTH), generator=torch.Generator().manual_seed(0))
"""Of each word its query, key and value."""


@pytest.fixture(params=["concat", "best_fit"])
def batch(request, tmp_path):
    """Return a batch of all sequences, the last of which have padding. All tokens of a document are its number."""
    lengths = np.random.default_rng(1).integers(1, 60, 14)
    documents = [[number + 1] * int(length) for number, length in enumerate(lengths)]
    pq.write_table(pa.table({"tokens": pa.array(documents, pa.list_(pa.int64()))}), tmp_path / "documents.parquet")
    packing = Packing("tokens", LENGTH, strategy=request.param, pad_value=0)
    loader, _ = StructuredDataset.create_dataloader(tmp_path, packing=packing, batch_size=100, num_workers=0)
    [batch] = loader
    assert (batch["document_ids"] < 0).any()
    return batch


def attend(tokens, mask):
    """Return what flex_attention makes of tokens, of shape (sequences, heads, length, width)."""
    query, key, value = EMBEDDINGS[:, tokens].transpose(2, 3)
    blocks = attention.create_block_mask(mask, len(tokens), None, LENGTH, LENGTH, device="cpu")
    return attention.flex_attention(query, key, value, block_mask=blocks)


def causal(_batch, _head, query, key):
    return query >= key


def within_documents(ids):
    return lambda batch, head, query, key: causal(batch, head, query, key) & (ids[batch, query] == ids[batch, key])


def test_no_token_attends_across_documents(batch):
    """What another document holds changes nothing, to the bit; without the mask it does."""
    tokens, ids = batch["tokens"], batch["document_ids"]
    mask = within_documents(ids)
    before, before_all = attend(tokens, mask), attend(tokens, causal)
    heard = 0
    for document in range(int(ids.max()) + 1):
        is_changed = ids == document
        changed = torch.where(is_changed, tokens + 500, tokens)
        others = ~is_changed[:, None, :, None].expand_as(before)
        assert torch.equal(attend(changed, mask)[others], before[others])
        heard += int((attend(changed, causal)[others] != before_all[others]).any())
    assert heard >= ids.max()  # all but those that are the last of each sequence


def test_variable_length_attention_finds_the_same_segments(batch):
    """`cu_seqlens` cuts the flattened batch where the ids change; kernels take segments of up to `max_seqlen`."""
    tokens, bounds = batch["tokens"], batch["cu_seqlens"].tolist()
    query, key, value = EMBEDDINGS[:, tokens.flatten()].transpose(1, 2)
    segments = [
        scaled_dot_product_attention(*(each[None, :, start:stop] for each in (query, key, value)), is_causal=True)[0]
        for start, stop in pairwise(bounds)
    ]
    alone = torch.cat(segments, dim=1).unflatten(1, tokens.shape).transpose(0, 1)
    together = attend(tokens, within_documents(batch["document_ids"]))
    torch.testing.assert_close(alone, together)
    assert batch["max_seqlen"] == max(stop - start for start, stop in pairwise(bounds))
