"""Gathers the states of all ranks into one list, and takes a rank's state out of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch.distributed as dist

from torch_dataloader_utils.errors import RankMismatchError

__all__ = ["LOG", "Stateful", "current_rank", "gather_states", "own_state", "require_one_of_each_rank"]

LOG = logging.getLogger("torch_dataloader_utils")
SHARED_KEYS = ("plan", "files", "base")
"""Parts of a state that are large, and equal on all ranks."""


class Stateful(Protocol):
    """An object with a state, such as a loader or a dataset."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(
        self, state_dict: Any, /, *, strict: bool = True, on_changed_files: Literal["error", "continue"] = "error"
    ) -> None:
        """Load a state, or the states of all ranks."""
        ...


def gather_states(source: Stateful, group: dist.ProcessGroup | None = None) -> list[dict[str, Any]]:
    """Gather every rank's state into one list, to save it in one file. All ranks call it together.

    Parts that are equal on all ranks are one object in the list, which ``torch.save`` and pickle write once.

    Args:
        source: This rank's loader or dataset.
        group: The process group; None for the default one. Without an initialised one the list has one state.

    Returns:
        The states, by rank, on every rank.

    Raises:
        RankMismatchError: If a rank's state is missing or there twice: no run could resume from such a list.
    """
    state = source.state_dict()
    if not dist.is_initialized():
        return [state]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, state, group=group)
    require_one_of_each_rank([(state["rank"], state["num_ranks"]) for state in gathered])
    for state in gathered[1:]:
        for key in SHARED_KEYS:
            if state[key] == gathered[0][key]:
                state[key] = gathered[0][key]
    return gathered


def own_state(
    states: Sequence[dict[str, Any]], rank: int | None = None, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Return this rank's state from a gathered list.

    Args:
        states: A result of `gather_states`, in any order.
        rank: This rank; None uses the process group's, else ``RANK``, else 0.
        group: The process group that gathered them; None for the default one.

    Returns:
        The state that this rank saved.

    Raises:
        RankMismatchError: If the list does not hold each rank's state once, or not this rank's.
        ValueError: If it is not a list of states.
    """
    rank = current_rank(group) if rank is None else rank
    try:
        saved = [(state["rank"], state["num_ranks"]) for state in states]
    except (KeyError, TypeError) as error:
        msg = f"not a list of loader states: {error!r}"
        raise ValueError(msg) from None
    ranks = require_one_of_each_rank(saved)
    if not 0 <= rank < len(saved):
        msg = f"rank {rank} has no state: the list was saved by {len(saved)} ranks"
        raise RankMismatchError(msg)
    return states[ranks.index(rank)]


def require_one_of_each_rank(saved: Sequence[tuple[int, int]]) -> list[int]:
    """Return the ranks of states, given as rank and number of ranks each, or raise if one is missing or there twice."""
    ranks = [rank for rank, _ in saved]
    if any(count != len(saved) for _, count in saved) or sorted(ranks) != list(range(len(saved))):
        counts = sorted({count for _, count in saved})
        msg = f"a gathered list holds each rank's state once; this one holds ranks {ranks}, saved by {counts} ranks"
        raise RankMismatchError(msg)
    return ranks


def current_rank(group: dist.ProcessGroup | None) -> int:
    """Return this rank: the process group's, else torchrun's, else 0."""
    return dist.get_rank(group) if dist.is_initialized() else int(os.environ.get("RANK", "0"))
