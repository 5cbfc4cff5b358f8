"""A range of a remote file that one request is made for, and that is received in parts, as there is memory for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import pyarrow as pa

from torch_dataloader_utils.storage.request_size import SMALLEST_ANSWER, Answer

OLDEST_SEC = 20.0
"""How long an answer is received at most. Storages and clients close connections on which nothing moves for a minute or
less, as where training is slower than reading."""

LARGEST_REST = 64 * 1024
"""How many bytes at either end of a file are received though they are not needed. Then the whole file is requested,
which some servers send sooner than a range that they have to cut out of it."""


class ReceivedRange(Protocol):
    """An answer of a storage's client, as far as it was received."""

    def read_into(self, memory: memoryview, seconds: float) -> int:
        """Fill memory with the next bytes, and return how many came; fewer only if the answer ends before them.

        Raises:
            TimeoutError: If they take longer.
        """

    @property
    def close(self) -> Callable[[], object]:
        """Called to receive nothing more."""


class RangeStream:
    """The bytes of a file from one place to another, received from one request. It is for one thread at a time.

    The request is made by `begin`, or by the first read. It is made again, for the rest, after an error or when it is
    too old.

    Args:
        begin: Makes a request: gets the seconds after which it is to give up, the start and the stop of the range, and
            the bytes of its first part.
        extent: Where the first part begins, and where the last part ends.
        size: The bytes of the file, which is requested as a whole if it has little more; None for the extent alone.
        oldest_sec: Seconds after which the rest is requested again.
        note: Called with how long an answer took to begin, and its first bytes to be received.
    """

    def __init__(
        self,
        begin: Callable[[float, int, int, int], ReceivedRange],
        extent: tuple[int, int],
        size: int | None,
        oldest_sec: float,
        note: Callable[[Answer], object],
    ) -> None:
        start, stop = extent
        self._begin = begin
        self._first, self._stop, self._end = start, stop, stop
        if size is not None and start <= LARGEST_REST and size - stop <= LARGEST_REST:
            self._first, self._end = 0, size
        self._oldest_sec = min(OLDEST_SEC, oldest_sec)
        self._note = note
        self._received: ReceivedRange | None = None
        self._position: int | None = None
        self._began = 0.0
        self._answer: Answer | None = None  # as far as it was received, until that tells enough

    def begin(self, seconds: float, start: int, stop: int) -> None:
        """Make the request before its first part, from `start` to `stop`, is read; raises what the client raises."""
        self._began = time.monotonic()
        first = self._first if self._position is None else start
        self._received = self._begin(seconds, first, self._end, stop - start)
        self._position = first
        self._answer = Answer(0, time.monotonic() - self._began, 0.0)

    def read(self, seconds: float, start: int, stop: int) -> pa.Buffer:
        """Receive a part, which begins where the last one ended or behind that; a TimeoutError if it takes longer."""
        until = time.monotonic() + seconds
        is_old = self._position is not None and (
            self._position > start or time.monotonic() - self._began > self._oldest_sec
        )
        if self._received is not None and is_old:
            self.close()
        if self._received is None:
            self.begin(seconds, start, stop)
        received, position = self._received, self._position
        assert received is not None  # noqa: S101 - `begin` sets both
        assert position is not None  # noqa: S101
        until_end = stop == self._stop  # then the connection can be used again
        size = (self._end if until_end else stop) - position
        content = pa.allocate_buffer(size)  # of Arrow's pool, whose memory is used again
        began = time.monotonic()
        self._received = None  # if an error occurs now
        try:
            received_bytes = received.read_into(memoryview(content).cast("B"), until - began)
            if received_bytes == size and not until_end:
                self._received = received
        finally:
            if self._received is None:
                received.close()
        if received_bytes < stop - position:
            raise OSError(f"{max(0, received_bytes - (start - position))} bytes came back of bytes {start} to {stop}")
        self._position = stop
        self._tell(received_bytes, time.monotonic() - began)
        return content.slice(start - position, stop - start)

    def _tell(self, size: int, seconds: float) -> None:
        """Tell how long the answer took, once it has so many bytes that this means something."""
        if self._answer is None:
            return
        self._answer = Answer(self._answer.size + size, self._answer.waited, self._answer.received + seconds)
        if self._answer.size >= SMALLEST_ANSWER:
            self._note(self._answer)
            self._answer = None

    def close(self) -> None:
        """Receive nothing more of the request."""
        received, self._received = self._received, None
        if received is not None:
            received.close()
