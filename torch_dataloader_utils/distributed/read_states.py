"""States from wherever they were saved: files, directories, checkpoints of frameworks, a `CheckpointStore`."""

from __future__ import annotations

import fnmatch
import io
import os
import posixpath
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch_dataloader_utils.distributed.checkpoints import RANK_FILES
from torch_dataloader_utils.distributed.entries import ALL_RANKS
from torch_dataloader_utils.distributed.find_states import EXPECTED, OWN_RANK, States, find_states
from torch_dataloader_utils.distributed.gather import parse_json
from torch_dataloader_utils.distributed.plain_values import MOST_BYTES, entries_of, torch_saved
from torch_dataloader_utils.distributed.store_files import METADATA, StoreFiles
from torch_dataloader_utils.errors import shown
from torch_dataloader_utils.loader.arguments import require_timeout
from torch_dataloader_utils.storage.attempts import DEFAULT_TIMEOUT_SEC
from torch_dataloader_utils.storage.file_object import open_stored, stored_file
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.stored_file import StoredFile

ADAPTERS_FILES = ("loader.pt", "custom_checkpoint_*.pkl", "meta.pt")
"""Files in the checkpoints of Transformers, of Accelerate, and of Lightning where a strategy saves a directory."""

FIRST_BYTES = 8

TORCH = b"PK\x03\x04"
"""The first bytes of a file that ``torch.save`` wrote: a zip archive."""


def read_states(
    source: Any,
    storage_options: Mapping[str, Any] | None = None,
    *,
    key: str | None = None,
    storage_timeout: float = DEFAULT_TIMEOUT_SEC,
) -> list[dict[str, Any]]:
    """Return the states that were saved somewhere, as plain values. They are not checked.

    Nothing is unpickled: of a pickle only plain values are read, and no class that it names is loaded. Of large
    checkpoints only what describes them is read, and no tensor.

    Args:
        source: A state; a list of them, such as `gather_states` returns; a dictionary that holds either under some key;
            a `CheckpointStore`, whose latest checkpoint is read. Or a path, or a URL of any storage that fsspec opens,
            of one of these: a JSON file; a file of ``torch.save``, Lightning's ``.ckpt`` too; a directory of
            `save_rank_state`; a directory of ``torch.distributed.checkpoint`` with a `CheckpointEntry`; a directory of
            Accelerate's ``save_state`` or a checkpoint of a Trainer, with this package's adapters; a `CheckpointStore`
            or one checkpoint in it.
        storage_options: fsspec's options for the storage, such as credentials.
        key: The key under which to look where a checkpoint holds the states of several loaders, such as ``"loader"``.
        storage_timeout: Seconds that each operation of the storage may take, with all its attempts.

    Returns:
        The states, by rank where they were saved by rank; one state where one rank's was saved.

    Raises:
        FileNotFoundError: If there is no such file or directory.
        CheckpointStoreError: If a store's checkpoint is incomplete or damaged.
        UnreadableFileError: If a file cannot be read.
        ValueError: If there is no state, or there are those of several loaders. The message says what was found.
        TypeError: If the source is none of these.
    """
    timeout_sec = require_timeout(storage_timeout, "storage_timeout")
    files = getattr(source, "files", None)
    if isinstance(files, StoreFiles):
        return _of_store(files, None, key)
    if isinstance(source, (Mapping, list, tuple)):
        return find_states(source, "the value", key)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"source is {type(source).__name__}: {EXPECTED}, a CheckpointStore, or a path or URL of these")
    url = os.fspath(source)
    storage, [location] = Storage.for_urls([url], storage_options, timeout_sec=timeout_sec)
    with storage.errors(location):
        storage.forget_listings()
        is_directory = storage.call("info", location)["type"] == "directory"
    if not is_directory:
        return find_states(_plain(storage, stored_file(storage, location)), storage.display(location), key)

    def store_of(root: str) -> StoreFiles:
        return StoreFiles(root, storage_options, timeout_sec)

    return _of_directory(url.rstrip("/"), storage, location.rstrip("/"), key, store_of)


