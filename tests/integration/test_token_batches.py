"""Batches by tokens: the same through stops at every batch, and each row once on other ranks and workers.

Each row has a list of as many copies of its number as it has tokens, and the number itself.
"""

from __future__ import annotations

import io
import json
from enum import Enum
from itertools import chain, islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from commands import Commands
from jobs.forked import start
from pairwise import pairwise
from stops import at_few_stops, each_stop

from torch_dataloader_utils import (
    ColumnError,
    LedgerUnknownError,
    MixedDataset,
    Packing,
    Padded,
    RunLog,
    Source,
    StructuredDataset,
    TokenBudget,
    audit,
)

ROWS, TOKENS = 100, 90
ORDERS = {
    "in order": {},
    "shards shuffled": {"shuffle": True},
    "rows shuffled": {"shuffle": True, "shuffle_buffer_size": 40},
    "in rounds": {"shuffle": True, "shuffle_buffer_size": 7},
    "filtered": {"shuffle": True, "filters": pc.field("kind") != 0},
    "small memory": {"read_ahead_bytes": 1},
}


def row_lengths():
    """Many rows of few tokens, rows of none, a row of exactly the budget, and row groups of one row."""
    lengths = np.random.default_rng(5).integers(0, 40, ROWS)
    lengths[[0, 1, 33, 34, 35, ROWS - 1]] = 0, 0, TOKENS, 0, TOKENS - 1, 0
    lengths[62:72] = 0
    return lengths


LENGTHS = row_lengths()


def tokens(rows, lengths=LENGTHS):
    return pa.array([[row] * int(lengths[row]) for row in rows], pa.list_(pa.int32()))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rows")
    for number, (first, stop) in enumerate([(0, 48), (48, 49), (49, 82), (82, ROWS)]):
        rows = range(first, stop)
        pq.write_table(
            pa.table({"row": rows, "kind": [row % 3 for row in rows], "tokens": tokens(rows)}),
            directory / f"{number}.parquet",
            row_group_size=8,
        )
    return directory


def open_batches(path, *, padded=False, tokens=TOKENS, oversized="error", num_workers=0, **options):  # noqa: ANN003
    loader, _ = StructuredDataset.create_dataloader(
        path,
        batching=TokenBudget("tokens", tokens, padded, oversized),
        **{"num_workers": num_workers, "split_rows": 15, **options},
    )
    return loader


def rows_of(batch):
    """The rows of a batch in any output format, whose tokens are theirs."""
    if isinstance(batch, pa.Table):
        batch = batch.to_pydict()
    rows = [int(row) for row in batch["row"]]
    lists = batch["tokens"].unbind() if isinstance(batch["tokens"], torch.Tensor) else batch["tokens"]
    for row, values in zip(rows, lists, strict=True):
        values = np.asarray(values)  # noqa: PLW2901
        assert values[: LENGTHS[row]].tolist() == [row] * LENGTHS[row]
        assert not (values[LENGTHS[row] :] + 1).any()  # padding is -1
    return rows


def flat(batches):
    return list(chain.from_iterable(batches))


def taken(rows, padded):
    lengths = [int(LENGTHS[row]) for row in rows]
    return max(lengths) * len(lengths) if padded else sum(lengths)


def require_full(batches, padded):
    """Each batch fits, and the next row of the same stream would not."""
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        assert taken(batch, padded) <= TOKENS
        assert following is None or taken([*batch, following[0]], padded) > TOKENS


@at_few_stops
@pytest.mark.parametrize(
    ("order", "padded"),
    [
        # Beside the filter shards are shuffled, too. Shuffled rows are padded where some of them are too large.
        *(pytest.param(order, False, marks=[pytest.mark.soak] * (order == "shards shuffled")) for order in ORDERS),
        ("in order", True),
        pytest.param("rows shuffled", True, marks=pytest.mark.soak),
    ],
    ids=[*ORDERS, "in order, with padding", "rows shuffled, with padding"],
)
def test_batches_are_full_and_a_stop_at_any_batch_changes_none(path, order, padded, stops):
    options = {"padded": padded, **ORDERS[order]}
    loader = open_batches(path, **options)
    states, whole = [loader.state_dict()], []
    for batch in loader:
        whole.append(rows_of(batch))
        states.append(json.loads(json.dumps(loader.state_dict())))
    wanted = range(ROWS) if order != "filtered" else [row for row in range(ROWS) if row % 3]
    assert sorted(flat(whole)) == list(wanted)
    require_full(whole, padded)
    for number in stops(states):
        resumed = open_batches(path, **options)
        resumed.load_state_dict(states[number])
        assert [rows_of(batch) for batch in resumed] == whole[number:]


