"""One file for the state of each rank."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

from torch_dataloader_utils.distributed.gather import Stateful

__all__ = ["load_rank_state", "save_rank_state"]


def save_rank_state(source: Stateful, directory: str | os.PathLike[str]) -> Path:
    """Write this rank's state to its own file, atomically: after a crash the file is the old one or the new one.

    Args:
        source: This rank's loader or dataset.
        directory: This checkpoint's directory; it is created if it does not exist.

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
    """Load this rank's state from the file that `save_rank_state` wrote, or all ranks' states where they are needed.

    Args:
        source: This rank's loader or dataset.
        directory: The checkpoint's directory. It holds the states of one checkpoint only.
        strict: Whether the run must be the one that saved the states, or have the same virtual topology; see
            `StructuredDataset.load_state_dict`. All ranks' files are read if False, and with a virtual topology.
        on_changed_files: How to handle files that have changed, where `strict` is False.

    Raises:
        FileNotFoundError: If there is no file of this rank and this number of ranks, or no file at all.
        CheckpointMismatchError: If the state was saved under another plan.
        RankMismatchError: If states of several ranks are needed and some are missing.
    """
    current = source.state_dict()
    found = sorted(Path(directory).glob("loader-*.json"))
    path = _rank_path(Path(directory), current["rank"], current["num_ranks"])
    needed = [path] if strict and current["plan"]["virtual_ranks"] is None else found
    if not needed or not set(needed) <= set(found):
        msg = f"there is no {path}; the directory holds {[path.name for path in found] or 'no states'}"
        raise FileNotFoundError(msg)
    states = [json.loads(path.read_text(encoding="utf-8")) for path in needed]
    source.load_state_dict(states, strict=strict, on_changed_files=on_changed_files)


def _rank_path(directory: Path, rank: int, num_ranks: int) -> Path:
    return directory / f"loader-{rank:05d}-of-{num_ranks:05d}.json"
