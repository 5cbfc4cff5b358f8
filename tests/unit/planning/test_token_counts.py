"""The sequences of a shard, counted by the tokens of its documents, are those that its rows are packed into."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dataloader_utils.errors import CheckpointMismatchError
from torch_dataloader_utils.planning import packing, token_counts
from torch_dataloader_utils.planning.manifest import Split
from torch_dataloader_utils.planning.packing import STRATEGIES, pack
from torch_dataloader_utils.planning.plan import TO_THE_END, Shard, ShardSlice
from torch_dataloader_utils.planning.shuffle import delivery_order
from torch_dataloader_utils.planning.token_counts import SequenceCounts, TokenCounts, needs_lengths

FILES = {"a": (4, 0, 3), "b": (6, 2)}
"""The documents of each row group."""

LENGTH = 8

DOCUMENTS = sum(sum(rows) for rows in FILES.values())

SPLITS = [Split("a", 0, 4), Split("a", 4, 3), Split("b", 0, 6), Split("b", 6, 2)]


@pytest.fixture(autouse=True, scope="module")
def small_windows():
    """Best fit packs few documents together, so that their order matters."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (packing, token_counts):
            patch.setattr(module, "WINDOW_DOCUMENTS", 4)
        yield


def counted(lengths, *, strategy, split_documents, has_separator=False):
    """The documents of the files have these tokens, one file after the other."""
    of_files = dict(zip(FILES, np.split(np.array(lengths, np.int32), [sum(FILES["a"])]), strict=True))
    sums = {
        path: tuple(int(part.sum()) for part in np.split(of_files[path], np.cumsum(rows)[:-1]))
        for path, rows in FILES.items()
    }
    kept = of_files if needs_lengths(strategy, split_documents=split_documents) else None
    tokens = TokenCounts("tokens", None, FILES, sums, kept)
    return SequenceCounts(tokens, LENGTH, strategy, split_documents, has_separator), of_files


@given(
    lengths=st.lists(st.integers(0, 20), min_size=DOCUMENTS, max_size=DOCUMENTS),
    splits=st.lists(st.sampled_from(SPLITS), min_size=1, max_size=4, unique=True),
    missing=st.booleans(),
    rounds=st.integers(1, 3),
    seed=st.none() | st.just(5),
    way=st.fixed_dictionaries({"strategy": st.sampled_from(STRATEGIES), "split_documents": st.booleans()}),
    has_separator=st.booleans(),
)
def test_counted_sequences_are_those_of_the_rows_in_their_order(
    lengths, splits, *, missing, rounds, seed, way, has_separator
):
    counts, of_files = counted(lengths, **way, has_separator=has_separator)
    rounds = 1 if seed is None else rounds
    shard = Shard(tuple(splits), rounds, (0,) if missing and len(splits) > 1 else ())
    of_splits = [of_files[s.path][s.row_offset : s.row_offset + s.row_length] for s in splits]
    rows = np.concatenate(of_splits).astype(np.int64)[delivery_order(ShardSlice(shard), seed=seed, epoch=3)]
    (part,) = counts.counted_slices([ShardSlice(replace(shard, delivers=TO_THE_END))], seed=seed, epoch=3)
    assert part.shard.rows == pack(rows + has_separator, length=LENGTH, **way).sequences


def test_slices_that_end_with_their_shard_end_with_what_it_gives():
    counts, _ = counted([8] * DOCUMENTS, strategy="concat", split_documents=True)
    shard = Shard((SPLITS[0],), delivers=TO_THE_END)
    slices = [ShardSlice(shard, 0, 3), ShardSlice(shard, 3), ShardSlice(shard, 4)]
    parts = counts.counted_slices(slices, seed=None, epoch=0)
    assert [(part.start, part.stop, part.window) for part in parts] == [
        (0, 3, (0, 3)),
        (3, 4, (3, TO_THE_END)),
        (4, 4, (4, TO_THE_END)),
    ]
    with pytest.raises(CheckpointMismatchError, match=r"records 5 sequences .* row 0 of a, .* gives 4"):
        counts.counted_slices([ShardSlice(shard, 5)], seed=None, epoch=0)