@at_few_stops
@pytest.mark.parametrize("order", ["in order", "rows shuffled"])
def test_workers_resume_at_any_batch_with_the_same_batches(path, order, stops):
    options = {"num_workers": 2, **ORDERS[order]}
    loader = open_batches(path, **options)
    states, whole = [loader.state_dict()], []
    for batch in loader:
        whole.append(rows_of(batch))
        states.append(loader.state_dict())
    assert sorted(flat(whole)) == list(range(ROWS))
    resumed = open_batches(path, persistent_workers=True, **options)
    for number in stops(states):
        resumed.load_state_dict(states[number])
        assert [rows_of(batch) for batch in resumed] == whole[number:]


FORMS = {
    "padded": {"column_formats": {"tokens": Padded(-1)}},
    "list": {"column_formats": {"tokens": "list"}},
    "numpy": {"output_format": "numpy"},
    "numpy padded": {"output_format": "numpy", "column_formats": {"tokens": Padded(-1)}},
    "arrow": {"output_format": "arrow"},
    "dict": {"output_format": "dict"},
}


@pytest.fixture(scope="module")
def rows_shuffled(path):
    """The rows of the batches of an epoch."""
    return [rows_of(batch) for batch in open_batches(path, **ORDERS["rows shuffled"])]


@pairwise(form=FORMS, num_workers=[0, 1])
def test_every_form_of_lists_is_cut_alike(path, rows_shuffled, form, num_workers):
    loader = open_batches(path, num_workers=num_workers, **ORDERS["rows shuffled"], **FORMS[form])
    assert [rows_of(batch) for batch in loader] == rows_shuffled


