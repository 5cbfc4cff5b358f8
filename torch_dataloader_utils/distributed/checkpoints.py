"""The state of each rank in a file of its own."""

from __future__ import annotations

import fnmatch
import json
import os
import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch_dataloader_utils.distributed.gather import Stateful, parse_json, state_of
from torch_dataloader_utils.errors import DatasetError, shown
from torch_dataloader_utils.storage.atomic_write import write_atomically
from torch_dataloader_utils.storage.filesystem import Storage

RANK_FILES = "loader-*.json"
"""The names of the files of ranks' states."""


def save_rank_state(
    source: Stateful, directory: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> Path | str:
    """Write this rank's state to its own file, atomically: after a crash the file is the old one or the new one.

    On a local disk the file is written under another name, flushed to the disk, and renamed. On other storages it is
    written in one request, which object stores do atomically.

    Args:
        source: This rank's loader or dataset.
        directory: This checkpoint's directory, as a path or as a URL of any storage that fsspec opens. A local one is
            created if it does not exist.
        storage_options: fsspec's options for the storage, such as credentials.

    Returns:
        The file, named after the rank and the number of ranks: a path, or a URL as a string.

    Raises:
        OSError: If it cannot be written; the message names the file.
    """
    state = state_of(source)
    storage, location = _open_directory(directory, storage_options)
    name = _file_name(state["rank"], state["num_ranks"])
    content = json.dumps(state).encode()
    if storage.is_local:
        path = Path(location, name)
        write_atomically(path, content)
        return path
    with storage.errors(f"{location}/{name}"):
        storage.call("pipe_file", f"{location}/{name}", content)
    return storage.display(f"{location}/{name}")


def load_rank_state(
    source: Stateful,
    directory: str | os.PathLike[str],
    *,
    strict: bool = True,
    on_changed_files: Literal["error", "continue"] = "error",
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Load this rank's state from the file that `save_rank_state` wrote, or all ranks' states where they are needed.

    Args:
        source: This rank's loader or dataset.
        directory: The checkpoint's directory. It holds the states of one checkpoint only.
        strict: Whether the run must be the one that saved the states, or have the same virtual topology; see
            `StructuredDataset.load_state_dict`. All ranks' files are read if False, and with a virtual topology.
        on_changed_files: How to handle files that have changed, where `strict` is False.
        storage_options: fsspec's options for the storage, such as credentials.

    Raises:
        FileNotFoundError: If there is no file of this rank and this number of ranks, or no file at all.
        OSError: If a file cannot be read; the message names it.
        ValueError: If a file is no state; the message names it.
        CheckpointMismatchError: If the state was saved under another plan.
        RankMismatchError: If states of several ranks are needed and some are missing.
    """
    current = state_of(source)
    storage, location = _open_directory(directory, storage_options)
    with storage.errors(location):
        storage.forget_listings()
        found = _states_in(storage, location)
    own = _file_name(current["rank"], current["num_ranks"])
    needed = [own] if strict and current["plan"]["virtual_ranks"] is None else found
    if not needed or not set(needed) <= set(found):
        name = storage.display(f"{location}/{own}")
        if not found:
            raise FileNotFoundError(f"there is no {name}, and no state of another rank: is this the directory?")
        msg = f"there is no {name}; the directory holds {shown(found)}"
        if not any(file.endswith(own[own.index("-of-") :]) for file in found):
            msg += ", of another number of ranks: with strict=False the rest is planned again for these"
        raise FileNotFoundError(msg)
    states = [_read_state(storage, f"{location}/{name}") for name in needed]
    try:
        source.load_state_dict(states, strict=strict, on_changed_files=on_changed_files)
    except DatasetError:
        raise
    except ValueError as error:
        files = storage.display(f"{location}/{needed[0]}") + (" and others" if len(needed) > 1 else "")
        raise ValueError(f"{files}: {error}") from None


def _states_in(storage: Storage, location: str) -> list[str]:
    """Return the names of the files of states in a directory; none if there is no such directory."""
    try:
        listed = storage.call("ls", location, detail=False)
    except FileNotFoundError:
        return []
    return sorted(fnmatch.filter(map(posixpath.basename, listed), RANK_FILES))


def _open_directory(
    directory: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
) -> tuple[Storage, str]:
    """Return the storage of a checkpoint's directory, and what the storage calls it."""
    storage, [location] = Storage.for_urls([os.fspath(directory)], storage_options)
    return storage, location.rstrip("/")


def _file_name(rank: int, num_ranks: int) -> str:
    return f"loader-{rank:05d}-of-{num_ranks:05d}.json"


def _read_state(storage: Storage, location: str) -> Any:
    with storage.errors(location):
        content = storage.call("cat_file", location)
    return parse_json(content, storage.display(location))
