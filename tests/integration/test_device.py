"""Batches that are copied to a device ahead: exact, counted as they are handed over, and whole on a GPU."""

from __future__ import annotations

import gc
import json
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from pairwise import pairwise
from support import all_rows_of, batches_of, open_loader, rows_of, write_dataset

from torch_dataloader_utils import IterationEndedError, PackedBytes, Padded, to_device
from torch_dataloader_utils.distributed import gather_states, in_step
from torch_dataloader_utils.loader import device as device_loader
from torch_dataloader_utils.workers import producer

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
@pairwise(most=4, workers=[2, 0], depth=[1, 4, 100])
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


LISTS: dict[str, Any] = {"padded": Padded(-1), "packed": "packed"}


def write_lists(path: Path) -> None:
    lists = [[*range(row % 4)] for row in range(50)]
    table = pa.table({"padded": lists, "jagged": lists, "packed": [f"row {row}" for row in range(50)]})
    pq.write_table(table, path / "a.parquet", row_group_size=20)


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


@WORKERS
def test_workers_do_not_ask_the_device(tmp_path, workers, monkeypatch):
    """A worker that is forked after CUDA was used cannot: torch raises an error there."""

    def fail(*_: Any) -> bool:
        raise AssertionError("asked")

    write_lists(tmp_path)
    monkeypatch.setattr(torch.Tensor, "is_pinned", fail)
    monkeypatch.setattr(torch.Tensor, "pin_memory", fail)
    for collate_fn in (None, dict):
        loader, _ = open_loader(tmp_path, num_workers=workers, collate_fn=collate_fn, column_formats=LISTS)
        assert sum(len(batch["padded"]) for batch in loader) == 50


@ON_GPU
@WORKERS
@pytest.mark.parametrize("collate_fn", [None, dict])
def test_what_is_pinned(tmp_path, workers, collate_fn):
    write_lists(tmp_path)
    options = {"num_workers": workers, "column_formats": LISTS, "collate_fn": collate_fn}
    torch.zeros(1, device="cuda")  # before workers are forked
    correct = open_loader(tmp_path, **options)[0]
    for batch, other in zip(open_loader(tmp_path, **options, pin_memory=True)[0], correct, strict=True):
        assert batch["padded"].tolist() == other["padded"].tolist()
        assert [row.tolist() for row in batch["jagged"].unbind()] == [row.tolist() for row in other["jagged"].unbind()]
        tensors = [batch["row"], batch["padded"], *batch["packed"]]
        if workers or not collate_fn:  # torch does not pin nested tensors of a collate_fn
            tensors += [batch["jagged"].values(), batch["jagged"].offsets()]
        assert [tensor.is_pinned() for tensor in tensors] == [True] * len(tensors)


