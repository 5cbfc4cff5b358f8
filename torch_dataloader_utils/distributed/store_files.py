"""The files of a `CheckpointStore`: which checkpoints are complete, whether one is whole, and what may be deleted.

Each checkpoint has a directory of its own, with a name that is never used again, so that the files of two saves never
mix. A marker in it, written last and in one request, makes it visible: object stores cannot rename a directory. What
is deleted loses its marker first. One process reads and writes here; it does not communicate.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import posixpath
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import fsspec

from torch_dataloader_utils.errors import CheckpointStoreError, shown
from torch_dataloader_utils.storage.atomic_write import sync_directory, write_atomically
from torch_dataloader_utils.storage.attempts import DEFAULT_TIMEOUT_SEC
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.listing import GLOB
from torch_dataloader_utils.storage.urls import is_s3

LOG = logging.getLogger("torch_dataloader_utils")

MARKER = "checkpoint.json"
METADATA = ".metadata"
"""The file that torch.distributed.checkpoint writes last, and reads first."""
FORMAT = "torch_dataloader_utils.CheckpointStore"
VERSION = 1

_DIRECTORY = re.compile(r"step-(\d{10,})-save-(\d{6,})-[0-9a-f]{8}")
_WRITTEN = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|checkpoint\.(json|[0-9a-f]{32}\.unfinished)")
"""The names of what the store writes, and nothing else in its directories."""

LISTED_AGAIN = 2
"""How often the same names have to be listed again, one after the other, where none of them is found to be complete."""

_CUT_TOKEN = re.compile(r'"([^"\\\x00-\x1f]|\\.)*\\?|(?<=\\)u[0-9a-f]{0,4}|[-NIfnt]\w*|(\.\d*)?([eE][-+]?)?')
"""What is left of a JSON text that was cut short, from where a parser finds no whole token."""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A complete checkpoint of a `CheckpointStore`.

    Attributes:
        step: The step that it was saved at.
        metrics: The metrics that it was saved with.
        parts: What it holds, such as ``("loader", "model", "optimizer")``.
        url: Its directory, which `torch.distributed.checkpoint` itself reads, too.
    """

    step: int
    metrics: Mapping[str, float]
    parts: tuple[str, ...]
    url: str
    number: int = field(repr=False)
    """How many saves came before it: the last one saved has the highest."""
    files: Mapping[str, int] = field(repr=False)
    """The size of each of its files."""
    metadata_digest: str = field(repr=False)

    @property
    def name(self) -> str:
        """The name of its directory."""
        return posixpath.basename(self.url)


@dataclass(frozen=True, slots=True)
class Best:
    """Which checkpoints are the best: the first `count` of them by a metric."""

    metric: str
    mode: str
    count: int

    def of(self, checkpoints: Collection[StoredCheckpoint]) -> list[StoredCheckpoint]:
        """Return the best ones, the best first. Of equal ones the later comes first; NaN and no value do not count."""
        sign = 1 if self.mode == "min" else -1
        measured = [found for found in checkpoints if not math.isnan(found.metrics.get(self.metric, math.nan))]
        measured.sort(key=lambda found: (sign * found.metrics[self.metric], -found.number))
        return measured[: self.count]


def expired(
    checkpoints: Collection[StoredCheckpoint], keep_last: int | None, keep_best: Best | None, in_use: Collection[str]
) -> list[StoredCheckpoint]:
    """Return which checkpoints are to be deleted, oldest first. One that was saved again at its step is replaced."""
    in_order = sorted(checkpoints, key=lambda found: found.number)
    current = list({found.step: found for found in in_order}.values())
    kept = sorted(current, key=lambda found: found.number)[-keep_last if keep_last else 0 :]
    kept += keep_best.of(current) if keep_best else []
    names = {found.name for found in kept} | set(in_use)
    return [found for found in in_order if found.name not in names]


