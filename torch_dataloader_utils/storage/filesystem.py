"""Opening and reading files through fsspec, with retries and without secrets in messages."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import fsspec
import pyarrow as pa
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.storage.attempts import DEFAULT_TIMEOUT_SEC, attempt, within
from torch_dataloader_utils.storage.causes import most_attempts, most_attempts_locally
from torch_dataloader_utils.storage.forks import hold_filesystems, release_filesystems
from torch_dataloader_utils.storage.redaction import Redactor

T = TypeVar("T")

os.register_at_fork(before=hold_filesystems, after_in_parent=release_filesystems)

S3_MODULE = "torch_dataloader_utils.storage.s3"


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


class LocalFile:
    """A local file that is mapped into memory, and whether it is still as it was when it was opened.

    Reading a mapped file beyond its end kills the process. So its size is checked before every read; a file that
    shrinks during a read still kills the process. Reading without a map would prevent that, but makes an epoch of
    numbers a sixth slower.

    Attributes:
        modified: Its modification time when it was opened: seconds since 1970, as in listings.
        size: Its size in bytes at that time.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.modified = os.stat(path).st_mtime  # noqa: PTH116 - as listings ask
        self._version = self._stat()
        self.size = self._version[0]
        with open(path, "rb") as file:  # noqa: PTH123 - the path as fsspec and os.stat take it
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.file = pa.BufferReader(pa.py_buffer(self._mapped))

    def ends_with(self, content: bytes) -> bool:
        """Whether these are its last bytes. The next read begins at its start."""
        self.file.seek(self.size - len(content))
        is_end = bool(self.file.read(len(content)) == content)
        self.file.seek(0)
        return is_end

    def will_need(self, start: int, stop: int) -> None:
        """Let the system read a range from disk, unless it is in memory."""
        self._advise(mmap.MADV_WILLNEED, start, stop)

    def forget(self, start: int, stop: int) -> None:
        """Release the pages of a range: as long as they are mapped they count as this process's memory."""
        self._advise(mmap.MADV_DONTNEED, start, stop)

    def _advise(self, advice: int, start: int, stop: int) -> None:
        first = start - start % mmap.PAGESIZE
        if stop > first:
            self._mapped.madvise(advice, first, stop - first)

    def require_unchanged(self) -> None:
        """Raise an OSError if the file was written since it was opened: what was read may be neither old nor new."""
        if self._stat() != self._version:
            raise OSError("the file was written while it was read")

    def _stat(self) -> tuple[int, int, int, int]:
        status = os.stat(self._path)  # noqa: PTH116 - of the path: pyarrow's file has no number before release 18
        return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino


@dataclass(frozen=True)  # without slots: they leave no room for a weak reference
class RemoteFile:
    """A file of a remote storage, for several threads to read ranges of.

    `read` gets the seconds after which it is to give up, and the start and the stop of a range.
    """

    file: StoredFile
    read: Callable[[float, int, int], bytes] = field(repr=False)

    @classmethod
    def of(cls, file: StoredFile, opened: Any, *, by_ranges: bool) -> RemoteFile:
        """Return a file that fsspec has opened. It is closed when nothing refers to it.

        `by_ranges` is whether it can fetch several ranges at once; else a read waits for the one before it.
        """
        one_at_a_time = threading.Lock()

        def from_position(start: int, stop: int) -> bytes:
            with one_at_a_time:
                opened.seek(start)
                return bytes(opened.read(stop - start))

        def read(seconds: float, start: int, stop: int) -> bytes:
            fetch = opened._fetch_range if by_ranges else from_position  # noqa: SLF001 - without fsspec's caches
            return bytes(within(seconds, fetch, start, stop))

        remote = cls(file, read)
        weakref.finalize(remote, opened.close).atexit = False
        return remote