def double(batch):
    return {"row": 2 * batch["row"], "tokens": batch["tokens"]}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collate_fn_gets_batches_of_unequal_sizes(path, num_workers):
    whole = [rows_of(batch) for batch in open_batches(path)]
    found = open_batches(path, collate_fn=double, num_workers=num_workers)
    assert [[int(row) // 2 for row in batch["row"]] for batch in found] == whole


@pytest.mark.parametrize("order", ORDERS)
def test_other_ranks_go_on_from_any_batch_with_each_row_once(path, order):
    """2 ranks, stopped, are continued by 3, those by 1."""
    delivered, states = [], None
    for ranks, stops in ((2, (5, 3)), (3, (2, 0, 3)), (1, (None,))):
        saved = []
        for rank, stop in enumerate(stops):
            loader = open_batches(path, num_ranks=ranks, rank=rank, **ORDERS[order])
            if states is not None:
                loader.load_state_dict(states, strict=False)
            batches = iter(loader)
            delivered += map(rows_of, islice(batches, stop))
            saved.append(loader.state_dict())
        states = saved
    wanted = range(ROWS) if order != "filtered" else [row for row in range(ROWS) if row % 3]
    assert sorted(flat(delivered)) == list(wanted)
    assert all(taken(rows, padded=False) <= TOKENS for rows in delivered)


IN_STEP = """
import json, os, sys
import torch.distributed as dist
from torch_dataloader_utils import StructuredDataset, TokenBudget
from torch_dataloader_utils.distributed import in_step

rank, path, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + directory + "/rendezvous", rank=rank, world_size=2)
loader, dataset = StructuredDataset.create_dataloader(
    path, batching=TokenBudget("tokens", 90), num_workers=0, split_rows=15, num_ranks=2, rank=rank
)
rows = [batch["row"].tolist() for batch in in_step(loader)]
alone = sum(1 for _ in StructuredDataset.create_dataloader(
    path, batching=TokenBudget("tokens", 90), num_workers=0, split_rows=15, num_ranks=2, rank=rank
)[0])
with open(directory + f"/{rank}.json", "w") as file:
    json.dump({"rows": rows, "alone": alone, "state": loader.state_dict()}, file)
dist.destroy_process_group()
"""


def test_ranks_with_unequal_steps_stop_together_and_the_rest_is_delivered_by_one(path, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(IN_STEP, encoding="utf-8")
    outputs = [tmp_path / f"{rank}.txt" for rank in range(2)]
    started = [
        start(script, str(rank), str(path), str(tmp_path), output=outputs[rank], environment={}) for rank in range(2)
    ]
    for process, output in zip(started, outputs, strict=True):
        process.join(240)
        process.kill()
        process.join()
        assert process.exitcode == 0, output.read_text()
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    alone = [rank["alone"] for rank in ranks]
    assert alone[0] != alone[1]  # else this shows nothing
    assert [len(rank["rows"]) for rank in ranks] == [min(alone)] * 2
    loader = open_batches(path)
    loader.load_state_dict([rank["state"] for rank in ranks], strict=False)
    rest = [rows_of(batch) for batch in loader]
    assert rest
    assert sorted(flat(ranks[0]["rows"] + ranks[1]["rows"] + rest)) == list(range(ROWS))


# States -------------------------------------------------------------------------------------------------------------


def test_a_state_is_continued_with_another_budget_and_with_a_batch_size(path):
    """As with another batch size, each row that is left is delivered once."""
    loader = open_batches(path)
    batches = iter(loader)
    before = flat(rows_of(next(batches)) for _ in range(5))
    state = loader.state_dict()
    assert state["batch_size"] is None
    other = open_batches(path, tokens=2 * TOKENS)
    other.load_state_dict(state)
    assert before + flat(map(rows_of, other)) == list(range(ROWS))
    by_rows, dataset = StructuredDataset.create_dataloader(path, batch_size=8, num_workers=0, split_rows=15)
    by_rows.load_state_dict(state)
    rest = [rows_of(batch) for batch in by_rows]
    assert [len(rows) for rows in rest[:-1]] == [8] * (len(rest) - 1)
    assert before + flat(rest) == list(range(ROWS))
    assert dataset.rows_at(6).rows.tolist() == [row % 48 for row in rest[1]]
    with pytest.raises(LedgerUnknownError, match="batches of other sizes"):
        dataset.rows_at(2)
    back = open_batches(path)
    by_rows.load_state_dict(state)
    batches = iter(by_rows)
    before += rows_of(next(batches))
    back.load_state_dict(by_rows.state_dict())
    assert before + flat(map(rows_of, back)) == list(range(ROWS))


@pytest.mark.parametrize("scan", [False, True])
def test_the_ledger_says_why_it_does_not_know_steps(path, tmp_path, scan):
    loader = open_batches(path, run_log=tmp_path / "log")
    next(iter(loader))
    for ask in (
        lambda: loader.dataset.rows_at(1, scan=scan),
        lambda: loader.dataset.step_of("0.parquet", 3, scan=scan),
    ):
        with pytest.raises(LedgerUnknownError, match="token budget"):
            ask()


def test_a_run_log_has_the_segment_and_says_why_its_steps_are_not_known(path, tmp_path):
    log = tmp_path / "log"
    loader = open_batches(path, run_log=log)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    (segment,) = RunLog.read(log).segments
    assert segment.batch_size is None
    by_rows, dataset = StructuredDataset.create_dataloader(
        path, batch_size=8, num_workers=0, split_rows=15, run_log=log
    )
    by_rows.load_state_dict(state)
    next(iter(by_rows))
    with pytest.raises(LedgerUnknownError, match="TokenBudget"):
        dataset.rows_at(1)


def test_the_command_line_says_why_steps_are_not_known_and_shows_the_difference(path, tmp_path):
    loader = open_batches(path)
    next(iter(loader))
    (tmp_path / "tokens.json").write_text(json.dumps(loader.state_dict()))
    by_rows, _ = StructuredDataset.create_dataloader(path, batch_size=8, num_workers=0, split_rows=15)
    next(iter(by_rows))
    (tmp_path / "rows.json").write_text(json.dumps(by_rows.state_dict()))
    tdu = Commands(tmp_path)
    done = tdu("rows", tmp_path / "tokens.json", 0)
    assert done.code
    assert "TokenBudget" in done.err
    settings = tdu("diff", tmp_path / "tokens.json", tmp_path / "rows.json", "--json").value["settings"]
    budget = loader.state_dict()["plan"]["batching"]
    assert [tuple(one.values()) for one in settings] == [("batch_size", None, 8), ("batching", budget, None)]


def test_skipped_steps_are_left_out_and_all_others_are_the_same(path):
    order = ORDERS["rows shuffled"]
    whole = [rows_of(batch) for batch in open_batches(path, **order)]
    loader = open_batches(path, **order)
    loader.skip_steps(2, 5)
    assert [rows_of(batch) for batch in loader] == whole[:2] + whole[5:]


def test_excluded_rows_change_no_other_batch_of_the_epoch(path):
    whole = [rows_of(batch) for batch in open_batches(path)]
    loader = open_batches(path)
    batches = iter(loader)
    found = [rows_of(next(batches)) for _ in range(2)]
    state = loader.state_dict()
    loader.dataset.exclude({"2.parquet": [2, 6]})
    loader.load_state_dict(state)
    found += [rows_of(batch) for batch in loader]
    assert found == [rows for rows in ([row for row in rows if row not in (51, 55)] for rows in whole) if rows]
    loader.dataset.set_epoch(1)
    assert sorted(flat(map(rows_of, loader))) == sorted(set(range(ROWS)) - {51, 55})


def test_an_audit_counts_each_row(path):
    loader = open_batches(path)
    assert len(list(loader)) > 1
    found = audit(loader.state_dict(), path).total
    assert (found.done, found.missing, found.twice) == (ROWS, 0, 0)


# Rows that are too large ----------------------------------------------------------------------------------------------


@pytest.fixture
def oversized(tmp_path):
    lengths = LENGTHS.copy()
    lengths[[20, 21, 55]] = TOKENS + 1, 5 * TOKENS, 2 * TOKENS
    table = pa.table({"row": range(ROWS), "tokens": tokens(range(ROWS), lengths)})
    pq.write_table(table, tmp_path / "long.parquet", row_group_size=9)
    return tmp_path, lengths


@each_stop
@pairwise(most=3, order=["in order", "rows shuffled", "in rounds"], padded=[False, True])
def test_a_row_that_is_too_large_is_a_batch_of_its_own_if_asked(oversized, order, padded, stops):
    path, lengths = oversized
    options = {"padded": padded, "oversized": "alone", **ORDERS[order]}
    loader = open_batches(path, **options)
    whole, states = [], []
    for batch in loader:
        whole.append(batch["row"].tolist())
        states.append(loader.state_dict())
    assert sorted(flat(whole)) == list(range(ROWS))
    large = [rows for rows in whole if max(lengths[rows]) > TOKENS]
    assert sorted(large) == [[20], [21], [55]]
    # The batches beside each row that is too large, and the row itself, are stops of their own kind.
    beside = {at for number, rows in enumerate(whole) if rows in large for at in (number - 1, number) if at >= 0}
    for number in sorted({*stops(states), *beside}):
        resumed = open_batches(path, **options)
        resumed.load_state_dict(states[number])
        assert [batch["row"].tolist() for batch in resumed] == whole[number + 1 :]


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({}, "in row 20 of the file"),
        ({"read_ahead_bytes": 1}, "in row 20 of the file"),
        ({"shuffle": True, "shuffle_buffer_size": 1000}, "in row (20|55) of the file"),
        ({"filters": pc.field("row") > 20, "row_id_column": "id"}, "in the row whose 'id' is 21"),
    ],
    ids=["in order", "in parts", "shuffled", "filtered"],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_row_that_is_too_large_is_named(oversized, options, place, num_workers):
    path, _ = oversized
    with pytest.raises(
        ColumnError, match=rf"'tokens' holds a list of \d+ values {place}.*row group \d of .*long\.parquet"
    ):
        list(open_batches(path, num_workers=num_workers, **options))


def test_rows_that_are_too_large_are_left_out_by_a_filter_or_excluded(oversized):
    path, _ = oversized
    fitting = [row for row in range(ROWS) if row not in (20, 21, 55)]
    short = pc.list_value_length(pc.field("tokens")) <= TOKENS
    assert flat(batch["row"].tolist() for batch in open_batches(path, filters=short)) == fitting
    loader = open_batches(path)
    batches = iter(loader)
    found = next(batches)["row"].tolist()
    state = loader.state_dict()
    with pytest.raises(ColumnError, match="row 20 of the file"):
        list(batches)
    loader.dataset.exclude({"long.parquet": [20, 21, 55]})
    loader.load_state_dict(state)
    assert found + flat(batch["row"].tolist() for batch in loader) == fitting
    other = open_batches(path)
    other.dataset.exclude({"long.parquet": [20, 21, 55]})
    assert flat(batch["row"].tolist() for batch in other) == fitting


# Columns and arguments -----------------------------------------------------------------------------------------------


def test_lists_of_one_length_null_lists_and_lists_of_lists_are_counted(tmp_path):
    table = pa.table(
        {
            "row": range(10),
            "fixed": pa.array([[row] * 4 for row in range(10)], pa.list_(pa.int32(), 4)),
            "holes": pa.array([None if row % 2 else [row] * 3 for row in range(10)], pa.large_list(pa.int32())),
            "nested": pa.array([[[1], [2, 3]]] * 10),
        }
    )
    pq.write_table(table, tmp_path / "lists.parquet")
    for column, most in (("fixed", 2), ("holes", 6), ("nested", 4)):
        for options in ({"output_format": "arrow"}, {"mask_nulls": ["holes"]}):
            loader, _ = StructuredDataset.create_dataloader(
                tmp_path, batching=TokenBudget(column, 8), num_workers=0, **options
            )
            sizes = [len(batch["row"]) for batch in loader]
            expected = {2: [2] * 5, 6: [4, 4, 2], 4: [4, 4, 2]}[most]
            assert sizes == expected


def test_a_column_without_lists_and_a_missing_one_are_refused(tmp_path):
    pq.write_table(pa.table({"name": ["a", "b"], "row": [1, 2]}), tmp_path / "names.parquet")
    for column, message in (
        ("name", "type string, and only values of lists"),
        ("row", "int64"),
        ("rows", "no column 'rows'"),
    ):
        with pytest.raises(ColumnError, match=message):
            StructuredDataset.create_dataloader(tmp_path, batching=TokenBudget(column, 8), num_workers=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 1024}, "batch_size=1024 beside batching: the number of rows"),
        ({"global_batch_size": 8}, "global_batch_size=8 beside batching: the number of rows"),
        ({"packing": Packing("tokens", 8)}, "packing=.* beside batching: sequences all have the same length"),
        ({"drop_last": True}, "drop_last=True beside batching: .* none of them is a short one"),
        ({"uneven_ranks": "drop"}, r"uneven_ranks='drop' beside batching: .*in_step.*Packing"),
        ({"uneven_ranks": "pad"}, r"uneven_ranks='pad' beside batching: .*in_step.*Packing"),
        (
            {"virtual_ranks": 2, "virtual_workers": 2},
            r"virtual_ranks=2 beside batching: .*in_step.*Packing",
        ),
        (
            {"column_formats": {"tokens": Padded(length=20)}, "tokens": 90, "padded": True},
            r"padded=True\) and Padded\(length=20\): .*give batch_size=4 in place of batching",
        ),
        (
            {"column_formats": {"tokens": Padded(length=20)}, "tokens": 19, "padded": True},
            "and Padded.*none fits into the budget",
        ),
    ],
    ids=["batch_size", "global_batch_size", "packing", "drop_last", "drop", "pad", "virtual", "one length", "too long"],
)
def test_what_does_not_go_with_a_token_budget_is_refused(path, options, message):
    with pytest.raises(ValueError, match=message):
        open_batches(path, **options)


