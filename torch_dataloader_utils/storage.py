"""Where bytes come from: listing, opening and reading through fsspec, with retries and without secrets in messages."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import posixpath
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any, TypeVar

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.redaction import HTTP, Redactor, without_query

__all__ = ["Listing", "Storage", "StoredFile"]

T = TypeVar("T")

FINAL = (FileNotFoundError, PermissionError, UnreadableFileError)
"""Errors that another attempt does not mend."""

PAUSES_SEC = (0.1, 0.2)
"""Pauses between attempts at a read; s3fs and its like retry beneath this on their own."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as its storage lists it.

    Attributes:
        path: Path relative to the listing's root.
        location: What the storage opens it by.
        size: Size in bytes.
        etag: What the storage calls this version, where it says.
        modified: Modification time as seconds since 1970, where the storage says.
    """

    path: str
    location: str = field(repr=False)
    size: int
    etag: str | None
    modified: float | None


@dataclass(frozen=True, slots=True)
class Listing:
    """The files that a path stands for, sorted, and what their paths are relative to."""

    root: str
    files: tuple[StoredFile, ...]


class Storage:
    """One fsspec filesystem, usable after a fork and after pickling.

    Args:
        url: Any path or URL on it; it says which filesystem.
        options: fsspec's storage options.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self._redactor = Redactor(options or {})
        with self._redactor.errors(url, ValueError, ImportError):
            self._fs, _ = fsspec.core.url_to_fs(url, **(options or {}))
        self._pid = os.getpid()

    @property
    def fs(self) -> Any:
        """The filesystem; made anew after a fork, for connections and event loops do not survive one."""
        if self._pid != os.getpid():
            self._fs = pickle.loads(pickle.dumps(self._fs))  # noqa: S301 - our own bytes, made on this line
            self._pid = os.getpid()
        return self._fs

    @property
    def is_http(self) -> bool:
        """Whether files are http URLs, whose query says nothing about which file it is."""
        protocols = self._fs.protocol
        return bool(HTTP.intersection([protocols] if isinstance(protocols, str) else protocols))

    @property
    def is_local(self) -> bool:
        """Whether files lie on this machine and can be memory-mapped."""
        return type(self._fs) is LocalFileSystem

    def list_files(self, urls: Sequence[str], suffixes: Sequence[str]) -> Listing:
        """List files, directories in depth, and globs.

        Hidden files and those that begin with an underscore are passed over, and so are other suffixes, unless a
        file is named in full.

        Args:
            urls: What to list.
            suffixes: Endings of the format's files, in lower case.

        Returns:
            The files, sorted by path under their common root.

        Raises:
            FileNotFoundError: If a URL stands for no file; the message says what was looked for.
            ValueError: If a file is named twice.
        """
        self.fs.invalidate_cache()
        found: list[dict[str, Any]] = []
        bases = []
        for url in urls:
            with self._redactor.errors(url, ValueError):
                base, infos = self._list_one(url, suffixes)
            bases.append(base)
            found += infos
        root = bases[0] if len(bases) == 1 else _common_directory(bases)
        files = sorted((self._stored(info, root) for info in found), key=lambda file: file.path)
        twice = next((file for file, other in pairwise(files) if file.path == other.path), None)
        if twice is not None:
            msg = f"the file {self.display(twice.location)!r} is named twice"
            raise ValueError(msg)
        return Listing(self.display(root).rstrip("/"), tuple(files))

    def read(self, file: StoredFile, start: int, stop: int) -> bytes:
        """Read a range of a file's bytes, trying again when the storage fails for a moment."""
        with self.errors(file.location):
            return self.attempt(lambda: bytes(self.fs.cat_file(file.location, start=start, end=stop)))

    def open(self, file: StoredFile) -> Any:
        """Open a file for reading by ranges: memory-mapped where it is local.

        Raises:
            FileNotFoundError: If it is gone.
            UnreadableFileError: If it cannot be opened, or its size or etag is no longer the listed one.
        """
        with self.errors(file.location):
            opened = self.attempt(lambda: self._open(file))
        if self.is_local:
            size, etag = opened.size(), None
        else:
            size, etag = opened.size, _etag(getattr(opened, "details", None) or {})
        if size != file.size or (etag and file.etag and etag != file.etag):
            opened.close()
            then, now = (f"{file.size} bytes", f"{size} bytes") if size != file.size else (file.etag, etag)
            msg = f"{self.display(file.location)} changed since it was listed: {then} then, {now} now"
            raise UnreadableFileError(msg)
        return opened

    def attempt(self, action: Callable[[], T]) -> T:
        """Read something, trying again when the storage fails for a moment."""
        for pause in PAUSES_SEC:
            try:
                return action()
            except FINAL:  # noqa: PERF203 - a try costs nothing beside a read
                raise
            except Exception:  # noqa: BLE001 - storages raise errors of their own kinds
                time.sleep(pause)
        return action()

    def errors(self, place: str) -> contextlib.AbstractContextManager[None]:
        """Turn whatever is raised within into an error that names the place and holds no secret."""
        return self._redactor.errors(place)

    def display(self, location: str) -> str:
        """Return a location as people may see it: a URL, or a plain path if local, without credentials or query."""
        if self.is_local:
            return location
        return self._redactor.clean(str(self._fs.unstrip_protocol(location)))

    def _open(self, file: StoredFile) -> Any:
        if self.is_local:
            return pa.memory_map(file.location)
        return self.fs.open(file.location, "rb", cache_type="none")

    def _list_one(self, url: str, suffixes: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
        """Return a URL's own root and the files it stands for."""
        location = str(self.fs._strip_protocol(url))  # noqa: SLF001 - fsspec's documented way to a path
        if isinstance(self._fs, LocalFileSystem):
            location = posixpath.normpath(location)  # one name for one file
        try:
            info = self.fs.info(location)
        except FileNotFoundError:
            info = None
        if info and info["type"] == "file":
            return posixpath.dirname(location), [info]
        if info:
            found = list(self.fs.find(location, detail=True).values())
            base = location
        elif len(plain := re.split(r"[*\[]" if self.is_http else r"[*?\[]", location, maxsplit=1)) > 1:
            found = self._glob(location)
            base = posixpath.dirname(plain[0])
        else:
            msg = f"there is no file or directory {self.display(location)!r}"
            raise FileNotFoundError(msg)
        wanted = [info for info in found if _is_data(_relative(info["name"], base), suffixes)]
        if not wanted:
            passed_over = f", only {len(found)} others, such as {self.display(found[0]['name'])!r}" if found else ""
            msg = f"found no {' or '.join(suffixes)} file at {self.display(location)!r}{passed_over}"
            raise FileNotFoundError(msg)
        return base, wanted

    def _glob(self, pattern: str) -> list[dict[str, Any]]:
        """Return the files that a pattern matches, and those in directories that it matches."""
        found: dict[str, dict[str, Any]] = {}
        for path, info in self.fs.glob(pattern, detail=True).items():
            found |= self.fs.find(path, detail=True) if info["type"] == "directory" else {path: info}
        return list(found.values())

    def _stored(self, info: Mapping[str, Any], root: str) -> StoredFile:
        location = str(info["name"])
        if location != location.encode(errors="replace").decode():
            msg = f"the file name {location!a} is no valid text: rename the file"
            raise UnreadableFileError(msg)
        size = info["size"]
        if size is None:
            msg = f"{self.display(location)}: the storage does not tell the size"
            raise UnreadableFileError(msg)
        modified = info.get("mtime") or info.get("LastModified") or info.get("last_modified")
        seconds = modified.timestamp() if isinstance(modified, datetime) else modified
        return StoredFile(
            path=_relative(without_query(location) if self.is_http else location, root),
            location=location,
            size=int(size),
            etag=_etag(info),
            modified=float(seconds) if isinstance(seconds, (int, float)) else None,
        )


def _etag(info: Mapping[str, Any]) -> str | None:
    etag = info.get("ETag") or info.get("etag")
    return str(etag).strip('"') if etag else None


def _is_data(path: str, suffixes: Sequence[str]) -> bool:
    """Whether a listed path is data: no hidden or underscored part (``_date=1`` is a partition), a known suffix."""
    parts = path.split("/")
    hidden = any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in parts)
    return not hidden and path.lower().endswith(tuple(suffixes))


def _common_directory(directories: Iterable[str]) -> str:
    """Return what paths have in common, segment by segment; unlike os.path.commonpath, also for bucket/key."""
    segments = zip(*(directory.split("/") for directory in directories), strict=False)
    return "/".join(one[0] for one in itertools.takewhile(lambda one: len(set(one)) == 1, segments))


def _relative(location: str, root: str) -> str:
    return location.removeprefix(root).lstrip("/")
