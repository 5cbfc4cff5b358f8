"""Batches that are copied to a device ahead of need, and counted as they are handed over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import pyarrow as pa
import torch
from torch.utils._pytree import tree_map_only

from torch_dataloader_utils.columns.convert import with_offsets
from torch_dataloader_utils.columns.inference import normal_mode
from torch_dataloader_utils.columns.ragged import Ragged
from torch_dataloader_utils.columns.tensors import map_tensors
from torch_dataloader_utils.loader.arguments import require_count
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader, refuse_lightning
from torch_dataloader_utils.loader.iteration import BatchIterator, CountedIterator
from torch_dataloader_utils.loader.progress_bar import PassProgress
from torch_dataloader_utils.reading.batching import Batch, Batches

TENSORLESS = frozenset((str, bytes, int, float, bool, type(None)))
"""Types of values that are neither tensors nor what may have some."""


def to_device(loader: StructuredDataLoader, device: torch.device | str | int, depth: int = 2) -> DeviceLoader:
    """Return a loader of the same batches on a device. They are copied there ahead, while the device computes.

    On a CUDA device (ROCm counts as one) batches are copied on a stream of their own. With the loader's
    ``pin_memory=True`` the copies run beside the computation. Without it they are right as well, but the training
    process waits for each.

    A batch counts as delivered when it is handed over, not when it is copied: a state that is saved between two steps
    is exact, however many batches were copied ahead.

    Args:
        loader: The loader that `StructuredDataset.create_dataloader` returns.
        device: Where to copy, such as ``"cuda"`` or ``torch.device("cuda", 1)``. On ``"cpu"`` nothing is copied.
        depth: Number of batches on the device beyond the one that is handed over. That one is handed over once they
            are fetched, and their copies have begun. Batches that are together as columns are copied together, in
            portions of about 32 MiB or a worker's message, so more of them may be there.

    Returns:
        A loader. Tensors in dictionaries, lists and tuples of a batch are on the device; everything else is as it was,
        NumPy arrays too.

    Raises:
        TypeError: If the loader is not this package's loader.
        ValueError: If the depth is less than 1.
        RuntimeError: From torch, if there is no such device.
    """
    require_loader(loader)
    require_count(depth, "depth")
    found = torch.empty(0, device=device).device  # with its index
    return DeviceLoader(loader, found, depth)


def require_loader(loader: object, name: str = "loader") -> None:
    """Raise a TypeError that names the parameter unless this is the loader that `create_dataloader` returns."""
    if isinstance(loader, StructuredDataLoader):
        return
    msg = f"{name} is {type(loader).__name__}, expected the loader that create_dataloader returns"
    if isinstance(getattr(loader, "loader", None), StructuredDataLoader):
        msg += f": pass its attribute `loader`, which is the loader that this {type(loader).__name__} was made of"
    raise TypeError(msg)


class DeviceLoader:
    """A loader whose batches are on a device. `to_device` makes it.

    `set_epoch`, `exclude`, `skip_steps`, `restore_skipped`, `state_dict`, `load_state_dict`, `progress` and ``len`` are
    those of the loader. Iterate over this one or over the loader: both deliver the rows of the same epoch.

    Attributes:
        loader: The loader.
        device: The device.
        depth: Number of batches that are copied ahead.
    """

    def __init__(self, loader: StructuredDataLoader, device: torch.device, depth: int) -> None:
        self.loader = loader
        self.device = device
        self.depth = depth

    @property
    def dataset(self) -> Any:
        """The dataset."""
        return self.loader.dataset

    @property
    def process_group(self) -> Any:
        """The process group of the ranks that share the rows: see `StructuredDataset.process_group`."""
        return self.loader.process_group

    def __iter__(self) -> DeviceIterator:
        """Begin the epoch, or continue once from a loaded state: see `StructuredDataLoader`."""
        return DeviceIterator(self.loader.iterate(_Copier(self.device, self._stream)), self.depth)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the stream out of a copy."""
        return {name: value for name, value in self.__dict__.items() if name != "_stream"}

    @cached_property
    def _stream(self) -> torch.cuda.Stream | None:
        """The stream of the copies, the same for all epochs: torch keeps free memory for each stream."""
        return _stream_on(self.device)

    def __len__(self) -> int:
        """Return the number of batches of the whole epoch, also if it continues from a state."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: see `StructuredDataset.set_epoch`."""
        self.loader.set_epoch(epoch)

    def exclude(self, rows: Any) -> None:
        """Exclude bad or withdrawn rows: see `StructuredDataset.exclude`."""
        self.loader.exclude(rows)

    def skip_steps(self, start: int, stop: int) -> None:
        """Skip steps of the current epoch, with a record: see `StructuredDataset.skip_steps`."""
        self.loader.skip_steps(start, stop)

    def restore_skipped(self) -> None:
        """Deliver skipped steps after the epoch's last one: see `StructuredDataset.restore_skipped`."""
        self.loader.restore_skipped()

    def progress(self, uneven: Literal["drop", "pad"] | None = None) -> PassProgress:
        """Return what a progress bar needs: see `StructuredDataLoader.progress`."""
        return self.loader.progress(uneven)

    def state_dict(self) -> dict[str, Any]:
        """Return the state. It does not count batches that were copied and not handed over.

        Raises:
            TypeError: If Lightning calls it for a checkpoint, as of the loader itself.
        """
        refuse_lightning()
        return self.loader.state_dict()

    def load_state_dict(
        self, state_dict: Any, *, strict: bool = True, on_changed_files: Literal["error", "continue"] = "error"
    ) -> None:
        """Load a state: see `StructuredDataset.load_state_dict`."""
        self.loader.load_state_dict(state_dict, strict=strict, on_changed_files=on_changed_files)


