"""Helpers for many ranks. These, and nothing else in the package, call ``torch.distributed``; the user calls them."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from torch_dataloader_utils.errors import RankMismatchError
from torch_dataloader_utils.iteration import Handover
from torch_dataloader_utils.loader import StructuredDataLoader
from torch_dataloader_utils.options import require_choice

__all__ = [
    "CheckpointEntry",
    "Planned",
    "Stateful",
    "gather_states",
    "in_step",
    "load_rank_state",
    "own_state",
    "require_same_plan",
    "save_rank_state",
]

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


class Planned(Protocol):
    """A dataset: what has a plan."""

    @property
    def plan_digest(self) -> str:
        """Digest of the plan."""
        ...


def in_step(
    loader: StructuredDataLoader, group: dist.ProcessGroup | None = None, uneven: Literal["drop", "pad"] = "drop"
) -> Iterator[Any]:
    """Iterate over a loader so that all ranks make the same number of steps, whatever a filter leaves each of them.

    Before a step is made ranks have agreed that each of them has a batch for it, by one sum of two integers over all
    ranks, which is on its way while the step before is made. All ranks iterate together, each step of all.

    The batch of the next step is waited for before a step begins, so that two are held at a time, and counts as
    delivered only with its own step: a state taken between two steps is exact. A rank whose loader raises leaves the
    others waiting until the group's timeout, as in every collective.

    Args:
        loader: This rank's loader.
        group: The process group; None for the default one. One with gloo leaves the accelerator alone.
        uneven: What happens once a rank has run out of batches. ``"drop"``: all ranks stop; what others have left is
            not delivered, and their states say so. ``"pad"``: that rank gets a copy of its last batch again, or if it
            has had none a batch of another rank, until all have run out.

    Yields:
        The batches.

    Raises:
        TypeError: If it is not this package's loader.
    """
    require_choice(uneven, "uneven", ("drop", "pad"))
    batches = iter(loader)
    if not isinstance(batches, Handover):
        msg = f"loader is {type(loader).__name__}, expected the loader that create_dataloader returns"
        raise TypeError(msg)
    if not dist.is_initialized():
        yield from batches
        return
    num_ranks = dist.get_world_size(group)
    wanted = num_ranks if uneven == "drop" else 1
    steps, spare = 0, None
    agreement = _Agreement(batches, group, has_spare=False)
    while agreement.reached(wanted):
        batch = next(batches) if agreement.has_own else copy.deepcopy(spare)
        if agreement.without_any:
            of_another = _batch_of_any(batch, group)
            if not agreement.has_own:
                spare, batch = of_another, copy.deepcopy(of_another)
        agreement = _Agreement(batches, group, has_spare=spare is not None or agreement.has_own)
        if uneven == "pad" and spare is None and not agreement.has_own:
            spare = copy.deepcopy(batch)  # before anybody changes it
        steps += 1
        yield batch
    left = "batches left" if agreement.has_own else "no batch left"
    LOG.info("ranks ended together after %d steps; rank %d had %s", steps, dist.get_rank(group), left)


def _batch_of_any(own: Any, group: dist.ProcessGroup | None) -> Any:
    """Return the batch of the first rank that has one. All ranks call it together."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    return next(batch for batch in gathered if batch is not None)


class _Agreement:
    """What ranks say to one another of their next step, on its way while they make another.

    Args:
        batches: This rank's batches.
        group: The process group.
        has_spare: Whether this rank has a batch to repeat once it has run out.
    """

    def __init__(self, batches: Handover, group: dist.ProcessGroup | None, *, has_spare: bool) -> None:
        self.has_own = batches.has_next()
        self.without_any = 0
        device = "cuda" if dist.get_backend(group) == dist.Backend.NCCL else "cpu"
        self._sums = torch.tensor([self.has_own, not (self.has_own or has_spare)], dtype=torch.int64, device=device)
        self._work = dist.all_reduce(self._sums, group=group, async_op=True)

    def reached(self, wanted: int) -> bool:
        """Wait for all ranks, and return whether so many of them have a batch."""
        self._work.wait()
        having, self.without_any = map(int, self._sums.tolist())
        return having >= wanted


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


def load_rank_state(
    source: Stateful,
    directory: str | os.PathLike[str],
    *,
    strict: bool = True,
    on_changed_files: Literal["error", "continue"] = "error",
) -> None:
    """Load this rank's state from the file that `save_rank_state` wrote; or all ranks', where they are needed.

    Args:
        source: This rank's loader or dataset.
        directory: The directory of the checkpoint. It holds the states of one checkpoint alone.
        strict: Whether the run must be the one that saved them, or, of a grid, one of its topologies; see
            `StructuredDataset.load_state_dict`. All ranks' files are read if not, and for a grid.
        on_changed_files: What becomes of files that have changed, where `strict` is False.

    Raises:
        FileNotFoundError: If this rank saved nothing there under this number of ranks, or nobody anything.
        CheckpointMismatchError: If the state was saved under another plan.
        RankMismatchError: If states of several ranks are needed and are not all there.
    """
    mine = source.state_dict()
    there = sorted(Path(directory).glob("loader-*.json"))
    own = _rank_path(Path(directory), mine["rank"], mine["num_ranks"])
    needed = [own] if strict and mine["plan"]["virtual_ranks"] is None else there
    if not needed or not set(needed) <= set(there):
        msg = f"there is no {own}; the directory holds {[path.name for path in there] or 'no states'}"
        raise FileNotFoundError(msg)
    states = [json.loads(path.read_text(encoding="utf-8")) for path in needed]
    source.load_state_dict(states, strict=strict, on_changed_files=on_changed_files)


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
