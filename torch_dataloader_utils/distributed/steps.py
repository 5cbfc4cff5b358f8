"""Lets all ranks make the same number of steps, however many batches each of them has."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pyarrow as pa
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from torch_dataloader_utils.columns.convert import ColumnSlice, copy_rows
from torch_dataloader_utils.columns.ragged import jagged_parts
from torch_dataloader_utils.distributed.gather import LOG, on_all_ranks, require_one_plan
from torch_dataloader_utils.distributed.groups import Group, Sum, all_gather, group_of, size_of
from torch_dataloader_utils.errors import RankMismatchError, shown
from torch_dataloader_utils.loader.arguments import require_choice
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader
from torch_dataloader_utils.loader.device import DeviceLoader
from torch_dataloader_utils.loader.iteration import CountedIterator


def in_step(
    loader: StructuredDataLoader | DeviceLoader, group: Group = None, uneven: Literal["drop", "pad"] = "drop"
) -> Iterator[Any]:
    """Iterate over a loader so that all ranks make the same number of steps, whatever a filter leaves each of them.

    Before each step the ranks agree that each of them has a batch for it: by one sum of two integers over all ranks,
    which runs while the step before is made. All ranks have to iterate together.

    The loader fetches the batch of the next step before a step begins. So a rank holds two batches at a time. A batch
    counts as delivered only with its own step: a state saved between two steps is exact. If a rank's loader raises an
    error, the other ranks wait until the group's timeout, as in every collective.

    Args:
        loader: This rank's loader, or what `to_device` made of it.
        group: The process group; None for that of the loader's mesh, else the default one. One with gloo does not use
            the accelerator.
        uneven: What happens when a rank has no batch left. ``"drop"``: all ranks stop. The batches that others have
            left are not delivered, and their states show that. ``"pad"``: that rank gets a copy of its last batch, or a
            batch of another rank if it had none, until no rank has a batch left.

    Yields:
        The batches.

    Raises:
        TypeError: If the loader is not this package's loader.
        RankMismatchError: On every rank, before the first step, if ranks planned different epochs, several processes
            deliver a rank and none delivers another, or `uneven` differs.
    """
    require_choice(uneven, "uneven", ("drop", "pad"))
    if dist.is_initialized():
        group = group_of(loader, group)
        require_one_plan(loader, group)  # before a rank by itself finds that it cannot iterate: others would wait
    batches = iter(loader)
    if not isinstance(batches, CountedIterator):
        raise TypeError(f"loader is {type(loader).__name__}, expected the loader that create_dataloader returns")
    if not dist.is_initialized():
        yield from batches
        return
    _require_one_choice(uneven, group)
    wanted = size_of(group) if uneven == "drop" else 1
    steps = 0
    spare: list[Any] = []  # a batch to repeat, once there is one; it may be None, as a `collate_fn` may return that
    agreement = _Agreement(batches, group, has_spare=False)
    while agreement.reached(wanted):
        has_own = agreement.has_own
        own = [batches.peek()] if has_own else _copied(spare)
        if agreement.without_any:
            of_another = next(other for other in all_gather(_copied(own), group) if other)
            if not own:
                spare, own = of_another, _copied(of_another)
        agreement = _Agreement(batches, group, after=int(has_own), has_spare=bool(own))
        if uneven == "pad" and not spare and not agreement.has_own:
            spare = _copied(own)  # before the training loop changes it
        if has_own:
            next(batches)  # counts the batch: if the one after it could not be fetched, it is not delivered
        steps += 1
        yield own.pop()
    left = "batches left" if agreement.has_own else "no batch left"
    LOG.info("ranks ended together after %d steps; process %d had %s", steps, dist.get_rank(), left)


def _require_one_choice(uneven: str, group: Group) -> None:
    """Raise on every rank if some would stop where others go on, and wait for them."""
    chosen = all_gather(uneven, group)
    dropping = [process for process, choice in enumerate(chosen) if choice == "drop"]
    if 0 < len(dropping) < len(chosen):
        msg = f"in_step has uneven='drop' in processes {shown(dropping)} and 'pad' in the others: pass one to all"
        raise RankMismatchError(msg)


def agreed_end(loader: StructuredDataLoader) -> Callable[[bool], bool]:
    """Return a function that says whether a step of a pass follows, from whether this rank has a batch for it.

    Where the number of batches is known before the rows are read, and no step may have lost all of its rows, a rank
    need not ask the others. Else all ranks call the function together, before each step, and it is False as soon as one
    of them has no batch.
    """
    asks = loader.loses_rows
    try:
        len(loader)
    except TypeError:
        asks = True
    return functools.partial(on_all_ranks, group=group_of(loader, None)) if asks else bool


def _copied(batches: list[Any]) -> list[Any]:
    """Return deep copies, in which tensors and tables have no memory of other rows.

    In a batch they are views of the memory of many batches, which `copy.deepcopy` and pickling take along. Here that is
    left only for jagged tensors on a device, sparse ones, and tensors in objects of other classes.
    """
    copies: dict[int, Any] = {}  # by the number of the object: `copy.deepcopy` takes those that it finds here

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.clone()
        clone: torch.Tensor = copies[id(tensor)]
        return clone

    for value in tree_leaves(batches):
        if isinstance(value, pa.Table):
            copies[id(value)] = copy_rows(ColumnSlice(value, 0, value.num_rows))
        elif isinstance(value, torch.Tensor) and (jagged := jagged_parts(value)) is not None:
            values, offsets = jagged
            offsets = copied(offsets)  # columns of the same lengths may share them
            copies[id(value)] = torch.nested.nested_tensor_from_jagged(values.clone(), offsets=offsets)
        elif _is_view(value):
            copied(value)
    return copy.deepcopy(batches, copies)


def _is_view(value: Any) -> bool:
    """Whether a value is a plain tensor whose memory is larger. That of an expanded one is smaller."""
    is_plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.requires_grad
    return is_plain and value.untyped_storage().nbytes() > value.nbytes


class _Agreement:
    """The ranks' agreement on their next step. It is communicated while they make the step before.

    The step is that after so many batches, which are still to be delivered. `has_spare` says that this rank has a batch
    to repeat when it has none left.
    """

    def __init__(self, batches: CountedIterator, group: Group, *, after: int = 0, has_spare: bool) -> None:
        self.has_own = batches.has_next(after)
        self.without_any = 0
        self._sum = Sum([self.has_own, not (self.has_own or has_spare)], group)

    def reached(self, wanted: int) -> bool:
        """Wait for all ranks, and return whether at least so many of them have a batch."""
        having, self.without_any = self._sum.wait()
        return having >= wanted
