"""What a batch is after its way from a worker: the same, in memory of its own."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch

from torch_dataloader_utils.columns.convert import split
from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.reading.batching import Batch, StreamEnd
from torch_dataloader_utils.reading.work import Counters, Work
from torch_dataloader_utils.storage.attempts import Retry
from torch_dataloader_utils.workers.collate import BatchBuffer
from torch_dataloader_utils.workers.messages import ALIGNMENT, Message
from torch_dataloader_utils.workers.shared_memory import SharedMemoryPool

RECEIPT = Receipt(stream=0, position=1, rows_delivered=2, rows=3)

WORK = Work(Counters(bytes_read=4, decoding_sec=0.5), retries=(Retry("row group 1 of a", "OSError: lost", 1, 0.5),))


class Pair(NamedTuple):
    left: Any
    right: Any


def sent(data: Any, pool: SharedMemoryPool | None = None) -> Any:
    """Pack, pickle as a queue would, and unpack."""
    message = Message.pack(7, [Batch(data, RECEIPT, WORK)], pool)
    (content,) = pickle.loads(pickle.dumps(message)).unpack()
    assert isinstance(content, Batch)
    assert (content.receipt, content.work) == (RECEIPT, WORK)
    return content.data


TENSORS = {
    "float": torch.arange(6.0).reshape(2, 3),
    "bool": torch.tensor([True, False, True]),
    "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
    "bfloat16": torch.tensor([1.5, -2], dtype=torch.bfloat16),
    "complex": torch.tensor([1 + 2j]),
    "no dimensions": torch.tensor(3),
    "no elements": torch.empty(0, 4),
    "one column of many": torch.arange(12).reshape(3, 4)[:, 1],
    "every other": torch.arange(10)[::2],
    "expanded": torch.ones(1).expand(5),
    "needs gradients": torch.ones(2, requires_grad=True),
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was(name):
    tensor = TENSORS[name]
    arrived = sent(tensor)
    assert (arrived.dtype, arrived.shape, arrived.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert arrived.requires_grad == tensor.requires_grad
    assert torch.equal(arrived.to_dense().resolve_conj(), tensor.to_dense().resolve_conj())


def test_nested_outputs_of_a_collate_fn_arrive_as_they_were():
    data = {
        "pair": Pair(torch.arange(3), [np.arange(2.0), "text", None]),
        "ordered": OrderedDict(a=(torch.ones(1), {"deep": torch.zeros(2, 2)})),
        "table": pa.table({"x": [1, None, 3]}),
        "objects": np.array(["a", None], dtype=object),
    }
    arrived = sent(data)
    assert isinstance(arrived["pair"], Pair)
    assert arrived["pair"].left.tolist() == [0, 1, 2]
    assert arrived["pair"].right[0].tolist() == [0.0, 1.0]
    assert arrived["pair"].right[1:] == ["text", None]
    assert isinstance(arrived["ordered"], OrderedDict)
    assert arrived["ordered"]["a"][1]["deep"].shape == (2, 2)
    assert arrived["table"].equals(data["table"])
    assert arrived["objects"].tolist() == ["a", None]


def test_tensors_and_arrays_are_writable_and_a_write_touches_nothing_else():
    arrived = sent({"a": torch.zeros(3), "b": np.zeros(3), "c": torch.zeros(3)})
    arrived["a"] += 1
    arrived["b"] += 2
    assert arrived["c"].tolist() == [0, 0, 0]
    assert arrived["b"].tolist() == [2, 2, 2]


def test_the_same_tensor_twice_arrives_as_one():
    tensor = torch.zeros(2)
    arrived = sent([tensor, tensor])
    arrived[0] += 1
    assert arrived[1].tolist() == [1, 1]


def test_one_tensor_in_two_batches_arrives_as_two():
    tensor = torch.zeros(2)
    message = Message.pack(0, [Batch([tensor], RECEIPT), Batch([tensor], RECEIPT)])
    one, other = message.unpack()
    one.data[0] += 1
    assert other.data[0].tolist() == [0, 0]


def test_all_memory_is_one_aligned_block():
    tensors = [torch.arange(3, dtype=torch.int8), torch.arange(5.0), torch.arange(2)]
    message = Message.pack(0, [Batch(tensors, RECEIPT)])
    assert message.lengths[:-1] == (3, 20, 16)
    assert message.size == len(message.memory)
    (batch,) = message.unpack()
    start = batch.data[0].data_ptr()
    assert [tensor.data_ptr() - start for tensor in batch.data] == [0, ALIGNMENT, 2 * ALIGNMENT]


def test_a_slice_of_a_table_sends_the_slice_alone():
    table = pa.table({"x": np.arange(100_000)})
    message = Message.pack(0, [Batch(table.slice(10, 5), RECEIPT)])
    assert message.size < 5_000


def test_the_end_of_a_stream_arrives():
    end = StreamEnd(RECEIPT, WORK)
    assert Message.pack(0, [end]).unpack() == [end]


ODD = {
    "another key": {"b": torch.zeros(3)},
    "another type": {"a": torch.zeros(3, dtype=torch.int32)},
    "another shape": {"a": torch.zeros(3, 2)},
    "fewer rows": {"a": torch.zeros(2)},
    "no rows": {"a": torch.tensor(1.0)},
    "no tensor": {"a": [1.0, 2.0, 3.0]},
    "an array": {"a": np.zeros(3)},
    "gradients": {"a": torch.zeros(3, requires_grad=True)},
    "sparse": {"a": torch.zeros(3).to_sparse()},
    "no dictionary": [torch.zeros(3)],
    "ordered": OrderedDict(a=torch.zeros(3)),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("place", [0, 1])
def test_batches_that_are_not_alike_are_not_put_together(odd, place):
    batches: list[Any] = [{"a": torch.zeros(3)}]
    batches.insert(place, ODD[odd])
    gathered = BatchBuffer([3, 3])
    taken = [gathered.append(batch) is not None for batch in batches]
    assert not taken[1] or not taken[0]
    assert not gathered.is_complete


def test_batches_that_are_alike_are_put_together_and_cut_apart_as_they_were():
    batches = [{"a": torch.arange(rows * 2.0).reshape(rows, 2), "b": torch.arange(rows)} for rows in (3, 4, 1)]
    gathered = BatchBuffer([3, 4, 1])
    copies = [gathered.append({name: tensor.clone() for name, tensor in batch.items()}) for batch in batches]
    assert gathered.is_complete
    for found in (copies, list(split(gathered.columns, [3, 4, 1]))):
        for cut, batch in zip(found, batches, strict=True):
            assert cut is not None
            assert cut.keys() == batch.keys()
            assert all(torch.equal(cut[name], batch[name]) for name in batch)


def test_what_was_put_together_is_not_changed_by_the_next_batch_in_the_same_memory():
    gathered = BatchBuffer([2, 2])
    memory = {"a": torch.zeros(2)}
    first = gathered.append(memory)
    memory["a"].fill_(1)
    second = gathered.append(memory)
    assert first is not None
    assert second is not None
    assert (first["a"].tolist(), second["a"].tolist()) == ([0, 0], [1, 1])


def test_one_tensor_by_two_names_stays_one():
    tensor = torch.zeros(3)
    assert BatchBuffer([3, 3]).append({"a": tensor, "b": tensor}) is None


def test_packing_keeps_nothing_alive_until_a_garbage_collection():
    array = np.zeros(1000)
    gone = weakref.ref(array)
    gc.disable()
    try:
        Message.pack(0, [Batch([array, torch.zeros(3)], RECEIPT)])
        del array
        assert gone() is None
    finally:
        gc.enable()
