"""A mixture wherever one dataset can be: in plain loaders, checkpoints, copies, on a device, from every format."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
import torch.distributed.checkpoint as dcp
from support import skip_unless_installed
from torch.utils.data import DataLoader

from torch_dataloader_utils import (
    CheckpointMismatchError,
    CheckpointStore,
    ColumnError,
    MixedDataset,
    Source,
    to_device,
)
from torch_dataloader_utils.distributed import CheckpointEntry, gather_states, in_step, load_gathered, require_same_plan

ROWS = {"web": 100, "code": 60, "math": 41}
WEIGHTS = {"web": 0.5, "code": 0.3, "math": 0.2}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    for name, rows in ROWS.items():
        (root / name).mkdir()
        pq.write_table(pa.table({"x": np.arange(rows)}), root / name / "part.parquet", row_group_size=15)
    return root


def open_mixture(root, weights: Any = WEIGHTS, sources: Any = None, **options: Any):
    sources = sources or {name: Source(root / name) for name in weights}
    given = {"rows_per_epoch": 75, "batch_size": 10, "num_workers": 0, "num_ranks": 1, "rank": 0}
    given |= {"shuffle": True, "shuffle_buffer_size": 30, "source_column": "source"}
    return MixedDataset.create_dataloader(sources, weights, **{**given, **options})


def rows_of(batch):
    return list(zip(batch["source"].tolist(), batch["x"].tolist(), strict=True))


def rest_of(batches):
    return [rows_of(batch) for batch in batches]


@pytest.fixture
def whole(root):
    """The batches of epoch 1."""
    loader, _ = open_mixture(root)
    loader.set_epoch(1)
    return rest_of(loader)


def stopped(root, **options: Any):
    """Return a loader after three batches of epoch 1."""
    loader, _ = open_mixture(root, **options)
    loader.set_epoch(1)
    assert len(list(islice(loader, 3))) == 3
    return loader


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_loader_delivers_the_batches_of_as_many_workers(root, workers):
    own, _ = open_mixture(root, num_workers=workers)
    own.set_epoch(1)
    _, dataset = open_mixture(root)
    dataset.set_epoch(1)
    plain = DataLoader(dataset, batch_size=None, num_workers=workers)
    assert len(plain) == 8
    assert rest_of(plain) == rest_of(own)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("workers", "stops"), [(0, (1, 3, 6)), (2, (3,)), pytest.param(2, (1, 6), marks=pytest.mark.soak)]
)
def test_torchdata_resumes_a_mixture_in_its_workers(root, workers, stops):
    skip_unless_installed("torchdata", reason="the group of frameworks is not installed")
    from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: PLC0415 - an extra

    def stateful():
        return StatefulDataLoader(open_mixture(root)[1], batch_size=None, num_workers=workers)

    whole = rest_of(stateful())
    for steps in stops:
        loader = stateful()
        assert len(list(islice(loader, steps))) == steps
        resumed = stateful()
        resumed.load_state_dict(loader.state_dict())
        assert rest_of(resumed) == whole[steps:]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_store_and_an_entry_of_a_checkpoint_continue_a_mixture(root, tmp_path, whole):
    CheckpointStore(str(tmp_path / "store")).save(3, loader=stopped(root))
    loader, _ = open_mixture(root)
    CheckpointStore(str(tmp_path / "store")).restore(loader=loader)
    assert rest_of(loader) == whole[3:]
    dcp.save({"loader": CheckpointEntry(stopped(root))}, checkpoint_id=tmp_path / "dcp")
    loader, _ = open_mixture(root)
    dcp.load({"loader": CheckpointEntry(loader)}, checkpoint_id=tmp_path / "dcp")
    assert rest_of(loader) == whole[3:]
    states = gather_states(stopped(root))
    loader, _ = open_mixture(root)
    load_gathered(loader, states)
    require_same_plan(loader)
    assert rest_of(in_step(loader)) == whole[3:]
    loader, dataset = open_mixture(root, {"web": 0.1, "code": 0.1, "math": 0.8})  # goes on with other weights
    load_gathered(loader, states)
    assert sum(len(rows) for rows in rest_of(loader)) == 45
    assert dataset.get_metrics()["sources"]["math"]["share_asked"] == 0.8


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))],
    ids=["copied", "copied deeply", "pickled"],
)
def test_copies_go_on_where_the_loader_stands(root, whole, copied):
    assert rest_of(copied(stopped(root))) == whole[3:]


def test_a_loader_of_a_device_continues_a_mixture(root, whole):
    loader = to_device(open_mixture(root)[0], "cpu")
    loader.set_epoch(1)
    assert rest_of(islice(loader, 2)) == whole[:2]
    loader, state = open_mixture(root)[0], loader.state_dict()
    loader.load_state_dict(state)
    assert rest_of(loader) == whole[2:]


def test_two_sources_may_be_the_same_files_and_names_may_look_like_paths_of_passes(root):
    sources = {"a": Source(root / "web"), "a@1": Source(root / "web"), "@": Source(root / "code"), "ä ö": Source(root)}
    weights = {"a": 1, "a@1": 1, "@": 1, "ä ö": 1}
    options: dict[str, Any] = {"rows_per_epoch": 400}
    loader, dataset = open_mixture(root, weights, sources, **options)
    batches = rest_of(loader)
    delivered = Counter(row for batch in batches for row in batch)
    assert [delivered[source, row] for source in (0, 1) for row in range(100)] == [1] * 200
    own = [[row for batch in batches for of, row in batch if of == source] for source in (0, 1)]
    assert own[0] != own[1]
    assert (0, 7) in batches[dataset.step_of("a/part.parquet", 7).step]
    assert (1, 7) in batches[dataset.step_of("a@1/part.parquet", 7).step]
    loader, _ = open_mixture(root, weights, sources, **options)
    assert rest_of(islice(loader, 7)) == batches[:7]
    state = json.loads(json.dumps(loader.state_dict()))
    resumed, _ = open_mixture(root, weights, sources, **options)
    resumed.load_state_dict(state)
    assert rest_of(resumed) == batches[7:]
    resumed, _ = open_mixture(root, weights, sources, batch_size=3, **options)
    resumed.load_state_dict([state], strict=False)
    again = Counter(row for batch in [*batches[:7], *rest_of(resumed)] for row in batch)
    assert again.total() == 400
    for source in (0, 1):  # quotas count anew: a row more or less than 100
        assert {again[source, row] for row in range(100)} in ({1}, {0, 1}, {1, 2})


def test_a_source_of_weight_0_rests_and_keeps_its_place(root):
    loader, _ = open_mixture(root)
    sequence = []
    for epoch in range(4):
        loader.set_epoch(epoch)
        sequence += [row for batch in rest_of(loader) for of, row in batch if of == 2]
    loader, dataset = open_mixture(root)
    taken = [row for batch in rest_of(loader) for of, row in batch if of == 2]
    dataset.set_weights({"web": 1, "code": 1, "math": 0})
    for epoch in (1, 2):
        loader.set_epoch(epoch)
        assert {of for batch in rest_of(loader) for of, _ in batch} == {0, 1}
    dataset.set_weights(WEIGHTS)
    loader.set_epoch(3)
    taken += [row for batch in rest_of(loader) for of, row in batch if of == 2]
    assert taken == sequence[: len(taken)]


def test_rows_of_an_epoch_that_is_left_early_do_not_come_back_in_the_pass(root, whole):
    loader, _ = open_mixture(root)
    assert len(list(islice(loader, 2))) == 2
    loader.set_epoch(1)
    assert rest_of(loader) == whole


@pytest.mark.parametrize("uneven", ["drop", "pad"])
def test_an_epoch_may_have_fewer_rows_than_there_are_ranks(root, uneven):
    made = []
    for rank in range(5):
        loader, _ = open_mixture(root, num_ranks=5, rank=rank, rows_per_epoch=3, uneven_ranks=uneven)
        loader.set_epoch(7)
        made.append(rest_of(loader))
        assert len(loader) == len(made[-1]) == (uneven == "pad")
    rows = [row for batches in made for batch in batches for row in batch]
    assert len(set(rows)) == len(rows) == (5 if uneven == "pad" else 0)


def test_collate_fn_gets_the_batches_and_row_ids_are_those_of_the_source(root):
    loader, _ = open_mixture(root, num_workers=2, row_id_column="id", collate_fn=as_lists)
    for batch in loader:
        assert batch["id"] == batch["x"]


def as_lists(batch):
    return {name: column.tolist() for name, column in batch.items()}


def test_columns_that_do_not_fit_are_named_with_their_sources(root, tmp_path):
    pq.write_table(pa.table({"x": ["a", "b"]}), tmp_path / "text.parquet")
    pq.write_table(pa.table({"y": [1, 2]}), tmp_path / "other.parquet")
    for file, message in {
        "text": "column 'x' is string in source 'text' but int64 in source 'web'",
        "other": "source 'web': column 'y' is in source 'other' but not in source 'web'",
    }.items():
        sources = {"web": Source(root / "web"), file: Source(tmp_path / f"{file}.parquet")}
        with pytest.raises(ColumnError, match=message):
            open_mixture(root, {"web": 1, file: 1}, sources)
    with pytest.raises(ColumnError, match="source 'web': there is no column 'z'"):
        open_mixture(root, {"web": 1}, {"web": Source(root / "web", columns=["z"])})


@pytest.mark.parametrize("workers", [0, 2])
def test_sources_of_every_format_mix_and_are_continued(root, tmp_path, workers):
    skip_unless_installed("pyiceberg", "deltalake", reason="the extras of tables are not installed")
    import deltalake  # noqa: PLC0415 - an extra
    import icebergs  # noqa: PLC0415 - imports an extra

    def table(rows):
        return pa.table({"x": np.arange(rows)})

    pa.orc.write_table(table(50), tmp_path / "part.orc")
    pa.csv.write_csv(table(40), tmp_path / "part.csv")
    (tmp_path / "part.jsonl").write_text("\n".join(json.dumps({"x": row}) for row in range(30)))
    iceberg = icebergs.new_catalog(tmp_path / "iceberg").create_table("db.rows", schema=table(1).schema)
    iceberg.append(table(70))
    deltalake.write_deltalake(str(tmp_path / "delta"), table(60))

    def opened(**options: Any):
        sources = {
            "parquet": Source(root / "web"),
            "orc": Source(tmp_path / "part.orc", "orc"),
            "csv": Source(tmp_path / "part.csv", "csv", count_rows=True),
            "jsonl": Source(tmp_path / "part.jsonl", "jsonl", count_rows=True),
            "iceberg": Source.iceberg(table="db.rows", catalog_config=icebergs.config_of(tmp_path / "iceberg")),
            "delta": Source.delta(str(tmp_path / "delta")),
        }
        given = {"rows_per_epoch": 180, "num_workers": workers, "row_id_column": "id", **options}
        return open_mixture(root, dict.fromkeys(sources, 1), sources, **given)

    loader, _ = opened()
    batches = rest_of(loader)
    delivered = Counter(row for batch in batches for row in batch)
    assert set(delivered.values()) == {1}
    assert Counter(source for source, _ in delivered) == dict.fromkeys(range(6), 30)
    loader, _ = opened()
    assert rest_of(islice(loader, 5)) == batches[:5]
    state = json.loads(json.dumps(loader.state_dict()))
    resumed, _ = opened()
    resumed.load_state_dict(state)
    assert rest_of(resumed) == batches[5:]
    resumed, _ = opened(batch_size=7)
    resumed.load_state_dict([state], strict=False)
    again = Counter(row for batch in [*batches[:5], *rest_of(resumed)] for row in batch)
    assert set(again.values()) == {1}
    assert again.total() == 180
    iceberg.append(table(5))  # the newest snapshot is another one now
    with pytest.raises(CheckpointMismatchError, match="snapshot_id of source 'iceberg'"):
        opened()[0].load_state_dict(state)
