"""The process group that a helper uses, and its collectives.

A loader of a mesh of several dimensions has a group along each of them, and no group of all its ranks. A collective
then runs along one dimension after the other, in the groups that the mesh has: no new group has to be made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

Group: TypeAlias = dist.ProcessGroup | tuple[dist.ProcessGroup, ...] | None
"""A process group, or a mesh's groups along each of its dimensions; None for the default one."""


def group_of(source: object, group: Group) -> Group:
    """Return the group as specified, else that of a loader's or dataset's mesh, else None."""
    return getattr(source, "process_group", None) if group is None else group


def size_of(group: Group) -> int:
    """Return the number of processes."""
    return math.prod(dist.get_world_size(along) for along in _dimensions(group))


def all_gather(value: Any, group: Group) -> list[Any]:
    """Return the values of all ranks, by rank. All ranks call it together."""
    values = [value]
    for along in reversed(_dimensions(group)):  # the last dimension's coordinate changes first from rank to rank
        gathered: list[Any] = [None] * dist.get_world_size(along)
        dist.all_gather_object(gathered, values, group=along)
        values = [value for part in gathered for value in part]
    return values


class Sum:
    """The sums of integers over all ranks, which all begin together. They run until `wait` returns them."""

    def __init__(self, values: Sequence[int], group: Group) -> None:
        first, *self._others = _dimensions(group)
        device = "cuda" if dist.get_backend(first) == dist.Backend.NCCL else "cpu"
        self._sums = torch.tensor(values, dtype=torch.int64, device=device)
        self._work = dist.all_reduce(self._sums, group=first, async_op=True)

    def wait(self) -> list[int]:
        """Return the sums, once all ranks have begun."""
        self._work.wait()
        for along in self._others:
            dist.all_reduce(self._sums, group=along)
        return list(map(int, self._sums.tolist()))


def _dimensions(group: Group) -> tuple[dist.ProcessGroup | None, ...]:
    return group if isinstance(group, tuple) else (group,)
