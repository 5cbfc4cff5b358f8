"""Objects of S3 read by obstore, a client in Rust: it starts in a tenth of the time, and reads beside Python's threads.

It is used where it is installed and certain to read what s3fs would. Its runtime does not survive a fork
(https://github.com/developmentseed/obstore/pull/214), and requests in a forked process would never end. So a process
that was forked after obstore was imported, by whomever, reads with s3fs; one that was forked before may use it. One
that is going to fork others has obstore list files and read footers in another process, and reads with s3fs what it
reads later. Where an endpoint is reached by plain HTTP, obstore signs the requests for ranges, and `plain_http` makes
them.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import posixpath
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib import import_module
from typing import Any, Literal, TypeVar

import fsspec
import pyarrow as pa

from torch_dataloader_utils.storage.attempts import within
from torch_dataloader_utils.storage.causes import require_same_version, told_by_s3
from torch_dataloader_utils.storage.obstore.calls import ObstoreCalls
from torch_dataloader_utils.storage.obstore.plain_http import HttpRange, PlainHttp
from torch_dataloader_utils.storage.obstore.process import ObstoreProcess
from torch_dataloader_utils.storage.range_stream import ReceivedRange
from torch_dataloader_utils.storage.request_size import Answer

T = TypeVar("T")

DEBUGGING = "\n\nDebug source"
"""What comes before the debugging output in a message of obstore."""

STATUS = re.compile(r"status code: (\d{3})")
"""The status of an answer."""

CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""Characters of keys that obstore does not request."""

LEAST_BY_HTTP = 1 << 20
"""Bytes from which on a range is received over plain HTTP. Python takes longer to make a request than obstore does: the
footers of 10,000 files came in 1.1 times the time."""

MOST_STARTS = 2
"""How many processes are started at most to run obstore in, one after the other."""

MOST_AT_ONCE = 1 << 20
"""How many bytes are received at most by one call, for which a thread waits until other Python code lets it go on: with
less, a training loop that keeps Python busy is waited for more often. They are there twice until they are copied."""

LONGER_SEC = 1.0
"""How much longer a request may take than whoever waits for it: they say how long they have waited."""

NO_ACCESS = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})
"""What S3 says, with status 400, of a session token that gives no access."""

_inherited = False
"""Whether this process was forked from one that may have started the runtime."""

_HELD: list[Any] = []
"""In a forked process, what it inherited: to drop it could close connections of the process that it was forked from."""

_RECEIVED: weakref.WeakSet[ObstoreRange | HttpRange] = weakref.WeakSet()
"""What is being received."""


def _note_fork() -> None:
    global _inherited  # noqa: PLW0603 - the runtime is one for the process, too
    _inherited = _inherited or "obstore" in sys.modules
    _HELD.extend(_RECEIVED)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_note_fork)


class ObstoreError(OSError):
    """An error of obstore, in the words of S3 if these came, else in obstore's before its debugging output.

    Attributes:
        status: The HTTP status of the answer; None if none came.
        code: What S3 calls the error; None if it did not say.
    """

    def __init__(self, error: Exception) -> None:
        words = without_debugging(error)
        status = STATUS.search(words)
        self.status = int(status[1]) if status else None
        told = told_by_s3(words, self.status)
        self.code = None if told is None else told[0]
        super().__init__(words if told is None else told[1])


def is_installed() -> bool:
    """Whether obstore is installed."""
    return importlib.util.find_spec("obstore") is not None


def is_usable() -> bool:
    """Whether obstore is installed and works in this process."""
    return not _inherited and is_installed()


def hold(client: Any) -> None:
    """Keep a client that was inherited from the process that this one was forked from."""
    _HELD.append(client)


