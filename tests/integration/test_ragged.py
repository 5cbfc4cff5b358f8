"""Lists as jagged and padded tensors, strings as packed bytes: resumed at any batch, sent, copied, pinned."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pairwise import pairwise
from stops import at_few_stops
from support import open_loader

from torch_dataloader_utils import Codes, PackedBytes, Padded
from torch_dataloader_utils.columns.convert import convert, split
from torch_dataloader_utils.columns.options import ColumnOptions
from torch_dataloader_utils.columns.tensors import pinned
from torch_dataloader_utils.columns.transform import ColumnTransform
from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.reading.batching import Batch
from torch_dataloader_utils.workers.collate import UncopyableError, copy_batch
from torch_dataloader_utils.workers.messages import Message

IS_OLD = int(pa.__version__.split(".")[0]) < 26  # and cannot read null fixed-size lists back

ROWS = 90
OPTIONS: dict[str, Any] = {
    "column_formats": {"padded": Padded(65535), "packed": "packed", "as_list": "list", "code": Codes(["a", "b", "c"])},
    "fill_nulls": {"jagged": -1},
    "mask_nulls": ["jagged", "pair"],
    "batch_size": 8,
}
ORDERS: dict[str, dict[str, Any]] = {
    "in file order": {},
    "mixed": {"shuffle": True, "shuffle_buffer_size": 25},
    "in a grid": {"virtual_ranks": 2, "virtual_workers": 2, "uneven_ranks": "drop"},
    "mixed in rounds": {"shuffle": True, "shuffle_buffer_size": 8, "shuffle_interleave": 2, "read_ahead_bytes": 500},
}


def has_pair(row: int) -> bool:
    return IS_OLD or row % 5 != 1


def tokens(row: int) -> list[int]:
    return [row, *range(row * 7 % 5)]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("ragged")
    rows = range(ROWS)
    table = pa.table(
        {
            "jagged": pa.array([None if row % 9 == 4 else [None, *tokens(row)] for row in rows], pa.list_(pa.int32())),
            "padded": pa.array([tokens(row) for row in rows], pa.large_list(pa.uint16())),
            "points": pa.array([[[row, 0.5]] * (row % 3) for row in rows], pa.list_(pa.list_(pa.float32(), 2))),
            "packed": [f"é{row}" * (row % 4) for row in rows],
            "as_list": [tokens(row) for row in rows],
            "texts": [f"text {row}" for row in rows],
            "code": pa.array(["abc"[row % 3] for row in rows]).dictionary_encode(),
            "pair": pa.array([[row, 1] if has_pair(row) else None for row in rows], pa.list_(pa.int16(), 2)),
            "time": pa.array(rows, pa.timestamp("ms")),
        }
    )
    pq.write_table(table.slice(0, 50), directory / "a.parquet", row_group_size=20)
    pq.write_table(table.slice(50), directory / "b.parquet", row_group_size=11)
    return directory


def plain(values: Any) -> Any:
    """Return a column of a batch as what can be compared: its type, its dtype, and its values."""
    if isinstance(values, PackedBytes):
        return "packed", plain(values.values), plain(values.offsets)
    if isinstance(values, torch.Tensor) and values.is_nested:
        return "jagged", values.dtype, plain(values.values()), plain(values.offsets())
    if isinstance(values, (torch.Tensor, np.ndarray)):
        return type(values).__name__, str(values.dtype), values.tolist()
    return [plain(row) if isinstance(row, np.ndarray) else row for row in values]


def plain_batches(batches: Any) -> list[dict[str, Any]]:
    return [{name: plain(values) for name, values in batch.items()} for batch in batches]


@at_few_stops
@pairwise(most=4, order=ORDERS, output_format=["torch", "numpy"])
def test_what_follows_a_resume_at_any_batch_is_what_would_have_followed(data, order, output_format, stops):
    options = {**OPTIONS, **ORDERS[order], "output_format": output_format}
    loader, _ = open_loader(data, **options)
    states, whole = [loader.state_dict()], []
    for batch in loader:
        whole.append(batch)
        states.append(loader.state_dict())
    correct = plain_batches(whole)
    assert sorted(row for batch in correct for row in batch["row"][2]) == list(range(ROWS))
    for done in stops(states[:-1]):
        resumed, _ = open_loader(data, **options)
        resumed.load_state_dict(states[done])
        assert plain_batches(resumed) == correct[done:], done


@pytest.mark.parametrize("order", ORDERS)
def test_each_row_keeps_its_values_in_any_order(data, order):
    for batch in open_loader(data, **OPTIONS, **ORDERS[order])[0]:
        rows = batch["row"].tolist()
        jagged = [[] if row % 9 == 4 else [-1, *tokens(row)] for row in rows]
        assert [one.tolist() for one in batch["jagged"].unbind()] == jagged
        assert batch["jagged_is_null"].tolist() == [row % 9 == 4 for row in rows]
        longest = max(len(tokens(row)) for row in rows)
        assert batch["padded"].dtype == torch.uint16
        assert batch["padded"].tolist() == [(tokens(row) + [65535] * longest)[:longest] for row in rows]
        assert [one.tolist() for one in batch["points"].unbind()] == [[[row, 0.5]] * (row % 3) for row in rows]
        values, ends = batch["packed"]
        content = bytes(values.numpy())
        assert [content[ends[n] : ends[n + 1]].decode() for n in range(len(rows))] == [f"é{r}" * (r % 4) for r in rows]
        assert batch["as_list"] == [tokens(row) for row in rows]
        assert batch["code"].tolist() == [row % 3 for row in rows]
        assert batch["pair"].tolist() == [[row, 1] if has_pair(row) else [0, 0] for row in rows]
        assert batch["pair_is_null"].tolist() == [[not has_pair(row)] * 2 for row in rows]
        assert batch["time"].tolist() == rows


# Worker processes -----------------------------------------------------------------------------------------------------


def as_it_is(batch: dict[str, Any]) -> dict[str, Any]:
    return dict(batch)


@pytest.mark.parametrize("output_format", ["torch", "numpy"])
@pytest.mark.parametrize("collate_fn", [None, as_it_is])
def test_workers_deliver_what_this_process_delivers_writable_and_in_memory_of_its_own(data, output_format, collate_fn):
    options = {**OPTIONS, "output_format": output_format, "collate_fn": collate_fn}
    alone = plain_batches(open_loader(data, **options)[0])
    loader, _ = open_loader(data, **options, num_workers=1, persistent_workers=False)
    batches = list(loader)
    assert plain_batches(batches) == alone
    for number, batch in enumerate(batches):
        for values in parts_of(batch):
            values[...] = 0
        assert plain_batches(batches[number + 1 :]) == alone[number + 1 :]
        assert all((np.asarray(values).astype(float) == 0).all() for values in parts_of(batch))


def parts_of(batch: dict[str, Any]) -> list[Any]:
    """Return the tensors and arrays that columns consist of."""
    parts = []
    for values in batch.values():
        if isinstance(values, torch.Tensor) and values.is_nested:
            parts.append(values.values())
        elif isinstance(values, PackedBytes):
            parts += list(values)
        elif isinstance(values, list):
            parts += [row for row in values if isinstance(row, np.ndarray)]
        else:
            parts.append(values)
    return parts


def sent(data: Any) -> Any:
    """Pack, pickle as a queue would, and unpack."""
    message = Message.pack(0, [Batch(data, Receipt(0, 0, 0, rows=1))])
    (content,) = pickle.loads(pickle.dumps(message)).unpack()
    return content.data


def jagged(*lengths: int, **options: Any) -> torch.Tensor:
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    return torch.nested.nested_tensor_from_jagged(torch.arange(float(offsets[-1])).requires_grad_(**options), offsets)


def test_nested_tensors_of_any_kind_that_a_collate_fn_makes_arrive_as_they_were():
    arrived = sent(
        {"jagged": jagged(2, 0, 3, requires_grad=False), "bytes": PackedBytes(torch.ones(2), torch.zeros(1))}
    )
    assert plain(arrived["jagged"]) == plain(jagged(2, 0, 3, requires_grad=False))
    assert type(arrived["bytes"]) is PackedBytes
    values = arrived["jagged"].values()
    values += 1
    assert values.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.skipif(IS_OLD, reason="torch of that age does not pickle them rightly either")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_the_older_layout_arrive_as_they_were():
    strided = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    assert [one.tolist() for one in sent([strided])[0].unbind()] == [[1, 1], [0, 0, 0]]


def test_memory_of_jagged_tensors_goes_out_of_band():
    tensor = torch.nested.nested_tensor_from_jagged(torch.zeros(10_000), torch.tensor([0, 10_000]))
    message = Message.pack(0, [Batch(tensor, Receipt(0, 0, 0, rows=1))])
    assert message.lengths[:2] == (40_000, 16)
    assert message.lengths[-1] < 2_000


def test_a_copy_of_a_jagged_tensor_is_not_changed_with_it_and_one_with_gradients_is_not_copied():
    tensor = jagged(1, 2, requires_grad=False)
    packed = PackedBytes(torch.zeros(2), np.zeros(3))
    copy, copied = copy_batch([tensor, packed])
    tensor.values().fill_(9)
    packed.values.fill_(9)
    assert plain(copy) == plain(jagged(1, 2, requires_grad=False))
    assert plain(copied) == plain(PackedBytes(torch.zeros(2), np.zeros(3)))
    with pytest.raises(UncopyableError):
        copy_batch(jagged(1, 2, requires_grad=True))


def filling_the_same_memory(batch: dict[str, Any]) -> dict[str, Any]:
    MEMORY.fill_(int(batch["row"][0]))
    return {"jagged": torch.nested.nested_tensor_from_jagged(MEMORY, torch.tensor([0, 1, 3])), "row": batch["row"]}


MEMORY = torch.zeros(3, dtype=torch.int64)


def test_a_collate_fn_may_fill_the_memory_of_a_jagged_tensor_again(data):
    loader, _ = open_loader(data, columns=[], num_workers=1, collate_fn=filling_the_same_memory, batch_size=3)
    for _ in range(2):  # in the second epoch many batches travel in one message
        for batch in loader:
            assert batch["jagged"].values().tolist() == [int(batch["row"][0])] * 3


def test_a_copy_of_the_dataset_in_another_process_delivers_the_same(data):
    _, dataset = open_loader(data, **OPTIONS)
    copy = pickle.loads(pickle.dumps(dataset))
    assert plain_batches(copy) == plain_batches(dataset)


# Memory ---------------------------------------------------------------------------------------------------------------


def test_no_two_batches_of_one_row_group_share_memory_or_versions(data):
    """What is done in place to one batch is not the others' business, for autograd neither."""
    first, second, *_ = open_loader(data, **OPTIONS)[0]
    before = plain_batches([second])
    factor = torch.ones(1, requires_grad=True)
    loss = (second["points"].values() * factor).sum()
    first["points"].values().mul_(2)
    loss.backward()
    assert factor.grad is not None
    for values in parts_of(first):
        values[...] = 0
    assert plain_batches([second]) == before