def write_numbers(path: Path, rows: int = 40_000) -> None:
    pq.write_table(pa.table({"x": np.arange(rows) * 3}), path / "a.parquet", row_group_size=rows // 4)


@ON_GPU
@pytest.mark.parametrize(("workers", "pin_memory"), [(0, False), (0, True), (2, False), (2, True)])
def test_batches_are_copied_together(tmp_path, workers, pin_memory, monkeypatch):
    """In this process, unless they are too large for that."""
    write_numbers(tmp_path)
    options = {"num_workers": workers, "batch_size": 100, "pin_memory": pin_memory}
    whole = batches_of(open_loader(tmp_path, **options)[0])
    for limit in (None,) if workers else (None, 1000):
        if limit:
            monkeypatch.setattr(producer, "PORTION_BYTES", limit)
        batches = list(to_device(open_loader(tmp_path, **options)[0], "cuda"))
        assert [rows_of(batch) for batch in batches] == whole
        assert all(batch["x"].tolist() == [3 * row for row in rows] for batch, rows in zip(batches, whole, strict=True))
        blocks = {batch["x"].untyped_storage().data_ptr() for batch in batches}
        assert len(blocks) == len(batches) if limit else len(blocks) < len(batches)
        del batches


class Events:
    """Stands for CUDA's streams and events where there is no GPU, and notes what is asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, int]] = []
        self.streams = 0
        self.on: list[Any] = []
        self.events: list[Any] = []
        self.current = SimpleNamespace(cuda_stream=0, wait_event=lambda event: self.seen.append(("wait", id(event))))
        monkeypatch.setattr(device_loader, "_stream_on", self.new_stream)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "Event", self.new_event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        record_stream = lambda tensor, _: self.seen.append(("keep", tensor.untyped_storage()._cdata))  # noqa: E731
        monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)

        def of(copy: Any, tensor: torch.Tensor) -> torch.Tensor:
            assert self.on == ["copies"]
            copied = tensor.clone()
            copy._tensors.extend(device_loader._parts(copied))
            return copied

        monkeypatch.setattr(device_loader._Copy, "of", of)

    def new_stream(self, _device: Any) -> str:
        self.streams += 1
        return "copies"

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.on.append(stream)
        yield
        self.on.pop()

    def new_event(self) -> Any:
        event = SimpleNamespace()
        self.events.append(event)  # so that no other has its number
        event.record = lambda stream: self.seen.append((f"recorded on {stream}", id(event)))
        return event


@WORKERS
def test_each_stream_waits_once_for_a_copy_and_keeps_its_memory(tmp_path, workers, monkeypatch):
    write_numbers(tmp_path)
    options = {"num_workers": workers, "batch_size": 100, "columns": ["x"]}
    whole = batches_of(open_loader(tmp_path, **options)[0])
    events = Events(monkeypatch)
    loader = to_device(open_loader(tmp_path, **options)[0], "cpu")
    kept = []  # so that no storage has the number of another one
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            kept.append(batch)
            tensors = [batch["x"], batch["row"]]
            assert {("keep", tensor.untyped_storage()._cdata) for tensor in tensors} <= set(events.seen)
    assert list(map(rows_of, kept[: len(whole)])) == whole
    told = [what for what, _ in events.seen]
    assert 0 < told.count("wait") == told.count("recorded on copies") < 2 * len(whole)
    assert told.count("keep") == 2 * told.count("wait")
    recorded = {event: place for place, (what, event) in enumerate(events.seen) if what == "recorded on copies"}
    assert all(recorded[event] < place for place, (what, event) in enumerate(events.seen) if what == "wait")
    assert events.streams == 1
    assert "_stream" not in loader.__getstate__()


def test_another_stream_waits_too(tmp_path, monkeypatch):
    write_numbers(tmp_path)
    events = Events(monkeypatch)
    iterator = iter(to_device(open_loader(tmp_path, batch_size=100, num_workers=0)[0], "cpu"))
    for number in (0, 0, 1, 1, 0):
        events.current.cuda_stream = number
        next(iterator)
    assert [what for what, _ in events.seen].count("wait") == 2


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged"])
def test_the_memory_of_every_part_of_a_tensor_is_kept(layout):
    dense = torch.arange(16.0).reshape(4, 4)
    if layout == "jagged":
        tensor = torch.nested.nested_tensor_from_jagged(dense, torch.tensor([0, 1, 4]))
    else:
        tensor = dense.to_sparse(layout=getattr(torch, layout), blocksize=(2, 2) if "_bs" in layout else None)
    parts = list(device_loader._parts(tensor))
    assert len(parts) == (2 if layout in ("sparse_coo", "jagged") else 3)
    assert all(part.layout == torch.strided and not part.is_nested for part in parts)


@WORKERS
def test_a_batch_that_was_copied_in_inference_mode_can_be_trained_on(tmp_path, workers, monkeypatch):
    write_lists(tmp_path)
    Events(monkeypatch)
    options = {"num_workers": workers, "batch_size": 5, "column_formats": LISTS}
    iterator = iter(to_device(open_loader(tmp_path, **options)[0], "cpu"))
    with torch.inference_mode():
        next(iterator)
    weight = torch.ones((), requires_grad=True)
    batch = next(iterator)
    for tensor in (batch["row"], batch["padded"], batch["packed"].values, batch["jagged"]):
        assert not tensor.is_inference()
        (weight * tensor).sum().backward()


@pytest.mark.parametrize("pinned", [False, True])
def test_a_copy_runs_meanwhile_only_of_pinned_memory(monkeypatch, pinned):
    asked = []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: pinned)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, _, non_blocking: asked.append(non_blocking) or tensor)
    device_loader._Copy(torch.device("cuda")).of(torch.arange(3))
    device_loader._Copy(torch.device("cuda")).of(torch.eye(2).to_sparse())
    assert asked == [pinned, pinned]


@WORKERS
def test_after_an_error_in_a_copy_the_state_is_that_of_what_was_handed_over(path, workers, monkeypatch):
    whole = batches_of(open_loader(path, num_workers=workers)[0])
    loader = to_device(open_loader(path, num_workers=workers)[0], "cpu", depth=1)
    iterator = iter(loader)
    monkeypatch.setattr(producer, "PORTION_BYTES", 1)
    seen = take(iterator, 0 if workers else 2)  # a worker's first message may have all of its batches

    def fail(*_: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("made up")

    with monkeypatch.context() as patched:
        patched.setattr(device_loader._Copy, "of", fail)
        with pytest.raises(torch.cuda.OutOfMemoryError, match="made up"):
            seen.extend(map(rows_of, iterator))
    with pytest.raises(IterationEndedError, match="made up"):
        next(iterator)
    loader.load_state_dict(loader.state_dict())
    assert seen + batches_of(loader) == whole


@ON_GPU
@WORKERS
def test_writing_to_one_batch_changes_no_other_and_no_gradient_of_another(tmp_path, workers):
    write_numbers(tmp_path, 4000)
    loader, _ = open_loader(tmp_path, num_workers=workers, batch_size=100, columns=["x"])
    first, second, *rest = to_device(loader, "cuda")
    weight = torch.ones((), device="cuda", requires_grad=True)
    loss = (weight * first["x"].double()).sum() + (weight * second["x"]).sum()
    gradient = sum(map(sum, (first["x"].tolist(), second["x"].tolist())))
    expected = [batch["x"].tolist() for batch in (second, *rest)]
    first["x"].fill_(-1)
    loss.backward()
    assert [batch["x"].tolist() for batch in (second, *rest)] == expected
    assert weight.grad is not None
    assert float(weight.grad) == gradient


class Reused:
    """A collate_fn that returns the same memory for each batch."""

    def __init__(self) -> None:
        self.memory = torch.empty(1000, dtype=torch.int64)

    def __call__(self, batch: Any) -> Any:
        rows = self.memory[: len(batch["row"])]
        rows[:] = batch["row"]
        return {"row": rows}


@ON_GPU
@WORKERS
@pytest.mark.parametrize("pin_memory", [False, True])
def test_a_collate_fn_may_write_to_the_same_memory_again(path, workers, pin_memory):
    options = {"num_workers": workers, "pin_memory": pin_memory}
    whole = batches_of(open_loader(path, **options)[0])
    assert batches_of(to_device(open_loader(path, **options, collate_fn=Reused())[0], "cuda", 3)) == whole


@ON_GPU
@WORKERS
def test_no_memory_of_the_device_is_kept(tmp_path, workers):
    write_numbers(tmp_path)
    loader = to_device(open_loader(tmp_path, num_workers=workers, batch_size=100, pin_memory=True)[0], "cuda")
    gc.collect()
    before = torch.cuda.memory_allocated()
    for epoch in range(3):
        loader.set_epoch(epoch)
        for batch in loader:
            assert torch.cuda.memory_allocated() > before
            del batch
        assert torch.cuda.memory_allocated() == before


def test_all_rows_arrive_once_with_more_depth_than_batches(path):
    loader, _ = open_loader(path, batch_size=200)
    assert sorted(all_rows_of(to_device(loader, "cpu", 50))) == list(range(443))
