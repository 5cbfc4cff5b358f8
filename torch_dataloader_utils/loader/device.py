"""Batches that are copied to a device ahead of need, and counted as they are handed over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_dataloader_utils.loader.arguments import require_count
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader
from torch_dataloader_utils.loader.iteration import BatchIterator, CountedIterator
from torch_dataloader_utils.loader.progress_bar import PassProgress


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
            are fetched, and their copies have begun.

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

    `set_epoch`, `skip_steps`, `restore_skipped`, `state_dict`, `load_state_dict`, `progress` and ``len`` are those of
    the loader. Iterate over this one or over the loader: both deliver the rows of the same epoch.

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
        copy = _copier(self.device)
        return DeviceIterator(iter(self.loader), copy, self.depth)

    def __len__(self) -> int:
        """Return the number of batches of the whole epoch, also if it continues from a state."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: see `StructuredDataset.set_epoch`."""
        self.loader.set_epoch(epoch)

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
        """Return the state. It does not count batches that were copied and not handed over."""
        return self.loader.state_dict()

    def load_state_dict(
        self, state_dict: Any, *, strict: bool = True, on_changed_files: Literal["error", "continue"] = "error"
    ) -> None:
        """Load a state: see `StructuredDataset.load_state_dict`."""
        self.loader.load_state_dict(state_dict, strict=strict, on_changed_files=on_changed_files)


class DeviceIterator(CountedIterator):
    """Hands batches over that were copied ahead, and counts each as it does."""

    def __init__(self, batches: BatchIterator, copy: Callable[[Any], _Copy], depth: int) -> None:
        self._batches = batches
        self._copy = copy
        self._depth = depth
        self._copies: dict[int, _Copy] = {}
        """The copies that have begun, by the batch's number among those of this iteration."""

    def __next__(self) -> Any:
        if not self.has_next():
            raise StopIteration
        for after in range(self._depth + 1):
            if self.has_next(after):
                self._begun(after)
        batch = self.peek()
        # Removed before it is counted. After a Ctrl-C in between it is copied once more, and no other takes its place.
        del self._copies[self._batches.delivered]
        next(self._batches)
        return batch

    def has_next(self, after: int = 0) -> bool:
        """Wait for the next batch, and return whether there is one: see `CountedIterator.has_next`."""
        return self._batches.has_next(after)

    def peek(self, after: int = 0) -> Any:
        """Return the batch of which `has_next(after)` says that there is one, ready for the current stream."""
        return self._begun(after).received()

    def _begun(self, after: int) -> _Copy:
        number = self._batches.delivered + after
        if number not in self._copies:
            self._copies[number] = self._copy(self._batches.peek(after))
        return self._copies[number]


@dataclass(frozen=True, slots=True)
class _Copy:
    """A batch on the device, whose copy may still be running.

    Attributes:
        batch: The batch.
        device: The device.
        done: Comes after the copy on its stream; None if the copy is complete.
    """

    batch: Any
    device: torch.device
    done: torch.cuda.Event | None = None

    def received(self) -> Any:
        """Return the batch for use on the current stream, which waits for the copy; this process does not."""
        if self.done is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self.done)
            for tensor in _plain_tensors(self.batch):
                # Its memory belongs to the stream of the copies. That could write another batch there as soon as Python
                # has released this one, while the current stream still has to read it.
                tensor.record_stream(stream)
        return self.batch


def _copier(device: torch.device) -> Callable[[Any], _Copy]:
    """Return what begins to copy a batch to a device."""
    if device.type != "cuda":
        return lambda batch: _Copy(_moved(batch, device), device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(batch: Any) -> _Copy:
        with torch.cuda.stream(stream):
            copied = _moved(batch, device, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
        return _Copy(copied, device, done)

    return copy


def _moved(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=non_blocking), batch)


def _plain_tensors(batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch; of a nested or a sparse one those that it is made of, which alone have streams."""
    tensors: list[Any] = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return [part for tensor in tensors for part in _parts(tensor)]


def _parts(tensor: Any) -> Iterator[torch.Tensor]:
    if tensor.is_nested:
        yield tensor.values()
        if tensor.layout == torch.jagged:
            yield tensor.offsets()
            if tensor.lengths() is not None:
                yield tensor.lengths()
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())  # noqa: SLF001 - indices() wants a tensor that is coalesced
    else:
        yield tensor
