"""What travels between the training process and its workers: assignments one way, batches the other.

torch would send each tensor as a message of its own, through a shared-memory file of its own. Here the memory of all
tensors and arrays of many batches is packed into one block, and the training process makes views of it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from torch_dataloader_utils.columns.ragged import jagged_parts
from torch_dataloader_utils.reading.batching import Batch, Batches, StreamEnd
from torch_dataloader_utils.workers.shared_memory import Bytes, SharedMemoryPool

__all__ = ["MOST_HELD", "Content", "Message", "pinned"]


ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes in a block."""


MOST_HELD = 2
"""SharedMemoryPool of one worker that batches in use may keep; with more of them, batches are copied out."""


Content: TypeAlias = Batch | Batches | StreamEnd


Pinnable = TypeVar("Pinnable", Batch, Batches)


@dataclass(frozen=True, slots=True)
class Message:
    """Some batches of a stream, or its end, packed for the way to the training process.

    Attributes:
        iteration: The iteration that asked for them.
        worker: The worker that packed them.
        count: How many things are packed.
        lengths: Bytes of each buffer in the memory, and last of the pickle that they were left out of. Each begins at
            a multiple of `ALIGNMENT`.
        of_tensors: For each buffer 1 if it is a tensor's, else 0.
        pool: Key of the pool of shared memory, or None.
        memory: Number of the block; without pool the bytes themselves, once pinned a tensor of them.
        seconds: How long it took to make.
    """

    iteration: int
    worker: int
    count: int
    lengths: tuple[int, ...]
    of_tensors: bytes
    pool: int | None
    memory: int | bytearray | torch.Tensor
    seconds: float

    @classmethod
    def pack(
        cls,
        iteration: int,
        worker: int,
        contents: list[Content],
        pool: SharedMemoryPool | None = None,
        seconds: float = 0,
    ) -> Message:
        """Pack in the worker, where what cannot be pickled is an error of the worker's, not of a queue's thread.

        Args:
            iteration: The iteration.
            worker: The worker that packed them.
            contents: Batches, and the end of the stream.
            pool: Where to put them. If none is free, or there are none at all, they travel as bytes.
            seconds: How long it took to make the contents.
        """
        pickled = io.BytesIO()
        left_out = _LeftOut()
        packer = _Packer(pickled, left_out)
        for content in contents:
            packer.clear_memo()  # one tensor in two batches is to arrive as two
            packer.dump(content)
        buffers = [*left_out.buffers, np.frombuffer(pickled.getvalue(), np.uint8)]
        lengths = tuple(buffer.nbytes for buffer in buffers)
        size = sum(map(_padded, lengths))
        block = None if pool is None else pool.take()
        inline = bytearray(size if block is None else 0)
        memory = np.frombuffer(inline, np.uint8) if pool is None or block is None else pool.memory(block, size)
        start = 0
        for buffer, length in zip(buffers, lengths, strict=True):
            memory[start : start + length] = buffer
            start += _padded(length)
        if pool is None or block is None:
            return cls(iteration, worker, len(contents), lengths, bytes(left_out.of_tensors), None, inline, seconds)
        return cls(iteration, worker, len(contents), lengths, bytes(left_out.of_tensors), pool.key, block, seconds)

    @property
    def size(self) -> int:
        """Bytes of its memory."""
        return sum(map(_padded, self.lengths))

    def unpack(self) -> list[Content]:
        """Return what was packed; its tensors and arrays are writable and share no byte.

        A block stays taken while any of them lives. Where many pool do, this one's bytes are copied instead.
        """
        buffers = list(self._buffers())
        pickled = buffers.pop()
        file, waiting = io.BytesIO(pickled.data), iter(buffers)
        return [pickle.Unpickler(file, buffers=waiting).load() for _ in range(self.count)]  # noqa: S301 - our own worker's

    def _buffers(self) -> Iterator[Any]:
        """Yield the buffers: tensors as tensors, for pinned ones are theirs, and others as arrays."""
        if isinstance(self.memory, torch.Tensor):
            memory, array = self.memory, self.memory.numpy()
        else:
            array = self._bytes(MOST_HELD)  # arrays hang on it, not on a tensor, which torch may move (share_memory_)
            memory = torch.from_numpy(array)
        sizes = [part for length in self.lengths for part in (length, -length % ALIGNMENT)]
        # Not views in autograd's eyes: what is done in place to one batch is not the others' business.
        tensors = torch.unsafe_split_with_sizes(memory, sizes)[::2]
        start = 0
        for length, tensor, is_tensor in zip(self.lengths, tensors, [*self.of_tensors, 0], strict=True):
            yield tensor if is_tensor else array[start : start + length]
            start += _padded(length)

    def pin_memory(self) -> Message:
        """Return the same in pinned memory: torch calls this in a thread of its own where its loader pins."""
        try:
            return replace(self, pool=None, memory=_pinned(torch.from_numpy(self._bytes(most_held=None))))
        except KeyError:  # the loader that it was for is gone
            return self

    def _bytes(self, most_held: int | None) -> Bytes:
        if self.pool is None:
            inline: Any = self.memory
            return np.frombuffer(inline, np.uint8)
        pool = SharedMemoryPool.by_key(self.pool)
        memory = pool.hold(self.memory, self.size)  # type: ignore[arg-type]
        return memory if most_held is None or pool.held <= most_held else memory.copy()