def test_a_mixture_is_refused(path):
    sources = {"a": Source(path), "b": Source(path)}
    with pytest.raises(ValueError, match=r"batching is not possible with a mixture of sources.*Packing"):
        MixedDataset.create_dataloader(sources, {"a": 1, "b": 1}, batching=TokenBudget("tokens", 8))


def test_the_number_of_batches_is_not_known(path):
    loader = open_batches(path, num_ranks=2, rank=1)
    with pytest.raises(TypeError, match="fit into the token budget"):
        len(loader)
    assert loader.dataset.batch_size is None
    digests = {open_batches(path, tokens=tokens).dataset.plan_digest for tokens in (TOKENS, TOKENS, 2 * TOKENS)}
    assert len(digests) == 2


class Names(str, Enum):
    """Names as many programs keep them."""

    TOKENS = "tokens"
    ALONE = "alone"


@pytest.mark.parametrize("column", [Names.TOKENS, np.str_("tokens")], ids=["enum", "numpy"])
def test_states_hold_plain_values_whatever_class_the_name_is_of(path, column):
    budget = TokenBudget(column, TOKENS, oversized=Names.ALONE)
    loader, _ = StructuredDataset.create_dataloader(path, batching=budget, num_workers=0)
    next(iter(loader))
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    expected = {"column": "tokens", "tokens": TOKENS, "padded": False, "oversized": "alone"}
    assert state["plan"]["batching"] == expected
    loader.load_state_dict(state)
