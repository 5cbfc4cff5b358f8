"""Gathers what all ranks have: their states into one list, and their plans to compare them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch.distributed as dist

from torch_dataloader_utils.errors import RankMismatchError, shown

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
        RankMismatchError: On every rank, if ranks planned different epochs, or a rank's state is missing or there
            twice: no run could resume from such a list.
    """
    state = source.state_dict()
    if not dist.is_initialized():
        return [state]
    gathered = all_gather(state, group)
    require_one_of_each_rank([(state["rank"], state["num_ranks"]) for state in gathered])
    require_equal_digests([state.get("plan_digest") for state in gathered])
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
        RankMismatchError: If the list does not hold each rank's state once, or not this rank's, or if the ranks planned
            different epochs.
        ValueError: If it is not a list of states.
    """
    if rank is None:
        rank = dist.get_rank(group) if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    try:
        saved = [(state["rank"], state["num_ranks"]) for state in states]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a list of loader states: {error!r}") from None
    ranks = require_one_of_each_rank(saved)
    if not 0 <= rank < len(saved):
        raise RankMismatchError(f"rank {rank} has no state: the list was saved by {len(saved)} ranks")
    digests = {state["rank"]: state.get("plan_digest") for state in states}
    require_equal_digests([digests[number] for number in range(len(saved))])
    return states[ranks.index(rank)]


def require_one_of_each_rank(
    saved: Sequence[tuple[int, int]], wanted: str = "a gathered list holds each rank's state once"
) -> list[int]:
    """Return the ranks of states or loaders, or raise if one is missing or there twice.

    Each is given as its rank and its number of ranks. `wanted` is the beginning of the message.
    """
    ranks = [rank for rank, _ in saved]
    if any(count != len(saved) for _, count in saved) or sorted(ranks) != list(range(len(saved))):
        counts = sorted({count for _, count in saved})
        shares = ", ".join(map(str, counts))
        raise RankMismatchError(f"{wanted}; this one holds ranks {shown(ranks)}, each of {shares} ranks")
    return ranks


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
    require_equal_digests(all_gather(dataset.plan_digest, group))


def require_equal_digests(digests: Sequence[str | None]) -> None:
    """Raise a RankMismatchError that names the ranks unless all of them planned the same epoch.

    States that were saved before states had a digest of their plan have None.
    """
    if len(set(digests)) > 1:
        by_digest = {digest: [rank for rank, other in enumerate(digests) if other == digest] for digest in digests}
        groups = "; ".join(f"ranks {ranks} have {digest}" for digest, ranks in by_digest.items())
        msg = f"ranks planned different epochs: {groups}. They see different files, or were given different options, "
        raise RankMismatchError(msg + "epochs or worker counts")


def all_gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks, by rank. All ranks call it together."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered
