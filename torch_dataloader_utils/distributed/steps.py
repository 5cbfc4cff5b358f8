"""Lets all ranks make the same number of steps, however many batches each of them has."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist

from torch_dataloader_utils.distributed.gather import LOG, all_gather, require_one_plan
from torch_dataloader_utils.loader.arguments import require_choice
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader
from torch_dataloader_utils.loader.device import DeviceLoader
from torch_dataloader_utils.loader.iteration import CountedIterator


def in_step(
    loader: StructuredDataLoader | DeviceLoader,
    group: dist.ProcessGroup | None = None,
    uneven: Literal["drop", "pad"] = "drop",
) -> Iterator[Any]:
    """Iterate over a loader so that all ranks make the same number of steps, whatever a filter leaves each of them.

    Before each step the ranks agree that each of them has a batch for it: by one sum of two integers over all ranks,
    which runs while the step before is made. All ranks have to iterate together.

    The loader fetches the batch of the next step before a step begins. So a rank holds two batches at a time. A batch
    counts as delivered only with its own step: a state saved between two steps is exact. If a rank's loader raises an
    error, the other ranks wait until the group's timeout, as in every collective.

    Args:
        loader: This rank's loader, or what `to_device` made of it.
        group: The process group; None for the default one. One with gloo does not use the accelerator.
        uneven: What happens when a rank has no batch left. ``"drop"``: all ranks stop. The batches that others have
            left are not delivered, and their states show that. ``"pad"``: that rank gets a copy of its last batch, or a
            batch of another rank if it had none, until no rank has a batch left.

    Yields:
        The batches.

    Raises:
        TypeError: If the loader is not this package's loader.
        RankMismatchError: On every rank, before the first step, if ranks planned different epochs, or several processes
            deliver a rank and none delivers another.
    """
    require_choice(uneven, "uneven", ("drop", "pad"))
    batches = iter(loader)
    if not isinstance(batches, CountedIterator):
        raise TypeError(f"loader is {type(loader).__name__}, expected the loader that create_dataloader returns")
    if not dist.is_initialized():
        yield from batches
        return
    require_one_plan(loader.state_dict(), group)
    num_ranks = dist.get_world_size(group)
    wanted = num_ranks if uneven == "drop" else 1
    steps = 0
    spare: list[Any] = []  # a batch to repeat, once there is one; it may be None, as a `collate_fn` may return that
    agreement = _Agreement(batches, group, has_spare=False)
    while agreement.reached(wanted):
        has_own = agreement.has_own
        own = [batches.peek()] if has_own else copy.deepcopy(spare)
        if agreement.without_any:
            of_another = next(other for other in all_gather(own, group) if other)
            if not own:
                spare, own = of_another, copy.deepcopy(of_another)
        agreement = _Agreement(batches, group, after=int(has_own), has_spare=bool(own))
        if uneven == "pad" and not spare and not agreement.has_own:
            spare = copy.deepcopy(own)  # before the training loop changes it
        if has_own:
            next(batches)  # counts the batch: if the one after it could not be fetched, it is not delivered
        steps += 1
        yield own.pop()
    left = "batches left" if agreement.has_own else "no batch left"
    LOG.info("ranks ended together after %d steps; rank %d had %s", steps, dist.get_rank(group), left)


class _Agreement:
    """The ranks' agreement on their next step. It is communicated while they make the step before.

    The step is that after so many batches, which are still to be delivered. `has_spare` says that this rank has a batch
    to repeat when it has none left.
    """

    def __init__(
        self, batches: CountedIterator, group: dist.ProcessGroup | None, *, after: int = 0, has_spare: bool
    ) -> None:
        self.has_own = batches.has_next(after)
        self.without_any = 0
        device = "cuda" if dist.get_backend(group) == dist.Backend.NCCL else "cpu"
        self._sums = torch.tensor([self.has_own, not (self.has_own or has_spare)], dtype=torch.int64, device=device)
        self._work = dist.all_reduce(self._sums, group=group, async_op=True)

    def reached(self, wanted: int) -> bool:
        """Wait for all ranks, and return whether at least so many of them have a batch."""
        self._work.wait()
        having, self.without_any = map(int, self._sums.tolist())
        return having >= wanted
