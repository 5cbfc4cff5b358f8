"""The ranks of a loader: those of a device mesh, or others. Nothing here communicates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist  # noqa: TID251 - only its size and rank are read

from torch_dataloader_utils.errors import RankMismatchError

METHODS = ("get_coordinate", "get_group", "ndim", "shape")


class Mesh(Protocol):
    """What is needed of a ``torch.distributed.device_mesh.DeviceMesh``."""

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of processes along each dimension."""
        ...

    def get_coordinate(self) -> Sequence[int] | None:
        """Return this process' position along each dimension; None if it is not in the mesh."""
        ...

    def get_group(self, mesh_dim: int) -> Any:
        """Return the process group along a dimension, in which this process is."""
        ...


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many ranks share the rows, and which of them this process is. Those of a mesh are in row-major order.

    Attributes:
        num_ranks: Number of ranks.
        rank: This rank.
        process_group: The process group of a mesh; with several dimensions a tuple, the group along each. Else None.
        are_assumed: Whether there is one rank because nothing tells how many there are.
    """

    num_ranks: int
    rank: int
    process_group: Any
    are_assumed: bool = False

    @classmethod
    def of(cls, mesh: Mesh) -> Ranks:
        """Return the ranks of a mesh.

        Raises:
            TypeError: If it is no mesh.
            ValueError: If this process is not in the mesh.
        """
        if not all(hasattr(mesh, name) for name in METHODS):
            raise TypeError(f"mesh={mesh!r} is {type(mesh).__name__}, expected a device mesh, such as mesh['dp']")
        coordinate, shape = mesh.get_coordinate(), tuple(mesh.shape)
        if coordinate is None:
            msg = f"this process is not in the mesh {mesh!r}, and delivers none of its rows: make the loader in the "
            raise ValueError(msg + "processes of the mesh alone")
        rank = 0
        for position, size in zip(coordinate, shape, strict=True):
            rank = rank * size + position
        groups = tuple(mesh.get_group(dimension) for dimension in range(mesh.ndim))
        return cls(math.prod(shape), rank, groups[0] if len(groups) == 1 else groups)


def world() -> tuple[int, int] | None:
    """Return the size of the default process group, and the rank in it; None where there is none."""
    return (dist.get_world_size(), dist.get_rank()) if dist.is_available() and dist.is_initialized() else None


def require_one_process() -> None:
    """Raise if this process is one of several by now, and has assumed that it is the only one.

    Raises:
        RankMismatchError: If the default process group has several processes.
    """
    processes, _ = world() or (1, 0)
    if processes > 1:
        raise RankMismatchError(assumed_alone(processes))


def assumed_alone(processes: int) -> str:
    """Return what is wrong with a dataset of a process that has assumed that it is the only one of several."""
    msg = "the dataset was opened as that of the only rank, before there was a process group, and without RANK and "
    msg += f"WORLD_SIZE. Now there are {processes} processes, and it would read all rows: open it after "
    return msg + "init_process_group, or pass num_ranks and rank, which are 1 and 0 where each is to read all rows"
