"""A file for the state of each rank."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

from torch_dataloader_utils.distributed.gather import Stateful

__all__ = ["load_rank_state", "save_rank_state"]


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


def _rank_path(directory: Path, rank: int, num_ranks: int) -> Path:
    return directory / f"loader-{rank:05d}-of-{num_ranks:05d}.json"