class StoreFiles:
    """The directory of a store. Errors name files, and hold no secret.

    Args:
        url: The directory.
        storage_options: fsspec's.
        timeout_sec: Bounds each operation of the storage, with all its attempts.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None,
        timeout_sec: float = DEFAULT_TIMEOUT_SEC,
    ) -> None:
        self.storage, [location] = Storage.for_urls([os.fspath(url)], storage_options, timeout_sec=timeout_sec)
        self._root = location.rstrip("/")
        self._url, self._options = os.fspath(url), dict(storage_options or {})
        self._known: dict[str, StoredCheckpoint] = {}

    @property
    def url(self) -> str:
        """The directory, for messages."""
        return self.storage.display(self._root)

    def location(self, name: str) -> str:
        """Return what the storage calls a checkpoint's directory."""
        return f"{self._root}/{name}"

    def url_of(self, name: str) -> str:
        """Return a checkpoint's directory, for messages."""
        return self.storage.display(self.location(name))

    @property
    def writing_fs(self) -> Any:
        """The filesystem with its own retries, for large files; None for this machine's."""
        return None if self.storage.is_local else fsspec.core.url_to_fs(self._url, **self._options)[0]

    def errors(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Turn an error into one that names a checkpoint and holds no secret."""
        return self.storage.errors(self.location(name), CheckpointStoreError)

    @staticmethod
    def names(name: str) -> bool:
        """Whether it is a name that a store gives the directory of a checkpoint."""
        return bool(_DIRECTORY.fullmatch(name))

    def new_name(self, step: int) -> str:
        """Return the name of a new checkpoint's directory. It has never been used."""
        number = max((_number(name) for name in self._names()), default=0) + 1
        return f"step-{step:010d}-save-{number:06d}-{secrets.token_hex(4)}"

    def complete(self) -> list[StoredCheckpoint]:
        """Return all complete checkpoints, in the order of their saves, without those whose marker is refused."""
        return self._complete_of(self._names())

    def _complete_of(self, names: Iterable[str]) -> list[StoredCheckpoint]:
        return [found for name in names if (found := self._if_not_refused(name))]

    def latest(self) -> StoredCheckpoint | None:
        """Return the complete checkpoint that was saved last, or None.

        Raises:
            CheckpointStoreError: If a marker that comes before it is damaged or foreign.
        """
        return self._found(self._last_of)

    def best(self, by: Best) -> StoredCheckpoint | None:
        """Return the best complete checkpoint, or None if none has the metric."""

        def find(names: list[str]) -> StoredCheckpoint | None:
            while best := next(iter(by.of(self._complete_of(names))), None):
                if self._marked_now(best.name) is not None:
                    return best
            return None

        return self._found(find)

    def at_step(self, step: int) -> StoredCheckpoint:
        """Return the complete checkpoint of a step, the last one saved.

        Raises:
            CheckpointStoreError: If it is incomplete, damaged or of another format.
            FileNotFoundError: If there is none.
        """
        if found := self._found(lambda names: self._last_of(name for name in names if _step(name) == step)):
            return found
        names = [name for name in self._names() if _step(name) == step]
        steps = sorted({found.step for found in self.complete()})
        others = f"the complete checkpoints are of steps {shown(steps)}" if steps else "no checkpoint is complete"
        if not names:
            raise FileNotFoundError(f"{self.url} has no checkpoint of step {step}; {others}")
        where = self.url_of(names[-1])
        raise CheckpointStoreError(
            f"{where} is incomplete: it has no whole {MARKER}, so its save did not end; {others}"
        )

    def _last_of(self, names: Iterable[str]) -> StoredCheckpoint | None:
        """Return the complete checkpoint among these, in the order of their saves, that was saved last."""
        return next((found for name in reversed([*names]) if (found := self._marked_now(name))), None)

    def _found(self, find: Callable[[list[str]], StoredCheckpoint | None]) -> StoredCheckpoint | None:
        """Return what is found among the names of checkpoints; None if it is not there, and was not a moment before.

        Another job may complete a checkpoint that was looked at before, or that was not listed, and then delete one
        that was to be looked at. So all are looked at again, until the same names were listed before and after.
        """
        names, stayed = self._names(), 0
        while (found := find(names)) is None and stayed < LISTED_AGAIN:
            before, names = names, self._names()
            stayed = stayed + 1 if names == before else 0
        return found

    def named(self, name: str) -> StoredCheckpoint:
        """Return the complete checkpoint in a directory of this name.

        Raises:
            CheckpointStoreError: If it is incomplete, damaged or of another format.
        """
        found = self._marked(name)
        if found is None:
            where = self.url_of(name)
            raise CheckpointStoreError(f"{where} is incomplete: it has no whole {MARKER}, so its save did not end")
        return found

    def require_whole(self, found: StoredCheckpoint) -> None:
        """Raise if a file of a checkpoint is missing, has another size, or its metadata was changed.

        Raises:
            CheckpointStoreError: The message names the file.
        """
        self._require_files(found.name, found.files)
        if self._digest(found.name) != found.metadata_digest:
            where = self.storage.display(f"{self.location(found.name)}/{METADATA}")
            raise CheckpointStoreError(f"{where} is damaged: its content is not what was saved")

    def commit(
        self, name: str, metrics: Mapping[str, float], parts: Sequence[str], files: Mapping[str, int]
    ) -> StoredCheckpoint:
        """Make a checkpoint visible, after a look at its files: `files` are those that were written, with their sizes.

        Raises:
            CheckpointStoreError: If a file is missing or has another size.
            OSError: If the marker cannot be written.
        """
        self._require_files(name, files)
        files = {**files, METADATA: self._sizes(name)[METADATA]}
        url = self.url_of(name)
        digest = self._digest(name)
        saved = StoredCheckpoint(_step(name), dict(metrics), tuple(parts), url, _number(name), files, digest)
        content = {key: value for key, value in asdict(saved).items() if key != "url"}
        marker = {"format": FORMAT, "version": VERSION, **content}
        text = json.dumps({**marker, "checksum": _checksum(marker)}, indent=1).encode()
        location = f"{self.location(name)}/{MARKER}"
        if self.storage.is_local:
            write_atomically(Path(location), text)
            sync_directory(Path(self._root))
        else:
            with self.storage.errors(location):
                self.storage.call("pipe_file", location, text)
        self._known[name] = saved
        return saved

    def incomplete(self) -> list[str]:
        """Return the names of the directories without a whole marker: their saves did not end."""
        found = []
        for name in self._names():
            with contextlib.suppress(CheckpointStoreError):  # foreign: it stays
                found += [name] if self._marked(name) is None else []
        return found

    def delete(self, name: str) -> None:
        """Delete what the store wrote into a directory, its marker first, and the directory if that is all."""
        location = self.location(name)
        with self.storage.errors(location):
            found = self._list(location, detail=True)
            written = sorted(filter(_WRITTEN.fullmatch, _files_of(found)), key=lambda file: file != MARKER)
            others = [entry for entry in found if entry["name"].rstrip("/") != location.rstrip("/")]
            is_all = len(written) == len(others)  # a directory in it is someone else's
            one_by_one = not is_all or re.search(GLOB, location)  # fsspec's `rm` takes some names for patterns
            for file in written:
                if file == MARKER or one_by_one:
                    self._remove("rm_file", f"{location}/{file}")
            if not one_by_one:
                self._remove("rm", location, recursive=True)
            elif is_all:
                with contextlib.suppress(Exception):  # object stores have no directories
                    self.storage.fs.rmdir(location)
        self._known.pop(name, None)

    def _remove(self, method: str, location: str, **options: Any) -> None:
        try:
            self.storage.call(method, location, **options)
        except FileNotFoundError:
            return  # an attempt before, whose answer was lost, did it

    def _names(self) -> list[str]:
        """Return the names of the directories that the store wrote, complete or not, in the order of the saves."""
        if self.storage.is_local and os.path.lexists(self._root) and not Path(self._root).is_dir():
            raise CheckpointStoreError(f"{self.url} is no directory: a store is the directory above its checkpoints")
        with self.storage.errors(self._root):
            found = [posixpath.basename(file.rstrip("/")) for file in self._list(self._root, detail=False)]
        for file in (MARKER, METADATA):
            if file in found:
                msg = f"{self.url} is a checkpoint by itself, for it has a file {file}; "
                raise CheckpointStoreError(f"{msg}a store is the directory above its checkpoints")
        return sorted(filter(_DIRECTORY.fullmatch, found), key=_number)

    def _sizes(self, name: str) -> dict[str, int]:
        return _files_of(self._list(self.location(name), detail=True))

    def _list(self, location: str, *, detail: bool) -> list[Any]:
        self.storage.forget_listings()
        try:
            return list(self.storage.call("ls", location, detail=detail))
        except FileNotFoundError as error:
            if is_s3(self.storage.fs) and location.rstrip("/") not in str(error):  # it is the bucket that is missing
                raise
            return []

    def _require_files(self, name: str, files: Mapping[str, int]) -> None:
        location = self.location(name)
        with self.storage.errors(location):
            sizes = self._sizes(name)
        for file in sorted({*files, METADATA}):
            where = self.storage.display(f"{location}/{file}")
            if file not in sizes:
                msg = f"{where} is missing; all ranks must write to the same storage, and nothing else may delete files"
                raise CheckpointStoreError(msg)
            if sizes[file] != files.get(file, sizes[file]):
                msg = f"{where} is truncated or changed: it has {sizes[file]} bytes, and was saved with {files[file]}"
                raise CheckpointStoreError(f"{msg}; load another checkpoint with `step`")

    def _digest(self, name: str) -> str:
        location = f"{self.location(name)}/{METADATA}"
        with self.storage.errors(location):
            return hashlib.blake2b(self.storage.call("cat_file", location), digest_size=16).hexdigest()

    def _marker(self, name: str) -> bytes | None:
        location = f"{self.location(name)}/{MARKER}"
        with self.storage.errors(location):
            try:
                return bytes(self.storage.call("cat_file", location))
            except FileNotFoundError:
                return None

    def _if_not_refused(self, name: str) -> StoredCheckpoint | None:
        try:
            return self._marked(name)
        except CheckpointStoreError as error:
            LOG.warning("%s; it is left out", error)
            return None

    def _marked_now(self, name: str) -> StoredCheckpoint | None:
        """Return what `_marked` does, unless another process has deleted the checkpoint since its marker was read."""
        self._known.pop(name, None)
        return self._marked(name)

    def _marked(self, name: str) -> StoredCheckpoint | None:
        """Return a checkpoint as its marker describes it, or None if it has no whole one.

        Raises:
            CheckpointStoreError: If the marker is not this store's, or was changed.
        """
        if name not in self._known:
            marker, url = self._marker(name), self.url_of(name)
            if marker is None or _is_cut(marker):
                return None
            self._known[name] = _parse(marker, name, url)
        return self._known[name]


def _files_of(entries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the files among the entries of a directory, with their sizes."""
    return {posixpath.basename(entry["name"]): entry["size"] for entry in entries if entry["type"] != "directory"}


def _is_cut(text: bytes) -> bool:
    """Whether it is the beginning of a JSON text: where a write is not atomic, a crash leaves a part of a marker."""
    try:
        json.loads(text.decode("ascii"))
    except json.JSONDecodeError as error:
        return _CUT_TOKEN.fullmatch(error.doc, error.pos) is not None
    except (ValueError, RecursionError):
        return False
    return False


def _parse(text: bytes, name: str, url: str) -> StoredCheckpoint:
    where = f"{url}/{MARKER}"
    try:
        marker = json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointStoreError(f"{where} is damaged: it is no JSON") from None
    if not isinstance(marker, dict) or marker.get("format") != FORMAT:
        raise CheckpointStoreError(f"{where} is foreign: no CheckpointStore wrote it")
    if marker.get("version") != VERSION:
        msg = f"{where} has format version {shown(marker.get('version'))}, and this release reads {VERSION}"
        raise CheckpointStoreError(msg)
    if marker.pop("checksum", None) != _checksum(marker):
        raise CheckpointStoreError(f"{where} is damaged: its checksum is another one")
    if (marker["step"], marker["number"]) != (_step(name), _number(name)):
        raise CheckpointStoreError(f"{where} is foreign: it describes save {marker['number']} of step {marker['step']}")
    content_of = {key: value for key, value in marker.items() if key not in {"format", "version", "parts"}}
    return StoredCheckpoint(url=url, parts=tuple(marker["parts"]), **content_of)


def _checksum(marker: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(marker, sort_keys=True).encode(), digest_size=16).hexdigest()


def _step(name: str) -> int:
    return int(name.split("-")[1])


def _number(name: str) -> int:
    return int(name.split("-")[3])
