"""Opening and reading files through fsspec, with retries and without secrets in messages."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.storage.local_file import (
    LocalFile,
    MappedFile,
    RangedFile,
    filesystem_type,
    may_be_mapped,
    pread,
)
from torch_dataloader_utils.storage.redaction import Redactor

T = TypeVar("T")
L = TypeVar("L", bound=LocalFile)

FINAL = (FileNotFoundError, PermissionError, UnreadableFileError)
"""Errors that another attempt does not help against."""

PAUSES_SEC = (0.1, 0.2)
"""Pauses between attempts at a read, in addition to the retries of s3fs and other filesystems."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as its storage lists it: its path relative to the listing's root, and its location in the storage.

    `etag` is what the storage calls this version, if it does. `modified` is in seconds since 1970, if it is known.
    """

    path: str
    location: str = field(repr=False)
    size: int
    etag: str | None
    modified: float | None


class RemoteFile:
    """A file of a remote storage, for several threads to read ranges of. It is closed when nothing refers to it.

    Args:
        opened: fsspec's open file. A file of s3fs reads only the version of the object that it was opened for.
        by_ranges: Whether it can fetch several ranges at once; else a read waits for the one before it.
    """

    def __init__(self, opened: Any, *, by_ranges: bool) -> None:
        self._opened = opened
        self._by_ranges = by_ranges
        self._one_at_a_time = threading.Lock()
        weakref.finalize(self, opened.close).atexit = False

    def read(self, start: int, stop: int) -> bytes:
        """Read a range; an OSError where it comes back short."""
        if self._by_ranges:
            content = bytes(self._opened._fetch_range(start, stop))  # noqa: SLF001 - how fsspec reads without its caches
        else:
            with self._one_at_a_time:
                self._opened.seek(start)
                content = self._opened.read(stop - start)
        if len(content) != stop - start:
            raise OSError(f"{len(content)} bytes came back of bytes {start} to {stop}")
        return content


class Storage:
    """One fsspec filesystem, usable after a fork and after pickling. Made by `for_urls`."""

    def __init__(self, fs: Any, redactor: Redactor, memory_map: bool | None = None) -> None:  # noqa: FBT001 - as users say it
        self._fs = fs
        self._redactor = redactor
        self._memory_map = memory_map
        self._pid = os.getpid()

    @classmethod
    def for_urls(
        cls, urls: Sequence[str], options: Mapping[str, Any] | None = None, *, memory_map: bool | None = None
    ) -> tuple[Storage, list[str]]:
        """Return the storage of some paths or URLs, and what it calls each of them.

        URLs may be chained, as in ``simplecache::s3://bucket/key``. `memory_map` says whether local files are mapped
        into memory; None for those on a file system of this machine.

        Raises:
            ValueError: If they are on several storages.
        """
        redactor = Redactor(options or {}, urls)
        first: Any = None
        locations = []
        for url in urls:
            with redactor.errors(partial(str, url), ValueError, ImportError):
                # A filesystem may log in as it is made. The log of a table must not choose where to.
                fs, location = _locate(url, options or {}) if _may_share(url, urls[0], options or {}) else (None, "")
            if first is None:
                first = fs
            if fs != first:
                msg = f"{redactor.clean(url)} and {redactor.clean(urls[0])} are on two storages: a dataset has only one"
                raise ValueError(msg)
            locations.append(location)
        return cls(first, redactor, memory_map), locations

    @property
    def fs(self) -> Any:
        """The filesystem. It is made again after a fork, because connections and event loops do not survive one."""
        if self._pid != os.getpid():
            self._fs = pickle.loads(pickle.dumps(self._fs))  # noqa: S301 - our own bytes, made on this line
            self._pid = os.getpid()
        return self._fs

    @property
    def is_local(self) -> bool:
        """Whether the files are on this machine."""
        return type(self._fs) is LocalFileSystem

    def read(self, file: StoredFile, start: int, stop: int) -> bytes:
        """Read a range of a file's bytes; try again if the storage fails for a moment."""
        with self.errors(file.location):
            if self.is_local:
                return self.attempt(partial(_read_local, file.location, start, stop))
            return bytes(self.attempt(partial(self.fs.cat_file, file.location, start=start, end=stop)))

    def maps(self, file: StoredFile) -> bool:
        """Whether a file is mapped into memory; else ranges of it are read."""
        if not self.is_local:
            return False
        if self._memory_map is not None:
            return self._memory_map
        return may_be_mapped(filesystem_type(file.location))

    def open_mapped(self, file: StoredFile) -> MappedFile:
        """Map a local file into memory; raises what `open_ranged` raises."""
        return self._open_local(file, MappedFile)

    def open_ranged(self, file: StoredFile) -> RangedFile | RemoteFile:
        """Open a file to read ranges of it.

        Raises:
            FileNotFoundError: If it is gone.
            UnreadableFileError: If it cannot be opened, or its size or etag is no longer the listed one.
        """
        return self._open_local(file, RangedFile) if self.is_local else self._open_remote(file)

    def _open_local(self, file: StoredFile, kind: type[L]) -> L:
        with self.errors(file.location):
            opened = self.attempt(lambda: kind(file.location))
        self._require_version(file, opened.size, None)
        return opened

    def _open_remote(self, file: StoredFile) -> RemoteFile:
        caches = isinstance(self._fs, CachingFileSystem)
        options: dict[str, Any] = {} if caches else {"cache_type": "none"}
        is_listed = self._is_s3 and file.etag is not None
        if is_listed:
            options["size"] = file.size
        with self.errors(file.location):
            opened = self.attempt(lambda: self.fs.open(file.location, "rb", **options))
            if not (is_listed and _bind(opened, file)):
                self._require_version(file, *_version(opened))
        return RemoteFile(opened, by_ranges=not caches and isinstance(opened, AbstractBufferedFile))

    @property
    def _is_s3(self) -> bool:
        """Whether it is s3fs, which requests the size and version of each file from S3 unless it is given them."""
        return type(self._fs).__module__.partition(".")[0] == "s3fs" and not self._fs.version_aware

    def _require_version(self, file: StoredFile, size: int, etag: str | None) -> None:
        if size != file.size or (etag and file.etag and etag != file.etag):
            then, now = (f"{file.size} bytes", f"{size} bytes") if size != file.size else (file.etag, etag)
            msg = f"{self.display(file.location)} changed since it was listed: {then} then, {now} now"
            raise UnreadableFileError(msg)

    def attempt(self, action: Callable[[], T]) -> T:
        """Read something; try again if the storage fails for a moment."""
        for pause in PAUSES_SEC:
            try:
                return action()
            except FINAL:  # noqa: PERF203 - a try costs nothing compared with a read
                raise
            except Exception:  # noqa: BLE001 - storages raise errors of any type
                time.sleep(pause)
        return action()

    def errors(self, location: str, *kept: type[Exception]) -> contextlib.AbstractContextManager[None]:
        """Turn an error that is raised within into one that names a location and holds no secret: see `Redactor`."""
        return self._redactor.errors(lambda: self.display(location), *kept)

    def errors_at(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Do the same with another name for what is read, such as a row group of a file."""
        return self._redactor.errors(lambda: name)

    def display(self, location: str) -> str:
        """Return a location for messages: a URL, or a plain path if it is local, without credentials and query."""
        if self.is_local:
            return location
        return self._redactor.clean(str(self._fs.unstrip_protocol(location)))


def _read_local(location: str, start: int, stop: int) -> bytes:
    number = os.open(location, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return bytes(pread(number, start, stop))
    finally:
        os.close(number)


def _may_share(url: str, other: str, options: Mapping[str, Any]) -> bool:
    """Whether two URLs have the same protocols, and the same hosts where a storage belongs to one."""

    def storage_of(link: str) -> tuple[Any, dict[str, Any]]:
        protocol, mark, _ = link.partition("://")
        fs_class = fsspec.get_filesystem_class("file" if not mark and _is_plain_path(link) else protocol)
        return fs_class, {**fs_class._get_kwargs_from_urls(link), **options}  # noqa: SLF001 - as fsspec.core does it

    def storages_of(url: str) -> list[tuple[Any, dict[str, Any]]]:
        return list(map(storage_of, [url] if _is_plain_path(url) else url.split("::")))

    return storages_of(url) == storages_of(other)


def _is_plain_path(url: str) -> bool:
    """Whether it is a path, in which two colons are a part of a name."""
    return "://" not in url and url.partition("::")[0] not in fsspec.available_protocols()


def _locate(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return a URL's filesystem and location."""
    if _is_plain_path(url):
        fs = fsspec.filesystem("file", **options)
        return fs, str(fs._strip_protocol(url))  # noqa: SLF001 - fsspec's documented way to a path
    fs, location = fsspec.core.url_to_fs(url, **options)
    return fs, str(location)


def etag_of(info: Mapping[str, Any]) -> str | None:
    """Return a file version's etag, if the storage has one."""
    etag = info.get("ETag") or info.get("etag")
    return str(etag).strip('"') if etag else None


def _bind(opened: Any, file: StoredFile) -> bool:
    """Let an open file of s3fs read only the version that was listed; return whether that is possible."""
    if not isinstance(getattr(opened, "read_kw", None), dict):
        return False
    opened.details = {"name": file.location, "size": file.size, "ETag": f'"{file.etag}"', "type": "file"}
    opened.read_kw = {**opened.read_kw, "IfMatch": f'"{file.etag}"'}
    return True


def _version(opened: Any) -> tuple[int, str | None]:
    """Return the size and etag of an open file. The size of a file in an archive shows only at its end."""
    size = getattr(opened, "size", None)
    if not isinstance(size, int):
        size = opened.seek(0, os.SEEK_END)
        opened.seek(0)
    return size, etag_of(getattr(opened, "details", None) or {})
