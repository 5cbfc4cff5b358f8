"""The states of all ranks gathered into one list, and a rank's own taken out of it."""

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
"""Parts of a state that are equal on all ranks, and large."""


class Stateful(Protocol):
    """A loader, or a dataset: what has a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(
        self, state_dict: Any, /, *, strict: bool = True, on_changed_files: Literal["error", "continue"] = "error"
    ) -> None:
        """Load a state, or those of all ranks."""
        ...


def gather_states(source: Stateful, group: dist.ProcessGroup | None = None) -> list[dict[str, Any]]:
    """Gather every rank's state into one list, to be saved in one file. All ranks call it together.

    What is equal on all ranks is one object in the list: ``torch.save`` and pickle write it once.

    Args:
        source: This rank's loader or dataset.
        group: The process group; None for the default one. Without an initialised one the list has one state.

    Returns:
        The states, by rank, on every rank.

    Raises:
        RankMismatchError: If the gathered states are not one of each rank: such a list could not be resumed from.
    """
    own = source.state_dict()
    if not dist.is_initialized():
        return [own]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    require_one_of_each_rank([(state["rank"], state["num_ranks"]) for state in gathered])
    for state in gathered[1:]:
        for key in SHARED_KEYS:
            if state[key] == gathered[0][key]:
                state[key] = gathered[0][key]
    return gathered


def own_state(
    states: Sequence[dict[str, Any]], rank: int | None = None, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Take one's own state from a gathered list.

    Args:
        states: What `gather_states` returned, in any order.
        rank: This rank; None asks the process group, else ``RANK``, else is 0.
        group: The process group that gathered them; None for the default one.

    Returns:
        The state that this rank saved.

    Raises:
        RankMismatchError: If the list does not hold each rank's state once, or not this rank's.
        ValueError: If it is no list of states.
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
    """Return the ranks of states, given as rank and number of ranks, if there is one state of each."""
    ranks = [rank for rank, _ in saved]
    if any(count != len(saved) for _, count in saved) or sorted(ranks) != list(range(len(saved))):
        counts = sorted({count for _, count in saved})
        msg = f"a gathered list holds each rank's state once; this one holds ranks {ranks}, saved by {counts} ranks"
        raise RankMismatchError(msg)
    return ranks


def current_rank(group: dist.ProcessGroup | None) -> int:
    """Return this rank: of the process group, else of torchrun, else 0."""
    return dist.get_rank(group) if dist.is_initialized() else int(os.environ.get("RANK", "0"))
