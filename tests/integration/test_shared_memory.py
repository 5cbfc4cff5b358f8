"""Batches from workers are in shared memory that is used again: no batch may change for it."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import mmap
import os
import random
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pairwise import pairwise
from support import all_rows_of, open_loader, rows_of, write_dataset

from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.reading.batching import Batch
from torch_dataloader_utils.workers import messages as transport
from torch_dataloader_utils.workers.messages import MAX_HELD, Message
from torch_dataloader_utils.workers.shared_memory import FLAGS_BYTES, SPACING, SharedMemoryPool

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

FILES = ((9000, 1000), (30, 30), (8000, 700))
ROWS = sum(rows for rows, _ in FILES)
SHORT_FILES = ((3600, 400), (30, 30), (3200, 280))
"""An epoch of 427 batches of 16 rows, for batches that take long to make or to compare."""
SHORT_ROWS = sum(rows for rows, _ in SHORT_FILES)
RECEIPT = Receipt(stream=0, position=1, rows_delivered=2, rows=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    directory: Path = tmp_path_factory.mktemp("pool")
    write_dataset(directory, FILES)
    return directory


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Path:
    directory: Path = tmp_path_factory.mktemp("short")
    write_dataset(directory, SHORT_FILES)
    return directory


@dataclass
class Sample:
    x: torch.Tensor
    note: str


def nested(batch: Any) -> Any:
    rows = batch["row"]
    return {
        "row": rows,
        "tuples": [(rows * 2, batch["score"].numpy()), (rows.to(torch.bfloat16).reshape(-1, 1), None)],
        "sample": Sample(batch["score"] * 3, f"from {int(rows[0])}"),
        "sparse": torch.diag(rows).to_sparse(),
        "names": np.array(batch["name"]),
        "empty": np.empty((0, 3)),
    }


def leaves(data: Any) -> list[Any]:
    """Return all tensors and arrays of a batch, however deep."""
    if isinstance(data, Sample):
        return [data.x]
    if isinstance(data, torch.Tensor) and data.layout == torch.sparse_coo:
        return [data._indices(), data._values()]
    if isinstance(data, (dict, list, tuple)):
        return [leaf for each in (data.values() if isinstance(data, dict) else data) for leaf in leaves(each)]
    return [data] if isinstance(data, (torch.Tensor, np.ndarray)) else []


def image(data: Any) -> list[bytes]:
    """Return a copy of all bytes of a batch."""
    return [leaf.contiguous().view(torch.uint8).numpy().tobytes() if isinstance(leaf, torch.Tensor) else leaf.tobytes()
            for leaf in leaves(data)]  # fmt: skip


def wipe(data: Any) -> None:
    """Write to every byte of a batch."""
    for leaf in leaves(data):
        if isinstance(leaf, torch.Tensor):
            leaf.view(torch.uint8).fill_(0xAB)
        else:
            leaf.view(np.uint8).fill(0xAB)


def batch_of(data: Any) -> Batch:
    return Batch(data, RECEIPT)


WORKERS = pytest.mark.parametrize(
    ("workers", "start"),
    [(0, None), (1, "fork"), (2, "fork"), (1, "forkserver"), pytest.param(1, "spawn", marks=pytest.mark.soak)],
)
KINDS: list[dict[str, Any]] = [{}, {"output_format": "numpy"}, {"collate_fn": nested}]


@WORKERS
def test_a_whole_epoch_that_is_kept_is_what_was_handed_over(short, workers, start):
    loader, _ = open_loader(short, num_workers=workers, multiprocessing_context=start)
    kept, images = [], []
    for batch in loader:
        kept.append(batch)
        images.append(image(batch))
    assert sorted(all_rows_of(kept)) == list(range(SHORT_ROWS))
    assert [image(batch) for batch in kept] == images
    assert all(batch["score"].tolist() == (batch["row"].double() / 7).tolist() for batch in kept)
    assert all(batch["name"] == [f"row {row}" for row in rows_of(batch)] for batch in kept)


@pytest.mark.parametrize("options", KINDS)
def test_batches_kept_for_a_while_or_long_are_what_was_handed_over(short, options):
    loader, _ = open_loader(short, num_workers=2, **options)
    chance = random.Random(1)
    kept: list[tuple[Any, list[bytes]]] = []
    seen = []
    for _ in range(2):  # the second time out of pool that were used before
        for number, batch in enumerate(loader):
            seen += rows_of(batch)
            kept.append((batch, image(batch)))
            while len(kept) > 3 and chance.random() < (0.9 if number % 400 < 300 else 0.1):
                old, before = kept.pop(chance.randrange(len(kept)))
                assert image(old) == before
    assert sorted(seen) == sorted(2 * list(range(SHORT_ROWS)))
    assert all(image(old) == before for old, before in kept)


def test_batches_kept_from_an_iteration_that_was_left_outlast_the_next(path):
    loader, _ = open_loader(path, num_workers=2)
    kept, images = [], []
    for stop in (3, 40, 300, 2000):
        for number, batch in enumerate(loader):
            if number in (0, stop - 1, stop):
                kept.append(batch)
                images.append(image(batch))
            if number == stop:
                break
    assert [image(batch) for batch in kept] == images


@pairwise(most=4, workers=[2, 0], options=KINDS)
def test_a_write_to_every_byte_of_a_batch_changes_no_other(short, workers, options):
    untouched, _ = open_loader(short, num_workers=workers, **options)
    expected = [image(batch) for batch in untouched]
    loader, _ = open_loader(short, num_workers=workers, **options)
    kept = []
    for number, batch in enumerate(loader):
        if number % 5 == 2:
            wipe(batch)
        else:
            kept.append((number, batch))
    assert all(image(batch) == expected[number] for number, batch in kept)
    assert len(expected) > len(kept) > 320


@pytest.mark.parametrize("workers", [0, 2])
def test_in_place_autograd_on_one_batch_is_not_another_batchs_business(path, workers):
    loader, _ = open_loader(path, num_workers=workers)
    batches = list(loader)[500:520]
    weight = torch.ones(16, dtype=torch.float64, requires_grad=True)
    loss = sum((weight * batch["score"]).sum() for batch in batches[1::2])  # keeps them for the way back
    for batch in batches[::2]:
        batch["score"].mul_(2)
        batch["score"].requires_grad_()
        batch["score"].mul(3).mul_(5).sum().backward()
        assert batch["score"].grad.tolist() == [15.0] * len(batch["score"])
        assert batch["row"]._version == 0
    assert all(batch["score"]._version == 0 and not batch["score"].requires_grad for batch in batches[1::2])
    loss.backward()
    torch.testing.assert_close(weight.grad, sum(batch["score"] for batch in batches[1::2]))


def test_nested_outputs_of_a_collate_fn_are_what_one_process_makes_of_them(short):
    options: dict[str, Any] = {"batch_size": 40, "collate_fn": nested, "shuffle": True, "shuffle_buffer_size": 500}
    here, _ = open_loader(short, **options)
    there, _ = open_loader(short, **options, num_workers=1)
    for one, other in zip(here, there, strict=True):
        assert image(one) == image(other)
        assert one["sample"].note == other["sample"].note
        assert other["tuples"][1][1] is None
        assert other["sparse"].layout == torch.sparse_coo
        assert [leaf.dtype for leaf in leaves(one)] == [leaf.dtype for leaf in leaves(other)]
        assert [leaf.shape for leaf in leaves(one)] == [leaf.shape for leaf in leaves(other)]


def sparse(batch: Any) -> Any:
    dense = torch.diag(batch["row"]).to(torch.float32)
    layouts = [dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()]
    return [*layouts, dense.to_sparse_bsr((1, 1)), dense.to_sparse_bsc((1, 1))]


@pytest.mark.filterwarnings("ignore:Sparse C:UserWarning")  # torch calls compressed layouts a beta
def test_sparse_tensors_of_every_layout_arrive_and_die_with_their_batch(short):
    loader, _ = open_loader(short, num_workers=1, collate_fn=sparse, batch_size=100)
    expected, _ = open_loader(short, collate_fn=sparse, batch_size=100)
    alive = []
    for batch, other in zip(loader, expected, strict=True):
        for one, two in zip(batch, other, strict=True):
            assert one.layout == two.layout
            assert one.dtype == two.dtype
            assert torch.equal(one.to_dense(), two.to_dense())
            alive.append(weakref.ref(one))
        assert batch[0].is_coalesced() == other[0].is_coalesced()
        del batch, one
    assert [reference() for reference in alive] == [None] * len(alive)


@pytest.mark.filterwarnings("ignore:Sparse C:UserWarning")  # torch calls compressed layouts a beta
def test_sparse_tensors_arrive_on_the_cpu_whatever_torchs_default_device_is():
    tensors = sparse({"row": torch.arange(1, 4)})
    with torch.device("meta"):
        (arrived,) = Message.pack(0, [batch_of(tensors)]).unpack()
    assert [one.to_dense().tolist() for one in arrived.data] == [one.to_dense().tolist() for one in tensors]


def in_other_orders(batch: Any) -> Any:
    rows = batch["row"]
    images = rows.view(-1, 1, 1, 1) + torch.arange(24).view(2, 3, 4)
    channels_last = images.to(memory_format=torch.channels_last)
    films = images.unsqueeze(1).expand(-1, 2, -1, -1, -1).to(memory_format=torch.channels_last_3d)
    return {"row": rows, "channels_last": channels_last, "half": channels_last.to(torch.bfloat16), "films": films}


def in_every_order(batch: Any) -> Any:
    images = in_other_orders(batch)["channels_last"]
    transposed = images.flatten(1).t().contiguous().t()
    return {"row": batch["row"], "transposed": transposed, "reversed": images.permute(3, 2, 1, 0), "in": [images]}


@pytest.mark.parametrize("collate_fn", [in_other_orders, in_every_order])
@pytest.mark.parametrize("batch_size", [1, 10, SHORT_ROWS])
def test_the_order_of_dimensions_in_memory_is_kept(short, collate_fn, batch_size):
    here, _ = open_loader(short, batch_size=batch_size, collate_fn=collate_fn)
    there, _ = open_loader(short, batch_size=batch_size, num_workers=1, collate_fn=collate_fn)
    for one, other in itertools.islice(zip(here, there, strict=True), 200):
        for sent, arrived in zip(leaves(one), leaves(other), strict=True):
            assert torch.equal(sent, arrived)
            assert sent.dtype == arrived.dtype
            if batch_size > 1:
                assert sent.stride() == arrived.stride()


def with_gaps(batch: Any) -> Any:
    table = batch["row"].view(-1, 1) + torch.arange(6)
    return {"row": batch["row"], "some": table[:, :4], "others": table[:, ::2], "same": table[:, :1].expand(-1, 5)}


def test_tensors_with_gaps_in_memory_arrive_without(short):
    here, _ = open_loader(short, batch_size=10, collate_fn=with_gaps)
    there, _ = open_loader(short, batch_size=10, num_workers=1, collate_fn=with_gaps)
    for one, other in zip(here, there, strict=True):
        for sent, arrived in zip(leaves(one), leaves(other), strict=True):
            assert torch.equal(sent, arrived)
            assert arrived.is_contiguous()


def that_holds_itself(batch: Any) -> Any:
    inner: list[Any] = [1]
    inner.append(inner)
    return {"row": batch["row"], "inner": inner}


def test_what_holds_itself_arrives_in_every_batch(path):
    loader, _ = open_loader(path, num_workers=1, collate_fn=that_holds_itself, batch_size=400)
    rows = []
    for batch in loader:
        rows += batch["row"].tolist()
        assert batch["inner"][1] is batch["inner"]
    assert sorted(rows) == list(range(ROWS))


CONSTANT = {"mask": torch.zeros(4), "array": np.zeros(4), "list": [0]}


def with_constant(batch: Any) -> Any:
    return {"row": batch["row"], **CONSTANT}


def test_what_a_collate_fn_hands_out_with_every_batch_is_a_thing_of_its_own_in_each(path):
    loader, _ = open_loader(path, num_workers=1, collate_fn=with_constant)
    for batch in loader:
        assert batch["mask"].tolist() == batch["array"].tolist() == [0.0] * 4
        assert batch["list"] == [0]
        batch["mask"] += 1
        batch["array"] += 1
        batch["list"][0] += 1


REUSED = np.zeros(16, np.int64)


def into_the_same_array(batch: Any) -> Any:
    REUSED[: len(batch["row"])] = batch["row"]
    return {"row": REUSED[: len(batch["row"])]}


def test_a_collate_fn_may_fill_the_same_array_each_time(path):
    loader, _ = open_loader(path, num_workers=1, collate_fn=into_the_same_array)
    assert sorted(all_rows_of(loader)) == list(range(ROWS))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_outlast_loader_and_dataset(path, workers):
    loader, dataset = open_loader(path, num_workers=workers)
    kept = [batch for number, batch in enumerate(loader) if number % 50 == 0]
    images = list(map(image, kept))
    del loader, dataset
    gc.collect()
    assert [image(batch) for batch in kept] == images
    list(map(wipe, kept))


def open_memory() -> int:
    """Return how many files of this process are blocks of shared memory."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found += "memfd:torch_dataloader_utils" in str(entry.readlink())
    return found


