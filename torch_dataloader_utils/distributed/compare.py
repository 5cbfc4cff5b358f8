"""Checks, before training, that all ranks planned the same epoch."""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist

from torch_dataloader_utils.errors import RankMismatchError

__all__ = ["Planned", "require_same_plan"]


class Planned(Protocol):
    """An object with a plan, such as a dataset."""

    @property
    def plan_digest(self) -> str:
        """Digest of the plan."""
        ...


def require_same_plan(dataset: Planned, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank unless all ranks planned the same epoch. All ranks call it together, before training.

    Args:
        dataset: This rank's dataset.
        group: The process group; None for the default one.

    Raises:
        RankMismatchError: If plans differ; the message names the ranks.
    """
    if not dist.is_initialized():
        return
    digests: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, dataset.plan_digest, group=group)
    if len(set(digests)) > 1:
        by_digest = {digest: [rank for rank, other in enumerate(digests) if other == digest] for digest in digests}
        groups = "; ".join(f"ranks {ranks} have {digest}" for digest, ranks in by_digest.items())
        msg = f"ranks planned different epochs: {groups}. They see different files, or were given different options, "
        msg += "epochs or worker counts"
        raise RankMismatchError(msg)