class Storage:
    """One fsspec filesystem, usable after a fork and after pickling. Made by `for_urls`."""

    def __init__(self, fs: Any, redactor: Redactor, timeout_sec: float) -> None:
        self._fs = fs
        self._redactor = redactor
        self._timeout_sec = timeout_sec
        self._pid = os.getpid()

    @classmethod
    def for_urls(
        cls, urls: Sequence[str], options: Mapping[str, Any] | None = None, timeout_sec: float = DEFAULT_TIMEOUT_SEC
    ) -> tuple[Storage, list[str]]:
        """Return the storage of some paths or URLs, and what it calls each of them.

        URLs may be chained, as in ``simplecache::s3://bucket/key``. `timeout_sec` bounds each operation of the storage,
        with all its attempts.

        Raises:
            ValueError: If they are on several storages.
        """
        redactor = Redactor(options or {}, urls)
        found = []
        for url in urls:
            with redactor.errors(partial(str, url), ValueError, ImportError):
                found.append(_locate(url, options or {}))
        first = found[0][0]
        for url, (fs, _) in zip(urls, found, strict=True):
            if fs != first:
                msg = f"{redactor.clean(url)} and {redactor.clean(urls[0])} are on two storages: a dataset has only one"
                raise ValueError(msg)
        return cls(_without_retries(first), redactor, timeout_sec), [location for _, location in found]

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

    @property
    def finds(self) -> bool:
        """Whether the filesystem finds files in depth by requests of its own, and raises where one fails."""
        find = self.fs.find
        package = getattr(find, "__wrapped__", find).__module__.partition(".")[0]
        return type(self._fs).__module__ == S3_MODULE or package not in {"fsspec", "s3fs"}

    def call(self, method: str, location: str, *args: Any, **options: Any) -> Any:
        """Call a method of the filesystem on a location, such as ``"ls"``; try again if the storage fails.

        Raises what the storage raises; see `errors`.
        """
        function = getattr(self.fs, method)

        def action(seconds: float) -> Any:
            return (
                function(location, *args, **options)
                if self.is_local
                else within(seconds, function, location, *args, **options)
            )

        return self._attempt(action, lambda: self.display(location))

    def read(self, file: StoredFile, start: int, stop: int) -> bytes:
        """Read a range of a file's bytes, of the version that was listed if the storage knows it."""
        with self.errors(file.location):
            if self.is_local:
                return self._attempt(lambda _: _read_local(file.location, start, stop), lambda: file.location)
            remote = self._bound(file) or RemoteFile(file, partial(self._cat, file.location))
            return self.fetch(remote, start, stop, lambda: self.display(file.location))

    def open_local(self, file: StoredFile) -> LocalFile:
        """Open a local file.

        Raises:
            FileNotFoundError: If it is gone.
            UnreadableFileError: If it cannot be opened, or its size is no longer the listed one.
        """
        with self.errors(file.location):
            opened = self._attempt(lambda _: LocalFile(file.location), lambda: file.location)
        self._require_version(file, opened.size, None)
        return opened

    def open_remote(self, file: StoredFile) -> RemoteFile:
        """Open a file of a remote storage.

        Raises:
            FileNotFoundError: If it is gone.
            UnreadableFileError: If it cannot be opened, or its size or etag is no longer the listed one.
        """
        bound = self._bound(file)
        if bound is not None:
            return bound
        with self.errors(file.location):
            if self._is_s3:
                info = self.call("info", file.location)
                self._require_version(file, info["size"], etag_of(info))
                return self._bound(replace(file, etag=etag_of(info))) or self._opened(file)
            return self._opened(file)

    def _opened(self, file: StoredFile) -> RemoteFile:
        caches = isinstance(self._fs, CachingFileSystem)
        options: dict[str, Any] = {} if caches else {"cache_type": "none"}

        def opened_version() -> tuple[Any, int, str | None]:
            opened = self.fs.open(file.location, "rb", **options)
            return opened, *_version(opened)

        opened, size, etag = self._attempt(
            lambda seconds: within(seconds, opened_version), lambda: self.display(file.location)
        )
        self._require_version(file, size, etag)
        return RemoteFile.of(file, opened, by_ranges=not caches and isinstance(opened, AbstractBufferedFile))

    def fetch(self, remote: RemoteFile, start: int, stop: int, name: Callable[[], str]) -> bytes:
        """Read a range of an open file; try again if the storage fails. `name` returns what is read, for messages.

        Raises what the storage raises; see `errors`.
        """

        def action(seconds: float) -> bytes:
            content = remote.read(seconds, start, stop)
            if len(content) != stop - start:
                self._require_same_size(remote.file, seconds)
                raise OSError(f"{len(content)} bytes came back of bytes {start} to {stop}")
            return content

        return self._attempt(action, name)

    def _require_same_size(self, file: StoredFile, seconds: float) -> None:
        """Raise if a file has another size than it was listed with. S3 answers with the listed version only."""
        if not self._is_s3:
            self.fs.invalidate_cache()
            info = within(seconds, self.fs.info, file.location)
            self._require_version(file, info["size"], etag_of(info))

    @property
    def _is_s3(self) -> bool:
        """Whether it is s3fs, which reads any version of an object that it is asked for by its etag."""
        return type(self._fs).__module__ == S3_MODULE and not self._fs.version_aware

    def _bound(self, file: StoredFile) -> RemoteFile | None:
        """Return an object of S3 of which only the version with the listed etag is read, if it has one."""
        if not self._is_s3 or file.etag is None:
            return None

        def fetch(seconds: float, start: int, stop: int) -> bytes:
            return bytes(within(seconds, self.fs.get_range, file.location, start, stop, file.etag))

        return RemoteFile(file, fetch)

    def _cat(self, location: str, seconds: float, start: int, stop: int) -> bytes:
        return bytes(within(seconds, self.fs.cat_file, location, start=start, end=stop))

    def _require_version(self, file: StoredFile, size: int | None, etag: str | None) -> None:
        if size != file.size or (etag and file.etag and etag != file.etag):
            then, now = (f"{file.size} bytes", f"{size} bytes") if size != file.size else (file.etag, etag)
            msg = f"{self.display(file.location)} changed since it was listed: {then} then, {now} now"
            raise UnreadableFileError(msg)

    def _attempt(self, action: Callable[[float], T], name: Callable[[], str]) -> T:
        return attempt(
            action,
            timeout_sec=self._timeout_sec,
            most_attempts=most_attempts_locally if self.is_local else most_attempts,
            name=name,
            clean=self._redactor.clean,
        )

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
        return os.pread(number, stop - start, start)
    finally:
        os.close(number)