@dataclass
class ObstoreS3:
    """What `Storage` needs of a filesystem, by obstore; the rest by s3fs, which is imported when that is needed.

    Attributes:
        options: obstore's.
        s3fs_options: The same for s3fs.
        timeout_sec: Seconds for which an attempt waits at most. A request that was given up ends a little later.
        runs_in: Where obstore runs; None where s3fs is to be used in its place.
    """

    options: Mapping[str, Any] = field(repr=False)
    s3fs_options: Mapping[str, Any] = field(repr=False)
    timeout_sec: float
    runs_in: Literal["this process", "another process"] | None = "this process"
    version_aware = False

    def __post_init__(self) -> None:
        self._calls: ObstoreCalls | None = None
        self._http = PlainHttp.of(self.options, self._request_sec)
        self._process: ObstoreProcess | None = None
        self._starts = 0
        self._s3fs: Any = None
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the clients, which cannot be pickled."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make clients when they are needed."""
        self.__dict__.update(state)
        self.__post_init__()

    def __getattr__(self, name: str) -> Any:
        """Return what only s3fs has."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.s3fs, name)

    @property
    def _request_sec(self) -> float:
        return self.timeout_sec + LONGER_SEC

    def for_this_process(self) -> ObstoreS3:
        """Return the same without what a forked process inherits."""
        return replace(self, runs_in="this process" if is_usable() else None)

    @property
    def s3fs(self) -> Any:
        """The same storage by s3fs, without its own retries."""
        with self._lock:
            if self._s3fs is None:
                module = import_module("torch_dataloader_utils.storage.s3")
                self._s3fs = module.OneAttemptS3.of(fsspec.filesystem("s3", **self.s3fs_options))
            return self._s3fs

    def start(self) -> bool:
        """Start the process in which obstore runs, if it does not; return whether obstore can be called.

        One that has ended is started once more. Where none can be started, s3fs is used from then on.
        """
        if self.runs_in == "another process" and not self._has_process():
            with self._lock:
                if not self._has_process() and self._starts < MOST_STARTS:
                    self._starts += 1
                    with suppress(OSError, RuntimeError):  # this system may allow no other process, or thread
                        self._process = ObstoreProcess(self.options, self._request_sec)
                if not self._has_process():
                    self.end_process()
        return self.runs_in is not None

    def _has_process(self) -> bool:
        return self._process is not None and not self._process.has_ended

    def end_process(self) -> None:
        """End the process in which obstore runs, if there is one: s3fs is used from then on."""
        with self._lock:
            if self.runs_in == "another process":
                self.runs_in, self._starts = None, MOST_STARTS
                if self._process is not None:
                    self._process.end()

    def invalidate_cache(self) -> None:
        """Forget the listings that s3fs may have made."""
        if self._s3fs is not None:
            self._s3fs.invalidate_cache()

    def unstrip_protocol(self, location: str) -> str:
        """Return a location as a URL."""
        return f"s3://{location}"

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call obstore, and raise its errors with their HTTP status."""
        return _told(lambda: self._called(method, *arguments))

    def _called(self, method: str, *arguments: Any) -> Any:
        if self.runs_in == "this process":
            with self._lock:
                self._calls = self._calls or ObstoreCalls(self.options, self._request_sec)
            return getattr(self._calls, method)(*arguments)
        if self._process is None:
            raise OSError("the process that reads S3 has not started")
        return self._process.call(method, *arguments)

    def find(self, location: str, *, detail: bool) -> Any:
        """Return the objects below a location: what is known of each, by location."""
        found = self.listed(location) if detail else None
        return self.s3fs.find(location, detail=detail) if found is None else found

    def listed(self, location: str) -> dict[str, dict[str, Any]] | None:
        """Return what `find` does with details; None where only s3fs can."""
        bucket, _, prefix = location.partition("/")
        found = self._call("listed", bucket, prefix, None) if is_readable(location) else None
        infos = None if found is None else [_info(bucket, each) for each in found]
        return None if infos is None or _may_be_marked(infos) else {info["name"]: info for info in infos}

    def info(self, location: str) -> dict[str, Any]:
        """Return what is known of an object, or that it is a directory."""
        bucket, _, path = location.partition("/")
        if not is_readable(location):
            known: dict[str, Any] = self.s3fs.info(location)
            return known
        try:
            return self.head(location)
        except FileNotFoundError:
            if self._call("listed", bucket, path, 1) == [] and path:
                raise
        return self.directory(location)

    def head(self, location: str) -> dict[str, Any]:
        """Return what is known of an object, or raise a FileNotFoundError. A bucket is none."""
        bucket, _, path = location.partition("/")
        if not path:
            raise FileNotFoundError(location)
        return _info(bucket, self._call("head", bucket, path))

    def directory(self, location: str) -> dict[str, Any]:
        """Return what `info` does of a directory."""
        return {"name": location, "size": 0, "type": "directory"}

    def get_range(self, location: str, start: int, stop: int, etag: str | None) -> tuple[bytes | pa.Buffer, Answer]:
        """Return a range of an object, of one version if there is an etag, and how long the answer took."""
        if not is_readable(location):
            found: tuple[bytes, Answer] = self.s3fs.get_range(location, start, stop, etag)
            return found
        content, answered, extent, waited, received = self._call("get", *_request(location, start, stop, etag))
        self._leave_http()
        _require_same(answered, extent, start, stop, etag)
        return pa.py_buffer(content), Answer(len(content), waited, received)

    def cat_file(self, location: str, *, start: int, end: int) -> bytes:
        """Return a range of an object, of whatever version."""
        return bytes(self.get_range(location, start, end, None)[0])

    def begin_range(self, location: str, start: int, stop: int, etag: str | None, part: int) -> ReceivedRange:
        """Request a range of an object, of one version if there is an etag, to be received in parts of some bytes."""
        if not is_readable(location) or self.runs_in != "this process":
            begun: ReceivedRange = self.s3fs.begin_range(location, start, stop, etag, part)
            return begun
        http = self._http_range(location, start, stop, etag)
        if http is not None:
            return http
        response = self._call("begin", *_request(location, start, stop, etag))
        self._leave_http()
        _require_same(response.meta["e_tag"], response.range, start, stop, etag)
        return ObstoreRange(response.stream(min(part, MOST_AT_ONCE)))

    def uses_http(self, size: int) -> bool:
        """Whether ranges of so many bytes are requested over plain HTTP."""
        return self._http is not None and size >= LEAST_BY_HTTP and self.runs_in == "this process"

    def _http_range(self, location: str, start: int, stop: int, etag: str | None) -> HttpRange | None:
        """Request a range over plain HTTP; None where obstore is to request it."""
        http = self._http
        if http is None or not self.uses_http(stop - start):
            return None
        bucket, path, _ = _request(location, start, stop, etag)
        received = http.get(self._call("signed", bucket, path), start, stop, etag)
        if received is not None:
            _RECEIVED.add(received)
            try:
                _require_same(received.etag, received.extent or (), start, stop, etag)
            except OSError:
                received.close()
                raise
        return received

    def _leave_http(self) -> None:
        """Use obstore alone from now on, which has got an answer, if plain HTTP got none."""
        http = self._http
        if http is not None and http.has_worked is False:
            self._http = None


