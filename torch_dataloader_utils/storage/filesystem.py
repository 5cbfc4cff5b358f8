"""Opening and reading files through fsspec, with retries and without secrets in messages."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.storage.attempts import DEFAULT_TIMEOUT_SEC, Retry, attempt, in_background, within
from torch_dataloader_utils.storage.causes import NoRangeError, most_attempts, most_attempts_locally
from torch_dataloader_utils.storage.forks import hold_filesystems, release_filesystems
from torch_dataloader_utils.storage.local_file import (
    LocalFile,
    MappedFile,
    RangedFile,
    filesystem_type,
    may_be_mapped,
    read_local,
    size_of,
)
from torch_dataloader_utils.storage.obstore import s3 as obstore_s3
from torch_dataloader_utils.storage.range_stream import RangeStream, ReceivedRange
from torch_dataloader_utils.storage.redaction import Redactor
from torch_dataloader_utils.storage.remote_file import RemoteFile, size_and_etag
from torch_dataloader_utils.storage.request_size import RequestSize
from torch_dataloader_utils.storage.stored_file import StoredFile, etag_of
from torch_dataloader_utils.storage.urls import Client, filesystem_of, is_s3, obstore_of

T = TypeVar("T")
L = TypeVar("L", bound=LocalFile)

if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=hold_filesystems, after_in_parent=release_filesystems)

MOST_RETRIES = 1000
"""Failed attempts that are kept until they are taken. Nobody takes them in workers of a plain DataLoader."""


class Storage:
    """One fsspec filesystem, usable after a fork and after pickling. Made by `for_urls`."""

    def __init__(
        self,
        fs: Any,
        redactor: Redactor,
        timeout_sec: float,
        *,
        memory_map: bool | None,
        obstore: obstore_s3.ObstoreS3 | None = None,
    ) -> None:
        self._fs = fs
        self._obstore = obstore
        self._redactor = redactor
        self._timeout_sec = timeout_sec
        self._memory_map = memory_map
        self._pid = os.getpid()
        self._retries: deque[Retry] = deque(maxlen=MOST_RETRIES)
        self._request_size = RequestSize()

    @classmethod
    def for_urls(
        cls,
        urls: Sequence[str],
        options: Mapping[str, Any] | None = None,
        *,
        timeout_sec: float = DEFAULT_TIMEOUT_SEC,
        memory_map: bool | None = None,
        client: Client = "s3fs",
    ) -> tuple[Storage, list[str]]:
        """Return the storage of some paths or URLs, and what it calls each of them.

        URLs may be chained, as in ``simplecache::s3://bucket/key``.

        Args:
            urls: The paths or URLs.
            options: fsspec's.
            timeout_sec: Bounds each operation of the storage, with all its attempts.
            memory_map: Whether local files are mapped into memory; None for those on a file system of this machine.
            client: What reads objects of S3: s3fs; or obstore, where that is usable. `"obstore in other processes"` is
                for a process that is going to fork others, which read with obstore; another one does until the
                `end_opening` of this process, and then this one reads with s3fs.

        Raises:
            ValueError: If they are on several storages, or one is empty.
        """
        if "" in urls:  # which file systems take for the working directory
            raise ValueError("a path is empty: name a file or directory, such as '.' for the working directory")
        options = options or {}
        redactor = Redactor(options, urls)
        obstore = None if client == "s3fs" else obstore_of(urls, options, timeout_sec, client)
        if obstore is not None and obstore.runs_in is not None:
            storage = cls(obstore, redactor, timeout_sec, memory_map=memory_map, obstore=obstore)
            return storage, [url.removeprefix("s3://").rstrip("/") for url in urls]
        fs, locations = filesystem_of(urls, options, redactor)
        return cls(fs, redactor, timeout_sec, memory_map=memory_map, obstore=obstore), locations

    @property
    def fs(self) -> Any:
        """The filesystem. It is made again after a fork, because connections and event loops do not survive one.

        It is s3fs once obstore, which read until then, has no process to run in.
        """
        if self._pid != os.getpid():
            inherited, obstore = self._fs, self._obstore
            if obstore is not None:
                obstore_s3.hold(inherited)
                self._fs = self._obstore = obstore.for_this_process()
            else:
                self._fs = pickle.loads(pickle.dumps(inherited))  # noqa: S301 - our own bytes, made on this line
            self._pid = os.getpid()
        if isinstance(self._fs, obstore_s3.ObstoreS3) and not self._fs.start():
            return self._fs.s3fs
        return self._fs

    def end_opening(self) -> None:
        """End what was started to list files and read footers, before this process forks another."""
        if isinstance(self._fs, obstore_s3.ObstoreS3):
            self._fs.end_process()

    def forget_listings(self) -> None:
        """Forget what the filesystem has listed, and what those have that it wraps.

        In ``dir://data::s3://bucket`` the first would have s3fs forget the listing of the bucket's root alone.
        """
        fs = self.fs
        fs.invalidate_cache()
        while isinstance(fs, AbstractFileSystem) and isinstance(getattr(fs, "fs", None), AbstractFileSystem):
            fs = fs.fs
            fs.invalidate_cache()

    @property
    def is_local(self) -> bool:
        """Whether the files are on this machine."""
        return type(self._fs) is LocalFileSystem

    @property
    def request_size(self) -> RequestSize | None:
        """How many bytes of a file to ask for at once; None where that makes no difference, or nothing tells."""
        return self._request_size if self._is_s3 else None

    @property
    def finds(self) -> bool:
        """Whether the filesystem finds files in depth by requests of its own, and raises where one fails."""
        find = self.fs.find
        package = getattr(find, "__wrapped__", find).__module__.partition(".")[0]
        return is_s3(self._fs) or package not in {"fsspec", "s3fs"}

    def call(self, method: str, location: str, *args: Any, **options: Any) -> Any:
        """Call a method of the filesystem on a location, such as ``"ls"``; try again if the storage fails.

        Raises what the storage raises; see `errors`.
        """

        def action(seconds: float) -> Any:
            function = getattr(self.fs, method)
            return (
                function(location, *args, **options)
                if self.is_local
                else within(seconds, function, location, *args, **options)
            )

        return self._attempt(action, lambda: self.display(location))

    def info_and_below(self, location: str) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
        """Return what the storage says of a location, and what is below it if that came at the same time.

        Both are None where there is nothing. Raises what the storage raises; see `errors`.
        """
        client = self.fs
        try:
            if isinstance(client, obstore_s3.ObstoreS3) and obstore_s3.is_readable(location):
                return self._look_for_both(client, location)
            return self.call("info", location), None
        except FileNotFoundError:
            return None, None

    def _look_for_both(
        self, client: obstore_s3.ObstoreS3, location: str
    ) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
        """Ask for an object of that name and list what is below it, at once: one of the two is there, mostly."""
        listed = in_background(lambda: client.listed(location))  # one attempt: nobody may wait for others
        try:
            return self.call("head", location), None
        except FileNotFoundError:
            pass
        waiting = [listed]

        def action(seconds: float) -> Any:
            fs = self.fs
            found = waiting.pop().result(seconds) if waiting else within(seconds, fs.find, location, detail=True)
            return within(seconds, client.s3fs.find, location, detail=True) if found is None else found

        below = self._attempt(action, lambda: self.display(location))
        if not below and "/" in location:
            raise FileNotFoundError(location)
        return client.directory(location), below

    def read(self, file: StoredFile, start: int, stop: int) -> bytes:
        """Read a range of a file's bytes, of the version that was listed if the storage knows it."""
        if self.is_local:
            try:  # of thousands of footers, nearly all are read at once
                return read_local(file.location, start, stop)
            except OSError:
                pass
        with self.errors(file.location):
            if self.is_local:
                return self._attempt(lambda _: read_local(file.location, start, stop), lambda: file.location)
            remote = self.opened_at_once(file) or RemoteFile(file, partial(self._cat, file.location))
            return bytes(self._fetch_remote(remote, start, stop, lambda: self.display(file.location)))

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

    def opened_at_once(self, file: StoredFile) -> RemoteFile | None:
        """Return a file to read ranges of, or None if it takes a request to open it.

        It takes none where only the listed version is read: of an object of S3 with an etag.
        """
        if not self._is_s3 or file.etag is None:
            return None

        def fetch(seconds: float, start: int, stop: int) -> bytes | pa.Buffer:
            if isinstance(self.fs, obstore_s3.ObstoreS3) and self.fs.uses_http(stop - start):
                stream = RangeStream(begin, (start, stop), None, seconds, self._request_size.note)
                return stream.read(seconds, start, stop)
            content, answer = within(seconds, self.fs.get_range, file.location, start, stop, file.etag)
            self._request_size.note(answer)
            return content

        def begin(seconds: float, start: int, stop: int, part: int) -> ReceivedRange:
            begun: ReceivedRange = within(seconds, self.fs.begin_range, file.location, start, stop, file.etag, part)
            return begun

        return RemoteFile(file, fetch, begin)

    def _open_local(self, file: StoredFile, kind: type[L]) -> L:
        with self.errors(file.location):
            size = self._attempt(lambda _: size_of(file.location), lambda: file.location)
        self._require_version(file, size, None)  # before it is opened: an empty file cannot be mapped
        with self.errors(file.location):
            opened = self._attempt(lambda _: kind(file.location), lambda: file.location)
        self._require_version(file, opened.size, None)
        return opened

    def _open_remote(self, file: StoredFile) -> RemoteFile:
        opened = self.opened_at_once(file)
        if opened is not None:
            return opened
        with self.errors(file.location):
            if self._is_s3:
                info = self.call("info", file.location)
                self._require_version(file, info["size"], etag_of(info))
                return self.opened_at_once(file._replace(etag=etag_of(info))) or self._opened(file)
            return self._opened(file)

    def _opened(self, file: StoredFile) -> RemoteFile:
        caches = isinstance(self._fs, CachingFileSystem)
        options: dict[str, Any] = {} if caches else {"cache_type": "none"}

        def opened_version() -> tuple[Any, int, str | None]:
            opened = self.fs.open(file.location, "rb", **options)
            return opened, *size_and_etag(opened)

        opened, size, etag = self._attempt(
            lambda seconds: within(seconds, opened_version), lambda: self.display(file.location)
        )
        self._require_version(file, size, etag)
        return RemoteFile.of(file, opened, by_ranges=not caches and isinstance(opened, AbstractBufferedFile))

    def fetch(
        self, opened: RangedFile | RemoteFile, start: int, stop: int, name: Callable[[], str]
    ) -> bytes | pa.Buffer:
        """Read a range of an open file; try again if the storage fails. `name` returns what is read, for messages.

        Raises what the storage raises; see `errors`.
        """
        if isinstance(opened, RangedFile):
            return self._attempt(lambda _: opened.read(start, stop), name)
        return self._fetch_remote(opened, start, stop, name)

    def stream(self, opened: RangedFile | RemoteFile, start: int, stop: int) -> RangeStream | None:
        """Return a range of an open file, to be received in parts; None if its parts are requested.

        What is received by one request has to come within the time that an attempt has: after half of that, the rest is
        requested again.
        """
        if not isinstance(opened, RemoteFile) or opened.begin is None:
            return None
        oldest_sec, note = self._timeout_sec / 4, self._request_size.note
        return RangeStream(opened.begin, (start, stop), opened.file.size, oldest_sec, note)

    def begin(self, stream: RangeStream, start: int, stop: int) -> None:
        """Make the request of a stream before its first part is received, which tries again where this fails."""
        with contextlib.suppress(Exception):
            stream.begin(self._timeout_sec / 2, start, stop)

    def receive(self, stream: RangeStream, start: int, stop: int, name: Callable[[], str]) -> pa.Buffer:
        """Receive the next part of a stream; request the rest of it again if the storage fails.

        Raises what the storage raises; see `errors`.
        """
        return self._attempt(lambda seconds: stream.read(seconds, start, stop), name)

    def _fetch_remote(self, remote: RemoteFile, start: int, stop: int, name: Callable[[], str]) -> bytes | pa.Buffer:
        def action(seconds: float) -> bytes | pa.Buffer:
            content = remote.read(seconds, start, stop)
            if len(content) != stop - start:
                self._require_same_size(remote.file, seconds)
                if len(content) == remote.file.size:
                    msg = f"the whole file of {len(content)} bytes came back of bytes {start} to {stop}: the server "
                    msg += "has to answer requests for a range of bytes, as Python's http.server does not"
                    raise NoRangeError(msg)
                raise OSError(f"{len(content)} bytes came back of bytes {start} to {stop}")
            return content

        return self._attempt(action, name)

    def _require_same_size(self, file: StoredFile, seconds: float) -> None:
        """Raise if a file has another size than it was listed with. S3 answers with the listed version only."""
        if not self._is_s3:
            self.forget_listings()
            info = within(seconds, self.fs.info, file.location)
            self._require_version(file, info["size"], etag_of(info))

    @property
    def _is_s3(self) -> bool:
        """Whether it reads any version of an object of S3 that it is asked for by its etag."""
        return is_s3(self._fs) and not self._fs.version_aware

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
            on_retry=self._retries.append,
        )

    def take_retries(self) -> tuple[Retry, ...]:
        """Return the attempts of this process that failed and were followed by others, since the last call."""
        retries = self._retries
        return tuple(retries.popleft() for _ in range(len(retries)))  # no other thread takes them

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