def _padded(length: int) -> int:
    return length + -length % ALIGNMENT


def _pinned(memory: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(memory, pin_memory=True).copy_(memory)


def pinned(content: Pinnable) -> Pinnable:
    """Return a batch, or several that are still together, with all tensors in pinned memory."""
    if isinstance(content, Batch):
        return replace(content, data=pin_memory(content.data))  # type: ignore[no-untyped-call]
    return replace(content, columns=pin_memory(content.columns))  # type: ignore[no-untyped-call]


class _LeftOut:
    """Takes the buffers that a pickler leaves out. It does not know the pickler: the two would keep one another alive.

    Attributes:
        buffers: Their bytes.
        of_tensors: For each 1 if it is a tensor's, else 0.
        tensor: The bytes of the tensor whose buffer comes next, or None.
    """

    def __init__(self) -> None:
        self.buffers: list[Bytes] = []
        self.of_tensors: list[int] = []
        self.tensor: Bytes | None = None

    def __call__(self, buffer: pickle.PickleBuffer) -> None:
        tensor, self.tensor = self.tensor, None
        self.of_tensors.append(int(tensor is not None))
        self.buffers.append(_flat(buffer) if tensor is None else tensor)


class _Packer(pickle.Pickler):
    """Pickles tensors in main memory by their bytes, out of band (PEP 574), and Arrow tables as Arrow IPC."""

    def __init__(self, pickled: io.BytesIO, left_out: _LeftOut) -> None:
        super().__init__(pickled, protocol=5, buffer_callback=left_out)
        self._left_out = left_out

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_nested:
            parts = jagged_parts(value)
            return NotImplemented if parts is None else (_unpack_jagged, parts)
        if type(value) is torch.Tensor:
            flat = _bytes_of(value)
            if flat is not None:
                self._left_out.tensor = flat
                return _unpack_tensor, (pickle.PickleBuffer(flat.data), value.dtype, tuple(value.shape))
        if isinstance(value, pa.Table):  # pickled, a slice would carry all that it was cut from
            return _unpack_table, (pickle.PickleBuffer(_ipc(value)),)
        return NotImplemented


def _flat(buffer: pickle.PickleBuffer) -> Bytes:
    memory = buffer.raw()
    return np.frombuffer(memory, np.uint8) if memory.nbytes else np.empty(0, np.uint8)


def _bytes_of(tensor: torch.Tensor) -> Bytes | None:
    """Return the bytes of a tensor; None where its values are not all there is to it."""
    try:
        array = tensor.numpy()
    except (RuntimeError, TypeError):  # a type that NumPy does not know, or another kind of tensor
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if _is_plain(tensor) else None
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are all there is to it."""
    in_memory = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized
    return in_memory and not tensor.requires_grad and not tensor.is_conj() and not tensor.is_neg()


def _unpack_tensor(flat: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    typed = flat.view(dtype)
    return typed if len(shape) == 1 else typed.view(shape)


def _unpack_jagged(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets)


def _ipc(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


def _unpack_table(buffer: Any) -> pa.Table:
    with pa.ipc.open_stream(pa.py_buffer(buffer)) as stream:
        return stream.read_all()
