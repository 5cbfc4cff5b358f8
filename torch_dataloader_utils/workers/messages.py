"""Messages: batches packed in a worker and unpacked in the training process.

torch would send each tensor through a shared-memory file of its own. Here one message holds several batches, and all
their memory is one block of shared memory (`shared_memory`).

Batches are pickled by protocol 5, which leaves large buffers out of the pickle (PEP 574, out-of-band buffers). The
memory of a message holds, in this order:

1. each buffer, in the order in which the pickler met it: the bytes of a tensor or of an array, or a table, or a column
   that becomes Python lists, as Arrow IPC;
2. the pickles of all batches and of the stream's end, one after the other.

Each buffer, and the first pickle, starts at a multiple of `ALIGNMENT`. What goes through torch's queue is a `Message`:
the lengths of these parts, and where the memory is. To unpack it, the pickles are loaded with views of the memory as
their buffers. So batches are copied once, in the worker.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from torch_dataloader_utils.columns.inference import normal_mode
from torch_dataloader_utils.columns.ragged import jagged_parts, split_values
from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.reading.batching import Batch, Batches, EmptyStep, StreamEnd
from torch_dataloader_utils.workers.collate import in_order, is_plain, order_of
from torch_dataloader_utils.workers.shared_memory import Bytes, SharedMemoryPool

ALIGNMENT = 64
"""A cache line: as much as any dtype or vector instruction wants, and no two tensors share one."""

MAX_HELD = 2
"""Blocks of one worker that batches in use may hold. Beyond that batches are copied, or a user who keeps many batches
would leave the worker without a free block."""

Content: TypeAlias = Batch | Batches | EmptyStep | StreamEnd


@dataclass(frozen=True, slots=True)
class Message:
    """Some batches of a stream, or its end, packed for the training process.

    Attributes:
        iteration: The iteration that the batches belong to.
        count: Number of pickles.
        lengths: Bytes of each buffer in the memory, and last of the pickles.
        tensor_flags: For each buffer 1 if it is a tensor's, else 0.
        pool_key: Key of the pool of shared memory, or None.
        memory: Number of the block in the pool. Without a pool the bytes themselves, or a pinned tensor of them.
    """

    iteration: int
    count: int
    lengths: tuple[int, ...]
    tensor_flags: bytes
    pool_key: int | None
    memory: int | bytearray | torch.Tensor

    @classmethod
    def pack(cls, iteration: int, contents: list[Content], pool: SharedMemoryPool | None = None) -> Message:
        """Pack batches, and the stream's end, into a free block of a pool. If there is none, the message has the bytes.

        This is done before torch's queue, in whose thread an error of pickling would be printed and not raised.
        """
        pickles, out_of_band = io.BytesIO(), _OutOfBand()
        pickler = _BatchPickler(pickles, out_of_band)
        for content in contents:
            pickler.clear_memo()  # a tensor in two batches must arrive as two, since users may write to one of them
            pickler.dump(content)
        buffers = [*out_of_band.buffers, np.frombuffer(pickles.getvalue(), np.uint8)]
        lengths = tuple(buffer.nbytes for buffer in buffers)
        size = sum(map(_aligned, lengths))
        block = None if pool is None else pool.acquire()
        key: int | None = None
        memory: int | bytearray
        if pool is None or block is None:
            memory = bytearray(size)
            array = np.frombuffer(memory, np.uint8)
        else:
            key, memory, array = pool.key, block, pool.memory(block, size)
        start = 0
        for buffer, length in zip(buffers, lengths, strict=True):
            array[start : start + length] = buffer
            start += _aligned(length)
        return cls(iteration, len(contents), lengths, bytes(out_of_band.tensor_flags), key, memory)

    @property
    def size(self) -> int:
        """Bytes of its memory."""
        return sum(map(_aligned, self.lengths))

    def unpack(self) -> list[Content]:
        """Return what was packed; its tensors and arrays are writable and share no byte.

        They hold the block until the last of them dies. If many blocks are held, this one is copied instead. They may
        be trained on, also where the first of them is asked for in torch's inference mode.
        """
        with normal_mode():
            *buffers, last = self._buffers()
            pickles, out_of_band = io.BytesIO(last.data), iter(buffers)
            return [pickle.Unpickler(pickles, buffers=out_of_band).load() for _ in range(self.count)]  # noqa: S301 - our own

    def _buffers(self) -> Iterator[Any]:
        """Yield the buffers and last the pickles: a tensor's buffer as a tensor, others as arrays."""
        if isinstance(self.memory, torch.Tensor):
            memory, array = self.memory, self.memory.numpy()  # views of a pinned tensor are pinned; arrays cannot be
        else:
            array = self._bytes(MAX_HELD)  # not made from the tensor, whose memory share_memory_ would exchange
            memory = torch.from_numpy(array)
        sizes = [part for length in self.lengths for part in (length, -length % ALIGNMENT)]
        tensors = split_values(memory, sizes)[::2]
        start = 0
        for length, tensor, is_tensor in zip(self.lengths, tensors, [*self.tensor_flags, 0], strict=True):
            yield tensor if is_tensor else array[start : start + length]
            start += _aligned(length)

    def pin_memory(self) -> Message:
        """Return the same in pinned memory. torch calls this, in the thread that pins."""
        try:
            return replace(self, pool_key=None, memory=_pinned(torch.from_numpy(self._bytes(max_held=None))))
        except KeyError:  # the loader is gone, and its pool with it
            return self

    def _bytes(self, max_held: int | None) -> Bytes:
        if self.pool_key is None:
            inline: Any = self.memory
            return np.frombuffer(inline, np.uint8)
        pool = SharedMemoryPool.by_key(self.pool_key)
        memory = pool.hold(self.memory, self.size)  # type: ignore[arg-type]
        return memory if max_held is None or pool.num_held <= max_held else memory.copy()