@pytest.mark.parametrize("end", ["end", "left"])
@pytest.mark.parametrize("persistent", [False, True])
def test_shared_memory_goes_with_the_workers_that_fill_it(short, persistent, end):
    loader, _ = open_loader(short, num_workers=2, persistent_workers=persistent)
    gc.collect()  # that of other tests
    before = open_memory()
    for _ in range(3):
        images: list[Any] = []
        kept: list[Any] = []
        for number, batch in enumerate(loader):
            kept = [*kept[-1:], batch]
            images = [*images[-1:], image(batch)]
            if end == "left" and number == 20:
                break
        assert [image(batch) for batch in kept] == images
        del batch, kept  # which keep their own blocks
        assert (open_memory() > before) is persistent


# SharedMemoryPool and messages by themselves ------------------------------------------------------------


def test_a_block_that_there_is_no_memory_for_is_an_error_that_says_what_it_is(monkeypatch):
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    pool = SharedMemoryPool(1)
    monkeypatch.setattr(mmap, "mmap", refused)
    with pytest.raises(
        OSError, match=r"no memory for the [\d,]+ bytes of a block.*use fewer workers or smaller batches"
    ):
        pool.memory(0, 1_000_000)


def test_a_message_for_which_no_block_is_free_travels_inline():
    pool = SharedMemoryPool(1)
    data = {"t": torch.arange(5), "n": np.arange(3.0)}
    first, second = (Message.pack(0, [batch_of(data)], pool) for _ in range(2))
    assert (first.pool_key, first.memory) == (pool.key, 0)
    assert second.pool_key is None
    assert [image(content.data) for message in (first, second) for content in message.unpack()] == [image(data)] * 2