def _of_directory(
    url: str,
    storage: Storage,
    location: str,
    key: str | None,
    store_of: Callable[[str], StoreFiles],
) -> States:
    """Return the states in a directory: a store, a checkpoint of one, or any other checkpoint."""
    name = posixpath.basename(location)
    if StoreFiles.names(name):
        return _of_store(store_of(url[: -len(name)]), name, key)
    with storage.errors(location):
        names = sorted(posixpath.basename(found.rstrip("/")) for found in storage.call("ls", location, detail=False))
    found = _in_directory(storage, location, names)
    if found:
        return find_states(found, storage.display(location), key)
    if any(map(StoreFiles.names, names)):
        return _of_store(store_of(url), None, key)
    where = storage.display(location)
    msg = f"{where} holds no states: it has {shown(names) if names else 'no files'}; expected {RANK_FILES} of "
    msg += f"save_rank_state, {METADATA} of torch.distributed.checkpoint, one of {', '.join(ADAPTERS_FILES)}, or the "
    raise ValueError(msg + "checkpoints of a CheckpointStore")


def _of_store(files: StoreFiles, name: str | None, key: str | None) -> States:
    """Return the states in a checkpoint of a store, after a look at its files; None for the latest."""
    found = files.latest() if name is None else files.named(name)
    if found is None:
        raise FileNotFoundError(f"{files.url} has no complete checkpoint")
    files.require_whole(found)
    location = files.location(found.name)
    entries = _in_distributed(files.storage, location)
    if not entries:
        raise ValueError(f"{found.url} holds no state of a loader: it was saved with {', '.join(found.parts)}")
    return find_states(entries, found.url, key)


def _in_directory(storage: Storage, location: str, names: list[str]) -> dict[str, Any]:
    """Return the values in a checkpoint's directory that may hold states, each under a name of its own."""
    found: dict[str, Any] = {}
    if METADATA in names:
        found |= _in_distributed(storage, location)
    ranks = fnmatch.filter(names, RANK_FILES)
    if ranks:
        files = [stored_file(storage, f"{location}/{name}") for name in ranks]
        states = (find_states(_plain(storage, file), storage.display(file.location)) for file in files)
        found[RANK_FILES] = [state for of_rank in states for state in of_rank]
    for pattern in ADAPTERS_FILES:
        for name in fnmatch.filter(names, pattern):
            found[name] = _plain(storage, stored_file(storage, f"{location}/{name}"))
    return found


def _in_distributed(storage: Storage, location: str) -> dict[str, dict[str, Any]]:
    """Return the entries of loaders in a ``torch.distributed.checkpoint``, by the name of what they are entries of."""
    metadata = stored_file(storage, f"{location}/{METADATA}")
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    files: dict[str, StoredFile] = {}
    for entry in entries_of(io.BytesIO(_content(storage, metadata)), storage.display(metadata.location)):
        parent, _, name = entry.name.rpartition(".")
        if name != ALL_RANKS and not OWN_RANK.fullmatch(name):
            continue
        if posixpath.basename(entry.file) != entry.file:
            raise ValueError(f"{storage.display(metadata.location)} names the file {shown(entry.file)} outside of it")
        file = files.get(entry.file) or stored_file(storage, f"{location}/{entry.file}")
        files[entry.file] = file
        stop = entry.start + entry.length
        if not 0 <= entry.start < stop <= file.size:
            raise ValueError(
                f"{storage.display(file.location)} is damaged: {entry.name} is not in its {file.size} bytes"
            )
        content = storage.read(file, entry.start, stop)
        found[parent][name] = torch_saved(io.BytesIO(content), f"{storage.display(file.location)}, {entry.name}")
    return dict(found)


def _plain(storage: Storage, file: StoredFile) -> Any:
    """Return the plain values that a JSON file or one of ``torch.save`` holds."""
    name = storage.display(file.location)
    with open_stored(storage, file) as opened:
        first = opened.read(FIRST_BYTES)
        if first.startswith(TORCH):
            return torch_saved(opened, name)
    if first.lstrip()[:1] in (b"{", b"["):
        return parse_json(_content(storage, file), name)
    kind = "a pickle, or a file of torch.save before its release 1.6" if first[:1] == b"\x80" else "another file"
    what = f"{kind}, which begins with {first!r}" if file.size else "an empty file"
    raise ValueError(f"{name} holds no state of a loader: it is {what}; {EXPECTED}")


def _content(storage: Storage, file: StoredFile) -> bytes:
    if file.size > MOST_BYTES:
        msg = f"{storage.display(file.location)} has {file.size:,} bytes, more than the states of any run"
        raise ValueError(msg)
    return storage.read(file, 0, file.size)
