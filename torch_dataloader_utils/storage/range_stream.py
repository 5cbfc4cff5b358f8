"""A range of a remote file that one request is made for, and that is received in parts, as there is memory for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import pyarrow as pa

from torch_dataloader_utils.storage.attempts import within
from torch_dataloader_utils.storage.request_size import Answer

OLDEST_SEC = 20.0
"""How long an answer is received at most. Storages and clients close connections on which nothing moves for a minute or
less, as where training is slower than reading."""


class ReceivedRange(Protocol):
    """An answer of a storage's client, as far as it was received."""

    def read(self, size: int) -> bytes | pa.Buffer:
        """Return the next bytes; fewer only if the answer ends before them."""

    @property
    def close(self) -> Callable[[], object]:
        """Called to receive nothing more."""


class RangeStream:
    """The bytes of a file up to some place, received from one request. It is for one thread at a time.

    The request is made by `begin`, or by the first read. It is made again, for the rest, after an error or when it is
    too old.

    Args:
        begin: Makes a request: gets the seconds after which it is to give up, the start and the stop of the range, and
            the bytes of its first part.
        stop: Where the range ends.
        oldest_sec: Seconds after which the rest is requested again.
        note: Called with how long an answer took to begin, and its first part to be received.
    """

    def __init__(
        self,
        begin: Callable[[float, int, int, int], ReceivedRange],
        stop: int,
        oldest_sec: float,
        note: Callable[[Answer], object],
    ) -> None:
        self._begin = begin
        self._stop = stop
        self._oldest_sec = min(OLDEST_SEC, oldest_sec)
        self._note = note
        self._received: ReceivedRange | None = None
        self._position = 0
        self._began = 0.0
        self._waited = 0.0  # seconds until the answer began, of which nothing was read yet

    def begin(self, seconds: float, start: int, stop: int) -> None:
        """Make the request before its first part, from `start` to `stop`, is read; raises what the client raises."""
        self._began = time.monotonic()
        self._received = self._begin(seconds, start, self._stop, stop - start)
        self._position = start
        self._waited = time.monotonic() - self._began

    def read(self, seconds: float, start: int, stop: int) -> bytes | pa.Buffer:
        """Receive a part, which begins where the last one ended or behind that; a TimeoutError if it takes longer."""
        until = time.monotonic() + seconds
        is_old = self._position > start or time.monotonic() - self._began > self._oldest_sec
        if self._received is not None and is_old:
            self.close()
        if self._received is None:
            self.begin(seconds, start, stop)
        received, waited, self._waited = self._received, self._waited, 0.0
        assert received is not None  # noqa: S101 - `begin` sets it
        began = time.monotonic()
        self._received = None  # if an error occurs now
        try:
            if start > self._position:
                within(until - began, received.read, start - self._position)
            content: bytes | pa.Buffer = within(until - time.monotonic(), received.read, stop - start)
            if len(content) == stop - start < self._stop - start:
                self._received = received
        finally:
            if self._received is None:
                received.close()
        if len(content) != stop - start:
            raise OSError(f"{len(content)} bytes came back of bytes {start} to {stop}")
        self._position = stop
        if waited:
            self._note(Answer(stop - start, waited, time.monotonic() - began))
        return content

    def close(self) -> None:
        """Receive nothing more of the request."""
        received, self._received = self._received, None
        if received is not None:
            received.close()