def test_a_block_is_free_when_the_last_that_looks_at_it_has_died_and_not_before():
    pool = SharedMemoryPool(1)
    data = {"t": torch.arange(5), "n": np.arange(3.0), "u": torch.ones(2)}
    one, two = Message.pack(0, [batch_of(data), batch_of({"v": torch.ones(2)})], pool).unpack()
    views = [one.data["t"][2:].view(torch.uint8), one.data["n"][1:], one.data["u"].numpy(), two.data["v"].sum(0) * 0]
    views += [two.data["v"].reshape(2, 1).T]
    del one, two
    while views:
        assert pool.acquire() is None
        assert pool.num_held == 1
        views.pop(0)
    assert pool.num_held == 0
    assert pool.acquire() == 0


def test_the_memory_of_blocks_that_an_iteration_did_not_need_goes_back_to_the_system():
    pool = SharedMemoryPool(4)

    def allocated() -> int:
        return os.fstat(pool._fd).st_blocks * 512

    sent = [Message.pack(0, [batch_of(torch.full((1 << 20,), number))], pool) for number in range(4)]  # 8 MiB each
    (kept,) = sent.pop(2).unpack()
    for message in sent:
        message.unpack()
    pool.release_unused()
    assert allocated() > 32 << 20  # all were acquired
    assert pool.acquire() == 0
    pool.release_unused()
    pool.release_unused()
    assert 16 << 20 < allocated() < 17 << 20  # one is acquired, one is held
    assert torch.equal(kept.data, torch.full((1 << 20,), 2))
    (later,) = Message.pack(1, [batch_of(torch.full((1 << 20,), 7))], pool).unpack()
    assert torch.equal(later.data, torch.full((1 << 20,), 7))


