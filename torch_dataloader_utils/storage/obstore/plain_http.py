"""Ranges of objects over plain HTTP, received by Python's own client straight into the memory that is decoded.

obstore hands over an answer as Python's bytes, which are copied twice, both times with Python's lock held. Here the
system writes what arrives to its place, without the lock. Over https, Python's client receives no more than 16 KB a
call, as a record of TLS has, and after each call it waits for Python's lock: beside a training loop that keeps Python
busy, 1.1 GB took ten times as long as with obstore.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from torch_dataloader_utils.storage.attempts import within
from torch_dataloader_utils.storage.causes import TRANSIENT, told_by_s3

CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/")

ERROR_BYTES = 1 << 16
"""How much is read of what a server says of an error."""

IDLE_SEC = 20.0
"""How long a connection is kept for another request. What lies between may forget one without a word."""

WAITS_FOR_ALL = sys.platform == "linux"
"""Whether the system can be told to return from a call once all is there that is wanted, or after a time. On others,
which have the same options, the time begins anew with each piece that arrives, or there is no such call."""

LEAST_FOR_ALL = 1 << 16
"""Of fewer bytes, Python's client receives all by a call or two."""

BUSY = TRANSIENT | {HTTPStatus.SERVICE_UNAVAILABLE}
"""The statuses of servers that want to be asked later."""


class HttpError(OSError):
    """An answer that says that a later request may have another one.

    Attributes:
        status: Its HTTP status.
    """

    def __init__(self, status: int, body: str) -> None:
        self.status = status
        _, words = told_by_s3(body, status) or ("", f"status {status}")
        super().__init__(words)


class _Connections:
    """Connections whose answers were received in full, each for another request. Threads may share it.

    A process that is forked makes connections of its own: two that read one would get parts of each other's answers.
    """

    def __init__(self) -> None:
        self._idle: defaultdict[tuple[int, str], list[tuple[float, HTTPConnection]]] = defaultdict(list)
        self._is_closed = False

    def take(self, host: str) -> HTTPConnection | None:
        """Return a connection to a host; None if there is none that is young enough."""
        idle = self._idle[os.getpid(), host]
        while idle:
            with suppress(IndexError):  # another thread took the last one
                since, connection = idle.pop()
                if time.monotonic() - since <= IDLE_SEC:
                    return connection
                connection.close()
        return None

    def keep(self, host: str, connection: HTTPConnection) -> None:
        """Keep a connection."""
        if self._is_closed:
            connection.close()
        else:
            self._idle[os.getpid(), host].append((time.monotonic(), connection))

    def forget(self, host: str) -> None:
        """Close the connections to a host."""
        while (connection := self.take(host)) is not None:
            connection.close()

    def close(self) -> None:
        """Close all connections, now and later."""
        self._is_closed = True
        for idle in list(self._idle.values()):
            for _, connection in idle:
                connection.close()


class PlainHttp:
    """Makes requests. Threads may share it.

    Args:
        timeout_sec: Seconds for which nothing may come before an answer.

    Attributes:
        has_worked: Whether a range has come; None before the first answer. Not all servers know URLs that are signed.
    """

    def __init__(self, timeout_sec: float) -> None:
        self.has_worked: bool | None = None
        self._timeout_sec = timeout_sec
        self._connections = _Connections()
        weakref.finalize(self, self._connections.close)

    @classmethod
    def of(cls, options: Mapping[str, Any], timeout_sec: float) -> PlainHttp | None:
        """Return it where an endpoint, by obstore's options, is reached so, and requests can be signed ahead."""
        endpoint = str(options.get("endpoint", ""))
        if not endpoint.startswith("http://") or "aws_access_key_id" not in options:
            return None
        proxies = getproxies()
        has_proxy = ("http" in proxies or "all" in proxies) and not proxy_bypass(urlsplit(endpoint).netloc)
        return None if has_proxy else cls(timeout_sec)

    def get(self, url: str, start: int, stop: int, etag: str | None) -> HttpRange | None:
        """Request a range of an object, of one version if there is an etag.

        Returns:
            What is received; None where another client is to request it: it gets it, or says what is wrong.

        Raises:
            OSError: If no answer came, or one that says to try again.
        """
        parts = urlsplit(url)
        headers = {"Range": f"bytes={start}-{stop - 1}"} | ({} if etag is None else {"If-Match": f'"{etag}"'})
        received = self._answer(parts.netloc, f"{parts.path}?{parts.query}", headers)
        status = received.response.status
        if status == HTTPStatus.PARTIAL_CONTENT and received.size == stop - start:
            self.has_worked = True
            return received
        try:
            if status in BUSY or (self.has_worked and status >= HTTPStatus.INTERNAL_SERVER_ERROR):
                raise HttpError(status, received.response.read(ERROR_BYTES).decode(errors="replace"))
        finally:
            received.close()
        if self.has_worked is None:
            self.has_worked = False
        return None

    def _answer(self, host: str, target: str, headers: Mapping[str, str]) -> HttpRange:
        """Make a request by a connection that is open, or by a new one: a server may have closed the open ones."""
        while True:
            kept = self._connections.take(host)
            connection = kept or HTTPConnection(host, timeout=self._timeout_sec)
            try:
                connection.request("GET", target, headers=dict(headers))
                opened = connection.sock  # an answer that ends the connection takes it from there
                return HttpRange(connection, opened, connection.getresponse(), partial(self._connections.keep, host))
            except (OSError, HTTPException) as error:
                connection.close()
                if isinstance(error, TimeoutError):  # the others that are kept may have been forgotten, too
                    self._connections.forget(host)
                if kept is None or isinstance(error, TimeoutError):
                    raise OSError(f"{host}: {type(error).__name__}: {error}") from error


