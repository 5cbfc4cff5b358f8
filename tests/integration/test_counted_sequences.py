"""Packed sequences that are counted ahead: steps are known, ranks make equally many, and each token comes once.

Each token tells its document and its place in it, so that whatever is delivered can be counted.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from icebergs import append_rows, config_of, data_files, delete_rows, new_catalog
from pairwise import pairwise
from pyiceberg.schema import Schema
from pyiceberg.types import IntegerType, ListType, NestedField
from stops import each_stop

from torch_dataloader_utils import (
    CheckpointMismatchError,
    ColumnError,
    IcebergDataset,
    Packing,
    StructuredDataset,
    audit,
)
from torch_dataloader_utils.dataset import counted_tokens

LENGTH, LONGEST = 32, 600
WAYS = {
    "concat": {"strategy": "concat"},
    "concat, separator": {"strategy": "concat", "separator": -2},
    "whole documents": {"strategy": "concat", "split_documents": False},
    "best fit": {"strategy": "best_fit"},
    "best fit, whole documents": {"strategy": "best_fit", "split_documents": False, "separator": -2},
}
ORDERS = {
    "in order": {},
    "shards shuffled": {"shuffle": True},
    "rows shuffled": {"shuffle": True, "shuffle_buffer_size": 36},
    "in rounds": {"shuffle": True, "shuffle_buffer_size": 7},
}
SOURCES = {"footers or documents": True, "length column": "num_tokens"}
ROWS_SHUFFLED = ORDERS["rows shuffled"]
"""Documents of several row groups are packed together."""


def document_lengths():
    """Documents of no token, of one, of many sequences; shards with none at all."""
    random = np.random.default_rng(3)
    lengths = random.integers(0, 50, 90)
    lengths[[5, 36, 37, 89]] = LONGEST - 1, 33, 32, 200
    lengths[57:78] = 0
    return lengths


def documents_of(lengths):
    return [[number * LONGEST + place for place in range(tokens)] for number, tokens in enumerate(lengths)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("documents")
    lengths = document_lengths()
    documents = documents_of(lengths)
    for number, (first, stop) in enumerate([(0, 24), (24, 25), (25, 78), (78, 90)]):
        tokens = pa.array(documents[first:stop], pa.list_(pa.int32()))
        table = pa.table({"tokens": tokens, "num_tokens": lengths[first:stop]})
        pq.write_table(table, directory / f"{number}.parquet", row_group_size=8)
    return directory


def open_packed(path, *, packing=None, num_workers=0, batch_size=3, count_tokens=True, split_rows=15, **options):  # noqa: ANN003
    options = {"columns": ["tokens"], **options}
    loader, _ = StructuredDataset.create_dataloader(
        path,
        packing=Packing("tokens", LENGTH, pad_value=-7, outputs=["document_ids"], **(packing or {})),
        count_tokens=count_tokens,
        batch_size=batch_size,
        num_workers=num_workers,
        split_rows=split_rows,
        **options,
    )
    return loader


def pieces_of(batches):
    """Each sequence as its pieces of documents: row, first and last token."""
    found = []
    for batch in batches:
        for sequence, ids in zip(batch["tokens"].tolist(), batch["document_ids"].tolist(), strict=True):
            pieces = {}
            for token, document in zip(sequence, ids, strict=True):
                if token >= 0:
                    pieces.setdefault(document, []).append(token)
            ends = ((tokens[0] // LONGEST, tokens[0] % LONGEST, tokens[-1] % LONGEST) for tokens in pieces.values())
            found.append(tuple(ends))
    return found


def tokens_of(sequences):
    return Counter(
        row * LONGEST + place
        for sequence in sequences
        for row, first, last in sequence
        for place in range(first, last + 1)
    )


def expected(packing):
    lengths = document_lengths()
    most = LENGTH - ("separator" in packing)
    kept = [number for number, tokens in enumerate(lengths) if packing.get("split_documents", True) or tokens <= most]
    return Counter(number * LONGEST + place for number in kept for place in range(lengths[number]))


@pairwise(most=10, way=WAYS, order=ORDERS, source=SOURCES)
def test_the_number_of_batches_is_known_and_counting_changes_none_of_them(dataset, way, order, source):
    options = {"packing": WAYS[way], **ORDERS[order]}
    loader = open_packed(dataset, count_tokens=SOURCES[source], **options)
    for epoch in (0, 1):
        loader.dataset.set_epoch(epoch)
        batches = list(loader)
        assert len(loader) == len(batches)
        uncounted = open_packed(dataset, count_tokens=False, **options)
        uncounted.dataset.set_epoch(epoch)
        assert pieces_of(uncounted) == pieces_of(batches)


@each_stop
@pairwise(most=4, way=["concat, separator", "whole documents", "best fit"], order=ORDERS, uneven=["drop", "pad"])
def test_ranks_make_equally_many_steps_and_go_on_from_any_of_them(dataset, way, order, uneven, stops):
    """Of 3 ranks, dropped or repeated sequences are fewer than there are ranks."""
    options = {"packing": WAYS[way], "uneven_ranks": uneven, "num_ranks": 3, **ORDERS[order]}
    delivered = []
    for rank in range(3):
        loader = open_packed(dataset, rank=rank, **options)
        states, whole = [loader.state_dict()], []
        for batch in loader:
            whole.append(batch)
            states.append(loader.state_dict())
        assert len(loader) == len(whole)
        delivered.append(pieces_of(whole))
        for number in stops(states):
            resumed = open_packed(dataset, rank=rank, **options)
            resumed.load_state_dict(states[number])
            assert len(resumed) == len(whole)
            assert pieces_of(resumed) == pieces_of(whole[number:])
    assert len({len(of_rank) for of_rank in delivered}) == 1
    metrics = loader.dataset.get_metrics()
    options["uneven_ranks"] = "allow"
    there_are = sum(len(pieces_of(open_packed(dataset, rank=rank, **options))) for rank in range(3))
    difference = metrics["uneven_sequences_repeated"] - metrics["uneven_sequences_dropped"]
    assert sum(map(len, delivered)) - there_are == difference
    sequences = [sequence for of_rank in delivered for sequence in of_rank]
    tokens, wanted = tokens_of(sequences), expected(WAYS[way])
    if uneven == "pad":
        assert tokens.keys() == wanted.keys()
        assert (
            sum(count - 1 for sequence, count in Counter(sequences).items() if sequence) < 3
        )  # not of separators alone
    else:
        assert max(tokens.values()) == 1
        assert (wanted - tokens).total() <= 2 * LENGTH
        assert not tokens - wanted


@pairwise(most=4, way=["concat", "best fit"], uneven=["allow", "drop", "pad"], num_workers=[0, 2])
def test_other_ranks_go_on_from_any_batch(dataset, way, uneven, num_workers):
    """2 ranks, stopped, are continued by 3, those by 1: every token once, for all that are left are planned again."""
    options = {"packing": WAYS[way], "uneven_ranks": uneven, "num_workers": num_workers, **ROWS_SHUFFLED}
    delivered, states = [], None
    for ranks, stops in ((2, (3, 5)), (3, (2, 0, 3)), (1, (None,))):
        saved = []
        for rank, stop in enumerate(stops):
            loader = open_packed(dataset, num_ranks=ranks, rank=rank, **options)
            if states is not None:
                loader.load_state_dict(states, strict=False)
            done = loader.state_dict()["batches_delivered"]
            batches = list(islice(loader, stop))
            assert stop is not None or len(loader) == done + len(batches)
            delivered += pieces_of(batches)
            saved.append(loader.state_dict())
        states = saved
    assert tokens_of(delivered) == expected(WAYS[way])


@pairwise(most=2, way=["concat", "best fit"], uneven=["drop", "pad"])
def test_virtual_ranks_make_the_same_global_batches_on_any_number_of_ranks(dataset, way, uneven):
    grid = {"virtual_ranks": 4, "virtual_workers": 2, "uneven_ranks": uneven, "packing": WAYS[way], **ROWS_SHUFFLED}

    def steps(ranks, num_workers=0, states=None, stop=None):
        loaders = [
            open_packed(dataset, batch_size=8 // ranks, num_ranks=ranks, rank=rank, num_workers=num_workers, **grid)
            for rank in range(ranks)
        ]
        for loader in loaders if states else ():
            loader.load_state_dict(states)
        of_ranks = [[pieces_of([batch]) for batch in islice(loader, stop)] for loader in loaders]
        made = [sorted(piece for of_rank in step for piece in of_rank) for step in zip(*of_ranks, strict=True)]
        return made, [loader.state_dict() for loader in loaders]

    whole, _ = steps(1)
    first, states = steps(2, num_workers=2, stop=4)
    second, states = steps(4, states=states, stop=3)
    third, _ = steps(1, num_workers=2, states=states)
    assert first + second + third == whole


@each_stop
@pairwise(most=4, counted=[True, False], strict=[True, False], order=ORDERS)
def test_a_run_goes_on_with_or_without_counts(dataset, counted, strict, order, stops):
    """From every batch, so also from one that ends with a shard, of which a run without counts does not know it."""
    options = {"packing": WAYS["best fit"], **ORDERS[order]}
    loader = open_packed(dataset, count_tokens=counted, **options)
    delivered, states = [[]], [loader.state_dict()]
    for batch in loader:
        delivered.append(delivered[-1] + pieces_of([batch]))
        states.append(loader.state_dict())
    for before, state in [(delivered[number], states[number]) for number in stops(states)]:
        resumed = open_packed(dataset, count_tokens=not counted, **options)
        resumed.load_state_dict(state if strict else [state], strict=strict)
        again = resumed.state_dict()
        following = pieces_of(resumed)
        if strict:
            assert before + following == delivered[-1]
            continue
        assert tokens_of(before + following) == expected(WAYS["best fit"])  # other shards may be left to make
        back = open_packed(dataset, count_tokens=counted, **options)
        back.load_state_dict(again)
        assert pieces_of(back) == following


def test_skipped_steps_are_known_ahead(dataset):
    whole = pieces_of(open_packed(dataset))
    loader = open_packed(dataset)
    steps = len(loader)
    loader.skip_steps(2, 5)
    assert len(loader) == steps - 3
    assert pieces_of(loader) == whole[:6] + whole[15:]


@pytest.mark.parametrize("way", ["concat", "best fit"])
def test_skipped_steps_are_restored_on_other_ranks(dataset, way):
    options = {"packing": WAYS[way], "uneven_ranks": "drop", **ROWS_SHUFFLED}
    delivered, states = [], []
    for rank in range(2):
        loader = open_packed(dataset, num_ranks=2, rank=rank, **options)
        loader.skip_steps(1, 6)
        delivered += pieces_of(islice(loader, 3))
        states.append(loader.state_dict())
    loader = open_packed(dataset, **options)
    loader.load_state_dict(states, strict=False)
    loader.restore_skipped()
    done, following = loader.state_dict()["batches_delivered"], list(loader)
    assert len(loader) == done - 5 + len(following)
    assert tokens_of(delivered + pieces_of(following)) == expected(WAYS[way])


@pytest.mark.parametrize("order", ORDERS)
def test_an_audit_counts_rows_of_whole_shards_as_done(dataset, order):
    """Also of those that give no sequence."""
    loader = open_packed(dataset, **ORDERS[order])
    assert len(list(islice(loader, 20))) == 20
    found = audit(loader.state_dict(), dataset).total
    assert found.under_way + found.done + found.left == len(document_lengths())
    assert found.under_way > 0
    loader = open_packed(dataset, **ORDERS[order])
    assert list(loader)
    found = audit(loader.state_dict(), dataset).total
    assert (found.done, found.missing, found.twice) == (len(document_lengths()), 0, 0)


# What is read to count ------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch):
    """The columns and row groups that are read to count tokens."""
    made = []

    def noted(files, groups):
        groups = list(groups)
        made.extend((files.schema.names[0], *group) for group in groups)
        return original(files, groups)

    original = counted_tokens.read_row_groups
    monkeypatch.setattr(counted_tokens, "read_row_groups", noted)
    return made


def test_footers_tell_what_documents_that_are_cut_need(dataset, reads):
    for source in (True, "num_tokens"):
        open_packed(dataset, count_tokens=source)
    assert not reads


@pytest.mark.parametrize(("source", "column"), [(True, "tokens"), ("num_tokens", "num_tokens")])
@pytest.mark.parametrize("way", ["whole documents", "best fit"])
def test_lengths_are_read_once_and_kept_in_the_manifest(dataset, reads, way, source, column):
    loader = open_packed(dataset, packing=WAYS[way], count_tokens=source)
    groups = sum(-(-rows // 8) for rows in (24, 1, 53, 12))
    assert len(set(reads)) == len(reads) == groups
    assert {name for name, *_ in reads} == {column}
    manifest = loader.dataset.dump_manifest()
    reads.clear()
    for packing in (WAYS[way], WAYS["concat"], WAYS["best fit, whole documents"]):
        again = open_packed(dataset, packing=packing, count_tokens=source, manifest=manifest)
        assert len(again) == sum(1 for _ in again)
    assert not reads


def test_sums_in_a_manifest_are_not_taken_for_lengths(dataset, reads):
    manifest = open_packed(dataset).dataset.dump_manifest()
    loader = open_packed(dataset, packing=WAYS["best fit"], manifest=manifest)
    assert reads
    assert len(loader) == sum(1 for _ in loader)


LISTS = {
    "empty lists": ([[1, 2], [], [3]], {}, False),
    "null lists": ([[1, 2], None, [], [3]], {"fill_nulls": {"tokens": 0}}, True),
    "null tokens": ([[1, None], None, [], [3]], {"fill_nulls": {"tokens": 0}}, True),
}


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("lists", LISTS)
def test_nulls_and_empty_lists_are_no_tokens(tmp_path, reads, lists, statistics):
    """Footers count them as values, less those without one; where null tokens are filled, that does not tell."""
    documents, options, unclear = LISTS[lists]
    table = pa.table({"tokens": pa.array(documents, pa.list_(pa.int32()))})
    pq.write_table(table, tmp_path / "a.parquet", write_statistics=statistics)
    loader, _ = StructuredDataset.create_dataloader(
        tmp_path, packing=Packing("tokens", 1), count_tokens=True, batch_size=1, num_workers=0, **options
    )
    assert len(loader) == sum(1 for _ in loader) == 3
    assert bool(reads) == (unclear or not statistics)


@pytest.mark.parametrize("trusted", [{"someone": 1}, {"parquet-cpp-arrow": 1000}], ids=["another", "a later one"])
def test_other_writers_statistics_are_not_trusted(tmp_path, reads, monkeypatch, trusted):
    monkeypatch.setattr("torch_dataloader_utils.formats.parquet.footer.COUNTING_WRITERS", trusted)
    pq.write_table(pa.table({"tokens": [[1, 2], [3]], "num_tokens": [2, 1]}), tmp_path / "a.parquet")
    assert len(open_packed(tmp_path, count_tokens="num_tokens")) == 1
    assert reads == [("num_tokens", "a.parquet", 0)]


def test_text_is_counted_where_its_rows_are(tmp_path, reads):
    lines = "".join(f'{{"tokens": {list(range(number % 7))}}}\n' for number in range(60))
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=r"count_tokens=True .*count_rows=True"):
        open_packed(tmp_path, format="jsonl")
    loader = open_packed(tmp_path, format="jsonl", count_rows=True, split_rows=None)
    assert len(loader) == sum(1 for _ in loader)
    assert reads


def test_deleted_rows_of_a_table_are_no_documents(tmp_path, reads):
    schema = Schema(NestedField(1, "tokens", ListType(2, IntegerType(), element_required=True)))
    table = new_catalog(tmp_path).create_table("db.documents", schema, properties={"format-version": "2"})
    documents = pa.array(documents_of(range(40)), pa.list_(pa.field("element", pa.int32(), nullable=False)))
    for _ in range(2):
        append_rows(table, pa.table({"tokens": documents}), group_rows=7)
    delete_rows(table, {data_files(table)[0]: [*range(7, 14), 22, 39]})
    loader, _ = IcebergDataset.create_dataloader(
        "db.documents",
        catalog_config=config_of(tmp_path),
        packing=Packing("tokens", LENGTH),
        count_tokens=True,
        batch_size=3,
        num_workers=0,
    )
    assert len(loader) == sum(1 for _ in loader)
    assert len(reads) == 5  # of the row groups with rows, of the file with deletes alone


# What is wrong --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_a_wrong_column_of_lengths_is_named(tmp_path, order, num_workers):
    table = pa.table({"tokens": [[1, 2, 3]] * 20, "num_tokens": [3] * 15 + [4] + [3] * 4})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    loader = open_packed(
        tmp_path, packing=WAYS["best fit"], count_tokens="num_tokens", num_workers=num_workers, **ORDERS[order]
    )
    with pytest.raises(ColumnError, match=r"'num_tokens' tells 31.*row group 1 of .*a\.parquet"):
        list(loader)


def test_lengths_of_the_wrong_documents_are_named(tmp_path):
    table = pa.table({"tokens": [[1] * 30, [1] * 2, [1] * 20, [1] * 12], "num_tokens": [20, 20, 20, 4]})
    pq.write_table(table, tmp_path / "a.parquet")
    loader = open_packed(tmp_path, packing=WAYS["best fit"], count_tokens="num_tokens")
    with pytest.raises(ColumnError, match=r"a\.parquet gives 2 sequences.* 3: column 'num_tokens'"):
        list(loader)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (pa.array(["a"]), "is string, expected integers"),
        (pa.array([None], pa.int64()), r"has nulls.*row group 0 of .*a\.parquet"),
        (pa.array([-1]), r"-1 is no number of tokens.*row group 0 of .*a\.parquet"),
    ],
    ids=["texts", "nulls", "negative"],
)
def test_what_is_no_length_is_refused(tmp_path, lengths, message):
    pq.write_table(pa.table({"tokens": [[1]], "num_tokens": lengths}), tmp_path / "a.parquet")
    with pytest.raises(ColumnError, match=message):
        open_packed(tmp_path, packing=WAYS["best fit"], count_tokens="num_tokens")


def test_a_column_of_lengths_that_does_not_exist_is_refused(dataset):
    with pytest.raises(ColumnError, match="'lengths'"):
        open_packed(dataset, packing=WAYS["best fit"], count_tokens="lengths")


@pytest.mark.parametrize(
    "given",
    [{"filters": pc.field("num_tokens") > 3}, {"transform": lambda table: table}, {"packing": None}],
    ids=["filter", "transform", "no packing"],
)
def test_what_cannot_be_counted_is_refused(dataset, given):
    with pytest.raises(ValueError, match=f"count_tokens=True.*{next(iter(given))}"):
        StructuredDataset.create_dataloader(
            dataset, **{"columns": ["tokens"], "packing": Packing("tokens", 8), **given}, count_tokens=True
        )


@pytest.mark.parametrize("given", [{}, {"virtual_ranks": 2, "virtual_workers": 1}], ids=["real ranks", "virtual ranks"])
def test_what_needs_counts_points_to_them(dataset, given):
    with pytest.raises(ValueError, match=r"uneven_ranks=.* beside packing: .*count_tokens=True"):
        open_packed(dataset, count_tokens=False, batch_size=4, uneven_ranks="drop", **given)
    with pytest.raises(TypeError, match="count_tokens"):
        len(open_packed(dataset, count_tokens=False))


def test_a_state_of_more_sequences_than_were_counted_is_refused(tmp_path):
    pq.write_table(pa.table({"tokens": [[1] * 30] * 6, "num_tokens": [3] * 6}), tmp_path / "a.parquet")
    loader = open_packed(tmp_path, count_tokens=False, packing=WAYS["best fit"])
    next(iter(loader))
    wrong = open_packed(tmp_path, count_tokens="num_tokens", packing=WAYS["best fit"])
    with pytest.raises(CheckpointMismatchError):
        wrong.load_state_dict([loader.state_dict()], strict=False)
