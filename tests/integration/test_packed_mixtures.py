"""Packing in mixtures: sequences of one source each, in exact shares, each piece of a document once a pass."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pairwise import pairwise

from torch_dataloader_utils import (
    CheckpointMismatchError,
    ColumnError,
    LedgerUnknownError,
    MixedDataset,
    Packing,
    Source,
    TokenBudget,
    audit,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

Piece: TypeAlias = tuple[int, int, int, int]
"""Source, row, first token and last token."""

LENGTH = 16
SEPARATOR = -7
DOCUMENTS = {"web": 56, "code": 40}
GROUP = 10
WEIGHTS = {"web": 0.75, "code": 0.25}
NEW_WEIGHTS = {"web": 0.4, "code": 0.6}
PACKINGS = {
    "concat": Packing("tokens", length=LENGTH, separator=SEPARATOR, pad_value=-1),
    "concat whole": Packing("tokens", length=LENGTH, split_documents=False, pad_value=-1),
    "best fit": Packing("tokens", length=LENGTH, strategy="best_fit", pad_value=-1),
}
ORDERS: dict[str, dict[str, Any]] = {
    "in order": {},
    "shards shuffled": {"shuffle": True},
    "row groups in parts": {"read_ahead_bytes": 500},
    "sequences shuffled": {"shuffle": True, "shuffle_buffer_size": 40},
    "buffer smaller than a row group": {"shuffle": True, "shuffle_buffer_size": 8},
}


def length_of(source: int, row: int) -> int:
    return (row * (7 + source)) % 23 + (40 if row == 31 else 0)


def document(source: int, row: int) -> list[int]:
    """Return tokens that tell source, row and place."""
    return [source * 1_000_000 + row * 1_000 + place for place in range(length_of(source, row))]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("sources")
    for source, (name, rows) in enumerate(DOCUMENTS.items()):
        (root / name).mkdir()
        for part, numbers in enumerate(np.array_split(np.arange(rows), 2)):
            tokens = pa.array([document(source, row) for row in numbers.tolist()], pa.list_(pa.int32()))
            table = pa.table({"tokens": tokens, "row": numbers})
            pq.write_table(table, root / name / f"{part}.parquet", row_group_size=GROUP)
    return root


def opened(root: Path, way: str = "concat", weights: Any = WEIGHTS, sources: Any = None, **options: Any) -> Any:
    sources = sources or {name: Source(root / name, columns=["tokens"]) for name in DOCUMENTS}
    given = {"packing": PACKINGS[way], "rows_per_epoch": 32, "batch_size": 4, "num_workers": 0, "num_ranks": 1}
    given |= {"rank": 0, "source_column": "source"}
    return MixedDataset.create_dataloader(sources, weights, **{**given, **options})


def pieces_of(batch: Any) -> list[list[Piece]]:
    """Return the pieces of each sequence of a batch, which has nothing but these, separators and padding."""
    found = []
    bounds = batch["cu_seqlens"].tolist()
    assert bounds[-1] == batch["tokens"].numel() == len(batch["source"]) * LENGTH
    assert int(batch["max_seqlen"]) == max(np.diff(bounds))
    for source, tokens, ids, positions in zip(
        *(batch[name].tolist() for name in ("source", "tokens", "document_ids", "position_ids")), strict=True
    ):
        pieces = []
        for number, members in itertools.groupby(zip(ids, tokens, positions, strict=True), lambda member: member[0]):
            of_piece = list(members)
            assert [position for _, _, position in of_piece] == list(range(len(of_piece)))
            if number < 0:
                assert {token for _, token, _ in of_piece} == {-1}
                continue
            held = [token for _, token, _ in of_piece]
            if held[-1] == SEPARATOR:
                held.pop()
            if held:
                assert held == list(range(held[0], held[-1] + 1))
                assert held[0] // 1_000_000 == source
                row = held[0] % 1_000_000 // 1_000
                pieces.append((source, row, held[0] % 1_000, held[-1] % 1_000))
        found.append(pieces)
    return found


def sequences_of(batch: Any) -> list[tuple[int, tuple[Piece, ...]]]:
    return list(zip(batch["source"].tolist(), map(tuple, pieces_of(batch)), strict=True))


def saved(loader: Any) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


def require_quota(batches: list[Any], weights: dict[str, float]) -> None:
    shares = [Fraction(repr(weight)) for weight in weights.values()]
    counts: Counter[int] = Counter()
    for batch in batches:
        counts.update(source for source, _ in batch)
        assert all(abs(counts[source] - counts.total() * share) < 1 for source, share in enumerate(shares))


@functools.cache
def in_one_pass(root: Path, way: str) -> dict[int, Counter[tuple[int, tuple[Piece, ...]]]]:
    """Return the sequences of one pass of each source: each token of a document that is not dropped is there once."""
    found = {}
    for source, name in enumerate(DOCUMENTS):
        shares = {other: float(other == name) for other in DOCUMENTS}
        loader, _ = opened(root, way, shares, rows_per_epoch=None, batch_size=1)
        sequences = [sequence for batch in loader for sequence in sequences_of(batch)]
        tokens = Counter(
            (row, place) for _, pieces in sequences for _, row, a, b in pieces for place in range(a, b + 1)
        )
        whole = way != "concat whole"
        assert tokens == Counter(
            (row, place)
            for row in range(DOCUMENTS[name])
            for place in range(length_of(source, row))
            if whole or length_of(source, row) <= LENGTH
        )
        found[source] = Counter(sequences)
    return found


def require_once_a_pass(delivered: Counter[Any], one_pass: dict[int, Counter[Any]]) -> None:
    for source, wanted in one_pass.items():
        own = {sequence: count for sequence, count in delivered.items() if sequence[0] == source}
        assert own.keys() <= wanted.keys()
        # A sequence without tokens, of separators alone, may be there several times.
        passes = sum(own.values()) / wanted.total()
        for sequence, times in wanted.items():
            assert int(passes) * times <= own.get(sequence, 0) <= -int(-passes // 1) * times


@pytest.mark.parametrize("every", [6, pytest.param(3, marks=pytest.mark.soak)], ids=["some states", "more states"])
@pairwise(most=5, way=PACKINGS, order=ORDERS)
def test_sequences_come_once_a_pass_in_exact_shares_and_follow_from_every_state(root, way, order, every):
    """Other states in each epoch."""
    one_pass = in_one_pass(root, way)
    delivered: Counter[Any] = Counter()
    loader, _ = opened(root, way, **ORDERS[order])
    for epoch in range(3):
        loader.set_epoch(epoch)
        batches, states = [], [saved(loader)]
        for batch in loader:
            batches.append(sequences_of(batch))
            states.append(saved(loader))
        assert len(batches) == len(loader) == 8
        require_quota(batches, WEIGHTS)
        delivered.update(itertools.chain(*batches))
        require_once_a_pass(delivered, one_pass)
        for step in range(epoch, 9, every):
            again, _ = opened(root, way, **ORDERS[order])
            again.load_state_dict(states[step])
            assert [sequences_of(batch) for batch in again] == batches[step:]


@pytest.mark.parametrize("order", ["in order", "sequences shuffled"])
def test_workers_deliver_what_one_process_does_and_resume(root, order):
    by_workers = {}
    for workers in (0, 2):
        loader, _ = opened(root, num_workers=workers, **ORDERS[order])
        batches, states = [], []
        for batch in loader:
            batches.append(sequences_of(batch))
            states.append(saved(loader))
        require_quota(batches, WEIGHTS)
        by_workers[workers] = Counter(itertools.chain(*batches))
        again, _ = opened(root, num_workers=workers, **ORDERS[order])
        again.load_state_dict(states[4])
        assert [sequences_of(batch) for batch in again] == batches[5:]
    assert by_workers[0] == by_workers[2]


@pytest.mark.parametrize("stops", [(0, 3), pytest.param(range(4), marks=pytest.mark.soak)], ids=["some", "all"])
@pytest.mark.parametrize(
    ("way", "order", "workers", "weights"),
    [
        ("concat", "sequences shuffled", 0, WEIGHTS),
        ("best fit", "shards shuffled", 0, NEW_WEIGHTS),
        ("concat whole", "in order", 0, NEW_WEIGHTS),
        ("best fit", "sequences shuffled", 2, NEW_WEIGHTS),
    ],
    ids=["same weights", "new weights", "in order", "workers"],
)
def test_other_ranks_and_weights_go_on_from_any_batch(root, *, way, order, workers, weights, stops):
    one_pass = in_one_pass(root, way)
    for stop in (stops[0], stops[-1]) if workers else stops:
        found: Counter[Any] = Counter()
        states: list[Any] | None = None
        for ranks, steps, shares in ((2, stop, WEIGHTS), (3, 1, weights), (1, None, weights)):
            loaders = [
                opened(root, way, shares, num_ranks=ranks, rank=rank, num_workers=workers, **ORDERS[order])[0]
                for rank in range(ranks)
            ]
            for loader in loaders:
                if states is not None:
                    loader.load_state_dict(states, strict=False)
            found.update(itertools.chain(*delivered_by(loaders, steps, shares)))
            states = list(map(saved, loaders))
        for epoch in range(1, 4):
            for loader in loaders:
                loader.set_epoch(epoch)
            found.update(itertools.chain(*delivered_by(loaders, None, weights)))
            require_once_a_pass(found, one_pass)


def delivered_by(loaders: list[Any], steps: int | None, weights: dict[str, float]) -> Iterator[list[Any]]:
    for loader in loaders:
        batches = [sequences_of(batch) for batch in itertools.islice(loader, steps)]
        require_quota(batches, weights)
        yield from batches


def test_the_batches_of_a_grid_are_the_same_on_one_and_two_ranks(root):
    grid = {"virtual_ranks": 2, "virtual_workers": 1, **ORDERS["sequences shuffled"]}
    loader, _ = opened(root, batch_size=8, **grid)
    whole = [sequences_of(batch) for batch in loader]
    ranks = [[sequences_of(batch) for batch in opened(root, num_ranks=2, rank=rank, **grid)[0]] for rank in range(2)]
    assert whole == [first + second for first, second in zip(*ranks, strict=True)]


def test_the_numbers_of_sequences_are_kept_in_the_manifest(root, monkeypatch):
    _, dataset = opened(root)
    manifests = {name: dataset.dump_manifest(name) for name in DOCUMENTS}
    sources = {name: Source(root / name, columns=["tokens"], manifest=manifests[name]) for name in DOCUMENTS}
    expected = [sequences_of(batch) for batch in opened(root)[0]]
    with monkeypatch.context() as patched:
        counting = "torch_dataloader_utils.formats.row_packing.RowGroupPacking.sequences"
        patched.setattr(counting, lambda *_: pytest.fail("the documents are counted again"))
        again, _ = opened(root, sources=sources)
    assert [sequences_of(batch) for batch in again] == expected
    other, _ = opened(root, "best fit", sources=sources, rows_per_epoch=None)
    assert len(other) == len(opened(root, "best fit", rows_per_epoch=None)[0])


def chunked(table: pa.Table) -> pa.Table:
    """Leave out every third document, and make two of each other one."""
    lists = [tokens for tokens in table["tokens"].to_pylist() if not tokens or tokens[0] % 1_000_000 // 1_000 % 3]
    halves = [half for tokens in lists for half in (tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :])]
    return pa.table({"tokens": pa.array(halves, pa.list_(pa.int32()))})


def test_what_a_filter_and_a_transform_leave_is_packed(root):
    sources = {
        "web": Source(root / "web", columns=["tokens"], filters=pc.field("row") >= 20, count_rows=True),
        "code": Source(root / "code", columns=["tokens"], transform=chunked, transform_id="chunks", count_rows=True),
    }
    loader, _ = opened(root, sources=sources, rows_per_epoch=140, **ORDERS["sequences shuffled"])
    batches = [sequences_of(batch) for batch in loader]
    require_quota(batches, WEIGHTS)
    pieces = [piece for batch in batches for _, held in batch for piece in held]
    tokens = Counter((source, row, place) for source, row, a, b in pieces for place in range(a, b + 1))
    wanted = {(0, row) for row in range(20, DOCUMENTS["web"])} | {(1, row) for row in range(40) if row % 3}
    expected = {(source, row, place) for source, row in wanted for place in range(length_of(source, row))}
    assert tokens.keys() == expected
    kept = [sequences_of(batch) for batch in itertools.islice(loader, 5)]
    state = saved(loader)
    assert kept == batches[:5]
    again, _ = opened(root, sources=sources, rows_per_epoch=140, **ORDERS["sequences shuffled"])
    again.load_state_dict(state)
    assert [sequences_of(batch) for batch in again] == batches[5:]


@pytest.mark.parametrize("way", PACKINGS)
def test_metrics_count_each_token_and_the_sequences_of_each_source(root, way):
    loader, dataset = opened(root, way, rows_per_epoch=32)
    batches = list(loader)
    figures = dataset.get_metrics()
    assert {name: source["rows"] for name, source in figures["sources"].items()} == {"web": 24, "code": 8}
    held = sum(int((batch["document_ids"] >= 0).sum()) for batch in batches)
    assert figures["tokens_packed"] == held
    assert figures["tokens_padding"] == 32 * LENGTH - held
    assert figures["tokens_separators"] == sum(int((batch["tokens"] == SEPARATOR).sum()) for batch in batches)
    assert bool(figures["tokens_dropped"]) == (way == "concat whole")


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "elastic"])
def test_a_state_of_other_packing_is_refused(root, strict):
    loader, _ = opened(root)
    list(itertools.islice(loader, 3))
    state = saved(loader)
    for other in (opened(root, packing=Packing("tokens", length=LENGTH))[0], opened(root, packing=None)[0]):
        with pytest.raises(CheckpointMismatchError, match="packing"):
            other.load_state_dict(state if strict else [state], strict=strict)


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.LostRowsWarning")
@pairwise(
    most=4,
    way=["concat", "best fit"],
    order=["sequences shuffled", "buffer smaller than a row group"],
    stop=[1, 3],
)
def test_sequences_of_files_that_did_not_change_come_once_a_pass_when_others_do(root, tmp_path, way, order, stop):
    copied = tmp_path / "sources"
    shutil.copytree(root, copied)
    one_pass, options = in_one_pass(root, way), ORDERS[order]
    loaders = [opened(copied, way, num_ranks=2, rank=rank, **options)[0] for rank in range(2)]
    found = Counter(itertools.chain(*delivered_by(loaders, stop, WEIGHTS)))
    states = list(map(saved, loaders))
    tokens = pa.array([document(0, row) for row in range(100, 140)], pa.list_(pa.int32()))
    pq.write_table(pa.table({"tokens": tokens, "row": range(40)}), copied / "web" / "1.parquet", row_group_size=GROUP)
    loaders = [opened(copied, way, num_ranks=3, rank=rank, **options)[0] for rank in range(3)]
    with pytest.raises(CheckpointMismatchError, match=r"web/1\.parquet"):
        loaders[0].load_state_dict(states, strict=False)
    for loader in loaders:
        loader.load_state_dict(states, strict=False, on_changed_files="continue")
    found.update(itertools.chain(*delivered_by(loaders, None, WEIGHTS)))
    for epoch in range(1, 4):
        for loader in loaders:
            loader.set_epoch(epoch)
        found.update(itertools.chain(*delivered_by(loaders, None, WEIGHTS)))
    require_once_a_pass(Counter({key: times for key, times in found.items() if key[0] == 1}), {1: one_pass[1]})
    unchanged = [key for key in one_pass[0] if key[1] and all(piece[1] < 28 for piece in key[1])]
    counts = {found[key] for key in unchanged}
    assert len(unchanged) > 10
    assert max(counts) - min(counts) <= 1
    assert any(piece[1] >= 100 for _, pieces in found for piece in pieces)


def test_an_audit_counts_sequences(root):
    loader, dataset = opened(root)
    list(itertools.islice(loader, 5))
    found = audit([saved(loader)], dataset)
    assert found.total.done + found.total.under_way == 20
    assert any("sequences, which were counted" in note for note in found.notes)


def test_steps_are_skipped_and_read_again(root):
    options = ORDERS["sequences shuffled"]
    whole = [sequences_of(batch) for batch in opened(root, **options)[0]]
    loader, dataset = opened(root, **options)
    assert [sequences_of(dataset.batch_at(step)) for step in (0, 4, 7)] == [whole[0], whole[4], whole[7]]
    loader.skip_steps(2, 4)
    assert [sequences_of(batch) for batch in loader] == whole[:2] + whole[4:]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"packing": None, "batching": TokenBudget("tokens", tokens=64), "batch_size": None}, ValueError, "Packing"),
        ({"row_id_column": "id"}, ValueError, "row_id_column='id' beside packing"),
        ({"fingerprint": True}, ValueError, "fingerprint=True beside packing"),
        ({"count_tokens": True}, ValueError, "a mixture counts its sequences when it is made"),
        ({"source_column": "document_ids"}, ColumnError, "output of Packing"),
        ({"packing": Packing("words", length=4)}, ColumnError, "no such column"),
    ],
    ids=["token budget", "row ids", "fingerprint", "counted tokens", "source column", "column"],
)
@pytest.mark.parametrize("count", [1, 2])
def test_what_has_no_meaning_for_sequences_is_refused(root, options, error, message, count):
    names = list(DOCUMENTS)[:count]
    sources = {name: Source(root / name, columns=["tokens"]) for name in names}
    with pytest.raises(error, match=message):
        opened(root, weights=dict.fromkeys(names, 1), sources=sources, **options)


def test_the_ledger_says_why_it_does_not_know(root):
    _, dataset = opened(root)
    with pytest.raises(LedgerUnknownError, match="source 'web' is packed"):
        dataset.step_of("web/0.parquet", 0)


def test_columns_are_packed_alike_and_nulls_filled_before(tmp_path):
    tables = {
        "web": pa.table({"tokens": [[1, 2, 3], None, [4]], "marks": [[1, 1, 0], None, [0]]}),
        "code": pa.table({"tokens": [[7] * 5] * 3, "marks": [[1] * 5] * 3}),
    }
    for name, table in tables.items():
        pq.write_table(table, tmp_path / f"{name}.parquet")
    packing = Packing("tokens", length=4, separator={"tokens": 9, "marks": 1}, pad_value={"tokens": 0, "marks": -1})
    sources = {name: Source(tmp_path / f"{name}.parquet") for name in tables}
    options = {"packing": packing, "rows_per_epoch": None, "batch_size": 2, "output_format": "numpy"}
    options |= {"weights": {"web": 1, "code": 1}, "sources": sources}
    loader, _ = opened(tmp_path, fill_nulls={"tokens": 0, "marks": 0}, **options)
    rows = {name: [] for name in ("tokens", "marks")}
    for batch in loader:
        assert batch["source"].tolist() == [0, 1]
        for name, of_column in rows.items():
            of_column.append(batch[name][0].tolist())
    assert rows == {"tokens": [[1, 2, 3, 9], [9, 4, 9, 0]], "marks": [[1, 1, 0, 1], [1, 0, 1, -1]]}
    with pytest.raises(ColumnError, match=r"'tokens' holds 1 nulls"):
        opened(tmp_path, **options)


def test_lists_of_other_lengths_and_columns_of_other_types_are_named(root, tmp_path):
    pq.write_table(pa.table({"tokens": [[1, 2], [3]], "marks": [[1], [1]]}), tmp_path / "part.parquet")
    sources = {"web": Source(tmp_path / "part.parquet")}
    loader, _ = opened(root, weights={"web": 1}, sources=sources, rows_per_epoch=None, batch_size=1)
    with pytest.raises(ColumnError, match=r"'marks' has lists of other lengths than 'tokens'.*row group 0 of .*part"):
        list(loader)
    with pytest.raises(ColumnError, match="'row' does not have lists of numbers"):
        opened(root, sources={name: Source(root / name) for name in DOCUMENTS})


@pytest.mark.parametrize("start", ["forkserver", pytest.param("spawn", marks=pytest.mark.soak)])
def test_workers_that_are_not_forked_from_this_process_pack_the_same(root, start):
    loader, _ = opened(root, num_workers=1, multiprocessing_context=start)
    expected = [sequences_of(batch) for batch in opened(root, num_workers=1)[0]]
    assert [sequences_of(batch) for batch in loader] == expected