def _locate(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return a URL's filesystem and location; two colons in a plain path are part of its name."""
    if "://" not in url and url.partition("::")[0] not in fsspec.available_protocols():
        fs = fsspec.filesystem("file", **options)
        return fs, str(fs._strip_protocol(url))  # noqa: SLF001 - fsspec's documented way to a path
    fs, location = fsspec.core.url_to_fs(url, **options)
    return fs, str(location)


def etag_of(info: Mapping[str, Any]) -> str | None:
    """Return a file version's etag, if the storage has one."""
    etag = info.get("ETag") or info.get("etag")
    return str(etag).strip('"') if etag else None


def _without_retries(fs: Any) -> Any:
    """Return s3fs without its own retries; another filesystem as it is."""
    if f"{type(fs).__module__}.{type(fs).__qualname__}" == "s3fs.core.S3FileSystem":
        return import_module(S3_MODULE).OneAttemptS3.of(fs)  # where s3fs is imported anyway
    return fs


def _version(opened: Any) -> tuple[int, str | None]:
    """Return the size and etag of an open file. The size of a file in an archive shows only at its end."""
    size = getattr(opened, "size", None)
    if not isinstance(size, int):
        size = opened.seek(0, os.SEEK_END)
        opened.seek(0)
    return size, etag_of(getattr(opened, "details", None) or {})
