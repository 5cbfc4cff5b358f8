"""How the hashes of delivered rows go on after a load. Pure.

There is one for each planned rank. Under a virtual topology a planned rank delivers the same rows whatever the real
ranks are, so its hash goes on. Else an elastic load gives each rank other rows, and the hashes begin anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_dataloader_utils.checkpoint.saved_state import SavedState
from torch_dataloader_utils.planning.row_hash import NO_ROWS, RankHashes, RowHash
from torch_dataloader_utils.planning.topology import Topology


def begun_hashes(topology: Topology) -> tuple[RowHash, ...]:
    """Return the hashes of this rank's planned ranks, of which no row is delivered."""
    return (NO_ROWS,) * topology.streams_per_turn


def loaded_hashes(states: Sequence[SavedState], topology: Topology, *, is_strict: bool) -> tuple[RowHash, ...] | None:
    """Return the hashes with which a run goes on from saved states; None where a state does not have what is needed."""
    if not (is_strict or have_same_ranks(states[0], topology)):
        return begun_hashes(topology)
    known = dict(all_hashes(states))
    if all(rank in known for rank in topology.own_ranks):
        return tuple(known[rank] for rank in topology.own_ranks)
    has_delivered = any(state.batches_delivered for state in states)
    return None if has_delivered else begun_hashes(topology)


def have_same_ranks(saved: SavedState, topology: Topology) -> bool:
    """Whether planned ranks go on delivering, after an elastic load, as the same ranks: those of a virtual topology."""
    return topology.virtual_ranks is not None and saved.settings["virtual_ranks"] == topology.virtual_ranks


def all_hashes(states: Sequence[SavedState]) -> RankHashes:
    """Return the hashes of all planned ranks of these states; none if a state has none."""
    if any(state.hashes is None for state in states):
        return ()
    return tuple(sorted(entry for state in states for entry in state.hashes or ()))
