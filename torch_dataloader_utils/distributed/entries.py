"""Entries of a ``torch.distributed.checkpoint``: the states of loaders as strings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from torch_dataloader_utils.distributed.gather import (
    SHARED_KEYS,
    Stateful,
    gather_each,
    load_gathered,
    num_ranks_of,
    parse_json,
    require_one_of_each_rank,
    require_one_plan,
    state_of,
)
from torch_dataloader_utils.distributed.groups import Group, group_of

ALL_RANKS = "states_of_all_ranks"


class CheckpointEntry:
    """A loader's entry in a ``torch.distributed.checkpoint``: a Stateful with one string.

    Such a checkpoint keeps one value per name, whichever rank wrote it, and loads only names that exist before
    loading. A loader's state differs between ranks, and its keys change. So the whole state is saved as one string:
    ``dcp.save({"loader": CheckpointEntry(loader)}, checkpoint_id=directory)``, and the same with ``dcp.load``.

    With ``elastic=True`` the string holds the states of all ranks, under a name that is the same on all of them. Then
    any number of ranks loads the checkpoint. Where it is the run that saved it, it continues exactly; else the rest of
    the epoch is planned again, and each remaining row is delivered once.

    Processes may share a rank, as in tensor parallelism: they have one state.

    Make the dictionary anew for each call: ``dcp.load`` of older releases of torch puts what it has loaded into it, in
    the place of the entry.

    Args:
        source: This rank's loader or dataset.
        group: The process group of the ranks that share the rows; None for that of the loader's mesh, else the default
            one.
        elastic: Whether another number of ranks may load the entry. Both `dcp.save` and `dcp.load` need the same value:
            the names of the entries differ.
    """

    def __init__(self, source: Stateful, group: Group = None, *, elastic: bool = False) -> None:
        self._source = source
        self._group = group_of(source, group)
        self._elastic = elastic

    def state_dict(self) -> dict[str, str]:
        """Return this rank's state as JSON, with the rank and the number of ranks in its name; or those of all ranks.

        ``dcp.save`` and ``dcp.load`` call it on all ranks together. They compare their plans, unless it is a loader for
        one rank alone, which other ranks need not have.

        Raises:
            RankMismatchError: On every rank, if ranks planned different epochs, or several processes deliver a rank and
                none delivers another, or a rank cannot tell its state, for which that rank raises its own error; with
                ``elastic=True`` also if processes that share a rank have different states, or there are other ranks
                and no process group.
        """
        is_alone = not dist.is_initialized() or num_ranks_of(self._source) == 1
        if self._elastic:
            states = [state_of(self._source)] if is_alone else gather_each(self._source, self._group)
            require_one_of_each_rank([(state["rank"], state["num_ranks"]) for state in states])
            return {ALL_RANKS: dump_states(states)}
        state = state_of(self._source) if is_alone else require_one_plan(self._source, self._group)
        return {_entry_name(state): json.dumps(state)}

    def load_state_dict(self, entry: Mapping[str, str]) -> None:
        """Load this rank's state, or with ``elastic=True`` the states of all ranks.

        Raises:
            CheckpointMismatchError: If the state was saved under another plan.
            RankMismatchError: If states of several ranks are needed, and some are missing or do not fit together.
            ValueError: If the entry is not a state.
        """
        name = ALL_RANKS if self._elastic else _entry_name(state_of(self._source))
        described = f"the checkpoint's entry {name!r}"
        if self._elastic:
            load_gathered(self._source, parse_dumped(entry[name], described))
        else:
            self._source.load_state_dict(parse_json(entry[name], described))


def dump_states(states: Sequence[dict[str, Any]]) -> str:
    """Return the states of all ranks as JSON, in which large parts that are equal in all of them are written once."""
    shared = {key: states[0][key] for key in SHARED_KEYS if all(state[key] == states[0][key] for state in states)}
    own = [{key: value for key, value in state.items() if key not in shared} for state in states]
    return json.dumps({"shared": shared, "ranks": own})


def parse_dumped(text: str, name: str) -> list[dict[str, Any]]:
    """Return the states that `dump_states` wrote, or raise a ValueError that names what should hold them."""
    dumped = parse_json(text, name)
    try:
        return [{**dumped["shared"], **state} for state in dumped["ranks"]]
    except (KeyError, TypeError):
        raise ValueError(f"{name} is not a state: it does not hold the states of all ranks") from None


def _entry_name(state: Mapping[str, Any]) -> str:
    return f"rank-{state['rank']}-of-{state['num_ranks']}"