class ObstoreRange:
    """A range of an object that is received in parts."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")
        _RECEIVED.add(self)

    def read_into(self, memory: memoryview, seconds: float) -> int:
        """Fill memory with the next bytes, and return how many came; fewer only if the answer ends before them.

        Raises:
            TimeoutError: If they take longer.
        """
        return _told(partial(within, seconds, self._read_all, memory))

    def _read_all(self, memory: memoryview) -> int:
        size = len(memory)
        while memory:
            piece = self._rest or memoryview(next(self._pieces, b""))
            if not piece:
                break
            taken = piece[: len(memory)]
            memory[: len(taken)] = taken
            memory, self._rest = memory[len(taken) :], piece[len(taken) :]
        return size - len(memory)

    def close(self) -> None:
        """Receive nothing more."""
        self._pieces, self._rest = iter(()), memoryview(b"")


def without_debugging(error: Exception) -> str:
    """Return the message of an error of obstore without its debugging output."""
    return str(error).partition(DEBUGGING)[0]


def is_readable(location: str) -> bool:
    """Whether obstore reads an object there, or lists a directory: no segment is empty, or of dots, or has CONTROL."""
    path = location.partition("/")[2]
    return not path or not ({"", ".", ".."} & set(path.split("/")) or CONTROL.search(path))


def _may_be_marked(found: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a listing may have a directory in it that is named like a file, as an object whose key ends in a slash.

    obstore leaves the slash out, so that it looks like an object. Mostly it is empty; what is in it comes next. Names
    that begin with a dot, such as `.keep`, are no data in any case.
    """
    following = itertools.chain((each["name"] for each in itertools.islice(found, 1, None)), [""])  # one more if empty
    return any(
        "." in posixpath.basename(each["name"])[1:]
        and (each["size"] == 0 or f"{after}/".startswith(f"{each['name']}/"))
        for each, after in zip(found, following, strict=False)
    )


def _request(location: str, start: int, stop: int, etag: str | None) -> tuple[str, str, dict[str, Any]]:
    """Return the bucket and the key of an object, and obstore's options for a range of it."""
    bucket, _, path = location.partition("/")
    return bucket, path, {"range": (start, stop)} | ({} if etag is None else {"if_match": f'"{etag}"'})


def _require_same(answered: str | None, extent: Sequence[int], start: int, stop: int, etag: str | None) -> None:
    """Raise if an answer is of another version or another range than was requested."""
    require_same_version(etag, (answered or "").strip('"'))
    if tuple(extent) != (start, stop):
        raise OSError(f"bytes {tuple(extent)} came back for bytes {start} to {stop}")


def _info(bucket: str, found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": f"{bucket}/{found['path']}",
        "size": found["size"],
        "type": "file",
        "ETag": found["e_tag"],
        "LastModified": found["last_modified"],
    }


def _told(call: Callable[[], T]) -> T:
    """Call obstore, and raise its errors with their HTTP status."""
    try:
        return call()
    except BaseException as error:
        if type(error).__module__ == "pyo3_runtime":  # a panic
            raise ValueError(str(error)) from None
        if not isinstance(error, Exception) or DEBUGGING not in str(error):
            raise
        told: OSError = ObstoreError(error)
        if isinstance(error, FileNotFoundError):
            told = FileNotFoundError(str(told))
        elif getattr(told, "code", None) in NO_ACCESS:
            told = PermissionError(str(told))
    raise told
