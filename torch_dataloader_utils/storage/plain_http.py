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
import weakref
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import pyarrow as pa

from torch_dataloader_utils.storage.causes import TRANSIENT

CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/")

REASON_BYTES = 1 << 16
"""How much is read of what a server says of an error."""

TOLD = re.compile(r".*<Code>(?P<code>[^<]*)</Code>.*<Message>(?P<message>[^<]*)</Message>.*", re.DOTALL)
"""What S3 says of an error, in the body of its answer."""


class HttpError(OSError):
    """An answer that says that a later request may have another one.

    Attributes:
        status: Its HTTP status.
    """

    def __init__(self, status: int, body: str) -> None:
        told = TOLD.fullmatch(body)
        self.status = status
        super().__init__(f"{told['code']}: {told['message']} (status {status})" if told else f"status {status}")


class PlainHttp:
    """Makes requests, and keeps the connections of those that were answered. Threads may share it.

    A process that is forked makes connections of its own: two that read one would get parts of each other's answers.

    Args:
        timeout_sec: Seconds for which nothing may come.

    Attributes:
        has_worked: Whether a range has come; None before the first answer. Not all servers know URLs that are signed.
    """

    def __init__(self, timeout_sec: float) -> None:
        self.has_worked: bool | None = None
        self._timeout_sec = timeout_sec
        self._idle: defaultdict[tuple[int, str], list[HTTPConnection]] = defaultdict(list)  # by process and host
        weakref.finalize(self, _close_all, self._idle)

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
            OSError: If no answer came; or, once ranges have come, one that says to try again.
        """
        parts = urlsplit(url)
        headers = {"Range": f"bytes={start}-{stop - 1}"} | ({} if etag is None else {"If-Match": f'"{etag}"'})
        idle = self._idle[os.getpid(), parts.netloc]
        received = self._answer(parts.netloc, f"{parts.path}?{parts.query}", headers, idle)
        status = received.response.status
        if status == HTTPStatus.PARTIAL_CONTENT and received.extent is not None:
            self.has_worked = True
            return received
        try:
            if self.has_worked and (status in TRANSIENT or status >= HTTPStatus.INTERNAL_SERVER_ERROR):
                raise HttpError(status, received.response.read(REASON_BYTES).decode(errors="replace"))
        finally:
            received.close()
        self.has_worked = bool(self.has_worked)
        return None

    def _answer(self, host: str, target: str, headers: Mapping[str, str], idle: list[HTTPConnection]) -> HttpRange:
        """Make a request by a connection that is open, or by a new one: a server may have closed the open ones."""
        while True:
            try:
                connection, is_new = idle.pop(), False
            except IndexError:
                connection, is_new = HTTPConnection(host, timeout=self._timeout_sec), True
            try:
                connection.request("GET", target, headers=dict(headers))
                opened = connection.sock  # an answer that ends the connection takes it from there
                return HttpRange(connection, opened, connection.getresponse(), idle)
            except (OSError, HTTPException) as error:
                connection.close()
                if is_new or isinstance(error, TimeoutError):
                    raise OSError(f"{type(error).__name__}: {error}") from error


class HttpRange:
    """A range of an object that is received in parts.

    Attributes:
        response: The answer.
        close: Receives nothing more. It is called when nothing refers to the range, too.
    """

    def __init__(
        self, connection: HTTPConnection, opened: socket.socket, response: HTTPResponse, idle: list[HTTPConnection]
    ) -> None:
        self.response = response
        self._process = os.getpid()
        self.close = weakref.finalize(self, _end, connection, opened, response, idle, self._process)
        self.close.atexit = False

    @property
    def etag(self) -> str | None:
        """The object's etag, in quotes."""
        return self.response.headers.get("ETag")

    @property
    def extent(self) -> tuple[int, int] | None:
        """Where the range begins and ends; None if the answer does not say."""
        found = CONTENT_RANGE.match(self.response.headers.get("Content-Range", ""))
        return (int(found[1]), int(found[2]) + 1) if found else None

    def read(self, size: int) -> pa.Buffer:
        """Receive so many bytes, or those that come before the answer ends, and nothing more."""
        memory = pa.allocate_buffer(size)  # of Arrow's pool, whose memory is used again
        try:
            return memory.slice(0, self.read_into(memoryview(memory).cast("B")))
        finally:
            self.close()

    def read_into(self, memory: memoryview) -> int:
        """Fill memory with the next bytes, and return how many came; fewer only if the answer ends before them."""
        if self._process != os.getpid():
            raise OSError("the answer is received by the process that this one was forked from")
        size = 0
        while size < len(memory) and (count := self.response.readinto(memory[size:])):
            size += count
        return size


def _end(
    connection: HTTPConnection,
    opened: socket.socket,
    response: HTTPResponse,
    idle: list[HTTPConnection],
    process: int,
) -> None:
    """Keep the connection if all of its answer was received, else close it. A thread that receives is woken up."""
    if process != os.getpid():  # inherited: to shut it down would end what that process receives
        return
    if response.length == 0 and not response.will_close:
        idle.append(connection)
        return
    with suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)
    response.close()
    connection.close()


def _close_all(idle: Mapping[Any, list[HTTPConnection]]) -> None:
    for connections in idle.values():
        for connection in connections:
            connection.close()