class DeviceIterator(CountedIterator):
    """Hands batches over whose copies have begun before, and counts each as it does."""

    def __init__(self, batches: BatchIterator, depth: int) -> None:
        self._batches = batches
        self._depth = depth

    def __next__(self) -> Any:
        if not self.has_next():
            raise StopIteration
        self._batches.has_next(self._depth)  # so many are fetched, which begins their copies
        batch = self.peek()
        next(self._batches)
        return batch

    def has_next(self, after: int = 0) -> bool:
        """Wait for the next batch, and return whether there is one: see `CountedIterator.has_next`."""
        return self._batches.has_next(after)

    def peek(self, after: int = 0) -> Any:
        """Return the batch of which `has_next(after)` says that there is one, ready for the current stream."""
        return self._batches.peek(after).received()


class _Copier:
    """Copies batches to a device. For CUDA it begins to, on a stream of its own.

    To begin a copy takes the training process as long as to begin a kernel, whatever its size. So batches that are
    together as columns are copied together, and then split on the device.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device = device
        self._stream = stream

    def batches(self, batches: Batches) -> Iterator[Batch]:
        """Copy batches that are together as columns, and yield them one by one. See `Transfer`."""
        columns = with_offsets(batches.columns, batches.sizes)
        if isinstance(columns, pa.Table):
            yield from map(self.batch, batches)
            return
        single = [name for name, values in columns.items() if isinstance(values, (Ragged, list))]
        together = {name: values for name, values in columns.items() if name not in single}
        copy = _Copy(self._device)
        with copy.running_on(self._stream):
            copied = map_tensors(together, copy.of)
        batches = replace(batches, columns={name: copied.get(name, values) for name, values in columns.items()})
        del columns, together  # not to keep the memory that they were copied from
        made = iter(batches)
        while True:
            with normal_mode():
                batch = next(made, None)
            if batch is None:
                return
            yield batch._replace(data=_OnDevice(batch.data, [copy, *self._copy_values(batch.data, single)]))

    def batch(self, batch: Batch) -> Batch:
        """Copy a batch. See `Transfer`."""
        whole = {"": batch.data}
        copies = self._copy_values(whole, [""])
        return batch._replace(data=_OnDevice(whole[""], copies))

    def _copy_values(self, values: dict[str, Any], names: Iterable[str]) -> list[_Copy]:
        """Copy the tensors in some values of a dictionary, wherever they are, and put the copies in their place."""
        names = [name for name in names if not _has_no_tensors(values[name])]
        if not names:
            return []
        copy = _Copy(self._device)
        with copy.running_on(self._stream):
            for name in names:
                values[name] = tree_map_only(torch.Tensor, copy.of, values[name])
        return [copy]


class _Copy:
    """A copy of some tensors to a device, which may still be running."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: list[torch.Tensor] = []
        self._done: torch.cuda.Event | None = None
        self._waiting: set[int] = set()

    @contextmanager
    def running_on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Let `of` copy on a stream, or without one at once."""
        with normal_mode(), nullcontext() if stream is None else torch.cuda.stream(stream):
            yield
        if stream is not None and self._tensors:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(stream)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device. This process goes on meanwhile if the tensor is in pinned memory."""
        may_run = self._device.type == "cuda" and all(part.is_pinned() for part in _parts(tensor))
        copied = tensor.to(self._device, non_blocking=may_run)
        self._tensors.extend(_parts(copied))
        return copied

    def receive(self) -> None:
        """Let the current stream wait for the copy. This process does not."""
        if self._done is None:
            return
        stream = torch.cuda.current_stream(self._device)
        if stream.cuda_stream in self._waiting:  # what comes later on it comes after the copy, too
            return
        stream.wait_event(self._done)
        for tensor in self._tensors:
            # Its memory belongs to the stream of the copies. That could write another batch there as soon as Python has
            # released this one, while the current stream still has to read it.
            tensor.record_stream(stream)
        self._waiting.add(stream.cuda_stream)


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """A batch on the device, and the copies that it consists of."""

    batch: Any
    copies: Sequence[_Copy]

    def received(self) -> Any:
        """Return the batch for use on the current stream."""
        for copy in self.copies:
            copy.receive()
        return self.batch


def _stream_on(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _has_no_tensors(values: Any) -> bool:
    """Whether values are a number, or a list of strings or numbers, in which to look for tensors would take long."""
    return type(values) in TENSORLESS or (type(values) is list and TENSORLESS.issuperset(map(type, values)))


def _parts(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor; of a nested or a sparse one those that it is made of, which alone have streams."""
    if tensor.is_nested:
        yield tensor.values()
        if tensor.layout == torch.jagged:
            yield tensor.offsets()
            if tensor.lengths() is not None:
                yield tensor.lengths()
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())  # noqa: SLF001 - indices() wants a tensor that is coalesced
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor
