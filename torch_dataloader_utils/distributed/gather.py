"""Gathers what all ranks have: their states into one list, and their plans to compare them."""

from __future__ import annotations

import json
import logging
import operator
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import torch.distributed as dist

from torch_dataloader_utils.dataset.ranks import assumed_alone
from torch_dataloader_utils.distributed.groups import Group, Sum, all_gather, group_of, size_of
from torch_dataloader_utils.errors import CheckpointMismatchError, RankMismatchError, cut, shown
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader
from torch_dataloader_utils.loader.device import DeviceLoader

LOG = logging.getLogger("torch_dataloader_utils")

T = TypeVar("T")

SHOWN = 5
"""How many differences between two ranks a message shows."""

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


def gather_states(source: Stateful, group: Group = None) -> list[dict[str, Any]]:
    """Gather every rank's state into one list, to save it in one file. All ranks call it together.

    Parts that are equal on all ranks are one object in the list, which ``torch.save`` and pickle write once.

    Args:
        source: This rank's loader or dataset.
        group: The process group; None for that of the loader's mesh, else the default one. Without an initialised one
            the list has one state. Processes of the group may share a rank: they have one state.

    Returns:
        The states, by rank, on every rank.

    Raises:
        RankMismatchError: On every rank, if ranks planned different epochs, or a rank's state is missing, or processes
            that share a rank have different states: no run could resume from such a list. Where a rank cannot tell its
            state, it raises that error, and the others this one, which names the process and its error.
    """
    return gather_each(source, group_of(source, group)) if dist.is_initialized() else [state_of(source)]


def state_of(source: Stateful) -> dict[str, Any]:
    """Return this rank's state, or raise a TypeError if the source has another kind of state."""
    state = source.state_dict()
    if "num_ranks" not in state:
        msg = f"the state of {type(source).__name__} is not that of one rank's loader: pass the loader that "
        raise TypeError(msg + "create_dataloader returned, or its dataset")
    return state


def num_ranks_of(source: Stateful) -> int:
    """Return the number of ranks that share the rows."""
    found = getattr(source, "num_ranks", None) or getattr(getattr(source, "dataset", None), "num_ranks", None)
    return int(found or state_of(source)["num_ranks"])


def gather_each(source: Stateful, group: Group) -> list[dict[str, Any]]:
    """Return the states of all ranks, in an initialised process group: see `gather_states`."""
    gathered = _one_of_each_rank(_gather_results(lambda: state_of(source), group))
    require_equal_digests([state["plan_digest"] for state in gathered], gathered)
    for state in gathered[1:]:
        for key in SHARED_KEYS:
            if state[key] == gathered[0][key]:
                state[key] = gathered[0][key]
    return gathered


def _gather_results(action: Callable[[], T], group: Group) -> list[T]:
    """Call an action on every rank and return all results. If it fails on any rank, raise on all: none waits for it."""
    results: list[T] = []
    failure: Exception | None = None
    try:
        results.append(action())
    except Exception as error:  # noqa: BLE001 - raised below, on all ranks
        failure = error
    gathered = all_gather((results, f"{type(failure).__name__}: {failure}"), group)
    if failure is not None:
        raise failure
    for process, (found, reason) in enumerate(gathered):
        if not found:
            raise RankMismatchError(f"the state of process {process} is not known. Its error is {reason}")
    return [result for [result], _ in gathered]


