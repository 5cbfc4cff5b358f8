"""What travels between the training process and its workers: assignments one way, batches the other.

torch would send each tensor as a message of its own, through a shared-memory file of its own. Here the memory of all
tensors and arrays of a batch is packed into one block, and the training process makes views of it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from torch_dataloader_utils.model import Assignment
from torch_dataloader_utils.reading import Batch, StreamEnd

__all__ = ["Inbox", "Parcel", "pinned"]

ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes in a block."""


class Inbox:
    """Where one worker process finds its assignments.

    A worker that serves several iterations learns nothing from torch but that a new one begins. Each iteration has
    one assignment, in the same order, so both sides count: the n-th iteration of a worker takes the n-th assignment.
    One that was abandoned before the worker came to it is passed over.

    Args:
        context: The multiprocessing context that starts the worker, or a module like it.
    """

    def __init__(self, context: Any) -> None:
        self._queue = context.Queue()
        self._queue.cancel_join_thread()
        self._sent = 0
        self._begun = 0

    def send(self, assignment: Assignment) -> None:
        """Send the assignment of the next iteration."""
        self._sent += 1
        self._queue.put((self._sent, assignment))

    def begin(self) -> int:
        """Count one more iteration in the worker and return its number, to be handed to `receive`."""
        self._begun += 1
        return self._begun

    def receive(self, number: int) -> Assignment:
        """Wait, in the worker, for an iteration's assignment."""
        sent, assignment = self._queue.get()
        while sent != number:
            sent, assignment = self._queue.get()
        return assignment  # type: ignore[no-any-return]

    def close(self) -> None:
        """Let go of the queue."""
        self._queue.close()


@dataclass(frozen=True, slots=True)
class Parcel:
    """A batch, or the end of a stream, packed for the way to the training process.

    Attributes:
        iteration: The iteration that asked for it.
        pickled: The batch without the memory of its tensors and arrays (pickle protocol 5, PEP 574).
        block: That memory.
        places: Where each tensor or array lies in the block: start and length in bytes.
    """

    iteration: int
    pickled: bytes
    block: bytes
    places: tuple[tuple[int, int], ...]

    @classmethod
    def pack(cls, iteration: int, content: Batch | StreamEnd) -> Parcel:
        """Pack in the worker, where what cannot be pickled is an error of the worker's, not of a queue's thread."""
        buffers: list[pickle.PickleBuffer] = []
        pickled = io.BytesIO()
        _Packer(pickled, protocol=5, buffer_callback=buffers.append).dump(content)
        parts: list[bytes | memoryview] = []
        places, length = [], 0
        for memory in (buffer.raw() for buffer in buffers):
            padding = -length % ALIGNMENT
            places.append((length + padding, memory.nbytes))
            parts += [bytes(padding), memory]
            length += padding + memory.nbytes
        return cls(iteration, pickled.getvalue(), b"".join(parts), tuple(places))

    def unpack(self) -> Batch | StreamEnd:
        """Return what was packed; its tensors and arrays are writable views of one block that is theirs alone."""
        block = memoryview(bytearray(self.block))
        buffers = [block[start : start + length] for start, length in self.places]
        content: Batch | StreamEnd = pickle.loads(self.pickled, buffers=buffers)  # noqa: S301 - our own worker's
        return content

    def pin_memory(self) -> Parcel:
        """Stay as it is: torch's loader calls this by name, and tensors are pinned once they are unpacked."""
        return self


def pinned(contents: Iterator[Batch | StreamEnd]) -> Iterator[Batch | StreamEnd]:
    """Copy the tensors of each batch into pinned memory."""
    for content in contents:
        if isinstance(content, Batch):
            yield replace(content, data=pin_memory(content.data))  # type: ignore[no-untyped-call]
        else:
            yield content


class _Packer(pickle.Pickler):
    """Pickles tensors in main memory by their bytes, out of band, and Arrow tables as Arrow IPC."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and _is_plain(value):
            return _unpack_tensor, (_bytes_of(value), value.dtype, tuple(value.shape))
        if isinstance(value, pa.Table):  # pickled, a slice would carry all that it was cut from
            return _unpack_table, (pickle.PickleBuffer(_ipc(value)),)
        return NotImplemented


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are all there is to it."""
    in_memory = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized
    return in_memory and not tensor.requires_grad and not tensor.is_conj() and not tensor.is_neg()


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    flat: npt.NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def _unpack_tensor(flat: npt.NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(flat).view(dtype).reshape(shape)


def _ipc(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


def _unpack_table(buffer: Any) -> pa.Table:
    with pa.ipc.open_stream(pa.py_buffer(buffer)) as stream:
        return stream.read_all()