def _aligned(length: int) -> int:
    return length + -length % ALIGNMENT


def _pinned(memory: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(memory, pin_memory=True).copy_(memory)


# Pickling ------------------------------------------------------------------------------------------------------------


class _OutOfBand:
    """Collects the buffers that a pickler leaves out.

    It is not a part of the pickler, which would then refer to itself: the memory of batches would stay until the next
    run of the garbage collector.

    Attributes:
        buffers: Their bytes.
        tensor_flags: For each 1 if it is a tensor's, else 0.
        tensor: The bytes of the tensor whose buffer comes next, or None.
    """

    def __init__(self) -> None:
        self.buffers: list[Bytes] = []
        self.tensor_flags: list[int] = []
        self.tensor: Bytes | None = None

    def __call__(self, buffer: pickle.PickleBuffer) -> None:
        tensor, self.tensor = self.tensor, None
        self.tensor_flags.append(int(tensor is not None))
        if tensor is None:
            raw = buffer.raw()
            tensor = np.frombuffer(raw, np.uint8) if raw.nbytes else np.empty(0, np.uint8)  # frombuffer refuses none
        self.buffers.append(tensor)


class _BatchPickler(pickle.Pickler):
    """Pickles tensors in main memory as out-of-band buffers, and what is in Arrow as IPC in such."""

    def __init__(self, pickles: io.BytesIO, out_of_band: _OutOfBand) -> None:
        super().__init__(pickles, protocol=5, buffer_callback=out_of_band)
        self._out_of_band = out_of_band

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._reduced(value)
        if type(value) is Receipt:  # each batch has one: a call is several times as fast as to set attributes
            return Receipt, tuple(value)
        if isinstance(value, pa.Table):
            return _unpack_table, (_table_bytes(value),)
        if isinstance(value, pa.ChunkedArray):
            return _unpack_column, (_table_bytes(pa.table([value], [""])),)
        return NotImplemented

    def _reduced(self, value: torch.Tensor) -> Any:
        if value.is_nested:
            parts = jagged_parts(value)
            if parts is not None:
                return torch.nested.nested_tensor_from_jagged, parts
            if type(value) is not torch.Tensor or not value.is_cpu:
                return NotImplemented
            # torch's own way to unpickle one takes its values from the beginning of the block of a message.
            return _unpack_nested, ([part.detach() for part in value.unbind()], value.dtype, value.requires_grad)
        if type(value) is torch.Tensor and value.layout is not torch.strided and not value.requires_grad:
            return _sparse_parts(value)
        order = order_of(value) if type(value) is torch.Tensor and value.layout is torch.strided else None
        array = _tensor_bytes(value if order is None else value.permute(order))
        if array is None:
            return NotImplemented
        self._out_of_band.tensor = array
        described = pickle.PickleBuffer(array.data), value.dtype, tuple(value.shape)
        return _unpack_tensor, described if order is None else (*described, order)


def _table_bytes(table: pa.Table) -> pickle.PickleBuffer:
    """Return a table as Arrow IPC; pyarrow's own pickle of a slice carries the whole table."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return pickle.PickleBuffer(sink.getvalue())


def _tensor_bytes(tensor: torch.Tensor) -> Bytes | None:
    """Return the bytes of a tensor, or None if they do not describe it completely."""
    if type(tensor) is not torch.Tensor:
        return None
    try:
        array = tensor.numpy()
    except (RuntimeError, TypeError):  # a dtype that NumPy does not have, or no plain tensor in main memory
        if not is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
            return None
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _sparse_parts(tensor: torch.Tensor) -> Any:
    """Return how to make a sparse tensor of its parts.

    torch's own way to unpickle one notes it in a list, for a check that only `torch.load` makes: no batch would die.
    """
    if tensor.layout is torch.sparse_coo:
        parts = tensor._indices(), tensor._values()  # noqa: SLF001 - the public ones need a coalesced tensor
        return _unpack_coo, (*parts, tuple(tensor.shape), tensor.is_coalesced())
    by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (
        (tensor.crow_indices(), tensor.col_indices()) if by_rows else (tensor.ccol_indices(), tensor.row_indices())
    )
    return _unpack_compressed, (*indices, tensor.values(), tuple(tensor.shape), tensor.layout)


def _unpack_coo(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], is_coalesced: bool) -> Any:  # noqa: FBT001
    return torch.sparse_coo_tensor(
        indices, values, shape, device=values.device, check_invariants=False, is_coalesced=is_coalesced
    )


def _unpack_compressed(
    compressed: torch.Tensor, plain: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], layout: torch.layout
) -> Any:
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=layout, device=values.device, check_invariants=False
    )


def _unpack_tensor(
    memory: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...] | None = None
) -> torch.Tensor:
    values = memory.view(dtype)
    return values if len(shape) == 1 else in_order(values, shape, order)


def _unpack_nested(parts: list[torch.Tensor], dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:  # noqa: FBT001
    return torch.nested.nested_tensor(parts, dtype=dtype, requires_grad=requires_grad)


def _unpack_table(buffer: Any) -> pa.Table:
    with pa.ipc.open_stream(pa.py_buffer(buffer)) as stream:
        return stream.read_all()


def _unpack_column(buffer: Any) -> pa.ChunkedArray:
    return _unpack_table(buffer).column(0)