class HttpRange:
    """A range of an object that is received in parts.

    Attributes:
        response: The answer.
        close: Receives nothing more, and wakes up a thread that receives. It is called when nothing refers to the
            range, too.
    """

    def __init__(
        self,
        connection: HTTPConnection,
        opened: socket.socket,
        response: HTTPResponse,
        keep: Callable[[HTTPConnection], object],
    ) -> None:
        self.response = response
        self._opened = opened
        self._process = os.getpid()
        self.close = weakref.finalize(self, _end, connection, opened, response, keep, self._process)
        self.close.atexit = False

    @property
    def etag(self) -> str | None:
        """The object's etag, in quotes."""
        return self.response.headers.get("ETag")

    @property
    def size(self) -> int | None:
        """How many bytes are still to come; None if the answer did not say."""
        return self.response.length

    @property
    def extent(self) -> tuple[int, int] | None:
        """Where the range begins and ends; None if the answer does not say."""
        found = CONTENT_RANGE.match(self.response.headers.get("Content-Range", ""))
        return (int(found[1]), int(found[2]) + 1) if found else None

    def read_into(self, memory: memoryview, seconds: float) -> int:
        """Fill memory with the next bytes, and return how many came; fewer only if the answer ends before them.

        Raises:
            TimeoutError: If they take longer.
        """
        if self._process != os.getpid():
            raise OSError("the answer is received by the process that this one was forked from")
        # Python's client receives the last byte, by which it sees that the answer has ended.
        wanted = 0 if self.response.isclosed() else min(len(memory), (self.response.length or 0) - 1)
        if not WAITS_FOR_ALL or wanted < LEAST_FOR_ALL:
            return within(seconds, self._read_rest, memory)
        until = time.monotonic() + seconds
        timeout = self._opened.gettimeout()
        try:
            self._opened.settimeout(_left(until))
            size = self._read_all(memory[:wanted], until)
            self._opened.settimeout(_left(until))
            return size + (self._read_rest(memory[size:]) if size == wanted else 0)
        except (TimeoutError, BlockingIOError):
            raise TimeoutError(f"not all of {len(memory):,} bytes came within {seconds:.3g} s") from None
        finally:
            with suppress(OSError):  # another thread closed it
                self._opened.settimeout(timeout)

    def _read_rest(self, memory: memoryview) -> int:
        size = 0
        while size < len(memory) and (count := self.response.readinto(memory[size:])):
            size += count
        return size

    def _read_all(self, memory: memoryview, until: float) -> int:
        """Fill memory by calls that return once all of it is there, or nothing more comes, and return how much came.

        Python's client returns from the system as often as something arrives, and then waits for Python's lock. What
        it has buffered comes first: some kilobytes, with the headers or received for this.
        """
        size = self.response.readinto(memory[: len(self.response.fp.peek())])
        self._opened.settimeout(None)  # the system waits, and not Python, which would return from it
        while size < len(memory):
            _limit_waiting(self._opened, _left(until))
            count = self._opened.recv_into(memory[size:], 0, socket.MSG_WAITALL)
            if not count:
                break
            size += count
            assert self.response.length is not None  # noqa: S101 - it has one, or it would not be received here
            self.response.length -= count
        return size


def _left(until: float) -> float:
    """Return the seconds until a time; raise a TimeoutError if it is over."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _limit_waiting(opened: socket.socket, seconds: float) -> None:
    """Have the system wait no longer than this in one call for what is received (`SO_RCVTIMEO` in socket(7)).

    Where a signal comes, or the process is stopped for a while, the time begins anew.
    """
    whole, rest = divmod(seconds, 1)
    limit = struct.pack("ll", int(whole), max(1, int(rest * 1_000_000)))
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _end(
    connection: HTTPConnection,
    opened: socket.socket,
    response: HTTPResponse,
    keep: Callable[[HTTPConnection], object],
    process: int,
) -> None:
    """Keep the connection if all of its answer was received, else close it."""
    if process != os.getpid():  # inherited: to shut it down would end what that process receives
        return
    if response.isclosed() and response.length == 0 and not response.will_close:
        keep(connection)
        return
    with suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)
    response.close()
    connection.close()
