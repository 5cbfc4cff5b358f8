"""The ranks of a loader, from a device mesh. Nothing here communicates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
class MeshRanks:
    """The ranks that a mesh stands for: its processes in row-major order.

    Attributes:
        num_ranks: Number of ranks.
        rank: This rank.
        process_group: The process group of all ranks; with several dimensions a tuple, the group along each.
    """

    num_ranks: int
    rank: int
    process_group: Any

    @classmethod
    def of(cls, mesh: Mesh) -> MeshRanks:
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
