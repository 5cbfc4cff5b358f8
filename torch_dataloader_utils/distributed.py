"""Helpers for many ranks. These, and nothing else in the package, call ``torch.distributed``; the user calls them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from torch_dataloader_utils.errors import RankMismatchError

__all__ = [
    "CheckpointEntry",
    "Planned",
    "Stateful",
    "gather_states",
    "load_rank_state",
    "own_state",
    "require_same_plan",
    "save_rank_state",
]

SHARED_KEYS = ("plan", "files")
"""Parts of a state that are equal on all ranks, and large."""


class Stateful(Protocol):
    """A loader, or a dataset: what has a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> None:
        """Load a state."""
        ...


class Planned(Protocol):
    """A dataset: what has a plan."""

    @property
    def plan_digest(self) -> str:
        """Digest of the plan."""
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
    _require_one_of_each_rank([(state["rank"], state["num_ranks"]) for state in gathered])
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
    rank = _own_rank(group) if rank is None else rank
    try:
        saved = [(state["rank"], state["num_ranks"]) for state in states]
    except (KeyError, TypeError) as error:
        msg = f"not a list of loader states: {error!r}"
        raise ValueError(msg) from None
    ranks = _require_one_of_each_rank(saved)
    if not 0 <= rank < len(saved):
        msg = f"rank {rank} has no state: the list was saved by {len(saved)} ranks"
        raise RankMismatchError(msg)
    return states[ranks.index(rank)]


def save_rank_state(source: Stateful, directory: str | os.PathLike[str]) -> Path:
    """Write this rank's state to a file of its own: atomically, so that a crash leaves the old one or the new one.

    Args:
        source: This rank's loader or dataset.
        directory: A directory of this checkpoint; it is made if need be.

    Returns:
        The file, named after the rank and the number of ranks.
    """
    state = source.state_dict()
    path = _rank_path(Path(directory), state["rank"], state["num_ranks"])
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    return path


def load_rank_state(source: Stateful, directory: str | os.PathLike[str]) -> None:
    """Load this rank's state from the file that `save_rank_state` wrote.

    Args:
        source: This rank's loader or dataset.
        directory: The directory of the checkpoint.

    Raises:
        FileNotFoundError: If this rank saved nothing there under this number of ranks.
        CheckpointMismatchError: If the state was saved under another plan.
    """
    mine = source.state_dict()
    path = _rank_path(Path(directory), mine["rank"], mine["num_ranks"])
    if not path.exists():
        there = sorted(one.name for one in Path(directory).glob("loader-*.json"))
        msg = f"there is no {path}; the directory holds {there or 'no states'}"
        raise FileNotFoundError(msg)
    source.load_state_dict(json.loads(path.read_text(encoding="utf-8")))


class CheckpointEntry:
    """A loader's entry in a ``torch.distributed.checkpoint``: a Stateful with one text under this rank's own name.

    Such a checkpoint keeps one value a name, whichever rank wrote it, and loads only names that exist before
    loading. A loader's state differs from rank to rank and grows, so it goes in as one text:
    ``dcp.save({"loader": CheckpointEntry(loader)}, checkpoint_id=directory)``, and the same with ``dcp.load``.

    Args:
        source: This rank's loader or dataset.
    """

    def __init__(self, source: Stateful) -> None:
        self._source = source

    def state_dict(self) -> dict[str, str]:
        """Return this rank's state as JSON, under a name with the rank and the number of ranks."""
        state = self._source.state_dict()
        return {_entry_name(state): json.dumps(state)}

    def load_state_dict(self, entry: dict[str, str]) -> None:
        """Load this rank's state.

        Raises:
            CheckpointMismatchError: If the state was saved under another plan.
        """
        self._source.load_state_dict(json.loads(entry[_entry_name(self._source.state_dict())]))


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
        apart = {digest: [rank for rank, one in enumerate(digests) if one == digest] for digest in digests}
        groups = "; ".join(f"ranks {ranks} have {digest}" for digest, ranks in apart.items())
        msg = (
            f"ranks planned different epochs: {groups}. They see different files, or were given different options, "
            "epochs or worker counts"
        )
        raise RankMismatchError(msg)


def _require_one_of_each_rank(saved: Sequence[tuple[int, int]]) -> list[int]:
    """Return the ranks of states, given as rank and number of ranks, if there is one state of each."""
    ranks = [rank for rank, _ in saved]
    if any(count != len(saved) for _, count in saved) or sorted(ranks) != list(range(len(saved))):
        counts = sorted({count for _, count in saved})
        msg = f"a gathered list holds each rank's state once; this one holds ranks {ranks}, saved by {counts} ranks"
        raise RankMismatchError(msg)
    return ranks


def _own_rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _rank_path(directory: Path, rank: int, num_ranks: int) -> Path:
    return directory / f"loader-{rank:05d}-of-{num_ranks:05d}.json"


def _entry_name(state: dict[str, Any]) -> str:
    return f"rank-{state['rank']}-of-{state['num_ranks']}"