def _one_of_each_rank(gathered: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the states by rank, each once: processes that share a rank, as in tensor parallelism, have one state."""
    states = sorted(gathered, key=lambda state: int(state["rank"]))
    ranks = [(state["rank"], state["num_ranks"]) for state in states]
    num_ranks = ranks[0][1]
    # Processes with a loader of one rank alone share no rows: they do not know of one another, and each reads all rows.
    if num_ranks == 1 or set(ranks) != {(rank, num_ranks) for rank in range(num_ranks)}:
        require_one_of_each_rank(ranks)
        return states
    firsts = [states[ranks.index((rank, num_ranks))] for rank in range(num_ranks)]
    differing = [state["rank"] for state in states if _progress_of(state) != _progress_of(firsts[state["rank"]])]
    if differing:
        msg = f"processes that share rank {differing[0]} of {num_ranks} have different states: open their loaders with "
        raise RankMismatchError(msg + "the same options, and gather the states after the same batch")
    return firsts


def _progress_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a state that do not depend on where a process finds the files."""
    return {key: value for key, value in state.items() if key not in ("plan", "files", "checksum")}


def own_state(
    states: Sequence[dict[str, Any]],
    rank: int | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    source: Planned | StructuredDataLoader | DeviceLoader | None = None,
) -> dict[str, Any]:
    """Return this rank's state from a gathered list.

    Args:
        states: A result of `gather_states`, in any order.
        rank: This rank; None uses that of `source`, else the process group's, else ``RANK``, else 0.
        group: The process group that gathered them; None for the default one.
        source: This rank's loader or dataset. One with a mesh is needed, or its rank: it is not that of the process.

    Returns:
        The state that this rank saved.

    Raises:
        RankMismatchError: If the list does not hold each rank's state once, or not this rank's, or if the ranks planned
            different epochs.
        ValueError: If it is not a list of states.
    """
    if rank is None and source is not None:
        rank = _planned(source).rank
    elif rank is None:
        rank = dist.get_rank(group) if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    try:
        saved = [(operator.index(state["rank"]), operator.index(state["num_ranks"])) for state in states]
    except (KeyError, TypeError, IndexError) as error:
        if isinstance(states, Mapping) and {"rank", "num_ranks"} <= states.keys():
            raise ValueError("not a list of loader states, but the state of one rank: load it as it is") from None
        raise ValueError(f"not a list of loader states: {cut(repr(error))}") from None
    ranks = require_one_of_each_rank(saved)
    if not 0 <= rank < len(saved):
        raise RankMismatchError(f"rank {rank} has no state: the list was saved by {len(saved)} ranks")
    in_order = [states[ranks.index(number)] for number in range(len(saved))]
    require_equal_digests([shown(state.get("plan_digest")) for state in in_order], in_order)
    return in_order[rank]


def broadcast_states(
    states: list[dict[str, Any]] | None, src: int = 0, group: dist.ProcessGroup | None = None
) -> list[dict[str, Any]]:
    """Give all ranks the states that one of them has read. All ranks call it together.

    Args:
        states: The states of all ranks on rank `src`; on other ranks they are ignored.
        src: The rank that has them, in the process group.
        group: The process group; None for the default one. Without an initialised one these states are returned.

    Returns:
        The states, on every rank.

    Raises:
        ValueError: On every rank, if `src` is not in the group, or has no states.
    """
    if dist.is_initialized():
        if not 0 <= src < dist.get_world_size(group):
            raise ValueError(f"src={src}: the process group has ranks 0 to {dist.get_world_size(group) - 1}")
        carrier = [states if dist.get_rank(group) == src else None]
        dist.broadcast_object_list(carrier, src if group is None else dist.get_global_rank(group, src), group)
        [states] = carrier
    if states is None:
        raise ValueError(f"rank {src} passed None in place of the states that it has read")
    return states


def load_gathered(source: Stateful, states: Sequence[dict[str, Any]]) -> None:
    """Load the states of all ranks: strictly if the run is the one that saved them, else elastically.

    Under the same number of ranks and workers the same batches follow. Under others, each remaining row is delivered
    once, in another order. Every rank loads the same list; it communicates with no other rank.

    Args:
        source: This rank's loader or dataset.
        states: A result of `gather_states`.

    Raises:
        CheckpointMismatchError: If the states were saved under another plan, which no load can continue.
        RankMismatchError: If states are missing or do not fit together.
        ValueError: If it is not a list of states.
    """
    try:
        source.load_state_dict(states)
    except CheckpointMismatchError:
        source.load_state_dict(states, strict=False)
        LOG.info("another topology saved these %d states: the rest of the epoch is planned again", len(states))


def on_all_ranks(claim: bool, group: Group = None) -> bool:  # noqa: FBT001 - what is asked
    """Whether a claim holds on all ranks. All ranks call it together."""
    return Sum([claim], group).wait() == [size_of(group)] if dist.is_initialized() else claim


def require_one_of_each_rank(saved: Sequence[tuple[int, int]]) -> list[int]:
    """Return the ranks of states, given as rank and number of ranks each, or raise if one is missing or there twice."""
    ranks = [rank for rank, _ in saved]
    if any(count != len(saved) for _, count in saved) or sorted(ranks) != list(range(len(saved))):
        counts = sorted({count for _, count in saved})
        msg = f"a gathered list holds each rank's state once; this one holds ranks {shown(ranks)}, saved by "
        msg += f"{shown(counts)} ranks"
        raise RankMismatchError(msg)
    return ranks


def parse_json(content: str | bytes, name: str) -> Any:
    """Return what JSON text holds, or raise a ValueError that names what should be a state."""
    try:
        return json.loads(content)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not a state: {error}") from None


class Planned(Protocol):
    """An object with a plan for several ranks, such as a dataset."""

    @property
    def plan_digest(self) -> str:
        """Digest of the plan."""
        ...

    @property
    def num_ranks(self) -> int:
        """Number of ranks that the plan is for."""
        ...

    @property
    def rank(self) -> int:
        """The rank that it delivers, from 0 to `num_ranks` - 1."""
        ...


def require_same_plan(dataset: Planned | StructuredDataLoader | DeviceLoader, group: Group = None) -> None:
    """Raise on every rank unless all ranks planned the same epoch, and each rank of the plan is there.

    All ranks call it together, before training. Processes may share a rank, as in tensor parallelism.

    Args:
        dataset: This rank's dataset or loader.
        group: The process group; None for that of the loader's mesh, else the default one.

    Raises:
        RankMismatchError: If plans differ, or several processes deliver a rank and none delivers another; the message
            names the ranks. If a process opened its dataset before it could know that there are others.
    """
    if not dist.is_initialized():
        return
    planned = _planned(dataset)
    gathered = all_gather((planned.plan_digest, planned.rank, _assumes_ranks(dataset)), group_of(dataset, group))
    _require_no_assumption([assumes for *_, assumes in gathered])
    require_equal_digests([digest for digest, *_ in gathered])
    require_all_ranks([rank for _, rank, _ in gathered], planned.num_ranks)


def _planned(source: Planned | StructuredDataLoader | DeviceLoader) -> Planned:
    return source if hasattr(source, "plan_digest") else source.dataset  # type: ignore[return-value]


def require_one_plan(source: Stateful, group: Group) -> dict[str, Any]:
    """Return this rank's state, or raise as `require_same_plan` does; the message also says in what states differ."""
    states: list[dict[str, Any]] = []

    def planned() -> tuple[str | None, int, bool]:
        states.append(state_of(source))
        return states[0]["plan_digest"], states[0]["rank"], _assumes_ranks(source)

    gathered = _gather_results(planned, group)
    _require_no_assumption([assumes for *_, assumes in gathered])
    [state] = states
    digests = [digest for digest, *_ in gathered]
    if len(set(digests)) > 1:  # then all ranks are here
        require_equal_digests(digests, all_gather(state, group))
    require_all_ranks([rank for _, rank, _ in gathered], state["num_ranks"])
    return state


def _assumes_ranks(source: Any) -> bool:
    """Whether a loader or dataset was opened as that of the only rank because nothing said how many there are."""
    dataset = source if hasattr(source, "ranks_are_assumed") else getattr(source, "dataset", None)
    return bool(getattr(dataset, "ranks_are_assumed", False))


def _require_no_assumption(assumptions: Sequence[bool]) -> None:
    """Raise on every rank if a process, given what each assumes, took itself for the only one of several."""
    if len(assumptions) > 1 and any(assumptions):
        processes = [process for process, assumes in enumerate(assumptions) if assumes]
        raise RankMismatchError(f"processes {shown(processes)}: {assumed_alone(len(assumptions))}")


def require_all_ranks(ranks: Sequence[int], num_ranks: int) -> None:
    """Raise if these processes, enough for all ranks, deliver some ranks several times and others not at all."""
    missing = sorted(set(range(num_ranks)) - set(ranks)) if len(ranks) >= num_ranks else []
    if missing:
        msg = f"no process delivers the rows of ranks {shown(missing)} of {num_ranks}: the processes deliver ranks "
        raise RankMismatchError(f"{msg}{shown(ranks)}; create the loader with another `rank`, or without it")


def require_equal_digests(digests: Sequence[Any], states: Sequence[Mapping[str, Any]] = ()) -> None:
    """Raise a RankMismatchError that names the ranks unless all of them planned the same epoch.

    States that were saved before states had a digest of their plan have None. The message also says in what the states
    of the ranks, if they are given, differ.
    """
    if all(digest == digests[0] for digest in digests):
        return
    alike: dict[Any, list[int]] = defaultdict(list)
    for rank, digest in enumerate(digests):
        alike[digest].append(rank)
    groups = [f"ranks {shown(ranks)}" for ranks in alike.values()]
    msg = f"ranks planned different epochs; these planned alike: {', '.join(groups[:SHOWN])}"
    msg += f" and {len(groups) - SHOWN} more groups. " if len(groups) > SHOWN else ". "
    first, other, *_ = (ranks[0] for ranks in alike.values())
    found = _differences(states[first], states[other]) if states else []
    if found:
        raise RankMismatchError(f"{msg}Rank {first} and rank {other} have {'; '.join(found[:SHOWN])}")
    msg += "They see different files, were given different options, epochs or worker counts, or skip, restore or "
    raise RankMismatchError(f"{msg}exclude different rows")


def _differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return in what two states differ that should be equal, as a message shows it."""
    names = {
        name: name.strip("_") for name in ("epoch", "num_ranks", "_num_workers", "_shuffle_seed", "plan_algorithm")
    }
    pairs = [(shown_as, first.get(name), other.get(name)) for name, shown_as in names.items()]
    mixtures = [_of_mixture(state.get("mixture")) for state in (first, other)]
    pairs += [(name, value, mixtures[1].get(name)) for name, value in mixtures[0].items()]
    plans = [state["plan"] if isinstance(state.get("plan"), Mapping) else {} for state in (first, other)]
    shown_before = ("root", "fingerprint", "files", "rows") if all(mixtures) else ("root",)
    pairs += [(str(name), value, plans[1].get(name)) for name, value in plans[0].items() if name not in shown_before]
    return [f"{name}={shown(one)} and {shown(two)}" for name, one, two in pairs if shown(one) != shown(two)]


def _of_mixture(mixture: Any) -> dict[str, Any]:
    """Return what a state says of a mixture's sources, and of how many rows of each an epoch takes."""
    if not isinstance(mixture, Mapping):
        return {}
    own: dict[str, Any] = {name: mixture.get(name) for name in ("schedule", "rows_per_epoch")}
    listed = mixture.get("sources")
    sources = [source for source in listed if isinstance(source, Mapping)] if isinstance(listed, list) else []
    for shown_as, name in (("weights", "weight"), ("fingerprints of sources", "fingerprint")):
        own[shown_as] = {str(source.get("name")): source.get(name) for source in sources}
    return own
