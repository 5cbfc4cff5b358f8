"""Helpers for many ranks: gather states, compare plans, make steps together, write checkpoints.

Only these helpers call ``torch.distributed``, and only users call these helpers: the loader communicates with no rank.
"""

from torch_dataloader_utils.distributed.checkpoints import load_rank_state, save_rank_state
from torch_dataloader_utils.distributed.entries import CheckpointEntry
from torch_dataloader_utils.distributed.gather import (
    Planned,
    Stateful,
    broadcast_states,
    gather_states,
    load_gathered,
    own_state,
    require_same_plan,
)
from torch_dataloader_utils.distributed.read_states import read_states
from torch_dataloader_utils.distributed.steps import in_step

__all__ = [
    "CheckpointEntry",
    "Planned",
    "Stateful",
    "broadcast_states",
    "gather_states",
    "in_step",
    "load_gathered",
    "load_rank_state",
    "own_state",
    "read_states",
    "require_same_plan",
    "save_rank_state",
]