def test_values_of_jagged_tensors_are_those_that_were_decoded(tmp_path):
    """Nothing is copied on the way from Arrow."""
    table = pa.table({"x": pa.array([[1, 2], [3]], pa.list_(pa.int64())), "s": ["ab", "c"]})
    delivery = ColumnTransform.of(table.schema, ColumnOptions("torch", {"s": "packed"}))
    rows = pa.table({name: pa.chunked_array([pa.concat_arrays(table[name].chunks)]) for name in table.column_names})
    addresses = {
        rows["x"].chunk(0).values.buffers()[1].address,
        rows["s"].chunk(0).buffers()[2].address,
    }
    (batch,) = split(convert(delivery.apply(rows), delivery), [2])
    assert {batch["x"].values().data_ptr(), batch["s"].values.data_ptr()} == addresses


def test_pinning_pins_what_tensors_consist_of_and_changes_no_value(data, monkeypatch):
    """Without an accelerator no memory can be pinned, so other memory stands for it."""
    _, dataset = open_loader(data, **OPTIONS)
    stream, parts = dataset._stream, dataset.begin_iteration().parts
    correct = plain_batches(open_loader(data, **OPTIONS)[0])
    blocks: list[torch.Tensor] = []

    def new_memory(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        memory = empty(*sizes, **options)
        if pin_memory:
            blocks.append(memory)
        return memory

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", new_memory)
    batches = [
        content.data
        for [one] in parts.assigned(parts.first).values()
        for content in stream.batches(one, pin=True)
        if isinstance(content, Batch)
    ]
    assert plain_batches(batches) == correct
    assert {block.dtype for block in blocks} >= {torch.int32, torch.uint16, torch.uint8, torch.float32, torch.int64}
    addresses = {block.data_ptr() for block in blocks}
    for batch in batches:
        values, offsets = batch["packed"]
        for tensor in (batch["row"], values, offsets, batch["jagged"].values(), batch["padded"]):
            assert tensor.untyped_storage().data_ptr() in addresses


def test_lists_are_padded_on_the_cpu_whatever_torchs_default_device_is(data):
    loader, _ = open_loader(data, **OPTIONS)
    expected = plain_batches(loader)
    with torch.device("meta"):
        batches = list(loader)
    assert plain_batches(batches) == expected


def test_pinned_memory_is_on_the_cpu_whatever_torchs_default_device_is(monkeypatch):
    """Without an accelerator no memory can be pinned, so other memory stands for it."""
    empty = torch.empty

    def new_memory(*sizes: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", new_memory)
    values = torch.arange(3)
    with torch.device("meta"):
        columns = pinned({"x": values})
    assert isinstance(columns, dict)
    assert columns["x"].tolist() == [0, 1, 2]
