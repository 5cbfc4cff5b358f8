"""Lets all ranks do something together, so that an error of one of them is an error of all, and no rank waits."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from torch_dataloader_utils.distributed.groups import all_gather

T = TypeVar("T")


class Together:
    """All processes of the job, or this one alone where there is no process group.

    They have a process group of their own, which needs no accelerator. So what a thread communicates here cannot mix
    with what the training communicates meanwhile.
    """

    def __init__(self) -> None:
        self._default: Any = None
        self._group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """This process's rank."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group. All processes ask for it together the first time."""
        if not dist.is_initialized():
            return None
        if self._default is not dist.group.WORLD:
            self._default = dist.group.WORLD
            self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
        return self._group

    def all(self, action: Callable[[], T]) -> list[T]:
        """Call an action on every rank and return all results, by rank; raise the first error on all of them."""
        outcome: tuple[T | None, Exception | None]
        try:
            outcome = (action(), None)
        except Exception as error:  # noqa: BLE001 - raised below, on all ranks
            outcome = (None, _portable(error))
        group = self.group
        outcomes = [outcome] if group is None else all_gather(outcome, group)
        for failed in (error for _, error in outcomes if error is not None):
            raise failed
        return [cast("T", result) for result, _ in outcomes]

    def own(self, action: Callable[[], T]) -> T:
        """Call an action on every rank and return this rank's result; raise the first rank's error on all of them."""
        results: list[T] = []
        self.all(lambda: results.append(action()))
        return results[0]

    def first(self, action: Callable[[], T]) -> T:
        """Call an action on rank 0 and return its result, or raise its error, on every rank."""
        return cast("T", self.all(lambda: action() if self.rank == 0 else None)[0])


def _portable(error: Exception) -> Exception:
    """Return an error that other ranks can load, with the same message."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes, made on this line
    except Exception:  # noqa: BLE001 - an error may refuse in any way
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
