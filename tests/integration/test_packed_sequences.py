"""Packed sequences: each token once, stopped at every batch, with other ranks, workers and orders.

Each token tells its document and its place in it, so that whatever is delivered can be counted.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pairwise import pairwise
from stops import each_stop

from torch_dataloader_utils import (
    CheckpointMismatchError,
    ColumnError,
    LedgerUnknownError,
    Packing,
    StructuredDataset,
    audit,
)
from torch_dataloader_utils.reading import packing as packing_module

LENGTH, LONGEST = 32, 600
PADDING = -7
WAYS = {
    "concat": {"strategy": "concat"},
    "whole documents": {"strategy": "concat", "split_documents": False},
    "best fit": {"strategy": "best_fit"},
    "best fit, separator": {"strategy": "best_fit", "separator": -2},
}
ORDERS = {
    "in order": {},
    "shards shuffled": {"shuffle": True},
    "rows shuffled": {"shuffle": True, "shuffle_buffer_size": 36},
    "in rounds": {"shuffle": True, "shuffle_buffer_size": 7},
}


def document_lengths():
    """Documents of no token, of one, of many sequences; row groups with none at all."""
    random = np.random.default_rng(3)
    lengths = random.integers(0, 50, 90)
    lengths[[5, 36, 37, 89]] = LONGEST - 1, 33, 32, 200
    lengths[60:74] = 0
    return lengths


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("documents")
    lengths = document_lengths()
    documents = [[number * LONGEST + place for place in range(tokens)] for number, tokens in enumerate(lengths)]
    for number, (first, stop) in enumerate([(0, 24), (24, 25), (25, 78), (78, 90)]):
        tokens = pa.array(documents[first:stop], pa.list_(pa.int32()))
        pq.write_table(pa.table({"tokens": tokens}), directory / f"{number}.parquet", row_group_size=8)
    return directory


def open_packed(dataset, *, outputs=("document_ids",), batch_size=3, num_workers=0, packing=None, **options):  # noqa: ANN003
    chosen = Packing("tokens", LENGTH, pad_value=PADDING, outputs=outputs, **(packing or {}))
    loader, _ = StructuredDataset.create_dataloader(
        dataset, packing=chosen, batch_size=batch_size, num_workers=num_workers, split_rows=15, **options
    )
    return loader


def sequences_of(batches):
    return [tuple(sequence) for batch in batches for sequence in batch["tokens"].tolist()]


def tokens_of(sequences):
    return Counter(token for sequence in sequences for token in sequence if token >= 0)


def expected(packing):
    lengths = document_lengths()
    most = LENGTH - ("separator" in packing)
    kept = [number for number, tokens in enumerate(lengths) if packing.get("split_documents", True) or tokens <= most]
    return Counter(number * LONGEST + place for number in kept for place in range(lengths[number]))


@each_stop
@pairwise(most=5, way=WAYS, order=ORDERS)
def test_each_token_is_delivered_once_stopped_at_every_batch(dataset, way, order, stops, monkeypatch):
    """What resumes makes few sequences at once, as large shards do: that changes nothing."""
    options = {"packing": WAYS[way], **ORDERS[order]}
    whole = list(open_packed(dataset, **options))
    assert tokens_of(sequences_of(whole)) == expected(WAYS[way])
    assert {len(batch["tokens"]) for batch in whole[:-1]} == {3}
    loader = open_packed(dataset, **options)
    states = [loader.state_dict(), *(loader.state_dict() for _ in loader)]
    monkeypatch.setattr(packing_module, "BYTES_TOGETHER", 1)
    for number in stops(states):
        resumed = open_packed(dataset, **options)
        resumed.load_state_dict(states[number])
        following = list(resumed)
        assert sequences_of(following) == sequences_of(whole[number:])
        for batch, other in zip(following, whole[number:], strict=True):
            assert torch.equal(batch["document_ids"], other["document_ids"])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", ["concat", "best fit"])
def test_other_ranks_and_workers_go_on_from_any_batch(dataset, way, order):
    """2 ranks, stopped, are continued by 3, those by 1, with other workers."""
    options = {"packing": WAYS[way], **ORDERS[order]}
    delivered, states = [], None
    for ranks, stops in ((2, (3, 4)), (3, (1, 0, 2)), (1, (None,))):
        saved = []
        for rank, stop in enumerate(stops):
            loader = open_packed(dataset, num_ranks=ranks, rank=rank, **options)
            if states is not None:
                loader.load_state_dict(states, strict=False)
            batches = iter(loader)
            if stop is None:
                delivered += sequences_of(batches)
            else:
                delivered += sequences_of(next(batches) for _ in range(stop))
                saved.append(loader.state_dict())
        states = saved
    assert tokens_of(delivered) == expected(WAYS[way])
    assert len(set(delivered)) == len(delivered)


def test_workers_deliver_what_one_process_does_and_resume(dataset):
    options = {"packing": WAYS["best fit"], "outputs": ("document_ids", "position_ids", "cu_seqlens", "max_seqlen")}
    loader = open_packed(dataset, num_workers=2, **ORDERS["rows shuffled"], **options)
    batches, state = [], None
    for number, batch in enumerate(loader):
        batches.append({name: np.asarray(values) for name, values in batch.items()})
        if number == 6:
            state = loader.state_dict()
    assert tokens_of(sequences_of(batches)) == expected(WAYS["best fit"])
    for batch in batches:
        assert batch["cu_seqlens"][-1] == batch["tokens"].size
        assert batch["max_seqlen"] == np.diff(batch["cu_seqlens"]).max()
        starts = np.flatnonzero(batch["position_ids"].reshape(-1) == 0)
        assert starts.tolist() == batch["cu_seqlens"][:-1].tolist()
    resumed = open_packed(dataset, num_workers=2, **ORDERS["rows shuffled"], **options)
    resumed.load_state_dict(state)
    for batch, other in zip(resumed, batches[7:], strict=True):
        assert all(np.array_equal(np.asarray(values), other[name]) for name, values in batch.items())


def test_a_state_of_other_packing_is_refused(dataset):
    loader = open_packed(dataset, packing=WAYS["concat"])
    next(iter(loader))
    state = loader.state_dict()
    for packing in (WAYS["best fit"], {"separator": 3}):
        with pytest.raises(CheckpointMismatchError, match="packing"):
            open_packed(dataset, packing=packing).load_state_dict(state)
    plain, _ = StructuredDataset.create_dataloader(dataset, batch_size=3, num_workers=0, split_rows=15)
    with pytest.raises(CheckpointMismatchError, match="packing"):
        plain.load_state_dict(state)


def test_the_length_is_not_known(dataset):
    with pytest.raises(TypeError, match="packed"):
        len(open_packed(dataset))


@pytest.mark.parametrize("order", ORDERS)
def test_a_shard_that_is_larger_than_the_memory_for_it_is_packed_all_the_same(dataset, order):
    options = {"packing": WAYS["best fit"], **ORDERS[order]}
    small = sequences_of(open_packed(dataset, read_ahead_bytes=1, num_workers=1, **options))
    assert small == sequences_of(open_packed(dataset, num_workers=1, **options))


@pytest.mark.parametrize(
    ("name", "given"), [("uneven_ranks", "drop"), ("row_id_column", "row"), ("output_format", "arrow")]
)
def test_what_has_no_meaning_for_sequences_is_refused(dataset, name, given):
    with pytest.raises(ValueError, match=rf"{name}=.* beside packing: "):
        open_packed(dataset, **{name: given})


def test_rows_cannot_be_excluded_and_the_ledger_says_why_it_does_not_know(dataset):
    loader = open_packed(dataset)
    with pytest.raises(ValueError, match=r"exclude: .* beside packing"):
        loader.exclude({"0.parquet": [1]})
    for scan in (False, True):
        with pytest.raises(LedgerUnknownError, match="a sequence has tokens of many rows"):
            loader.batch_at(1, scan=scan)


@pytest.mark.parametrize("order", ["in order", "rows shuffled"])
def test_skipped_steps_are_left_out_and_all_others_are_the_same(dataset, order):
    whole = sequences_of(open_packed(dataset, **ORDERS[order]))
    loader = open_packed(dataset, **ORDERS[order])
    loader.skip_steps(2, 5)
    assert sequences_of(loader) == whole[:6] + whole[15:]


def test_an_audit_of_packed_sequences_counts_rows_of_whole_shards_as_done(dataset):
    loader = open_packed(dataset)
    assert sum(1 for _ in loader)
    found = audit(loader.state_dict(), dataset)
    assert (found.total.done, found.total.missing, found.total.twice) == (len(document_lengths()), 0, 0)
    loader = open_packed(dataset)
    assert len(list(islice(loader, 20))) == 20
    found = audit(loader.state_dict(), dataset).total
    assert found.under_way + found.done + found.left == len(document_lengths())
    assert found.under_way > 0


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_metrics_count_each_token_once_as_packed_or_dropped(dataset, way, num_workers):
    loader = open_packed(dataset, packing=WAYS[way], num_workers=num_workers, **ORDERS["rows shuffled"])
    places = sum(batch["tokens"].numel() for batch in loader)
    found = loader.dataset.get_metrics()
    lengths = document_lengths()
    separators = (lengths >= 0).sum() if "separator" in WAYS[way] else 0
    assert found["tokens_separators"] == separators
    assert found["tokens_packed"] + found["tokens_dropped"] == lengths.sum() + separators
    assert found["tokens_packed"] - found["tokens_separators"] == expected(WAYS[way]).total()
    assert found["tokens_packed"] + found["tokens_padding"] == places
    assert found["fill_rate"] == found["tokens_packed"] / places


@pytest.mark.parametrize("option", ["separator", "pad_value"])
@pytest.mark.parametrize("value", [1.5, 300, -1, float("nan"), {"tokens": 256}])
def test_a_value_that_the_tokens_type_does_not_hold_is_refused_at_once(tmp_path, option, value):
    tokens = pa.array([[1, 2], [3]], pa.list_(pa.uint8()))
    pq.write_table(pa.table({"tokens": tokens}), tmp_path / "part.parquet")
    with pytest.raises(ColumnError, match=f"{option} of column 'tokens': .* does not fit the type uint8"):
        StructuredDataset.create_dataloader(tmp_path, packing=Packing("tokens", 4, **{option: value}), num_workers=0)


@pytest.mark.parametrize("inner", [pa.list_(pa.int64(), 2), pa.list_(pa.int64())], ids=["fixed", "variable"])
def test_lists_of_lists_are_refused_at_once(tmp_path, inner):
    pq.write_table(pa.table({"tokens": pa.array([[[1, 2]], [[3, 4]]], pa.list_(inner))}), tmp_path / "part.parquet")
    with pytest.raises(ColumnError, match="'tokens' does not have lists of numbers"):
        StructuredDataset.create_dataloader(tmp_path, packing=Packing("tokens", 4, separator=0), num_workers=0)


def test_lists_of_one_length_are_refused_with_other_advice_than_to_choose_them(tmp_path):
    tokens = pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))
    pq.write_table(pa.table({"tokens": tokens}), tmp_path / "part.parquet")
    with pytest.raises(ColumnError, match=r"'tokens' does not have .* type fixed_size_list.* make such lists of it"):
        StructuredDataset.create_dataloader(tmp_path, packing=Packing("tokens", 4, separator=0), num_workers=0)


@pytest.mark.skipif(int(pa.__version__.split(".")[0]) < 26, reason="this pyarrow cannot write views of lists")
@pytest.mark.parametrize("view", [pa.list_view, pa.large_list_view])
def test_list_views_are_packed_as_lists_are(tmp_path, view):
    documents = [[1, 2], [3], [], [4, 5, 6]]
    pq.write_table(pa.table({"tokens": pa.array(documents, view(pa.int32()))}), tmp_path / "part.parquet")
    packing = Packing("tokens", 4, separator=0, pad_value=9)
    loader, _ = StructuredDataset.create_dataloader(tmp_path, packing=packing, count_tokens=True, num_workers=0)
    [batch] = loader
    assert batch["tokens"].tolist() == [[1, 2, 0, 3], [0, 0, 4, 5], [6, 0, 9, 9]]
    for option in ("separator", "pad_value"):
        with pytest.raises(ColumnError, match=f"{option} of column 'tokens': .* does not fit the type int32"):
            StructuredDataset.create_dataloader(
                tmp_path, packing=Packing("tokens", 4, **{option: 2**40}), num_workers=0
            )