def test_with_more_blocks_in_use_than_may_be_batches_are_copied_out():
    pool = SharedMemoryPool(20)
    kept = []
    for number in range(10):
        kept += Message.pack(0, [batch_of(torch.full((100,), number))], pool).unpack()
        assert pool.num_held == min(number + 1, MAX_HELD)
    assert [int(content.data[0]) for content in kept] == list(range(10))


def test_the_pool_does_not_grow_with_what_is_kept(path):
    loader, _ = open_loader(path, num_workers=1, batch_size=200)
    kept = []
    for _ in range(3):
        for batch in loader:
            kept.append(batch["score"])
            pool = loader._channels[0].pool
            assert pool.num_held <= MAX_HELD
            assert os.fstat(pool._fd).st_blocks * 512 < 2 * 1024**2


def test_memory_of_an_epoch_with_many_messages_is_given_back_in_later_ones(path):
    loader, dataset = open_loader(path, num_workers=1, batch_size=20, prefetch_factor=8, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    pool = loader._channels[0].pool

    def blocks() -> int:
        """Return the blocks that have memory: each is a hole of the file, or not."""
        count = 0
        for block in range(pool._count):
            start = FLAGS_BYTES + block * SPACING
            with contextlib.suppress(OSError):  # there is no data behind it
                count += os.lseek(pool._fd, start, os.SEEK_DATA) < start + SPACING
        return count

    until = time.monotonic() + 60
    while blocks() < 7:  # messages that wait for the loop
        assert time.monotonic() < until
        time.sleep(0.01)
    del iterator
    for epoch in (1, 2, 3):
        dataset.set_epoch(epoch)
        dataset.skip_steps(1, 1000)
        assert len(list(loader)) == 1
    assert blocks() <= 4  # two of the last epoch, for the batch and for the end, and two of the one before


def test_pinning_frees_the_block_at_once(monkeypatch):
    monkeypatch.setattr(transport, "_pinned", torch.clone)
    pool = SharedMemoryPool(1)
    data = {"t": torch.arange(5), "n": np.arange(3.0), "s": ["text"]}
    message = Message.pack(0, [batch_of(data)], pool)
    assert pool.acquire() is None
    pinned = message.pin_memory()
    assert pool.acquire() == 0
    pool.memory(0, 4096)[:] = 0xFF
    (content,) = pinned.unpack()
    assert image(content.data) == image(data)
    assert content.data["s"] == ["text"]
    wipe(content.data)


def test_a_message_whose_loader_is_gone_is_left_alone_by_pinning(monkeypatch):
    monkeypatch.setattr(transport, "_pinned", torch.clone)
    pool = SharedMemoryPool(1)
    message = Message.pack(0, [batch_of(torch.arange(5))], pool)
    del pool
    assert message.pin_memory() is message


def test_a_forked_process_that_drops_its_copy_of_a_batch_does_not_free_the_block():
    pool = SharedMemoryPool(2)
    (kept,) = Message.pack(0, [batch_of(torch.zeros(4))], pool).unpack()
    child = os.fork()
    if not child:
        del kept
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    (later,) = Message.pack(0, [batch_of(torch.ones(4))], pool).unpack()
    assert (kept.data.tolist(), later.data.tolist()) == ([0.0] * 4, [1.0] * 4)


def test_arrays_stay_what_they_are_when_a_tensor_beside_them_moves_to_shared_memory():
    pool = SharedMemoryPool(2)
    data = {"t": torch.zeros(4), "n": np.zeros(4)}
    (kept,) = Message.pack(0, [batch_of(data)], pool).unpack()
    kept.data["t"].share_memory_()  # as sending it to another process does
    (later,) = Message.pack(0, [batch_of({"t": torch.ones(4), "n": np.ones(4)})], pool).unpack()
    assert kept.data["n"].tolist() == [0.0] * 4
    assert later.data["n"].tolist() == [1.0] * 4


def of_other_sizes(batch: Any) -> Any:
    """Return a nested tensor of torch's older layout, which has no shape."""
    return {"row": batch["row"], "parts": torch.nested.nested_tensor(list(batch["row"].double().split(3)))}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_the_older_layout_arrive_from_an_epoch_of_workers(tmp_path):
    write_dataset(tmp_path, ((400, 40),))
    loader, _ = open_loader(tmp_path, batch_size=10, num_workers=1, collate_fn=of_other_sizes)
    parts = [part.tolist() for batch in loader for part in batch["parts"].unbind()]
    assert len(parts) == 160
    assert [value for part in parts for value in part] == list(range(400))


def under_two_names(batch: Any) -> Any:
    twice = {"labels": batch["row"]}
    return {"row": batch["row"], "labels": batch["row"], "inner": [twice, twice]}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_tensor_under_two_names_is_one_tensor_in_each_batch(tmp_path, workers):
    write_dataset(tmp_path, ((400, 40),))
    for batch in open_loader(tmp_path, batch_size=10, num_workers=workers, collate_fn=under_two_names)[0]:
        assert batch["row"] is batch["labels"]
        assert batch["inner"][0] is batch["inner"][1]
        batch["labels"].fill_(-100)
        assert batch["row"].tolist() == batch["inner"][1]["labels"].tolist() == [-100] * len(batch["row"])


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_asked_for_after_inference_mode_can_be_trained_on(tmp_path, workers):
    """Also where it came in one message with what was asked for in it."""
    lists = pa.ListArray.from_arrays(np.arange(4001) * 2, np.arange(8000.0))
    pq.write_table(pa.table({"value": np.arange(4000.0), "list": lists}), tmp_path / "a.parquet", row_group_size=400)
    batches = iter(open_loader(tmp_path, batch_size=10, num_workers=workers)[0])
    weight = torch.ones((), requires_grad=True)
    for number in range(40):
        with torch.inference_mode(number % 10 < 5):
            batch = next(batches)
        assert batch["list"].values().tolist() == list(range(20 * number, 20 * number + 20))
        if number % 10 >= 5:
            (weight * batch["value"]).sum().backward()
            (weight * batch["list"].values()).sum().backward()
