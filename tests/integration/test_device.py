"""Batches that are copied to a device ahead: exact, counted as they are handed over, and whole on a GPU."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from support import all_rows_of, batches_of, open_loader, rows_of, write_dataset

from torch_dataloader_utils import IterationEndedError, PackedBytes, to_device
from torch_dataloader_utils.distributed import gather_states, in_step

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
WORKERS = pytest.mark.parametrize("workers", [0, 2])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    write_dataset(directory)
    return directory


def take(batches: Any, count: int) -> list[list[int]]:
    return [rows_of(next(batches)) for _ in range(count)]


@DEVICES
@WORKERS
@pytest.mark.parametrize("depth", [1, 4, 100])
def test_an_epoch_resumed_after_every_batch_is_that_of_the_loader(path, device, workers, depth):
    options = {"num_workers": workers, "shuffle": True, "shuffle_buffer_size": 60}
    whole = batches_of(open_loader(path, **options)[0])
    loader = to_device(open_loader(path, **options)[0], device, depth)
    states = [loader.state_dict()]
    seen = []
    for batch in loader:
        seen.append(rows_of(batch))
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert seen == whole
    assert len(loader) == len(whole)
    for count, state in enumerate(states):
        if count % 5 == 0 or count == len(whole):
            loader.load_state_dict(state)
            assert loader.progress() == {"initial": count, "total": len(whole)}
            assert whole[:count] + batches_of(loader) == whole


@DEVICES
@WORKERS
def test_a_break_loses_no_batch_that_was_copied_ahead(path, device, workers):
    whole = batches_of(open_loader(path, num_workers=workers)[0])
    loader = to_device(open_loader(path, num_workers=workers)[0], device, 4)
    iterator = iter(loader)
    seen = take(iterator, 3)
    for batch in iterator:
        seen.append(rows_of(batch))
        if len(seen) == 9:
            break
    assert loader.progress()["initial"] == 9
    again = to_device(open_loader(path, num_workers=workers)[0], device, 4)
    again.load_state_dict(loader.state_dict())
    assert seen + batches_of(iterator) == whole
    assert seen + batches_of(again) == whole


@DEVICES
@WORKERS
def test_epochs_follow_one_another_and_an_older_iterator_ends(path, device, workers):
    plain, _ = open_loader(path, num_workers=workers, shuffle=True)
    loader = to_device(open_loader(path, num_workers=workers, shuffle=True)[0], device)
    left = iter(loader)
    take(left, 2)
    for epoch in (0, 1, 2):
        loader.set_epoch(epoch)
        plain.set_epoch(epoch)
        assert loader.dataset.epoch == epoch
        assert batches_of(loader) == batches_of(plain)
    with pytest.raises(IterationEndedError):
        next(left)


def fail_at_row_100(batch: Any) -> Any:
    if 100 in rows_of(batch):
        raise ValueError("made up")
    return batch


@WORKERS
def test_an_error_in_a_batch_that_is_fetched_ahead_leaves_the_state_at_what_was_handed_over(path, workers):
    whole = batches_of(open_loader(path, num_workers=workers)[0])
    loader = to_device(open_loader(path, num_workers=workers, collate_fn=fail_at_row_100)[0], "cpu", 3)
    seen: list[list[int]] = []
    with pytest.raises(ValueError, match="made up"):
        seen.extend(map(rows_of, loader))
    resumed, _ = open_loader(path, num_workers=workers)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.progress()["initial"] == len(seen) > 0
    assert seen + batches_of(resumed) == whole


class Pair(NamedTuple):
    first: Any
    second: Any


def nested(batch: Any) -> Any:
    rows = batch["row"]
    return {
        "row": rows,
        "deep": [Pair(rows * 2, (rows + 1, "text")), OrderedDict(x=rows.to(torch.bfloat16)), None, 3],
        "array": np.asarray(batch["score"]),
        "sparse": torch.diag(rows).to_sparse(),
    }


@DEVICES
def test_tensors_are_moved_wherever_they_are_and_all_else_is_as_it_was(path, device):
    plain, _ = open_loader(path, collate_fn=nested)
    loader = to_device(open_loader(path, collate_fn=nested)[0], device)
    for moved, batch in zip(loader, plain, strict=True):
        assert [type(value) for value in moved["deep"]] == [Pair, OrderedDict, type(None), int]
        found = [moved["row"], moved["deep"][0].first, moved["deep"][0].second[0], moved["deep"][1]["x"]]
        expected = [batch["row"], batch["deep"][0].first, batch["deep"][0].second[0], batch["deep"][1]["x"]]
        assert all(tensor.device == loader.device for tensor in (*found, moved["sparse"]))
        assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))
        assert torch.equal(moved["sparse"].cpu().to_dense(), batch["sparse"].to_dense())
        assert moved["deep"][0].second[1] == "text"
        assert type(moved["array"]) is np.ndarray
        assert (moved["array"] == batch["array"]).all()


@DEVICES
def test_jagged_and_packed_columns_are_moved(tmp_path, device):
    lists = [[*range(row % 4)] for row in range(50)]
    table = pa.table({"lists": lists, "names": [f"row {row}" for row in range(50)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20)
    loader, _ = open_loader(tmp_path, column_formats={"names": "packed"})
    moved = to_device(loader, device)
    seen: list[list[int]] = []
    for batch in moved:
        assert type(batch["names"]) is PackedBytes
        assert batch["names"].values.device == batch["lists"].device == moved.device
        seen += [row.tolist() for row in batch["lists"].unbind()]
    assert seen == lists


@pytest.mark.parametrize("uneven", ["drop", "pad"])
def test_in_step_counts_a_batch_with_its_step(path, uneven):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        options = {"filters": pc.field("value") < 300}
        whole = batches_of(open_loader(path, **options)[0])
        loader = to_device(open_loader(path, **options)[0], "cpu", 3)
        seen = []
        for batch in in_step(loader, uneven=uneven):
            seen.append(rows_of(batch))
            resumed, _ = open_loader(path, **options)
            resumed.load_state_dict(gather_states(loader)[0])
            assert resumed.progress()["initial"] == len(seen)
            if len(seen) in (1, 8, len(whole)):
                assert seen + batches_of(resumed) == whole
        assert seen == whole
    finally:
        dist.destroy_process_group()


def test_wrong_arguments_are_refused(path):
    loader, dataset = open_loader(path)
    with pytest.raises(TypeError, match=r"loader is DeviceLoader, .*: pass its attribute `loader`"):
        to_device(to_device(loader, "cpu"), "cpu")
    with pytest.raises(TypeError, match="loader is StructuredDataset"):
        to_device(dataset, "cpu")
    with pytest.raises(ValueError, match="depth=0"):
        to_device(loader, "cpu", depth=0)
    with pytest.raises(RuntimeError, match="nonsense"):
        to_device(loader, "nonsense")


@ON_GPU
@WORKERS
@pytest.mark.parametrize("pin_memory", [False, True])
def test_batches_on_a_gpu_are_whole_while_it_computes_and_memory_is_used_again(tmp_path, workers, pin_memory):
    values = np.random.default_rng(1).integers(0, 2**40, 400_000)
    pq.write_table(pa.table({"x": values}), tmp_path / "a.parquet", row_group_size=50_000)
    loader, _ = open_loader(tmp_path, num_workers=workers, batch_size=20_000, pin_memory=pin_memory)
    sums, rows = [], []
    for batch in to_device(loader, "cuda", depth=3):
        torch.cuda._sleep(10_000_000)  # the device is behind this process, which releases the batch at once
        sums.append(batch["x"].sum())
        rows.append(batch["row"].clone())
        del batch
    ids = torch.cat(rows).cpu().numpy()
    assert sorted(ids.tolist()) == list(range(len(values)))
    assert [int(each) for each in sums] == [int(values[row.cpu().numpy()].sum()) for row in rows]


def test_all_rows_arrive_once_with_more_depth_than_batches(path):
    loader, _ = open_loader(path, batch_size=200)
    assert sorted(all_rows_of(to_device(loader, "cpu", 50))) == list(range(443))
