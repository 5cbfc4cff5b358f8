"""A loader as an entry in a checkpoint of torch.distributed.checkpoint."""

from __future__ import annotations

import json
from typing import Any

from torch_dataloader_utils.distributed.gather import Stateful

__all__ = ["CheckpointEntry"]


class CheckpointEntry:
    """A loader's entry in a ``torch.distributed.checkpoint``: a Stateful with one string, named after its rank.

    Such a checkpoint keeps one value per name, whichever rank wrote it, and loads only names that exist before
    loading. A loader's state differs between ranks, and its keys change. So the whole state is saved as one string:
    ``dcp.save({"loader": CheckpointEntry(loader)}, checkpoint_id=directory)``, and the same with ``dcp.load``.

    Args:
        source: This rank's loader or dataset.
    """

    def __init__(self, source: Stateful) -> None:
        self._source = source

    def state_dict(self) -> dict[str, str]:
        """Return this rank's state as JSON, with the rank and the number of ranks in its name."""
        state = self._source.state_dict()
        return {_entry_name(state): json.dumps(state)}

    def load_state_dict(self, entry: dict[str, str]) -> None:
        """Load this rank's state.

        Raises:
            CheckpointMismatchError: If the state was saved under another plan.
        """
        self._source.load_state_dict(json.loads(entry[_entry_name(self._source.state_dict())]))


def _entry_name(state: dict[str, Any]) -> str:
    return f"rank-{state['rank']}-of-{state['num_ranks']}"
